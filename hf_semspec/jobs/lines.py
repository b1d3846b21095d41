"""What a job is asked, a line each, and how lines are put together into batches."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Chat = list[dict[str, Any]]
WINDOW = 64  # batches; lines are sorted by length within as many


@dataclass(frozen=True)
class Line:
    """One line.

    Args:
        number (`int`): its place, from 0.
        asked (`str` or `list[dict]`): the prompt, or the messages of a chat.
        error (`str`, *optional*): why it cannot be asked.
    """

    number: int
    asked: str | Chat = ""
    error: str | None = None

    @property
    def length(self) -> int:
        """In characters, which orders lines without a tokenizer."""
        return len(self.asked) if isinstance(self.asked, str) else sum(len(str(turn)) for turn in self.asked)


@dataclass(frozen=True)
class Batch:
    """Lines that are decoded together; the same ones however often the job is started, in however many processes."""

    number: int
    lines: list[Line]

    @property
    def digest(self) -> str:
        """Of what is asked."""
        text = json.dumps([[line.number, line.asked, line.error] for line in self.lines])
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def read_file(path: Path) -> Iterator[Line]:
    """The lines of a file of JSON, read one at a time; blank ones count but ask nothing."""
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            try:
                entry = json.loads(line)
            except ValueError as error:
                yield Line(number, error=f"no line of JSON: {error}")
                continue
            yield as_line(number, entry)


def read_rows(rows: Iterable[Any]) -> Iterator[Line]:
    """The lines of an iterable of texts, of chats, or of dicts with `prompt` or `messages`."""
    return (as_line(number, row) for number, row in enumerate(rows))


def as_line(number: int, entry: Any) -> Line:
    """`entry` as line `number`; one that asks nothing carries its error."""
    asked = entry
    if isinstance(entry, dict):
        given = [name for name in ("prompt", "messages") if entry.get(name) is not None]
        if len(given) != 1:
            return Line(number, error="must have either `prompt` or `messages`")
        asked = entry[given[0]]
    if isinstance(asked, str) and asked:
        return Line(number, asked)
    if isinstance(asked, list) and asked and all(isinstance(turn, dict) and "role" in turn for turn in asked):
        return Line(number, asked)
    return Line(number, error="must be a text that is not empty, or a list of messages with `role` and `content`")


def batches(lines: Iterable[Line], size: int) -> Iterator[Batch]:
    """Batches of `size` lines of like length; of the lines no more than `WINDOW` batches are held at once."""
    source, number = iter(lines), 0
    while window := list(itertools.islice(source, WINDOW * size)):
        window.sort(key=lambda line: line.length, reverse=True)  # stable: the order of equals is that of the file
        for first in range(0, len(window), size):
            yield Batch(number, window[first : first + size])
            number += 1
