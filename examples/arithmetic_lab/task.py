"""The lab's task: chains of two-digit operations mod 100, one written step a line, made and checked by code.

A question is read strictly from left to right: `47+38-15*03=` is answered by the lines `47+38=85`, `85-15=70`,
`70*03=10` and `#10`. Every step has the same shape, so a slip is a wrong character and seldom a shifted one.
"""

import hashlib
import random
import re
from dataclasses import dataclass

MODULUS = 100
# A product is by one digit, 2 to 9, and is what the models learn last.
OPERATORS, PRODUCT_SHARE = "+-*", 0.15
# Which sixteenth of all questions a split owns; training owns the other thirteen.
SPLITS = {"heldout": 0, "calibration": 1, "validation": 2}
LINE = re.compile(r"(\d\d)([-+*])(\d\d)=(\d\d)")


@dataclass(frozen=True)
class Problem:
    """A start value and the (operator, operand) pairs applied to it in order."""

    start: int
    steps: tuple[tuple[str, int], ...]

    @property
    def question(self) -> str:
        """The question as it is asked, `47+38-15*03=`."""
        return f"{self.start:02d}" + "".join(f"{operator}{operand:02d}" for operator, operand in self.steps) + "="

    @property
    def answer(self) -> str:
        """The right final answer, two digits."""
        value = self.start
        for operator, operand in self.steps:
            value = apply(value, operator, operand)
        return f"{value:02d}"


def apply(value: int, operator: str, operand: int) -> int:
    """One step, mod 100."""
    return {"+": value + operand, "-": value - operand, "*": value * operand}[operator] % MODULUS


def split_of(question: str) -> str:
    """The split that owns a question: `train` or a key of `SPLITS`; a function of its text alone."""
    part = hashlib.sha256(question.encode()).digest()[0] % 16
    return next((name for name, owned in SPLITS.items() if owned == part), "train")


def sample_problem(rng: random.Random, min_steps: int = 4, max_steps: int = 10, split: str = "train") -> Problem:
    """A problem of one split, its number of steps uniform between the two bounds."""
    count = rng.randint(min_steps, max_steps)
    while True:
        steps = tuple(sample_step(rng) for _ in range(count))
        problem = Problem(rng.randrange(MODULUS), steps)
        if split_of(problem.question) == split:
            return problem


def sample_step(rng: random.Random) -> tuple[str, int]:
    """An operator and its operand."""
    if rng.random() < PRODUCT_SHARE:
        return "*", rng.randint(2, 9)
    return rng.choice("+-"), rng.randrange(MODULUS)


def parse_question(question: str) -> Problem:
    """The problem a question asks.

    Raises:
        ValueError: The text is not a question of this task.
    """
    if not re.fullmatch(r"\d\d([-+*]\d\d)+=", question):
        raise ValueError(f"{question!r} is not a question of this task, such as '47+38-15*03='")
    return Problem(int(question[:2]), tuple((op, int(value)) for op, value in re.findall(r"([-+*])(\d\d)", question)))


def solution(problem: Problem) -> str:
    """The one right solution: a line for each step, then `#` and the answer."""
    return corrupted_solution(problem, {})[0]


def corrupted_solution(problem: Problem, faults: dict[tuple[int, int], str]) -> tuple[str, list[bool]]:
    """The solution of a writer who slips where `faults` says and otherwise goes on consistently from what it wrote.

    Args:
        problem: What is asked.
        faults: (line, column) -> the character written there. Line k is step k; the last line is the answer's.

    Returns:
        The text, and for each of its characters whether a faultless writer would put it after the text before it.
    """
    text, expected = "", []
    written = f"{problem.start:02d}"
    for index, (operator, operand) in enumerate((*problem.steps, ("", 0))):
        if operator:
            line = f"{written}{operator}{operand:02d}="
            line = "".join(faults.get((index, column), char) for column, char in enumerate(line))
            wanted = f"{written}{operator}{operand:02d}="
            result = f"{apply(int(line[:2]), line[2], int(line[3:5])):02d}"
        else:
            line, wanted, result = "#", "#", written
        written = "".join(faults.get((index, len(line) + column), char) for column, char in enumerate(result))
        text += line + written + ("\n" if operator else "")
        wanted += result + ("\n" if operator else "")
        expected += [got == want for got, want in zip(line + written + "\n", wanted, strict=False)]
    return text, expected


def corrupt(rng: random.Random, problem: Problem, share: float = 0.0) -> tuple[str, list[bool]]:
    """A solution with a wrong character at one random step, or at many; later steps follow from what is written.

    Args:
        rng: The source of every choice.
        problem: What is asked.
        share: Above 0, the share of the lines with a wrong character; 0 is one line, now and then two.

    Returns:
        As `corrupted_solution`.
    """
    faults: dict[tuple[int, int], str] = {}
    true = solution(problem)
    if share > 0:
        lines = [line for line in range(len(problem.steps) + 1) if rng.random() < share]
    else:
        drawn = rng.choices(range(len(problem.steps)), k=2 if rng.random() < 0.15 else 1)
        lines = [line if rng.random() < 0.92 else len(problem.steps) for line in drawn]
    for line in lines:
        last = line == len(problem.steps)
        # Columns: 0-1 the value carried over, 2 the operator, 3-4 the operand, 6-7 the result; the answer is in 1-2.
        column = rng.choice((1, 2)) if last else rng.choice((0, 1, 2, 3, 4, 3, 4, 6, 6, 6, 7, 7, 7))
        if not last and problem.steps[line][0] == "*" and column == 3:
            column = 4  # a product by two digits is nothing a writer of this task comes to
        was = true[9 * line + column]
        if was in OPERATORS:
            faults[line, column] = rng.choice("+-".replace(was, ""))
        else:
            # A slip of the carry is off by one, and is what a weak writer does most.
            shift = rng.choice((1, 9)) if rng.random() < 0.4 else rng.randrange(1, 10)
            faults[line, column] = str((int(was) + shift) % 10)
    text, expected = corrupted_solution(problem, faults)
    # Two faults can undo each other: what is left must be wrong.
    return (text, expected) if text != true else corrupt(rng, problem, share)


def step_is_right(line: str) -> bool:
    """Whether a line is a step, `47+38=85`, with the right result; whether it was asked for is not looked at."""
    match = LINE.fullmatch(line)
    return match is not None and apply(int(match[1]), match[2], int(match[3])) == int(match[4])


def prefix_is_right(problem: Problem, text: str) -> bool:
    """Whether all that is written of a solution is right and follows from the question: the judge's label."""
    return solution(problem).startswith(text)


def right_length(problem: Problem, text: str) -> int:
    """The number of characters before the first wrong one."""
    true = solution(problem)
    return next((index for index, char in enumerate(text) if true[index : index + 1] != char), len(text))


def extract_answer(text: str) -> str | None:
    """The final answer of a solution, None if it has none."""
    match = re.search(r"#(\d\d)$", text.strip())
    return match[1] if match else None


def check(text: str, answer: str) -> bool:
    """Whether a solution ends with the answer; its steps are not looked at."""
    return extract_answer(text) == answer
