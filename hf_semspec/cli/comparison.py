"""Schemes beside plain decoding of the same prompts: what `hf-semspec generate` and `demo` run and show."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..configuration import SemSpecConfig
from ..engine.outputs import DecodingStats

PLAIN = "plain"


@dataclass
class Run:
    """What one way of decoding did, summed over prompts.

    Args:
        name (`str`): the scheme, or `"plain"`.
        seconds (`float`): wall time of the `generate` calls.
        target_forwards (`int`): calls of the target; plain decoding makes one a token.
        texts (`list[list[int]]`): the new ids of each prompt.
        stats (`list[DecodingStats]`): of each call; empty for plain decoding.
    """

    name: str
    seconds: float = 0.0
    target_forwards: int = 0
    texts: list[list[int]] = field(default_factory=list)
    stats: list[DecodingStats] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """New tokens of all prompts."""
        return sum(len(text) for text in self.texts)

    @property
    def tokens_per_second(self) -> float:
        """New tokens over wall time."""
        return self.tokens / self.seconds

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over tested drafted tokens, under parse those of the revision; `None` where nothing was tested, and
        for smc, which keeps them all."""
        if self.name == "smc":
            return None
        tested = sum(stats.tested for stats in self.stats)
        return sum(stats.accepted for stats in self.stats) / tested if tested else None

    @property
    def trigger_rate(self) -> float | None:
        """Triggers over the drafted tokens that passed the ordinary test; `None` for all schemes but easd."""
        triggered = sum(stats.triggered for stats in self.stats)
        passed = sum(stats.accepted for stats in self.stats) + triggered
        return triggered / passed if passed and self.name == "easd" else None

    @property
    def kept_fraction(self) -> float | None:
        """Kept over written tokens of the draft's whole answers; `None` for all schemes but parse."""
        written = sum(stats.written for stats in self.stats)
        return sum(stats.kept for stats in self.stats) / written if written else None


def _percent(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.0%}"


def decode(
    run: Run,
    model: PreTrainedModel,
    ids: torch.Tensor,
    config: GenerationConfig,
    *,
    draft: PreTrainedModel | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Any:
    """Decode one prompt `(1, length)` and add what came of it to `run`; plain decoding where `config` names no scheme.
    Returns the output."""
    plainly = getattr(config, "semspec", None) is None
    arguments: dict[str, Any] = {} if draft is None else {"assistant_model": draft}
    if plainly and getattr(model.generation_config, "semspec", None) is not None:
        arguments["semspec"] = None  # a model folder may carry a scheme of its own
    if config.stop_strings is not None or not plainly:
        arguments["tokenizer"] = tokenizer
    ids = ids.to(model.device)
    start = time.perf_counter()
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=streamer, **arguments
    )
    text = output.sequences[0, ids.shape[1] :].tolist()
    run.seconds += time.perf_counter() - start
    run.texts.append(text)
    stats = getattr(output, "stats", None)
    if stats is None:
        run.target_forwards += len(text)
    else:
        run.target_forwards += stats.target_forwards
        run.stats.append(stats)
    return output


def verdicts_table(output: Any, tokenizer: PreTrainedTokenizerBase, prompt_length: int) -> Any:
    """A `rich` table of the target's verdicts on one row of parse: each judged prefix's end, its confidence, and
    whether it was kept."""
    from rich.table import Table

    table = Table("tokens", "confidence", "kept", "the prefix ends with")
    text, kept = output.sequences[0, prompt_length:], int(output.kept_tokens[0])
    pairs = zip(output.boundaries[0].tolist(), output.verdicts[0].tolist(), strict=True)
    for length, confidence in pairs:
        if length < 0:
            continue
        inside = length <= kept
        ending = tokenizer.decode(text[max(length - 12, 0) : length], skip_special_tokens=True) if inside else "(cut)"
        table.add_row(str(length), f"{confidence:.2f}", "yes" if inside else "no", repr(ending) if inside else ending)
    return table


def plain_config(config: SemSpecConfig) -> GenerationConfig:
    """The same options without the scheme."""
    entries = {name: value for name, value in config.to_dict().items() if name != "semspec"}
    return GenerationConfig(**entries)


def comparison_table(runs: Sequence[Run]) -> Any:
    """A `rich` table of the runs, speed and text beside those of the plain one among them."""
    from rich.table import Table

    plain = next(run for run in runs if run.name == PLAIN)
    judged = any(run.kept_fraction is not None for run in runs)
    table = Table(padding=(0, 0 if judged else 1))  # a column more still fits into 80
    table.add_column("scheme", no_wrap=True)
    kept = ["answers\nkept"] if judged else []
    for column in (
        "tokens",
        "target\nforwards",
        "accepted",
        "trigger\nrate",
        *kept,
        "tokens\n/s",
        "over\nplain",
        "same\ntext",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        same = sum(a == b for a, b in zip(run.texts, plain.texts, strict=True))
        table.add_row(
            run.name,
            str(run.tokens),
            str(run.target_forwards),
            _percent(run.acceptance_rate),
            _percent(run.trigger_rate),
            *([_percent(run.kept_fraction)] if judged else []),
            f"{run.tokens_per_second:.1f}",
            "" if run is plain else f"{run.tokens_per_second / plain.tokens_per_second:.2f}x",
            "" if run is plain else f"{same} of {len(plain.texts)}",
        )
    return table


def checked_table(runs: Sequence[Run], right: Mapping[str, int]) -> Any:
    """A `rich` table of runs whose answers were checked, `right` of each run's, and speed beside the plain one."""
    from rich.table import Table

    plain = next(run for run in runs if run.name == PLAIN)
    table = Table("scheme")
    for column in ("right\nanswers", "same text\nas plain", "target\nforwards", "tokens/s", "over\nplain"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        same = sum(a == b for a, b in zip(run.texts, plain.texts, strict=True))
        total = len(run.texts)
        table.add_row(
            run.name,
            f"{right[run.name]} of {total}",
            "" if run is plain else f"{same} of {total}",
            str(run.target_forwards),
            f"{run.tokens_per_second:.0f}",
            "" if run is plain else f"{run.tokens_per_second / plain.tokens_per_second:.1f}x",
        )
    return table
