"""What stopping criteria, streamers and processors are shown: what plain decoding shows, or will."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_semspec import SemSpecConfig
from hf_semspec.engine.stopping import STREAMS_FIRST
from tests.encoder_models import encoder_decoder, sources
from tests.helpers import (
    CACHE,
    EXACT,
    TESTING,
    WEAK_DRAFTS,
    Recorder,
    assisted,
    cache_length,
    cache_of,
    check_identities,
    new_tokens,
    plain,
    states,
)
from tests.models import PAD, draft_of, prompts, tiny

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]

EOS = 1


class Criterion(StoppingCriteria):
    """Keeps every call; ends what `rule(ids, calls)` says."""

    def __init__(self, rule: Callable[[torch.Tensor, int], Any]) -> None:
        self.rule, self.seen, self.kept = rule, list[list[list[int]]](), list[torch.Tensor]()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        self.seen.append(input_ids.tolist())
        self.kept.append(input_ids)
        return self.rule(input_ids, len(self.seen))


def counting(ids: torch.Tensor, calls: int) -> torch.Tensor:
    return torch.full((len(ids),), calls >= 9)


def row_zero(ids: torch.Tensor, calls: int) -> bool:
    return int(ids[0, -2:].sum()) % 5 == 0


def by_row(ids: torch.Tensor, calls: int) -> torch.Tensor:
    return ids[:, -2:].sum(dim=1) % 7 == 0


class Done:
    """lm-eval's: one answer for the batch, once every row has shown the end token behind the prompt."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, ids: torch.Tensor, calls: int) -> bool:
        self.done = [False] * len(ids) if calls == 1 else self.done
        found = [EOS in row for row in ids[:, self.width :].tolist()]
        self.done = [one or two for one, two in zip(self.done, found, strict=True)]
        return all(self.done)


RULES: dict[str, Callable[[], Callable[[torch.Tensor, int], Any]]] = {
    "counting": lambda: counting,
    "row zero": lambda: row_zero,
    "by row": lambda: by_row,
    "lm-eval": lambda: Done(9),
    "0-dim": lambda: lambda ids, calls: torch.tensor(calls >= 5),
    "last width": lambda: lambda ids, calls: calls == 18,
}


def both(target: Any, draft: Any, inputs: Any, kind: str, rule: str, **fields: Any) -> list[tuple[Any, Any, Any]]:
    found = []
    fields = {"max_new_tokens": 18, "return_dict_in_generate": True, **fields}
    for run in (plain, assisted):
        criterion, streamer = Criterion(RULES[rule]()), Recorder()
        call = {"stopping_criteria": StoppingCriteriaList([criterion]), "streamer": streamer}
        more = () if run is plain else (draft, inputs, kind)
        output = run(target, *(more or (inputs,)), call=call, **fields)
        found.append((output, criterion, [value.tolist() for value in streamer.puts]))
    return found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rows", [(9,), (4, 9, 6)])
@pytest.mark.parametrize("kind", EXACT)
def test_b01_b03_criteria_and_streamers_get_what_plain_decoding_gives_them(
    kind: str, rows: tuple[int, ...], rule: str
) -> None:
    """Each width once and in order, the whole batch, ended rows padded; then the column goes to the streamer."""
    target = tiny("llama", 4, attention="sdpa", eos=EOS)
    inputs = prompts(rows, seed=4)
    expected, ours = both(target, draft_of(target, "near"), inputs, kind, rule)
    assert torch.equal(ours[0].sequences, expected[0].sequences)
    assert ours[1].seen == expected[1].seen
    assert ours[2] == expected[2]
    assert [ids.tolist() for ids in ours[1].kept] == expected[1].seen, "what they keep stays as it was"
    check_identities(ours[0].stats)


@pytest.mark.parametrize("kind", ["lossless", "parse", "semantic"])
@pytest.mark.parametrize("rule", ["by row", "row zero"])
def test_without_an_eos_rows_go_on_and_are_shown_so(kind: str, rule: str) -> None:
    target = tiny("llama", 4, attention="sdpa")
    expected, ours = both(target, draft_of(target, "near"), prompts((4, 9, 6), seed=4), kind, rule)
    assert torch.equal(ours[0].sequences, expected[0].sequences)
    assert ours[1].seen == expected[1].seen
    assert ours[2] == expected[2]
    check_identities(ours[0].stats)


