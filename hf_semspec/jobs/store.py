"""What a job has finished, so that a kill at any moment loses no more than the batch in work, and its output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..evaluation.journal import Journal
from .lines import WINDOW, Batch

Record = dict[str, Any]


class Store:
    """The finished batches of a job, a line of a part each, and the output made of them.

    Args:
        output (`Path`): the file of answers, which appears whole at the end. Until then and after, the folder beside
            it with `.parts` at the end of its name holds the job; it may be deleted once the output is there.
        process (`int`): which process this is; it writes a part of its own.
    """

    def __init__(self, output: Path, process: int = 0) -> None:
        self.output = output
        self.folder = output.with_name(output.name + ".parts")
        self.journal = Journal(self.folder, process)
        # Of each finished batch: the digest of its lines, and where its records stand.
        self.done: dict[int, tuple[str, Path, int]] = {}

    def check(self, definition: dict[str, Any]) -> None:
        """See that the output is this job's.

        Raises:
            ValueError: the output is another's.
        """
        if not self.output.parent.is_dir():
            raise ValueError(f"output {self.output}: there is no folder {self.output.parent}")
        if self.output.exists() and not self.folder.exists():
            raise ValueError(f"output {self.output} exists: take another file, or remove it")
        self.journal.check(definition)

    def open(self, definition: dict[str, Any]) -> None:
        """Go on with the job, or begin it."""
        self.journal.begin(definition)
        self.journal.mend()
        self.read()

    def read(self) -> None:
        """Take in what all processes have finished."""
        self.done.clear()
        for part in sorted((self.folder / "parts").glob("*.jsonl"), key=lambda part: int(part.stem)):
            place = 0
            with open(part, "rb") as file:
                for line in file:
                    if line.endswith(b"\n"):
                        entry = json.loads(line)
                        self.done.setdefault(entry["batch"], (entry["digest"], part, place))
                    place += len(line)

    def has(self, batch: Batch) -> bool:
        """Whether `batch` is finished.

        Raises:
            ValueError: it is, but was of other lines.
        """
        found = self.done.get(batch.number)
        if found is not None and found[0] != batch.digest:
            raise self._other_input()
        return found is not None

    def add(self, batch: Batch, records: list[Record]) -> None:
        """Put a finished batch on disk."""
        self.journal.add({"batch": batch.number, "digest": batch.digest, "records": records})

    def merge(self, batches: int) -> None:
        """Write the output of `batches` batches, a record a line in the order of the input."""
        self.read()
        if set(self.done) != set(range(batches)):
            raise self._other_input()
        scratch = self.output.with_name(self.output.name + ".tmp")
        with open(scratch, "w", encoding="utf-8") as file:
            window: list[Record] = []
            for number in range(batches):
                window += self._records(number)
                # Lines change places only within a window of batches.
                if (number + 1) % WINDOW == 0 or number + 1 == batches:
                    window.sort(key=lambda record: record["line"])
                    file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in window)
                    window = []
        scratch.replace(self.output)

    def _other_input(self) -> ValueError:
        return ValueError(f"the input differs from that of {self.folder}: take another output, or remove that folder")

    def _records(self, number: int) -> list[Record]:
        _, part, place = self.done[number]
        with open(part, "rb") as file:
            file.seek(place)
            records: list[Record] = json.loads(file.readline())["records"]
        return records
