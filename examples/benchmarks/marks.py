"""What the pages made from results share: where a number comes from, and the marks that it stands between."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def origin(meta: dict[str, Any]) -> str:
    """One paragraph on a result of [`hf_semspec.tools.machine.describe`]: command, commit, date, versions, machine."""
    machine = meta["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in meta["versions"].items() if number)
    where = f"{machine['processor']}, {machine['cores']} cores, {machine['torch_threads']} torch threads"
    if machine["accelerator"]:
        where += f", {machine['accelerator']}"
    if machine.get("load_average") is not None:
        where += f"; load average {machine['load_average']:.1f} when it began"
    return (
        f"`{meta['command']}` at commit {meta['commit'] or 'unknown'} on {meta['date']}; Python {meta['python']}, "
        f"{versions}; {where}."
    )


def marks(name: str = "measured") -> tuple[str, str]:
    """The lines between which a page holds what is made from results."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def write_between(text: str, page: Path, name: str = "measured") -> None:
    """Replace what stands between the two marks of `name` in `page` by `text`.

    Raises:
        ValueError: the page lacks the marks.
    """
    first, last = marks(name)
    head, begin, rest = page.read_text(encoding="utf-8").partition(first)
    _, end, tail = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {first!r} and {last!r} to write between.")
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}", encoding="utf-8")
