"""Thresholds for parse from what the target's verdicts are worth on prompts of the user's task."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from ..configuration import PARSEConfig, SemSpecConfig
from ..engine.text import find_tokenizer
from .easd import progress_over, prompt_inputs

BINS = 10


@dataclasses.dataclass(frozen=True)
class PARSECalibration:
    """Result of `calibrate_parse`.

    Args:
        config (`PARSEConfig`): the given config with calibrated thresholds, ready for `SemSpecConfig`.
        report (`dict`): JSON-safe: thresholds, numbers of prompts and verdicts, false-accept and false-reject rates at
            the thresholds, and the reliability curves, each for `"full"` (whole answers) and `"prefix"`.
        confidences (`dict` of `torch.Tensor` of shape `(verdicts,)`): c of each of the two kinds.
        right (`dict` of `torch.Tensor` of shape `(verdicts,)`, bool): whether what was judged was right.
    """

    config: PARSEConfig
    report: dict[str, Any]
    confidences: dict[str, torch.Tensor]
    right: dict[str, torch.Tensor]

    def plot(self, path: str | Path) -> None:
        """Draw both reliability curves with 95 % Wilson intervals, how often each confidence occurs, and the
        thresholds to `path` (needs matplotlib and scipy, `hf-semspec[bench]`)."""
        from matplotlib.figure import Figure
        from scipy.stats import binomtest

        figure = Figure(figsize=(9, 5.5), layout="constrained")
        axes = figure.subplots(2, 2, sharex=True, gridspec_kw={"height_ratios": [3, 1]})
        for column, (kind, title) in enumerate((("full", "whole answers"), ("prefix", "unfinished answers"))):
            curve, threshold = self.report["reliability"][kind], self.report["thresholds"][kind]
            upper, lower = axes[0][column], axes[1][column]
            upper.plot([0, 1], [0, 1], color="0.7", linewidth=1, zorder=0)
            shares = [point["right"] / point["verdicts"] for point in curve]
            bounds = [binomtest(point["right"], point["verdicts"]).proportion_ci(method="wilson") for point in curve]
            spread = [
                [max(share - bound.low, 0.0) for share, bound in zip(shares, bounds, strict=True)],
                [max(bound.high - share, 0.0) for share, bound in zip(shares, bounds, strict=True)],
            ]
            upper.errorbar([point["confidence"] for point in curve], shares, yerr=spread, marker="o", capsize=2)
            rates = self.report["rates"][kind]
            upper.set_title(
                f"{title}: {rates['verdicts']} verdicts, {_percent(rates['false_accept'])} of the wrong accepted,\n"
                f"{_percent(rates['false_reject'])} of the right rejected at {threshold:.3g}",
                fontsize=9,
            )
            upper.set(ylabel="share right" if column == 0 else "", ylim=(-0.03, 1.03), xlim=(-0.02, 1.02))
            values, right = self.confidences[kind], self.right[kind]
            lower.hist(
                [values[right].numpy(), values[~right].numpy()],
                bins=40,
                range=(0, 1),
                stacked=True,
                color=["C0", "C3"],
                label=["right", "wrong"],
            )
            lower.set(xlabel="the target's confidence", ylabel="verdicts" if column == 0 else "")
            lower.legend(fontsize=8)
            if threshold <= 1:
                for panel in (upper, lower):
                    panel.axvline(threshold, color="0.3", linestyle="--", linewidth=1)
        figure.savefig(path, dpi=130)


def calibrate_parse(
    model: Any,
    draft: Any,
    prompts: Sequence[Any],
    answers: Sequence[str] | None = None,
    max_false_accept: float = 0.02,
    *,
    check: Callable[[str, str], bool] | None = None,
    config: PARSEConfig | None = None,
    generation_config: GenerationConfig | None = None,
    tokenizer: Any = None,
    max_new_tokens: int = 256,
    progress: bool = True,
) -> PARSECalibration:
    """Set parse's thresholds to the lowest at which at most a share `max_false_accept` of what is wrong would be
    accepted (ours; arXiv 2605.04263 tunes its thresholds by hand).

    The draft answers each prompt and the target judges the answer and its prefixes. An answer is right if `check` says
    so; a prefix is right if the target, going on from it, comes to a right answer. Prefixes of prompts that the target
    by itself gets wrong are left out.

    Args:
        model, draft: the pair to calibrate for.
        prompts: strings (encoded as they are: apply a chat template first), lists of chat messages, or dicts of
            `input_ids` and `attention_mask`, one prompt each.
        answers (*optional*): the right answer to each prompt. Without them the target's own answer, decoded plainly,
            is taken for right: then the thresholds speak of agreement with the target, not of truth.
        max_false_accept (`float` in [0, 1]): share of the wrong answers, and of the wrong prefixes, that may pass.
        check: `check(text, answer)` compares a written text with the right answer; by default the last numbers in
            both are compared, or where the answer has none, the ends of the texts.
        config (`PARSEConfig`, *optional*): the other fields of the result; defaults otherwise.
        generation_config (`GenerationConfig`, *optional*): the settings to calibrate for, its length aside; greedy
            otherwise.
        tokenizer (*optional*): the target's; by default the one in the folder that `model` came from.
        max_new_tokens (`int`): tokens to decode a prompt.
        progress (`bool`): show a progress bar (with rich, if it is installed).

    Returns:
        `PARSECalibration` with `.config`, `.report` and `.plot(path)`.

    Raises:
        ValueError: a share outside its range, no prompts, another number of answers, or a prompt that is no prompt.
    """
    if not 0 <= max_false_accept <= 1:
        raise ValueError(f"max_false_accept={max_false_accept!r}: must be a number in [0, 1]")
    prompts = list(prompts)
    if not prompts:
        raise ValueError("prompts is empty: pass at least one prompt of the task that parse is to be used on")
    if answers is not None and len(answers) != len(prompts):
        raise ValueError(f"answers has {len(answers)} entries for {len(prompts)} prompts: pass one for each")
    tokenizer = find_tokenizer(model, tokenizer)
    base = config if config is not None else PARSEConfig()
    judged = dataclasses.replace(base, accept_threshold=0.0, single_pass=True, max_redrafts=0, boundary="first_fail")
    settings = {"do_sample": False} if generation_config is None else generation_config.to_diff_dict()
    settings = {name: value for name, value in settings.items() if name not in ("transformers_version", "semspec")}
    settings = {**settings, "max_new_tokens": max_new_tokens}
    call = SemSpecConfig(judged, **{**settings, "return_dict_in_generate": True})
    batches = [prompt_inputs(prompt, tokenizer, model) for prompt in prompts]
    compare = check or same_answer
    confidences: dict[str, list[float]] = {"full": [], "prefix": []}
    right: dict[str, list[bool]] = {"full": [], "prefix": []}
    for i, batch in enumerate(progress_over(batches, "calibrating parse", progress)):
        output = model.generate(**batch, assistant_model=draft, generation_config=call, tokenizer=tokenizer)
        width = batch["input_ids"].shape[1]
        cuts = [n for n in output.boundaries[0].tolist() if n >= 0]
        text = output.sequences[0]
        prefixes = [text[: width + n] for n in (0, *cuts[:-1])]
        alone, *written = _write(model, tokenizer, prefixes, width, settings)
        goal = alone if answers is None else answers[i]
        # Where the target fails by itself, that it fails behind a prefix says nothing of the prefix.
        marks = [compare(own, goal) for own in written] if compare(alone, goal) else []
        whole = compare(tokenizer.decode(text[width:], skip_special_tokens=True), goal)
        for kind, values, truths in (
            ("full", output.verdicts[0, len(cuts) - 1 : len(cuts)], [whole]),
            ("prefix", output.verdicts[0, : len(cuts) - 1], marks),
        ):
            known = [(c, truth) for c, truth in zip(values.tolist(), truths, strict=False) if not math.isnan(c)]
            confidences[kind] += [c for c, _ in known]
            right[kind] += [truth for _, truth in known]
    return _calibration(base, confidences, right, max_false_accept, answers is not None)


def same_answer(text: str, answer: str) -> bool:
    """Whether `text` comes to `answer`: the last numbers of both are equal, or, where `answer` has none, `text` ends
    with it, case and punctuation at the end aside."""
    numbers = [re.findall(r"-?\d[\d,]*(?:\.\d+)?", part) for part in (text, answer)]
    if numbers[1]:
        values = [[float(number.replace(",", "")) for number in part[-1:]] for part in numbers]
        return values[0] == values[1]
    ends = [part.strip().rstrip(".!?").casefold() for part in (text, answer)]
    return ends[0].endswith(ends[1])


def _write(model: Any, tokenizer: Any, texts: list[torch.Tensor], width: int, settings: dict[str, Any]) -> list[str]:
    """What the target makes of each of `texts` on its own, after the prompt of `width` tokens; all as one batch."""
    longest = max(len(text) for text in texts)
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    ids = torch.full((len(texts), longest), pad, device=texts[0].device)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, longest - len(text) :] = text
        mask[row, longest - len(text) :] = 1
    most = settings["max_new_tokens"]
    room = max(width + most - min(len(text) for text in texts), 1)  # the shortest text has most left to write
    plain = GenerationConfig(**{**settings, "max_new_tokens": room, "pad_token_id": pad})
    output = model.generate(
        input_ids=ids, attention_mask=mask, generation_config=plain, tokenizer=tokenizer, semspec=None
    )
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    starts = [longest - len(text) + width for text in texts]
    return [
        tokenizer.decode(row[start : start + most], skip_special_tokens=True)
        for row, start in zip(sequences, starts, strict=True)
    ]


def _calibration(
    base: PARSEConfig,
    confidences: dict[str, list[float]],
    right: dict[str, list[bool]],
    max_false_accept: float,
    labelled: bool,
) -> PARSECalibration:
    values = {kind: torch.tensor(own, dtype=torch.float64) for kind, own in confidences.items()}
    truths = {kind: torch.tensor(own, dtype=torch.bool) for kind, own in right.items()}
    defaults = {"full": base.accept_threshold, "prefix": base.prefix_threshold}
    thresholds = {
        kind: lowest_threshold(values[kind], truths[kind], max_false_accept, defaults[kind]) for kind in values
    }
    report = {
        "max_false_accept": max_false_accept,
        "labelled": labelled,
        "prompts": len(confidences["full"]),
        "thresholds": thresholds,
        "rates": {kind: rates(values[kind], truths[kind], thresholds[kind]) for kind in values},
        "reliability": {kind: reliability(values[kind], truths[kind]) for kind in values},
    }
    calibrated = dataclasses.replace(base, accept_threshold=thresholds["full"], prefix_threshold=thresholds["prefix"])
    return PARSECalibration(calibrated, report, values, truths)


def lowest_threshold(confidences: torch.Tensor, right: torch.Tensor, max_false_accept: float, default: float) -> float:
    """The lowest threshold that at most a share `max_false_accept` of the wrong ones reaches; `default` where nothing
    was wrong, so that nothing can be said.

    Args:
        confidences (`torch.Tensor` of shape `(verdicts,)`, float64).
        right (`torch.Tensor` of shape `(verdicts,)`, bool).
    """
    wrong = confidences[~right].sort(descending=True).values
    if not len(wrong):
        return default
    allowed = int(max_false_accept * len(wrong))
    return math.nextafter(float(wrong[allowed]), math.inf) if allowed < len(wrong) else 0.0


def rates(confidences: torch.Tensor, right: torch.Tensor, threshold: float) -> dict[str, Any]:
    """Numbers of verdicts, and the shares of the wrong ones accepted and of the right ones rejected at `threshold`."""
    accepted = confidences >= threshold
    wrong, good = int((~right).sum()), int(right.sum())
    return {
        "verdicts": len(right),
        "wrong": wrong,
        "false_accept": int((accepted & ~right).sum()) / wrong if wrong else None,
        "false_reject": int((~accepted & right).sum()) / good if good else None,
    }


def reliability(confidences: torch.Tensor, right: torch.Tensor) -> list[dict[str, float]]:
    """For each of ten bins of confidence that holds any verdict: its mean confidence, how many were right, and the
    number of verdicts."""
    curve = []
    for b in range(BINS):
        inside = (confidences * BINS).long().clamp(max=BINS - 1) == b
        count = int(inside.sum())
        if count:
            mean = float(confidences[inside].mean())
            curve.append({"confidence": mean, "right": int(right[inside].sum()), "verdicts": count})
    return curve


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
