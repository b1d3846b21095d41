"""Tasks: problems, the prompt they are put in, and how an answer is read out of a text and checked."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from ..common.fields import listed

# A sign counts only where no digit or letter stands before it: `16-3` ends in 3, `= -$3` in -3. Commas only between
# groups of three. A dot that no digit follows ends a sentence.
_NUMBER = re.compile(
    r"(?:(?<![\w.)])(-)\s?)?\$?\s?((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
GSM8K_TEMPLATE = "{prompt}\nThink step by step, then give the final answer as a number in the last line."


@dataclass(frozen=True)
class Example:
    """A problem and the right answer to it, as `Task.extract` would give it."""

    prompt: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the contenders are asked, and when an answer is right.

    Args:
        name (`str`): for the report.
        examples (`tuple[Example, ...]`): the problems, in the order they are asked in.
        template (`str`): what is asked; `{prompt}` stands for the problem.
        extract (`Callable[[str], str | None]`): the answer in a generated text, `None` where there is none.
        check (`Callable[[str, str], bool]`): whether an extracted answer equals the right one.
        rule (`str`): in words how answers are read and checked; part of what a resumed run must have in common.
    """

    name: str
    examples: tuple[Example, ...]
    template: str = "{prompt}"
    extract: Callable[[str], str | None]
    check: Callable[[str, str], bool]
    rule: str = ""

    def __post_init__(self) -> None:
        if "{prompt}" not in self.template:
            raise ValueError(f"--template {self.template!r}: must hold {{prompt}}, which stands for the problem")
        if not self.examples:
            raise ValueError(f"the task {self.name} has no examples")

    def question(self, index: int) -> str:
        """What is asked for example `index`."""
        return self.template.replace("{prompt}", self.examples[index].prompt)

    def grade(self, index: int, text: str) -> tuple[str | None, bool]:
        """The answer in `text`, and whether it is the right one to example `index`."""
        answer = self.extract(text)
        return answer, answer is not None and self.check(answer, self.examples[index].answer)

    def first(self, limit: int | None) -> Task:
        """The task with no more than its first `limit` examples."""
        return self if limit is None else replace(self, examples=self.examples[:limit])

    def describe(self) -> dict[str, Any]:
        """JSON-safe: what tells this task from another, its examples as a digest."""
        pairs = json.dumps([[example.prompt, example.answer] for example in self.examples])
        return {
            "name": self.name,
            "template": self.template,
            "rule": self.rule,
            "examples": len(self.examples),
            "sha256": hashlib.sha256(pairs.encode()).hexdigest(),
        }


def last_number(text: str) -> str | None:
    """The last number in `text` in plain form (`$1,234.50.` gives `1234.5`), `None` if there is none."""
    found = list(_NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")))
    if not found:
        return None
    sign, digits = found[-1].groups()
    number = Decimal((sign or "") + digits.replace(",", ""))
    plain = f"{number:f}"
    plain = plain.rstrip("0").rstrip(".") if "." in plain else plain
    return "0" if plain == "-0" else plain


def by_pattern(pattern: str) -> Callable[[str], str | None]:
    """An extractor that gives the last match's first group (the match, if it has no groups), stripped.

    Raises:
        ValueError: not a regular expression.
    """
    try:
        compiled = re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise ValueError(f"--extract {pattern!r}: no regular expression ({error})") from None

    def extract(text: str) -> str | None:
        matches = list(compiled.finditer(text))
        found = matches[-1][1 if compiled.groups else 0] if matches else None
        return None if found is None else found.strip()

    return extract


def gsm8k(path: str | Path, *, template: str | None = None) -> Task:
    """GSM8K: grade-school problems whose answers end in `#### 18`; the last number of a text is its answer.

    Args:
        path (`str` or `Path`): the published file, a line of JSON with `question` and `answer` each.
        template (`str`, *optional*): replaces the prompt asked by default.

    Raises:
        ValueError: a line that is not such; the message has its number.
        OSError: the file cannot be read.
    """
    examples = []
    for line, entry in _lines(path, ("question", "answer")):
        _, mark, rest = entry["answer"].rpartition("####")
        number = last_number(rest) if mark else None
        if number is None:
            raise ValueError(f'{path}, line {line}: "answer" does not end in "#### NUMBER"')
        examples.append(Example(entry["question"], number))
    return Task(
        name="gsm8k",
        examples=tuple(examples),
        template=GSM8K_TEMPLATE if template is None else template,
        extract=last_number,
        check=lambda answer, right: Decimal(answer) == Decimal(right),
        rule="last number",
    )


def jsonl(path: str | Path, *, extract: str | None = None, template: str | None = None) -> Task:
    """Problems of one's own: a line of JSON with `prompt` and `answer` each.

    Args:
        path (`str` or `Path`): the file.
        extract (`str`, *optional*): a regular expression (multiline): the last match's first group is the answer.
            Without one the whole text is, less the blanks around it. It must equal the file's.
        template (`str`, *optional*): what is asked; `{prompt}` stands for the problem.

    Raises:
        ValueError: a bad pattern or template, or a line that is not such; the message has its number.
        OSError: the file cannot be read.
    """
    extractor = str.strip if extract is None else by_pattern(extract)
    examples = [Example(entry["prompt"], entry["answer"].strip()) for _, entry in _lines(path, ("prompt", "answer"))]
    return Task(
        name="jsonl",
        examples=tuple(examples),
        template="{prompt}" if template is None else template,
        extract=extractor,
        check=str.__eq__,
        rule="whole text" if extract is None else f"last match of {extract}",
    )


TASKS = ("gsm8k", "jsonl")


def task_by_name(name: str, path: str | Path | None, *, extract: str | None, template: str | None) -> Task:
    """The task of `TASKS` called `name`, over the file `path`; arguments as of [`jsonl`].

    Raises:
        ValueError: an unknown name, no path, an option that the task does not have, or a bad file.
        OSError: the file cannot be read.
    """
    if name not in TASKS:
        raise ValueError(f"--task {name}: must be one of {listed(TASKS)}")
    if path is None:
        raise ValueError(f"--task {name} reads its problems from a file: pass --path FILE")
    if name == "gsm8k":
        if extract is not None:
            raise ValueError("--extract is for --task jsonl: gsm8k takes the last number of a text")
        return gsm8k(path, template=template)
    return jsonl(path, extract=extract, template=template)


def _lines(path: str | Path, names: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, the fields `names` as text) of every line that is not blank."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file in UTF-8 ({error.reason})") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error.msg})") from None
        if not isinstance(entry, dict):
            raise ValueError(f"{path}, line {number}: must be an object with {listed(names)}")
        missing = [name for name in names if name not in entry]
        if missing:
            raise ValueError(f"{path}, line {number}: lacks {listed(missing)}; it has {listed(entry)}")
        for name in names:
            if isinstance(entry[name], bool) or not isinstance(entry[name], str | int | float):
                raise ValueError(f'{path}, line {number}: "{name}" must be text or a number')
        yield number, {name: str(entry[name]) for name in names}
