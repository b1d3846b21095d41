"""`hf-semspec export-recipe`: what it asks for, and what it does."""

from __future__ import annotations

import argparse
from typing import Any

from ..common.json_files import read_object
from ..configuration import SemSpecConfig
from ..schemes.table import SCHEMES
from .recipe import REQUIREMENT, call_arguments, export_recipe
from .sidecar import Sidecar


def add_arguments(parser: argparse.ArgumentParser, setting: Any) -> None:
    """Add the command's arguments.

    Args:
        parser: of the command.
        setting: reads NAME=VALUE.
    """
    parser.add_argument("folder", metavar="DIR", help="the folder to write; it may hold a model already")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--scheme", choices=tuple(SCHEMES), help="the scheme (default: lossless)")
    start.add_argument("--config", metavar="NAME", help="a folder or Hub id whose SemSpecConfig the recipe is to hold")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=setting,
        metavar="NAME=VALUE",
        dest="settings",
        help="a field of the scheme or of GenerationConfig; may be repeated",
    )
    parser.add_argument("--target", help="Hub id of the target it was made for")
    parser.add_argument("--draft", help="Hub id of the draft")
    parser.add_argument("--calibration", metavar="FILE", help="JSON: the report of a calibration")
    parser.add_argument("--results", metavar="FILE", help="JSON: what was measured, such as results.json of eval")
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there")


def execute(arguments: argparse.Namespace, command: str) -> int:
    """Write the recipe, say how to use it; returns 0."""
    settings = dict(arguments.settings)
    if arguments.config is not None:
        config = SemSpecConfig.from_pretrained(arguments.config, **settings)
    else:
        config = SemSpecConfig(arguments.scheme or "lossless", **settings)
    files = {name: getattr(arguments, name) for name in ("calibration", "results")}
    read = {name: None if path is None else read_object(path) for name, path in files.items()}
    sidecar = Sidecar(target=arguments.target, draft=arguments.draft, **read)
    folder = export_recipe(arguments.folder, config, sidecar, overwrite=arguments.overwrite)
    beside = "".join(f"{argument}, " for argument in call_arguments(config.semspec or {}))
    call = f"model.generate(..., {beside}custom_generate={str(folder)!r}, trust_remote_code=True)"
    print(f'{call}\nneeds pip install "{REQUIREMENT}". `hf upload REPO {folder}` puts the folder on the Hub.')
    return 0
