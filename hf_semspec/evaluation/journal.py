"""What a run has finished, a line of JSON each, so that an interruption loses no more than the batch in work."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Unit = tuple[int, int, str]  # seed, batch, contender
Record = dict[str, Any]
PARTS, MERGED, DEFINITION = "parts", "records.jsonl", "run.json"


def unit_of(record: Record) -> Unit:
    """What the record is of."""
    return record["seed"], record["batch"], record["contender"]


class Journal:
    """The records of a run: in a folder if there is one, in memory otherwise.

    Args:
        folder (`Path`, *optional*): the run's folder. It holds `run.json`, what the run is; `parts/N.jsonl`, written
            by process N alone; and `records.jsonl`, all of them in order, written at the end.
        process (`int`): which process this is.
    """

    def __init__(self, folder: Path | None, process: int = 0) -> None:
        self.folder = folder
        self.process = process
        self._memory: list[Record] = []

    def check(self, definition: dict[str, Any], of_first: Callable[[int], dict[str, Any]] | None = None) -> None:
        """See that the folder is still empty, or this run's, or, with `of_first`, holds a part of it: fewer
        contenders, or the first problems in whole batches.

        Args:
            definition (`dict`): what the run is.
            of_first (`Callable[[int], dict]`, *optional*): what it is on the first problems of that number.

        Raises:
            ValueError: the folder holds another run; the message names what differs.
        """
        stored = self._definition()
        if stored is None:
            return
        if of_first is not None:
            number = stored["task"]["examples"]
            if number < definition["task"]["examples"] and number % definition["batch_size"] == 0:
                definition = of_first(number)
        stored, definition = _flat(stored), _flat(json.loads(json.dumps(definition)))
        names = [name for name in {**stored, **definition} if stored.get(name) != definition.get(name)]
        if of_first is not None:
            names = [name for name in names if name in stored or not name.startswith("contenders.")]
        if names:
            was = "; ".join(
                f"{name} was {_short(stored.get(name))}, is {_short(definition.get(name))}" for name in names
            )
            raise ValueError(
                f"--out {self.folder} holds another run ({was}): repeat that command to go on with it, or take "
                "another folder"
            )

    def begin(self, definition: dict[str, Any]) -> None:
        """Note what the run is now; the folder is made if it is missing."""
        if self.folder is None:
            return
        (self.folder / PARTS).mkdir(parents=True, exist_ok=True)
        if self.process == 0 and self._definition() != definition:
            _write_whole(self.folder / DEFINITION, json.dumps(definition, indent=1) + "\n")

    def add(self, record: Record) -> None:
        """Append one record; on disk when this returns."""
        if self.folder is None:
            self._memory.append(record)
            return
        with open(self._part(), "a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def mend(self) -> None:
        """Drop what an interruption left of a line at the end of this process's part."""
        part = self._part()
        if self.folder is None or not part.exists():
            return
        content = part.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(part, whole)

    def records(self) -> list[Record]:
        """The units finished so far, by all processes, in order; a unit that two processes finished counts once."""
        found: dict[Unit, Record] = {}
        for entry in self._entries():
            if "seed" in entry:
                found.setdefault(unit_of(entry), entry)
        return [found[unit] for unit in sorted(found, key=lambda unit: unit[:2])]

    def sessions(self) -> list[Record]:
        """One entry for each start of each process that had something to do."""
        return sorted((entry for entry in self._entries() if "seed" not in entry), key=lambda entry: entry["session"])

    def merge(self) -> None:
        """Write `records.jsonl` from all parts."""
        if self.folder is not None:
            lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in self.records()]
            _write_whole(self.folder / MERGED, "".join(lines))

    def _entries(self) -> Iterable[Record]:
        if self.folder is None:
            return self._memory
        parts = sorted((self.folder / PARTS).glob("*.jsonl"), key=lambda part: int(part.stem))
        return (entry for part in parts for entry in _whole_lines(part))

    def _part(self) -> Path:
        return (self.folder or Path()) / PARTS / f"{self.process}.jsonl"

    def _definition(self) -> dict[str, Any] | None:
        if self.folder is None or not (self.folder / DEFINITION).exists():
            return None
        return dict(json.loads((self.folder / DEFINITION).read_text(encoding="utf-8")))


def _whole_lines(part: Path) -> Iterator[Record]:
    with open(part, encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            if line.endswith("\n"):  # another process may be writing its last one
                yield json.loads(line)


def _write_whole(path: Path, text: str) -> None:
    """The file appears whole or not at all."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def _flat(entries: dict[str, Any]) -> dict[str, Any]:
    """One level of dicts written out, `{"task": {"name": 1}}` as `{"task.name": 1}`."""
    flat: dict[str, Any] = {}
    for name, value in entries.items():
        flat |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."
