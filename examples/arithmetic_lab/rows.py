"""The solutions a model is trained on: right ones, corrupted ones, and the draft's own."""

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from .evaluate import write_solutions
from .packing import Row
from .settings import Settings
from .task import Problem, corrupt, right_length, sample_problem, solution


class Rows:
    """Draws the rows of a step: a function of the seed and the step alone, so that a resumed run sees the same.

    Args:
        settings: The run's.
        tokenizer: The lab's tokenizer.
    """

    REFRESH = 50

    def __init__(self, settings: Settings, tokenizer: PreTrainedTokenizerFast):
        self.settings, self.tokenizer = settings, tokenizer
        self.judged = settings.role == "target"
        self.draft: Any = None
        self.pool: dict[int, list[Row]] = {}
        self.pool_index = -1

    def __call__(self, step: int) -> list[Row]:
        rng = random.Random(f"{self.settings.seed}-{step}")
        judged = self.judged and step >= self.settings.judge_from
        grown = min(1.0, step / max(1, self.settings.curriculum))
        count = rng.randint(1 + round(3 * grown), 2 + round(8 * grown))
        length = 12 * count + 8 + (3 * count + 3 if judged else 0)
        number = max(2, self.settings.tokens // length)
        rows = self.drafted(rng, step, count, number // 2) if self.mixed(step) else []
        return rows + [synthetic_row(rng, count, judged) for _ in range(number - len(rows))]

    def mixed(self, step: int) -> bool:
        """Whether a step has rows of the draft's own."""
        folder = self.settings.draft
        if folder is None or step < self.settings.mix_from:
            return False
        if self.draft is None and (Path(folder) / "model.safetensors").exists():
            self.draft = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return self.draft is not None

    def drafted(self, rng: random.Random, step: int, count: int, number: int) -> list[Row]:
        """Rows the draft wrote, of one chain length, from a pool that is written anew every few steps."""
        index = step // self.REFRESH
        if index != self.pool_index:
            self.pool_index, self.pool = index, {}
            source = random.Random(f"{self.settings.seed}-pool-{index}")
            problems = [sample_problem(source) for _ in range(self.settings.pool)]
            for row in drafted_rows(self.draft, self.tokenizer, problems, source.uniform(0.7, 1.0), source.random()):
                self.pool.setdefault(len(row.problem.steps), []).append(row)
        rows = self.pool.get(count, [])
        return rng.sample(rows, min(number, len(rows)))


def synthetic_row(rng: random.Random, count: int, judged: bool) -> Row:
    """A right solution or, for a model that is to judge, more often than not a corrupted one.

    Half of the corrupted have a fault on every other line: one fault in a hundred characters is too few to learn from.
    """
    problem = sample_problem(rng, count, count)
    if judged and rng.random() < 0.6:
        return Row(problem, *corrupt(rng, problem, rng.choice((0.0, 0.5))))
    text = solution(problem)
    return Row(problem, text, [True] * len(text), judged=judged)


def drafted_rows(
    draft: Any, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], temperature: float, seed: float
) -> list[Row]:
    """What a model writes, to be judged; its characters are imitated up to the first wrong one."""
    texts = write_solutions(draft, tokenizer, problems, temperature=temperature, seed=int(seed * 2**31))
    rows = []
    for problem, (text, finished) in zip(problems, texts, strict=True):
        right = right_length(problem, text)
        expected = [index < right for index in range(len(text))]
        rows.append(Row(problem, text, expected, right + 1, finished=finished and text == solution(problem)))
    return rows


def right_row(problem: Problem) -> Row:
    """The right solution as a row to be judged."""
    text = solution(problem)
    return Row(problem, text, [True] * len(text))
