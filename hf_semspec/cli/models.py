"""The command `models`: which models there are in wheels, and fetching them."""

from __future__ import annotations

import argparse
from typing import Any

from ..tools import wheels
from .console import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="fetch these (default: list all)")


def execute(arguments: argparse.Namespace, command: str) -> int:
    """Fetch the models that are named and print their folders; without names, list what there is."""
    for name in arguments.names:
        print(wheels.fetch(name))
    if not arguments.names:
        console().print(_table())
    return 0


def _table() -> Any:
    from rich.table import Table

    table = Table("--model", "with a network, the Hub's", "licence", "download", "here")
    for name, model in wheels.MODELS.items():
        here = "yes" if (wheels.folder_of(name) / "config.json").exists() else "no"
        table.add_row(name, model.hub, model.licence, f"{model.size / 1e9:.1f} GB", here)
    return table
