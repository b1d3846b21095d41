"""`num_draft_tokens="auto"` in whole calls: rounds without drafts, measured and given costs, what is said and kept."""

import contextlib
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch

from hf_semspec import SemSpecConfig
from hf_semspec.engine import ranks, timing
from hf_semspec.engine.costs import CostTable
from hf_semspec.engine.gamma import CHOICES, ChosenLength
from hf_semspec.engine.timing import costs_of, pair_of
from tests.drafts.shared import looked_up
from tests.helpers import (
    TESTING,
    WEAK_DRAFTS,
    Forwards,
    assisted,
    caught,
    check_identities,
    exact,
    new_tokens,
    plain,
    plain_rows,
    refuses,
)
from tests.models import draft_of, prompts, tiny, tokenizer

pytestmark = WEAK_DRAFTS


def profile(draft: float, wide: float = 1.2, **more: Any) -> dict[str, Any]:
    """Costs at which a pass over nine tokens takes `wide` steps, and a draft forward `draft`."""
    return {"target": [[1, 1, 0.01], [1, 9, 0.01 * wide]], "draft": [[1, 0.01 * draft]], **more}


def chosen(draft: float, **fields: Any) -> dict[str, Any]:
    return {"num_draft_tokens": "auto", "cost_profile": profile(draft), **fields}


@pytest.mark.parametrize("kind", TESTING)
def test_a_draft_that_costs_too_much_is_left_alone(kind: str) -> None:
    """Rounds without drafts cost what plain decoding's do: no forward of the draft, and one token a row."""
    target = tiny()
    draft, inputs = draft_of(target, "near"), prompts((5, 3))
    with caught() as messages, Forwards(target) as spy, Forwards(draft) as of_draft:
        output = assisted(target, draft, inputs, kind, max_new_tokens=20, return_dict_in_generate=True, **chosen(5.0))
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=20))
    assert spy.widths[:20] == [5] + [1] * 19, "what comes then is for the returned cache"
    assert of_draft.calls == output.stats.draft_forwards == output.stats.drafted == 0
    check_identities(output.stats, [20, 20])
    auto = output.stats.auto
    assert (auto["rounds"], auto["off"], auto["costs"]) == ({0: 19}, True, "profile of an unnamed pair")
    assert auto["target_seconds"][1] == 0.01 and auto["draft_seconds"] == 0.05
    assert "ended with drafting off" in messages[0] and "10 ms" in messages[0] and "50 ms" in messages[0]


def test_it_is_said_once_of_a_pair() -> None:
    target = tiny()
    draft, other = draft_of(target, "near"), draft_of(target, "far")
    with caught() as messages:
        for one, cost in ((draft, 5.0), (draft, 6.0), (other, 7.0), (other, 8.0)):
            assisted(target, one, prompts((5,)), max_new_tokens=12, **chosen(cost))
    assert sum("ended with drafting off" in message for message in messages) == 2


@pytest.fixture
def picks(monkeypatch: pytest.MonkeyPatch) -> None:
    """γ is 3, then 0 for a while, again and again."""
    turns = itertools.cycle((3, 0, 0, 0, 0, 2))
    monkeypatch.setattr(ChosenLength, "pick", lambda self, rows: next(turns))


@pytest.mark.usefixtures("picks")
@pytest.mark.parametrize("kind", [*TESTING, "parse", "ngram+model", "foreign"])
def test_a_draft_reads_what_it_has_missed_in_one_forward(kind: str) -> None:
    target = tiny("llama", 3)
    draft, inputs = draft_of(target, "near"), prompts((6, 4), seed=3)
    fields = {"num_draft_tokens": "auto", "max_new_tokens": 40}
    expected = plain_rows(target, inputs, max_new_tokens=40)
    with Forwards(draft) as spy:
        if kind == "ngram+model":
            output = looked_up(target, inputs, kind, draft, **fields)
        elif kind == "foreign":
            call = {"tokenizer": tokenizer(), "assistant_tokenizer": tokenizer(permute=1)}
            output = assisted(target, draft, inputs, "lossless", call=call, **fields)
        else:
            output = assisted(target, draft, inputs, kind, **fields)
    assert torch.equal(new_tokens(output, inputs), expected)
    if kind in ("lossless", "easd"):
        assert max(spy.widths[1:]) in (5, 6), "four plain rounds, and what the one before them added"


def test_what_rounds_take_is_measured_first_and_kept() -> None:
    target = tiny()
    draft, inputs = draft_of(target, "near"), prompts((5,))
    with Forwards(target) as spy:
        output = assisted(
            target, draft, inputs, num_draft_tokens="auto", max_new_tokens=30, return_dict_in_generate=True
        )
    assert spy.widths[1:5] == [1, 1, 4, 4]
    table = costs_of(target, draft, False, False)
    assert {(1, 1), (1, 4)} <= table.passes.keys() and table.drafts.keys() == {1}
    assert sum(output.stats.auto["rounds"].values()) == len(spy.widths) - 1
    assert output.stats.auto["costs"] == "measured"
    assert costs_of(target, draft, False, True) is not table, "sampling takes other time"
    found = {name for model in (target, draft) for module in model.modules() for name in vars(module)}
    assert not [name for name in found if "cost" in name or "semspec" in name]


def test_a_table_goes_with_its_models() -> None:
    target = tiny()
    draft = draft_of(target, "near")
    table = weakref.ref(costs_of(target, draft))
    assert table() is not None
    del draft
    gc.collect()
    assert table() is None


