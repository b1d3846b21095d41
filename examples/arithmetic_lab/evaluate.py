"""Accuracy of a model's solutions and of its verdicts."""

from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from .packing import IGNORE, Packed, Packer, Row
from .task import Problem, solution
from .tokenizer import prompt_text


def logits_of(model: Any, batch: Packed) -> torch.Tensor:
    """One forward of a batch, (B, L, vocabulary)."""
    inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    logits: torch.Tensor = model(**inputs, attention_mask=batch.mask.to(model.dtype), use_cache=False).logits
    return logits


@torch.no_grad()
def right_answers(model: Any, packer: Packer, problems: list[Problem], rows: int = 64) -> dict[str, float]:
    """Share of problems, and of characters, that greedy decoding gets right.

    Greedy decoding writes the right solution exactly if, after every right prefix, the likeliest character is the
    right one: one forward shows it. (A wrong solution that ends with the right answer counts as wrong here.)

    Args:
        model: The writer.
        packer: The lab's.
        problems: What it is asked.
        rows: Problems a forward.

    Returns:
        `accuracy` over problems, `step_accuracy` over lines.
    """
    right = 0
    lines, right_lines = 0, 0
    for start in range(0, len(problems), rows):
        texts = [solution(problem) for problem in problems[start : start + rows]]
        chunk = [
            Row(problem, text, [True] * len(text), judged=False)
            for problem, text in zip(problems[start : start + rows], texts, strict=True)
        ]
        batch = packer(chunk)
        logits = logits_of(model, batch)
        wrong = (logits.argmax(-1) != batch.targets) & (batch.targets != IGNORE)
        right += int((~wrong.any(1)).sum())
        newline = packer.encode("\n")[0]
        for row in range(len(chunk)):
            kept = batch.targets[row] != IGNORE
            ends = (batch.targets[row][kept] == newline).nonzero().flatten().tolist()
            begin = 0
            for end in ends:
                lines += 1
                right_lines += not bool(wrong[row][kept][begin : end + 1].any())
                begin = end + 1
    return {"accuracy": right / len(problems), "step_accuracy": right_lines / lines}


@torch.no_grad()
def judge_scores(model: Any, packer: Packer, rows: list[Row], batch_rows: int = 64) -> list[tuple[float, bool, bool]]:
    """The confidence of each verdict, P(Y) / (P(Y) + P(N)), whether Y is right, whether it is on a whole answer."""
    scores = []
    for start in range(0, len(rows), batch_rows):
        batch = packer(rows[start : start + batch_rows])
        logits = logits_of(model, batch)
        where = batch.labels != IGNORE
        confidence = torch.sigmoid(logits[where][:, packer.yes] - logits[where][:, packer.no])
        right = batch.labels[where] == packer.yes
        scores += zip(confidence.tolist(), right.tolist(), batch.whole[where].tolist(), strict=True)
    return scores


def judge_rates(model: Any, packer: Packer, rows: list[Row]) -> dict[str, dict[str, float]]:
    """Error rates of the verdicts at a threshold of one half, over whole answers and over unfinished ones.

    Args:
        model: The judge.
        packer: The lab's.
        rows: What it judges.

    Returns:
        For `whole` and `unfinished`: `accuracy`, `balanced` (mean of the accuracies on right and on wrong ones),
        `false_accept` (share of the wrong that pass), `false_reject` (of the right that do not), `count`, `right`.
    """
    scores = judge_scores(model, packer, rows)
    rates = {}
    for kind, wanted in (("whole", True), ("unfinished", False)):
        pairs = [(confidence >= 0.5, right) for confidence, right, whole in scores if whole == wanted]
        on_right = [accepted for accepted, right in pairs if right]
        on_wrong = [accepted for accepted, right in pairs if not right]
        false_accept = sum(on_wrong) / max(1, len(on_wrong))
        false_reject = 1 - sum(on_right) / max(1, len(on_right)) if on_right else 0.0
        rates[kind] = {
            "accuracy": sum(accepted == right for accepted, right in pairs) / max(1, len(pairs)),
            "balanced": 1 - (false_accept + false_reject) / 2,
            "false_accept": false_accept,
            "false_reject": false_reject,
            "count": len(pairs),
            "right": len(on_right),
        }
    return rates


@torch.no_grad()
def write_solutions(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    temperature: float = 0.0,
    seed: int = 0,
    rows: int = 256,
    max_new_tokens: int = 104,
) -> list[tuple[str, bool]]:
    """What a model writes, and whether it ended it, problem by problem.

    Args:
        model: The writer.
        tokenizer: The lab's tokenizer.
        problems: What it is asked.
        temperature: Of the sampling; 0 is greedy.
        seed: Of the sampling; the global generator is put back afterwards.
        rows: Problems a batch.
        max_new_tokens: Where a solution is cut off.
    """
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    # Problems of a like length share a batch: little padding, and a batch is done when its longest is.
    order = sorted(range(len(problems)), key=lambda index: len(problems[index].steps))
    written: dict[int, tuple[str, bool]] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for start in range(0, len(order), rows):
            chunk = order[start : start + rows]
            prompts = [prompt_text(tokenizer, problems[index].question) for index in chunk]
            inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
            inputs.pop("token_type_ids", None)
            cap = min(max_new_tokens, 10 * (max(len(problems[index].steps) for index in chunk) + 1))
            output = model.generate(**inputs, **sampling, max_new_tokens=cap)[:, inputs["input_ids"].shape[1] :]
            for index, ids in zip(chunk, output.tolist(), strict=True):
                finished = tokenizer.eos_token_id in ids
                length = ids.index(tokenizer.eos_token_id) if finished else len(ids)
                written[index] = (tokenizer.decode(ids[:length], skip_special_tokens=True), finished)
    return [written[index] for index in range(len(problems))]