def test_one_column_of_answers_counts_as_one_a_row() -> None:
    """The shape that transformers' docstring names; its own loop takes it of a single row without an EOS only."""
    target, inputs = tiny("llama", 4, attention="sdpa"), prompts((9, 4), seed=4)
    call = {"stopping_criteria": StoppingCriteriaList([Criterion(lambda ids, calls: counting(ids, calls)[:, None])])}
    output = assisted(target, draft_of(target, "near"), inputs, call=call, max_new_tokens=18)
    assert output.shape == (2, 9 + 9)


@pytest.mark.parametrize("kind", TESTING)
@pytest.mark.parametrize("rule", ["by row", "counting"])
def test_a_row_that_ran_ahead_is_cut_with_its_states_scores_and_counts(kind: str, rule: str) -> None:
    target = tiny("llama", 6, attention="sdpa", eos=EOS)
    inputs = prompts((9, 9, 9), seed=6)
    fields = {"output_scores": True, "output_logits": True}
    expected, ours = both(target, draft_of(target, "near"), inputs, kind, rule, **fields)
    assert torch.equal(ours[0].sequences, expected[0].sequences)
    new = new_tokens(ours[0], inputs)
    lengths = [9 if rule == "counting" else int((row != PAD).sum()) for row in new]
    check_identities(ours[0].stats, lengths)
    live = torch.arange(new.shape[1])[:, None] < torch.tensor(lengths)
    for name in ("scores", "logits"):
        values, wanted = torch.stack(ours[0][name]), torch.stack(expected[0][name])
        assert len(values) == len(wanted)
        assert torch.allclose(values[live], wanted[live], atol=1e-4)
        assert values[~live].eq(0).all()
    cache, wanted = cache_of(ours[0]), cache_of(expected[0])
    assert cache_length(cache) == cache_length(wanted)
    for one, two in zip(states(cache), states(wanted), strict=True):
        for got, want in zip(one, two, strict=True):
            assert torch.allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("kind", ["lossless", "chains", "easd"])
def test_criteria_of_an_encoder_decoder(kind: str) -> None:
    target, inputs = encoder_decoder("t5", seed=1, eos=EOS), sources((5, 7, 3), seed=1)
    draft = draft_of(target, "near")
    expected, ours = both(target, draft, inputs, kind, "by row")
    assert torch.equal(ours[0].sequences, expected[0].sequences)
    assert ours[1].seen == expected[1].seen
    assert ours[2] == expected[2]


