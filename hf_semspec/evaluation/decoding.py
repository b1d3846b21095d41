"""How each contender decodes a batch of prompts, through nothing but `generate` and the models' own forward."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..configuration import SemSpecConfig
from ..drafts.choose import asks_for_model
from ..drafts.vocabulary import first_clash
from .batch import Batch, prepare
from .contenders import ASSISTED, BEST_OF, DRAFT, MAJORITY, TARGET, Contender

# What is kept of a scheme's statistics; all of them add up over calls.
_COUNTS = (
    "target_forwards",
    "target_tokens",
    "draft_forwards",
    "draft_tokens",
    "rounds",
    "accepted",
    "tested",
    "triggered",
    "resamplings",
    "collapses",
    "dead_particles",
    "answers",
    "full_accepts",
    "written",
    "kept",
    "segments",
    "accepted_segments",
    "target_seconds",
    "draft_seconds",
    "other_seconds",
)
_STOCK_FIELDS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
# Records of a scheme that are kept row by row.
_ROWS = ("verdicts", "boundaries", "kept_tokens", "log_weights")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The models of a run and what turns text into their ids.

    Args:
        model (`PreTrainedModel`): the target.
        tokenizer (`PreTrainedTokenizerBase`): the target's.
        draft (`PreTrainedModel`, *optional*): the draft.
        draft_tokenizer (`PreTrainedTokenizerBase`, *optional*): the draft's, where it has one of its own.
        chat (`bool`): whether prompts are put as a user's turn where the tokenizer has a chat template.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    draft: PreTrainedModel | None = None
    draft_tokenizer: PreTrainedTokenizerBase | None = None
    chat: bool = True

    @property
    def foreign(self) -> bool:
        """Whether an id means one token to the target and another to the draft."""
        return first_clash(self.tokenizer, self.draft_tokenizer) is not None


@dataclass
class Decoded:
    """What one contender made of a batch.

    Args:
        candidates: for each prompt its candidate answers, each the new ids with EOS, without padding.
        chosen: for each prompt the candidate that is its answer; `None` where they are to be voted on.
        votes: for each prompt the weight of each candidate's vote; `None` for one each.
        seconds: wall time, from the prompts' ids to the new ids on the host.
        figures: counts that add up over batches.
        rows: for each prompt what is kept of the scheme's own records.
    """

    candidates: list[list[list[int]]]
    chosen: list[int] | None
    votes: list[list[float]] | None = None
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] | None = None


def decode(
    contender: Contender, pair: Pair, prompts: Sequence[str], *, max_new_tokens: int, temperature: float | None
) -> Decoded:
    """Decode `prompts` with `contender`, timed.

    Raises:
        ValueError: what `generate` or the scheme refuses, with the contender's name.
    """
    draft_alone = contender.kind == DRAFT
    model = pair.draft if draft_alone and pair.draft is not None else pair.model
    tokenizer = pair.draft_tokenizer if draft_alone and pair.draft_tokenizer is not None else pair.tokenizer
    batch = prepare(model, tokenizer, prompts, chat=pair.chat)
    common = {
        "max_new_tokens": max_new_tokens,
        "pad_token_id": batch.pad,
        "eos_token_id": batch.eos or None,
        "return_dict_in_generate": True,
        **contender.fields,
        **contender.sampling(temperature),
    }
    way = _scheme if contender.is_scheme else _WAYS[contender.kind]
    try:
        synchronize()
        start = time.perf_counter()
        decoded = way(contender, pair, batch, common)
        synchronize()
    except (TypeError, ValueError) as error:
        raise ValueError(f"contender {contender.name!r}: {error}") from error
    decoded.seconds = time.perf_counter() - start
    return decoded


def _plain(contender: Contender, pair: Pair, batch: Batch, common: dict[str, Any]) -> Decoded:
    """Plain `generate` of target or draft, one answer a prompt."""
    model = pair.model if contender.kind == TARGET else pair.draft
    with counted(pair.model) as figures:
        sequences = _generate(model, batch, common)
    return Decoded([[answer] for answer in batch.answers(sequences)], [0] * len(batch.ids), figures=figures)


def _scheme(contender: Contender, pair: Pair, batch: Batch, common: dict[str, Any]) -> Decoded:
    """One of this package's schemes; for smc with a vote every particle is a candidate."""
    config = SemSpecConfig(contender.kind, **common)
    given: dict[str, Any] = {"tokenizer": pair.tokenizer}
    if asks_for_model(config):
        given["assistant_model"] = pair.draft
        if pair.draft_tokenizer is not None:
            given["assistant_tokenizer"] = pair.draft_tokenizer
    output = pair.model.generate(batch.ids, attention_mask=batch.mask, generation_config=config, **given)
    decoded = Decoded([[answer] for answer in batch.answers(output.sequences)], [0] * len(batch.ids))
    if contender.kind == "smc" and contender.own("vote") is not None:
        decoded.candidates = [batch.answers(particles) for particles in output.particles]
        decoded.chosen = None
        if contender.own("vote") == "weighted":
            decoded.votes = output.log_weights.softmax(-1).tolist()
    decoded.figures = {name: getattr(output.stats, name) for name in _COUNTS}
    if hasattr(output, "ess"):
        known = output.ess[~output.ess.isnan()]
        decoded.figures |= {"ess": float(known.sum()), "ess_count": known.numel()}
    kept = {name: _json_safe(getattr(output, name).tolist()) for name in _ROWS if hasattr(output, name)}
    if kept:
        decoded.rows = [{name: kept[name][i] for name in kept} for i in range(len(batch.ids))]
    return decoded


