"""Files that register schemes before the arguments are read."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def add_scheme_file(parser: argparse.ArgumentParser) -> None:
    """Add the option that names files of schemes."""
    parser.add_argument(
        "--scheme-file",
        action="append",
        metavar="FILE.py",
        help="run this file first, which registers a scheme of your own; may be repeated",
    )


def run_scheme_files(argv: Sequence[str]) -> None:
    """Run the files that `--scheme-file` names, once a process."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_scheme_file(parser)
    for name in parser.parse_known_args(argv)[0].scheme_file or ():
        path = Path(name).resolve()
        if str(path) in sys.modules:
            continue
        spec = spec_from_file_location(str(path), path)
        if spec is None or spec.loader is None:
            raise ValueError(f"--scheme-file {name}: must be a file of Python, FILE.py")
        module = sys.modules[str(path)] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[str(path)]
            raise
