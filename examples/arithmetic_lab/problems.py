"""Writes `heldout.jsonl` and `calibration.jsonl`: `python -m examples.arithmetic_lab.problems`."""

import json
import random
from pathlib import Path

from .task import Problem, sample_problem, solution

HERE = Path(__file__).parent
SIZES = {"heldout": 2400, "calibration": 500}


def write_problems(name: str, path: Path) -> None:
    """Writes the problems of one split, each once: prompt, right answer, number of steps, solution.

    Args:
        name: The split, a key of `SIZES`.
        path: The file.
    """
    rng, drawn = random.Random(name), dict[str, Problem]()
    while len(drawn) < SIZES[name]:
        problem = sample_problem(rng, split=name)
        drawn.setdefault(problem.question, problem)
    with path.open("w") as file:
        for question, problem in drawn.items():
            item = {
                "prompt": question,
                "answer": problem.answer,
                "steps": len(problem.steps),
                "solution": solution(problem),
            }
            file.write(json.dumps(item) + "\n")


if __name__ == "__main__":
    for split in SIZES:
        write_problems(split, HERE / f"{split}.jsonl")
