"""Thresholds for easd from the entropies that target and draft really have on prompts of the user's task."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from ..configuration import EASDConfig, SemSpecConfig


@dataclasses.dataclass(frozen=True)
class EASDCalibration:
    """Result of `calibrate_easd`.

    Args:
        config (`EASDConfig`): the given config with calibrated thresholds, ready for `SemSpecConfig`.
        report (`dict`): JSON-safe: percentile, thresholds, number of positions, quantiles of both entropies (nats),
            sampling settings.
        target_entropies, draft_entropies (`torch.Tensor` of shape `(positions,)`): nats.
    """

    config: EASDConfig
    report: dict[str, Any]
    target_entropies: torch.Tensor
    draft_entropies: torch.Tensor

    def plot(self, path: str | Path) -> None:
        """Draw both entropy distributions and their thresholds to `path` (needs matplotlib, `hf-semspec[bench]`)."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        for name, values, colour in (("target", self.target_entropies, "C0"), ("draft", self.draft_entropies, "C1")):
            threshold = self.report[f"{name}_entropy_threshold"]
            axes.hist(
                values.numpy(), bins=60, histtype="step", color=colour, label=f"{name}, threshold {threshold:.2f} nats"
            )
            axes.axvline(threshold, color=colour, linestyle="--")
        axes.set(xlabel="entropy of the processed law (nats)", ylabel="positions", yscale="log")
        axes.set_title(f"{self.report['positions']} tested positions, percentile {self.report['percentile']:g}")
        axes.legend()
        figure.savefig(path)


def calibrate_easd(
    model: Any,
    draft: Any,
    prompts: Iterable[Any],
    percentile: float = 90.0,
    *,
    config: EASDConfig | None = None,
    generation_config: GenerationConfig | None = None,
    tokenizer: Any = None,
    max_new_tokens: int = 256,
    progress: bool = True,
) -> EASDCalibration:
    """Set easd's entropy thresholds to a percentile of the entropies met on the target's own text (arXiv 2512.23765;
    the percentile is not published, 90 is ours).

    Each prompt is decoded exactly (easd with infinite thresholds), so the text follows the target; the entropies are
    those of the positions where a drafted token is tested, the only ones where easd can act.

    Args:
        model, draft: the pair to calibrate for.
        prompts: strings or lists of chat messages (with `tokenizer`), or dicts of `input_ids` and `attention_mask`.
        percentile (`float` in [0, 100]): share of positions, in percent, that lie below each threshold.
        config (`EASDConfig`, *optional*): the other fields of the result; defaults otherwise.
        generation_config (`GenerationConfig`, *optional*): the settings to calibrate for, its length aside; greedy
            otherwise.
        tokenizer: turns strings into ids.
        max_new_tokens (`int`): tokens to decode a prompt.
        progress (`bool`): show a progress bar (with rich, if it is installed).

    Returns:
        `EASDCalibration` with `.config`, `.report` and `.plot(path)`.

    Raises:
        ValueError: a percentile outside its range, no prompts, strings without a tokenizer, or nothing was drafted.
    """
    if not 0 <= percentile <= 100:
        raise ValueError(f"percentile={percentile!r}: must be a number in [0, 100]")
    batches = [prompt_inputs(prompt, tokenizer, model) for prompt in prompts]
    if not batches:
        raise ValueError("prompts is empty: pass at least one prompt of the task that easd is to be used on")
    base = config if config is not None else EASDConfig()
    exact = dataclasses.replace(
        base,
        target_entropy_threshold=math.inf,
        draft_entropy_threshold=math.inf,
        trigger="entropy",
        calibrated_for=None,
    )
    settings: dict[str, Any] = {"do_sample": False} if generation_config is None else generation_config.to_diff_dict()
    settings = {name: value for name, value in settings.items() if name not in ("transformers_version", "semspec")}
    call = SemSpecConfig(exact, **{**settings, "max_new_tokens": max_new_tokens, "return_dict_in_generate": True})
    target_values, draft_values, sampling = [], [], {}
    for batch in progress_over(batches, "calibrating easd", progress):
        output = model.generate(**batch, assistant_model=draft, generation_config=call)
        sampling = output.stats.sampling
        tested = ~output.target_entropies.isnan()
        target_values.append(output.target_entropies[tested].cpu())
        draft_values.append(output.draft_entropies[tested].cpu())
    h_p, h_q = torch.cat(target_values).double(), torch.cat(draft_values).double()
    if not len(h_p):
        raise ValueError(f"max_new_tokens={max_new_tokens}: too few tokens for a draft; pass at least 3")
    thresholds: dict[str, Any] = {
        f"{name}_entropy_threshold": float(h.quantile(percentile / 100))
        for name, h in (("target", h_p), ("draft", h_q))
    }
    calibrated = dataclasses.replace(base, **thresholds, calibrated_for=sampling)
    marks = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
    report = {
        "percentile": percentile,
        **thresholds,
        "positions": len(h_p),
        "prompts": len(batches),
        "sampling": sampling,
        "target_quantiles": {str(mark): float(h_p.quantile(mark)) for mark in marks},
        "draft_quantiles": {str(mark): float(h_q.quantile(mark)) for mark in marks},
    }
    return EASDCalibration(calibrated, report, h_p, h_q)


def prompt_inputs(prompt: Any, tokenizer: Any, model: Any) -> dict[str, torch.Tensor]:
    """One prompt as `generate`'s inputs: a string, a list of chat messages, or inputs already."""
    if isinstance(prompt, Mapping):
        return {name: prompt[name] for name in ("input_ids", "attention_mask") if name in prompt}
    chat = isinstance(prompt, list) and all(isinstance(message, Mapping) for message in prompt)
    if not isinstance(prompt, str) and not chat:
        raise ValueError(
            f"prompts holds a {type(prompt).__name__}: must be strings, lists of chat messages, or dicts with "
            "input_ids"
        )
    if tokenizer is None:
        raise ValueError("tokenizer=None: prompts that are strings need the tokenizer of the models")
    if chat:
        rendered = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        encoded = tokenizer(rendered, add_special_tokens=False, return_tensors="pt")
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    return {name: encoded[name].to(model.device) for name in ("input_ids", "attention_mask")}


def progress_over(batches: list[Any], description: str, wanted: bool) -> Iterable[Any]:
    """`batches`, with a progress bar if it is wanted and rich is installed."""
    if not wanted:
        return batches
    try:
        from rich.progress import track
    except ImportError:
        return batches
    return track(batches, description=description)