def test_fixed_lengths_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(timing.RoundClock, "start")
    target = tiny()
    output = assisted(target, draft_of(target, "near"), prompts((5,)), max_new_tokens=8, return_dict_in_generate=True)
    assert output.stats.auto is None and "auto" not in output.stats.to_dict()


@pytest.mark.parametrize("kind", ["lossless", "chains", "easd"])
def test_with_a_profile_a_seed_decides_the_tokens(kind: str) -> None:
    target = tiny("llama", 1)
    draft, inputs = draft_of(target, "near"), prompts((5, 3))
    texts, rounds = [], []
    for _ in range(2):
        torch.manual_seed(4)
        config = exact(kind, do_sample=True, max_new_tokens=40, return_dict_in_generate=True, **chosen(0.05))
        output = target.generate(**inputs, assistant_model=draft, generation_config=config)
        check_identities(output.stats, [40, 40])
        texts.append(output.sequences)
        rounds.append(output.stats.auto["rounds"])
    assert torch.equal(*texts) and rounds[0] == rounds[1]
    assert set(rounds[0]) <= set(CHOICES) and len(rounds[0]) > 1


def test_turns_of_a_reviser_are_counted_together() -> None:
    target = tiny()
    fields = {"max_new_tokens": 24, "first_segment": "target", "scorer": "none", "top_k_accept": 0}
    own = {"scheme": "lossless", **chosen(0.05)}
    config = SemSpecConfig("semantic", segment_stop=None, think_end=None, revise_with=own, revise_chunk=4, **fields)
    config.return_dict_in_generate = True
    call = {"assistant_model": draft_of(target, "near"), "generation_config": config}
    output = target.generate(**prompts((5,)), **call)
    assert sum(output.stats.auto["rounds"].values()) >= output.stats.rounds > 2


@pytest.mark.parametrize(
    ("name", "value"), [("parameters", [1, 2]), ("dtype", ["float16", "float64"]), ("device", ["cuda", "cuda"])]
)
@pytest.mark.parametrize("inside", [False, True])
def test_the_profile_of_another_pair_is_refused(name: str, value: list[Any], inside: bool) -> None:
    target = tiny()
    draft, inputs = draft_of(target, "near"), prompts((5,))
    pair = pair_of(target, draft)
    own = {"num_draft_tokens": "auto", "cost_profile": profile(0.1, pair={**pair, name: value}), "scheme": "lossless"}
    config = SemSpecConfig("semantic", scorer="none", top_k_accept=1, revise_with=own, max_new_tokens=4)
    if not inside:
        config = SemSpecConfig("lossless", max_new_tokens=4, **{key: own[key] for key in own if key != "scheme"})
    more = {"tokenizer": tokenizer()} if inside else {}
    refuses(target, draft, inputs, f"`cost_profile` was measured with .* {name}", generation_config=config, **more)
    right = chosen(0.1) | {"cost_profile": profile(0.1, pair=pair)}
    output = assisted(target, draft, inputs, max_new_tokens=4, return_dict_in_generate=True, **right)
    assert output.stats.auto["costs"] == "profile"


def test_ranks_take_the_choice_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[Any] = []

    def broadcast(values: list[Any], src: int, group: Any) -> None:
        assert (src, group) == (0, "tp")
        shared.append(values[0])
        if values[0] in CHOICES:
            values[0] = 2

    target = tiny()
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *_, src, group: None)
    monkeypatch.setattr(torch.distributed, "get_global_rank", lambda *_: 0)
    monkeypatch.setattr(ranks, "tensor_parallel_group", lambda *_: "tp")
    inputs = prompts((5,))
    with Forwards(target) as spy:
        output = assisted(target, draft_of(target, "near"), inputs, max_new_tokens=12, **chosen(5.0))
    assert len(shared) > 2
    assert max(spy.widths[1:]) == 3
    monkeypatch.undo()
    assert torch.equal(output, plain(target, inputs, max_new_tokens=12))


class TestClock:
    @pytest.fixture
    def now(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """The time, for a test to set."""
        time = [0.0]
        monkeypatch.setattr(timing.time, "perf_counter", lambda: time[0])
        return time

    def test_the_drafting_is_taken_out_of_a_round(self, now: list[float]) -> None:
        table = CostTable()
        clock = timing.RoundClock(table, torch.device("cpu"))
        clock.stop()  # no round was begun
        for forwards, rest in ((3, 2.0), (0, 4.0)):
            clock.start(2, 4)
            now[0] += 6.0
            clock.drafted(forwards)
            now[0] += rest
            clock.stop()
        clock.start(2, 1)
        now[0] += 1.0
        clock.stop()
        assert table.passes == {(2, 4): (2.0, 4.0), (2, 1): (1.0,)}
        assert table.drafts == {2: (2.0,)}, "what had more to read is no common forward"

    @pytest.mark.parametrize("done", [True, False])
    def test_on_cuda_the_device_times_the_drafting_and_is_not_waited_for(
        self, done: bool, now: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.at = 0.0

            def record(self) -> None:
                self.at = 1e3 * device_time[0]

            def query(self) -> bool:
                return done

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at)

        device_time = [0.0]
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        table = CostTable()
        clock = timing.RoundClock(table, torch.device("cuda"))
        clock.start(1, 3)
        now[0], device_time[0] = 0.001, 0.5  # queued at once, run later
        clock.drafted(2)
        now[0] = 2.5
        clock.stop()
        assert (table.passes, table.drafts) == (({(1, 3): (2.0,)}, {1: (0.25,)}) if done else ({}, {}))
