"""What the tests of whole calls share: exact-mode configs, plain references, counters, the identities of the stats."""

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig, PreTrainedModel, RepetitionPenaltyLogitsProcessor, StoppingCriteria

from hf_semspec import LosslessConfig, SemSpecConfig
from hf_semspec.common import warn_once as notices
from hf_semspec.schemes.parse.judge import suffix_ids
from tests.models import PAD, row_of, tokenizer

VERSION = Version(transformers.__version__)
# From 5 on `generate` marks a cache as the caller's own; before, an empty one can be told from its own by nothing.
MARKS_CACHES = Version("5") <= VERSION
CACHE = "cache" if Version("5.24.dev0") <= VERSION else "past_key_values"

# Configurations whose greedy output must equal plain decoding's, token for token.
# smc samples: where both laws are cut to their best token, the target's text is the only one with weight.
# parse keeps nothing of an answer whose thresholds are out of reach: the target writes all, sped up by lossless.
# semantic keeps a greedy segment only if each token is the target's best, and a sampled one never.
TESTING = ("lossless", "easd", "chains")
EXACT = (*TESTING, "smc", "parse", "semantic")
SINGLE = ("lossless", "easd")

# Most tests run drafts that are meant to be useless.
WEAK_DRAFTS = pytest.mark.filterwarnings("ignore:fewer than 10%")

Inputs = dict[str, torch.Tensor]


# Short questions and labels of one character, which is all that the tiny tokenizer can tell apart.
JUDGE = {"segment_tokens": 4, "judge_prompt": "ok?", "full_judge_prompt": "all ok?", "labels": ("Y", "N")}


def exact(kind: str, **fields: Any) -> SemSpecConfig:
    """`lossless`, `easd` with its extra rejection off, three chains, `smc`, `parse` that keeps nothing of the draft's
    answers, or `semantic` whose segments pass by the token rule alone; `fields` of both namespaces."""
    if kind == "easd":
        return SemSpecConfig(
            "easd",
            target_entropy_threshold=math.inf,
            draft_entropy_threshold=math.inf,
            **{"num_draft_tokens": 3, **fields},
        )
    if kind == "chains":
        return SemSpecConfig("lossless", num_chains=3, **{"num_draft_tokens": 3, **fields})
    if kind == "parse":
        own = {"num_draft_tokens": fields.pop("num_draft_tokens", 3)}
        own |= {"num_chains": fields.pop("num_chains")} if "num_chains" in fields else {}
        never = {"accept_threshold": 2.0, "prefix_threshold": 2.0, "revise_with": LosslessConfig(**own)}
        return SemSpecConfig("parse", **{**JUDGE, **never, **fields})
    if kind == "semantic":
        drafted = fields.pop("num_draft_tokens", 3)
        own = {"max_segment_tokens": 3 if drafted == "auto" else drafted, "revise_chunk": 2, "first_segment": "draft"}
        own |= {"scorer": "none", "top_k_accept": 0 if fields.get("do_sample") else 1, "accept_floor": math.inf}
        fields.pop("num_chains", None)
        return SemSpecConfig("semantic", **{**own, "segment_stop": None, "think_end": None, **fields})
    if kind == "smc":
        greedy = {} if fields.pop("do_sample", False) else {"top_k": 1}
        return SemSpecConfig("smc", **{"num_particles": 3, "num_draft_tokens": 3, **greedy, **fields})
    return SemSpecConfig(kind, **{"num_draft_tokens": 3, **fields})


def plain(model: PreTrainedModel, inputs: Inputs, *, call: dict[str, Any] | None = None, **fields: Any) -> Any:
    """`generate` without a draft; `fields` belong in its config, `call` among its other arguments."""
    return model.generate(**inputs, **(call or {}), generation_config=GenerationConfig(**fields))


def assisted(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    inputs: Inputs,
    kind: str = "lossless",
    *,
    call: dict[str, Any] | None = None,
    **fields: Any,
) -> Any:
    """The same call with a draft and a scheme in exact mode; `parse` gets the tokenizer that it needs."""
    words = {"tokenizer": tokenizer()} if kind == "parse" else {}
    return model.generate(
        **inputs, **{**words, **(call or {})}, assistant_model=draft, generation_config=exact(kind, **fields)
    )


