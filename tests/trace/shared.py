"""Traced calls, and the identities of their record."""

import json

import torch

from hf_semspec import SemSpecConfig
from hf_semspec.trace import COMMITTED, DROPPED
from tests.helpers import JUDGE, check_identities, new_tokens
from tests.models import prompts, tokenizer

LENGTHS = (5, 3, 7)
SEGMENTS = {"scorer": "none", "max_segment_tokens": 4, "segment_stop": None, "think_end": None}
CONFIGS = {
    "lossless": ("lossless", {"num_draft_tokens": 3}),
    "easd": ("easd", {"num_draft_tokens": 3, "trigger": "random", "trigger_rate": 0.3}),
    "chains": ("lossless", {"num_draft_tokens": 3, "num_chains": 3}),
    "easd chains": ("easd", {"num_draft_tokens": 3, "num_chains": 3, "trigger": "random", "trigger_rate": 0.3}),
    "auto": ("lossless", {"num_draft_tokens": "auto"}),
    "ngram": ("lossless", {"num_draft_tokens": 3, "draft": "ngram"}),
    "ngram first": ("lossless", {"draft": "ngram+model"}),
    "parse": (
        "parse",
        {**JUDGE, "max_redrafts": 2, "prefix_threshold": 0.3, "accept_threshold": 0.9, "revise_with": "easd"},
    ),
    "parse plain": ("parse", {**JUDGE, "draft_ngram": True, "boundary": "random"}),
    "semantic": ("semantic", {**SEGMENTS, "top_k_accept": 20}),
    "semantic bare": ("semantic", {**SEGMENTS, "top_k_accept": 25, "bonus": False, "salvage": True}),
    "semantic revised": (
        "semantic",
        {**SEGMENTS, "top_k_accept": 15, "revise_with": "easd", "first_segment": "draft"},
    ),
    "smc": ("smc", {"num_particles": 4, "num_draft_tokens": 3, "ess_threshold": 0.9}),
    "smc power": ("smc", {"num_particles": 3, "num_draft_tokens": 2, "power": 2.0}),
}


def run(target, draft, kind, *, call=None, lengths=LENGTHS, **fields):
    scheme, own = CONFIGS[kind]
    torch.manual_seed(fields.pop("seed", 3))
    config = SemSpecConfig(scheme, **{"trace": True, "max_new_tokens": 18, **own, **fields})
    inputs = prompts(lengths)
    models = {} if own.get("draft") == "ngram" else {"assistant_model": draft}
    output = target.generate(**inputs, **(call or {}), **models, tokenizer=tokenizer(), generation_config=config)
    return output, inputs


def check(output, inputs):
    """Every count of the statistics is a count of events, and the tokens are those returned."""
    trace = output.trace
    assert len(trace.rows) == len(output.sequences) == len(output.stats.rows)
    check_identities(output.stats)
    for row, stats, ids in zip(trace.rows, output.stats.rows, new_tokens(output, inputs).tolist(), strict=True):
        counts = row.counts()
        assert counts == {name: getattr(stats, name) for name in counts}
        assert row.tokens == ids[: row.length]
        assert row.length == stats.emitted
        committed = [event for event in row.events if event.kind in COMMITTED]
        assert [event.position for event in committed] == list(range(len(committed)))
        assert all(event.cut == (event.position >= row.length) for event in committed)
        assert not any(event.cut for event in row.events if event.kind in DROPPED)
    assert json.loads(json.dumps(trace.to_dict(), allow_nan=False))["scheme"] == output.stats.scheme


def by_position(row, *kinds):
    return {event.position: event for event in row.events if event.kind in kinds and not event.cut}