def _assisted(contender: Contender, pair: Pair, batch: Batch, common: dict[str, Any]) -> Decoded:
    """Transformers' assisted generation with a constant schedule, row by row since it takes one row at a time."""
    answers = []
    draft: Any = pair.draft
    with counted(pair.model) as figures, stock_schedule(draft, contender.own("num_draft_tokens")):
        for ids, mask in zip(batch.ids, batch.mask, strict=True):
            alone = ids[mask.bool()][None]
            row = Batch(alone, torch.ones_like(alone), batch.eos, batch.pad)
            answers += row.answers(_generate(pair.model, row, common, assistant_model=draft))
    return Decoded([[answer] for answer in answers], [0] * len(answers), figures=figures)


def _best_of(contender: Contender, pair: Pair, batch: Batch, common: dict[str, Any]) -> Decoded:
    """n samples of the draft; the one that the target finds likeliest, in one forward over all of them."""
    if pair.foreign:
        raise ValueError("a draft with a tokenizer of its own writes ids that the target does not know")
    number = contender.own("n")
    with counted(pair.model) as figures:
        sequences = _generate(pair.draft, batch, {**common, "num_return_sequences": number})
        likelihoods = log_likelihoods(pair.model, batch, sequences)
    candidates = batch.answers(sequences)
    groups = [candidates[i : i + number] for i in range(0, len(candidates), number)]
    best = likelihoods.view(-1, number).argmax(-1).tolist()
    rows = [{"log_likelihoods": values} for values in likelihoods.view(-1, number).tolist()]
    return Decoded(groups, best, figures=figures, rows=rows)


def _majority(contender: Contender, pair: Pair, batch: Batch, common: dict[str, Any]) -> Decoded:
    """n samples of the target, to be voted on."""
    number = contender.own("n")
    with counted(pair.model) as figures:
        candidates = batch.answers(_generate(pair.model, batch, {**common, "num_return_sequences": number}))
    return Decoded([candidates[i : i + number] for i in range(0, len(candidates), number)], None, figures=figures)


_WAYS: dict[str, Callable[[Contender, Pair, Batch, dict[str, Any]], Decoded]] = {
    TARGET: _plain,
    DRAFT: _plain,
    ASSISTED: _assisted,
    BEST_OF: _best_of,
    MAJORITY: _majority,
}