def asked(output: Any) -> int:
    """The columns that the judge's questions took in the packed forward of a call of `parse`."""
    words, (part, full) = tokenizer(), (JUDGE["judge_prompt"], JUDGE["full_judge_prompt"])
    return len(suffix_ids(words, full)) + (output.boundaries.shape[1] - 1) * len(suffix_ids(words, part))


def plain_rows(model: PreTrainedModel, inputs: Inputs, *, pad: int = PAD, **fields: Any) -> torch.Tensor:
    """New tokens of every row when it is decoded alone, unpadded: (B, longest), `pad` after a row's end.

    The reference for padded batches: stock eager attention turns padded float64 rows into NaN, because the mask value
    of float64 is -inf in its float32 softmax.
    """
    rows = []
    for index in range(inputs["input_ids"].shape[0]):
        alone = row_of(inputs, index)
        rows.append(plain(model, alone, **fields)[0, alone["input_ids"].shape[1] :])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)


def new_tokens(output: Any, inputs: Inputs) -> torch.Tensor:
    """The columns after the prompt, (B, T)."""
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    return sequences[:, inputs["input_ids"].shape[1] :]


def first_occurrence(tokens: list[int], index: int) -> bool:
    """Whether the token at `index` was not there before: declared the EOS, it would end the text exactly there."""
    return tokens[index] not in tokens[:index]


def cache_of(output: Any) -> Any:
    return getattr(output, CACHE)


def cache_length(cache: Any) -> int:
    return int(cache.get_seq_length())