@pytest.mark.parametrize("kind", EXACT)
def test_a_client_that_stops_by_what_was_streamed_gets_no_token_more(kind: str) -> None:
    """Its criterion ends the call as soon as its streamer has seen enough."""
    target, inputs = tiny("llama", 4, attention="sdpa", eos=EOS), prompts((9,), seed=4)
    found = []
    for run in (plain, assisted):
        streamer = Recorder()
        criterion = Criterion(lambda ids, calls, seen=streamer: len(seen.puts) >= 7)
        call = {"stopping_criteria": StoppingCriteriaList([criterion]), "streamer": streamer}
        more = (inputs,) if run is plain else (draft_of(target, "near"), inputs, kind)
        output = run(target, *more, call=call, max_new_tokens=18)
        assert streamer.ids() == output[0].tolist()
        found.append(output.tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", EXACT)
def test_a_criterion_may_read_the_scores(kind: str) -> None:
    target, inputs = tiny("llama", 4, attention="sdpa", eos=EOS), prompts((9,), seed=4)
    found = []
    for run in (plain, assisted):
        seen: list[tuple[int, int]] = []

        def rule(input_ids: torch.Tensor, scores: Any, seen: Any = seen, **_: Any) -> bool:
            seen.append((len(scores), int(scores[-1][0].argmax())))
            return len(seen) == 8

        more = (inputs,) if run is plain else (draft_of(target, "near"), inputs, kind)
        fields = {"max_new_tokens": 18, "output_scores": True, "return_dict_in_generate": True}
        output = run(target, *more, call={"stopping_criteria": StoppingCriteriaList([rule])}, **fields)
        found.append((output.sequences.tolist(), seen))
    assert found[0] == found[1]
    assert len(found[0][1]) == 8


@pytest.mark.parametrize("kind", ["lossless", "smc"])
def test_criteria_see_every_row_that_is_returned(kind: str) -> None:
    target, inputs = tiny("llama", 4, attention="sdpa", eos=EOS), prompts((9, 9), seed=4)
    criterion = Criterion(lambda ids, calls: torch.tensor([6, 9, 7, 8]) <= calls)
    call = {"stopping_criteria": StoppingCriteriaList([criterion])}
    torch.manual_seed(0)
    fields = {
        "do_sample": True,
        "top_k": 2,
        "max_new_tokens": 18,
        "num_return_sequences": 2,
        "suppress_tokens": [PAD, EOS],
    }
    output = assisted(target, draft_of(target, "near"), inputs, kind, call=call, **fields)
    assert [len(ids[0]) for ids in criterion.seen] == list(range(10, 9 + 10))
    assert criterion.seen[-1] == output.tolist()
    assert [int((row != PAD).sum()) for row in output[:, 9:]] == [6, 9, 7, 8]


class Refuses(StopIteration):
    pass


@pytest.mark.parametrize("kind", ["lossless", "parse", "semantic", "smc"])
@pytest.mark.parametrize("error", [StopIteration, Refuses, RuntimeError])
def test_a_criterion_that_raises_leaves_the_callers_cache(kind: str, error: type[Exception]) -> None:
    target, inputs = tiny("llama", 4, attention="sdpa", eos=EOS), prompts((9,), seed=4)
    streamer, cache = Recorder(), DynamicCache()

    def rule(ids: torch.Tensor, calls: int) -> bool:
        if calls == 6:
            raise error("enough")
        return False

    call = {"stopping_criteria": StoppingCriteriaList([Criterion(rule)]), "streamer": streamer, CACHE: cache}
    with pytest.raises(error, match="enough"):
        assisted(target, draft_of(target, "near"), inputs, kind, call=call, max_new_tokens=18)
    assert cache_length(cache) == 0
    assert streamer.ends == 1
    assert len(streamer.puts) == 1 + 5 + STREAMS_FIRST


# Processors.


def trie(texts: list[list[int]]) -> Callable[[list[int]], list[int]]:
    """Allows what leads to one of `texts`, each with its EOS; whatever else it is asked about nobody can write."""

    def allowed(prefix: list[int]) -> list[int]:
        size = len(prefix)
        found = sorted({text[size] for text in texts if text[:size] == prefix and len(text) > size})
        assert found, f"asked about {prefix}"
        return found

    return allowed


class Trie(LogitsProcessor):
    """A constraint of a client's own, which asks a trie for each row; where a row has ended nobody is asked."""

    def __init__(self, allowed: Callable[[list[int]], list[int]], width: int) -> None:
        self.allowed, self.width = allowed, width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        mask = torch.full_like(scores, -torch.inf)
        for row, ids in enumerate(input_ids[:, self.width :].tolist()):
            mask[row, PAD if EOS in ids else self.allowed(ids)] = 0
        return scores + mask


NAMES = [[23, 90, 96, 1], [23, 5, 1], [40, 2, 7, 8, 9, 1], [40, 3, 1], [40, 2, 7, 30, 11, 12, 13, 14, 1]]


@pytest.mark.parametrize("form", ["function", "processor"])
@pytest.mark.parametrize("rows", [(6,), (4, 6, 3)])
@pytest.mark.parametrize("kind", [*EXACT, "ngram"])
def test_b04_a_trie_is_asked_only_for_texts_that_can_be(kind: str, rows: tuple[int, ...], form: str) -> None:
    """Not behind an EOS, not for rows that are not there, not behind ids that were masked."""
    target = tiny("llama", 0, attention="sdpa", eos=EOS)
    inputs = prompts(rows, seed=0)
    allowed = trie(NAMES)
    asked: list[tuple[int, list[int]]] = []

    def of_row(row: int, ids: torch.Tensor) -> list[int]:
        asked.append((row, ids[:6].tolist()))
        return allowed(ids[6:].tolist())

    # Plain decoding does ask for rows that have ended.
    call: dict[str, Any] = {"logits_processor": LogitsProcessorList([Trie(allowed, 6)])}
    expected = plain(target, inputs, call=call, max_new_tokens=12)
    call = {"prefix_allowed_tokens_fn": of_row} if form == "function" else call
    if kind == "ngram":
        config = SemSpecConfig("lossless", draft="ngram", max_new_tokens=12)
        output = target.generate(**inputs, **call, generation_config=config)
    else:
        output = assisted(target, draft_of(target, "near"), inputs, kind, call=call, max_new_tokens=12)
    assert torch.equal(output, expected)
    assert all(prompt == inputs["input_ids"][row].tolist() for row, prompt in asked), "each row by its own number"
    assert {row for row, _ in asked} == (set(range(len(rows))) if form == "function" else set())