@torch.no_grad()
def log_likelihoods(model: PreTrainedModel, batch: Batch, sequences: torch.Tensor) -> torch.Tensor:
    """(rows,) sums of the model's own log-probabilities (temperature 1, natural log) of each row's new tokens, EOS
    included; `sequences` `(rows, length)` are `rows / B` texts of each prompt of the batch, in turn."""
    sequences = sequences.to(model.device)
    copies = len(sequences) // len(batch.ids)
    new = sequences.shape[1] - batch.width
    lengths = torch.tensor([len(answer) for answer in batch.answers(sequences)], device=model.device)
    counts = torch.arange(new, device=model.device) < lengths[:, None]  # (rows, new)
    mask = torch.cat([batch.mask.to(model.device).repeat_interleave(copies, 0), counts.long()], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=sequences, attention_mask=mask, position_ids=positions).logits[:, batch.width - 1 : -1]
    tokens = sequences[:, batch.width :, None]
    log_p = logits.gather(-1, tokens)[..., 0].float() - logits.float().logsumexp(-1)  # (rows, new)
    likelihoods: torch.Tensor = log_p.masked_fill(~counts, 0.0).sum(-1)
    return likelihoods


def vote(answers: Sequence[str | None], weights: Sequence[float] | None = None) -> int:
    """The first candidate with the answer that has most votes; of several such answers the one that came first.

    Candidates without an answer do not vote, unless none has one.

    Args:
        answers (`Sequence[str | None]`): the answer of each candidate.
        weights (`Sequence[float]`, *optional*): the weight of each vote; 1 by default.
    """
    votes: dict[str, float] = {}
    for answer, weight in zip(answers, weights or [1.0] * len(answers), strict=True):
        if answer is not None:
            votes[answer] = votes.get(answer, 0.0) + weight
    # A dict keeps the order of first appearance, and `max` takes the first of equals.
    return answers.index(max(votes, key=votes.__getitem__)) if votes else 0


def synchronize() -> None:
    """Wait for the accelerator, so that a clock read on the host means what it says."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def stock_schedule(draft: PreTrainedModel, num_draft_tokens: int | None) -> Iterator[None]:
    """Inside the block transformers' assisted generation drafts `num_draft_tokens` tokens every round, whatever their
    confidence (`None`: by its own heuristic); the draft's settings are put back in any case."""
    # Stock reads these from the draft, not from the call, and leaves its adapted length behind there.
    settings = draft.generation_config
    before = {name: getattr(settings, name) for name in _STOCK_FIELDS}
    if num_draft_tokens is not None:
        settings.num_assistant_tokens = num_draft_tokens
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[dict[str, float]]:
    """Counts the model's forwards and the tokens they read; for stock's loops, which report neither."""
    figures: dict[str, float] = {"target_forwards": 0, "target_tokens": 0}

    def count(module: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        figures["target_forwards"] += 1
        figures["target_tokens"] += 0 if ids is None else ids.numel()

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield figures
    finally:
        handle.remove()


def _json_safe(values: Any) -> Any:
    """Nested lists with `None` for nan and text for infinite numbers, neither of which JSON has."""
    if isinstance(values, list):
        return [_json_safe(value) for value in values]
    if isinstance(values, float) and not math.isfinite(values):
        return None if math.isnan(values) else str(values)
    return values


def _generate(model: Any, batch: Batch, options: dict[str, Any], **arguments: Any) -> torch.Tensor:
    if getattr(model.generation_config, "semspec", None) is not None:
        arguments["semspec"] = None  # a model folder may carry a scheme of its own
    config = GenerationConfig(**options)
    output = model.generate(batch.ids, attention_mask=batch.mask, generation_config=config, **arguments)
    sequences: torch.Tensor = output.sequences
    return sequences