def states(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer, each (B, heads, columns, head_dim)."""
    return [(layer.keys, layer.values) for layer in cache.layers]


class Forwards:
    """Records every forward of `model` while it is open: shape of the input ids, masks, shape of the logits."""

    def __init__(self, *models: PreTrainedModel) -> None:
        self.models = models
        self.shapes: list[tuple[int, int]] = []
        self.kwargs: list[dict[str, Any]] = []
        self.logits: list[tuple[int, ...]] = []
        self.finite = True

    @property
    def calls(self) -> int:
        return len(self.shapes)

    @property
    def widths(self) -> list[int]:
        return [width for _, width in self.shapes]

    @property
    def tokens(self) -> int:
        return sum(rows * width for rows, width in self.shapes)

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else next(kwargs[n] for n in ("input_ids", "inputs_embeds") if kwargs.get(n) is not None)
        self.shapes.append((ids.shape[0], ids.shape[1]))
        self.kwargs.append(kwargs)

    def _after(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        logits = getattr(output, "logits", None)
        if logits is not None:
            self.logits.append(tuple(logits.shape))
            self.finite = self.finite and bool(logits.isfinite().all())

    def __enter__(self) -> "Forwards":
        self._handles = [m.register_forward_pre_hook(self._before, with_kwargs=True) for m in self.models]
        self._handles += [m.register_forward_hook(self._after, with_kwargs=True) for m in self.models]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


def check_identities(stats: Any, lengths: list[int] | None = None) -> None:
    """Every identity of the statistics; `lengths` are the new tokens of each row with EOS, without padding."""
    totals = dict.fromkeys(
        [
            "rounds",
            "drafted",
            "tested",
            "untested",
            "accepted",
            "rejected",
            "triggered",
            "residual",
            "resampled",
            "bonus",
            "plain",
            "written",
            "kept",
            "cut",
            "emitted",
        ],
        0,
    )
    for row in stats.rows:
        assert row.drafted == row.tested + row.untested, row
        assert row.tested == row.accepted + row.rejected + row.triggered, row
        assert row.residual == row.rejected, row
        assert row.resampled == row.triggered, row
        committed = row.accepted + row.residual + row.resampled + row.bonus + row.plain
        assert row.emitted == committed + row.kept, row
        assert row.kept <= row.written, row
        assert row.tokens_by_draft + row.tokens_by_target == row.emitted, row
        assert row.rounds == sum(row.histogram), row
        assert row.accepted == sum(length * count for length, count in enumerate(row.histogram)), row
        for name in totals:
            assert getattr(row, name) >= 0, (name, row)
            totals[name] += getattr(row, name)
        _check_rates(row)
    for name, total in totals.items():
        assert getattr(stats, name) == total, name
    _check_rates(stats)
    assert stats.target_forwards > 0
    seconds = stats.draft_seconds + stats.target_seconds + stats.other_seconds
    assert seconds == pytest.approx(stats.total_seconds, rel=1e-6, abs=1e-9)
    assert min(stats.draft_seconds, stats.target_seconds, stats.other_seconds) >= 0
    if lengths is not None:
        assert [row.emitted for row in stats.rows] == lengths


def _check_rates(counts: Any) -> None:
    for value, part, whole in (
        (counts.acceptance_rate, counts.accepted, counts.tested),
        (counts.mean_accepted_length, counts.accepted, counts.rounds),
        (counts.trigger_rate, counts.triggered, counts.triggered + counts.accepted),
        (counts.kept_fraction, counts.kept, counts.written),
    ):
        assert math.isnan(value) if whole == 0 else value == pytest.approx(part / whole)


def check_against_one_pass(
    model: PreTrainedModel, output: Any, inputs: Inputs, *, eos: int, penalty: float
) -> list[int]:
    """Logits, scores under a repetition penalty, and cache of `output` are those of one plain pass over its texts.

    Returns the new tokens of every row up to its EOS.
    """
    width, new = inputs["input_ids"].shape[1], new_tokens(output, inputs)
    assert len(output.scores) == len(output.logits) == new.shape[1]
    alive = torch.stack([(new[:, :t] != eos).all(dim=1) for t in range(new.shape[1])])
    mask = torch.cat([inputs["attention_mask"], alive.T.long()], dim=1)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        forced = model(output.sequences, attention_mask=mask, position_ids=positions, use_cache=True)
    penalised = RepetitionPenaltyLogitsProcessor(penalty)
    for t in range(new.shape[1]):
        raw = forced.logits[:, width + t - 1].float()
        scores = penalised(output.sequences[:, : width + t], raw.clone())
        for got, want in ((output.logits[t], raw), (output.scores[t], scores)):
            # Plain generate's penalty passes over padding, which this one cannot tell from a token.
            assert torch.allclose(got[alive[t], 1:], want[alive[t], 1:], atol=1e-4)
            assert got[~alive[t]].eq(0).all()
    assert cache_length(cache_of(output)) == output.sequences.shape[1] - 1
    real = mask[:, :-1].bool()
    for ours, theirs in zip(states(cache_of(output)), states(getattr(forced, CACHE)), strict=True):
        for got, want in zip(ours, theirs, strict=True):
            got, want = got.transpose(1, 2), want[:, :, :-1].transpose(1, 2)
            assert torch.allclose(got[real], want[real], atol=1e-5)
    return alive.sum(dim=0).tolist()


@contextlib.contextmanager
def caught() -> Iterator[list[str]]:
    """The messages of the warnings raised inside, as a process sees them that has not been warned before."""
    notices.forget()
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        yield messages
    messages += [str(entry.message) for entry in record]


class Recorder:
    """A streamer that keeps every `put` and counts `end`."""

    def __init__(self) -> None:
        self.puts: list[torch.Tensor] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert self.ends == 0, "put after end"
        self.puts.append(value.clone())

    def end(self) -> None:
        self.ends += 1

    def ids(self) -> list[int]:
        return [int(token) for value in self.puts for token in value.flatten()]


class RowLengths(StoppingCriteria):
    """Ends row `i` once it has `limits[i]` columns."""

    def __init__(self, limits: list[int]) -> None:
        self.limits = torch.tensor(limits)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        assert input_ids.shape[0] == len(self.limits), "criteria see the caller's rows"
        return self.limits.to(input_ids.device) <= input_ids.shape[1]


def refuses(
    model: PreTrainedModel,
    draft: PreTrainedModel | None,
    inputs: dict[str, Any],
    match: str,
    error: Any = ValueError,
    **call: Any,
) -> None:
    """The call must raise `error` matching `match` before any forward, and leave plain `generate` as it was."""
    reference = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    before = plain(model, reference, max_new_tokens=4)
    parts = [part for part in (model, draft) if part is not None]
    parts += [part for part in (getattr(model, "encoder", None),) if isinstance(part, torch.nn.Module)]
    with Forwards(*parts) as spy, pytest.raises(error, match=match):
        model.generate(**inputs, assistant_model=draft, **call)
    assert spy.calls == 0
    assert torch.equal(before, plain(model, reference, max_new_tokens=4))
