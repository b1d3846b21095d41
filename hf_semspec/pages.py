"""What the pages made from results share: tables, and where a number comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, numbers aligned to the right after the first column."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def origin(meta: dict[str, Any]) -> str:
    """One paragraph on a result of [`machine.describe`]: command, commit, date, versions, machine."""
    machine = meta["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in meta["versions"].items() if number)
    where = f"{machine['processor']}, {machine['cores']} cores, {machine['torch_threads']} torch threads"
    if machine["accelerator"]:
        where += f", {machine['accelerator']}"
    return (
        f"`{meta['command']}` at commit {meta['commit'] or 'unknown'} on {meta['date']}; Python {meta['python']}, "
        f"{versions}; {where}."
    )
