"""Grids: one scheme over all combinations of some of its options, `smc:num_particles=1|4|8,num_draft_tokens=4|8`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .contenders import TARGET, Contender, read_value, split

MAX_AXES = 3


@dataclass(frozen=True)
class Grid:
    """One contender's options, some of them with several values.

    Args:
        kind (`str`): the contender's kind.
        axes (`dict[str, list]`): the options that vary, as written, in the order they were written in.
        fixed (`dict`): the options that do not.
        name (`str`): what the grid is called in files and titles.
    """

    kind: str
    axes: Mapping[str, Sequence[str]]
    fixed: Mapping[str, Any]
    name: str

    def contenders(self) -> list[Contender]:
        """One for each combination, the last axis fastest."""
        return [self.at(values) for values in itertools.product(*self.axes.values())]

    def at(self, values: Sequence[str]) -> Contender:
        """The contender with these values of the axes."""
        return Contender(self.cell(values), self.kind, {**self.fixed, **self._options(values)})

    def cell(self, values: Sequence[str]) -> str:
        """The name of that contender."""
        return f"{self.name}:" + ",".join(f"{axis}={value}" for axis, value in zip(self.axes, values, strict=True))

    def _options(self, values: Sequence[str]) -> dict[str, Any]:
        return {axis: read_value(value) for axis, value in zip(self.axes, values, strict=True)}

    def table(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The grid's part of a summary, JSON-safe.

        Args:
            rows (`Sequence[Mapping[str, Any]]`): the rows of [`summarize`].

        Returns:
            `name`, `kind`, `fixed`, `axes`, the `target`'s accuracy, and `cells`: in the order of [`contenders`], each
            with `values` and the contender's `accuracy`, `interval`, `speed_ratio`, `target_forwards_per_token` and
            `difference`.
        """
        found = {row["name"]: row for row in rows}
        cells = []
        for values in itertools.product(*self.axes.values()):
            row = found.get(self.cell(values), {})
            names = ("accuracy", "interval", "speed_ratio", "target_forwards_per_token", "difference")
            cells.append({"values": list(values), **{name: row.get(name) for name in names}})
        return {
            "name": self.name,
            "kind": self.kind,
            "fixed": {name: str(value) for name, value in self.fixed.items()},
            "axes": {name: list(values) for name, values in self.axes.items()},
            "target": found.get(TARGET, {}).get("accuracy"),
            "cells": cells,
        }


def parse_grid(text: str) -> Grid:
    """The grid that `text` describes: a contender whose options may have several values with `|` between.

    Raises:
        ValueError: no option with several values, more than three, a value twice; or what [`Contender`] refuses.
    """
    head, *rest = split(text.strip(), ":", 1)
    name, *kind = split(head, "=", 1)
    axes: dict[str, list[str]] = {}
    fixed: dict[str, Any] = {}
    for option in split(rest[0], ",") if rest else []:
        key, *value = split(option, "=", 1)
        if not value or not key.strip().isidentifier():
            raise ValueError(f"--grid {text!r}: {option!r} must be NAME=VALUE or NAME=VALUE|VALUE")
        values = [one.strip() for one in split(value[0], "|")]
        if len(values) > 1:
            axes[key.strip()] = values
        else:
            fixed[key.strip()] = read_value(values[0])
    if not 1 <= len(axes) <= MAX_AXES:
        raise ValueError(
            f"--grid {text!r}: give one to {MAX_AXES} of the options several values, as in penalty=0|0.5|1"
        )
    for key, values in axes.items():
        if len(set(values)) < len(values):
            raise ValueError(f"--grid {text!r}: {key} has a value twice")
    grid = Grid((kind or [name])[0].strip(), axes, fixed, name.strip())
    grid.contenders()
    return grid
