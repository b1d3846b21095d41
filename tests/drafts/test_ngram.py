"""Drafts looked up in the text, with no draft model and with one behind: exact like any others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, pipeline

from hf_semspec import LosslessConfig, SemSpecConfig, record_stats
from hf_semspec.drafts.ngram import NGramGenerator
from tests.drafts.shared import SOURCES, looked_up
from tests.helpers import (
    CACHE,
    JUDGE,
    WEAK_DRAFTS,
    Forwards,
    Recorder,
    cache_of,
    caught,
    check_identities,
    first_occurrence,
    new_tokens,
    plain,
    plain_rows,
    refuses,
    states,
)
from tests.models import DRAFTS, PAD, draft_of, prompts, row_of, tiny, tokenizer

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]


def cycling(seed: int = 1, **fields: Any) -> PreTrainedModel:
    """A target that mostly repeats itself in a cycle of eleven tokens, and breaks out of it now and then."""
    model = tiny("llama", seed, **fields)

    def cycle(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        ids = kwargs["input_ids"][:, -output.logits.shape[1] :]
        places = kwargs["position_ids"][:, -output.logits.shape[1] :]
        pull = torch.where((places % 17 == 0), 0.0, 60.0).to(output.logits)
        output.logits.scatter_add_(-1, (2 + (ids * 5 + 1) % 11).unsqueeze(-1), pull.unsqueeze(-1))
        return output

    model.register_forward_hook(cycle, with_kwargs=True)
    return model


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("make", [tiny, cycling])
def test_greedy_is_plain_greedy(make: Callable[..., Any], source: str) -> None:
    target = make(seed=1)
    inputs = prompts((3, 7, 12), seed=2)
    expected = plain_rows(target, inputs, max_new_tokens=40)
    runs = [(None, 1), (None, 4)]
    if source == "ngram+model":
        runs = [(draft_of(target, name), length) for name, length in zip(DRAFTS, ("auto", 4, 1), strict=True)]
        runs.append((runs[1][0], "auto"))
    for draft, length in runs:
        output = looked_up(target, inputs, source, draft, num_draft_tokens=length, max_new_tokens=40)
        assert torch.equal(new_tokens(output, inputs), expected)
        check_identities(output.stats, [40] * 3)
        assert (output.stats.draft_forwards == 0) == (draft is None)
    alone = looked_up(target, row_of(inputs, 1), source, draft, num_draft_tokens=4, max_new_tokens=40)
    assert torch.equal(alone.sequences[0, 7:], expected[1])
    if make is cycling:
        assert output.stats.acceptance_rate > 0.5
        assert output.stats.target_forwards < 33


def test_the_model_drafts_only_where_nothing_is_found() -> None:
    """And reads each token once, also those that were looked up while it was not asked."""
    target = cycling()
    inputs = prompts((3, 7, 12), seed=2)
    draft = draft_of(target, "same")
    with Forwards(draft) as spy:
        output = looked_up(target, inputs, "ngram+model", draft, num_draft_tokens=4, max_new_tokens=60)
    alone = looked_up(target, inputs, "ngram", num_draft_tokens=4, max_new_tokens=60)
    assert 0 < spy.calls < 4 * output.stats.rounds / 2
    assert output.stats.target_forwards < alone.stats.target_forwards
    inputs = prompts((12,), seed=2)
    with Forwards(draft) as spy:
        output = looked_up(target, inputs, "ngram+model", draft, num_draft_tokens=4, max_new_tokens=60)
    assert 0 < spy.calls < 4 * output.stats.rounds / 2
    assert spy.tokens <= 12 + 60


def test_a_longer_ngram_goes_first() -> None:
    texts = {0: [5, 6, 7, 8, 9, 6, 7, 8, 4, 9, 9, 7, 8, 3, 5, 6, 7, 8]}
    found = []
    for size in (1, 2, 3, 4):
        made = NGramGenerator(20, 1, texts, max_length=99, with_laws=False, device=None, max_ngram=size)
        found.append(made.get_candidates(torch.tensor([texts[0]]))[0][0, -1].item())
    assert found == [3, 3, 4, 9]


def test_a_short_period_is_drafted_on() -> None:
    ids = torch.tensor([[9, 5, 6, 5, 6]])
    made = NGramGenerator(20, 5, {0: ids[0].tolist()}, max_length=99, with_laws=False, device=None)
    assert made.get_candidates(ids)[0][0, 5:].tolist() == [5, 6, 5, 6, 5]


@pytest.mark.parametrize("source", SOURCES)
def test_few_distinct_target_widths(source: str) -> None:
    """As with a model: prefill, one token, γ drafts, and whatever room is left at the end."""
    target = tiny("llama", 1)
    with Forwards(target) as spy:
        looked_up(target, prompts((6,), seed=2), source, num_draft_tokens=4, max_new_tokens=50)
    assert set(spy.widths[1:-4]) == ({5} if source == "ngram+model" else {1, 5})


@pytest.mark.parametrize("source", SOURCES)
def test_an_end_inside_a_block(source: str) -> None:
    target = cycling()
    inputs = prompts((3, 7, 12), seed=2)
    text = plain_rows(target, inputs, max_new_tokens=30)[2].tolist()
    for token in {text[column] for column in range(1, 24, 2) if first_occurrence(text, column)}:
        output = looked_up(target, inputs, source, eos_token_id=token, max_new_tokens=30, num_draft_tokens=6)
        assert torch.equal(
            new_tokens(output, inputs), plain_rows(target, inputs, eos_token_id=token, max_new_tokens=30)
        )
        check_identities(output.stats)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "fields", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 3}, {"suppress_tokens": [4]}]
)
def test_processors_see_the_text(fields: dict[str, Any], source: str) -> None:
    target = cycling()
    inputs = prompts((6,), seed=2)
    output = looked_up(target, inputs, source, max_new_tokens=30, **fields)
    assert torch.equal(output.sequences, plain(target, inputs, max_new_tokens=30, **fields))


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_returned_beside_the_text_is_plain_decodings(source: str) -> None:
    target = cycling()
    inputs = prompts((6,), seed=2)
    wanted = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    streamer, words = Recorder(), tokenizer()
    text = plain(target, inputs, max_new_tokens=30)[0, 6:].tolist()
    stop = {"stop_strings": [words.decode(text[17:19])]}
    mine = looked_up(
        target,
        inputs,
        source,
        call={"streamer": streamer, "tokenizer": words},
        max_new_tokens=30,
        output_scores=True,
        output_logits=True,
        **stop,
    )
    theirs = plain(target, inputs, call={"tokenizer": words}, max_new_tokens=30, **wanted, **stop)
    assert torch.equal(mine.sequences, theirs.sequences)
    assert streamer.ids() == theirs.sequences[0].tolist()
    for name in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(getattr(mine, name)), torch.stack(getattr(theirs, name)))
    for mine_pair, their_pair in zip(states(cache_of(mine)), states(cache_of(theirs)), strict=True):
        torch.testing.assert_close(mine_pair, their_pair)
    turn = torch.cat([mine.sequences, torch.tensor([[9, 8, 7]])], dim=1)
    again = {"input_ids": turn, "attention_mask": torch.ones_like(turn)}
    output = looked_up(target, again, source, call={CACHE: cache_of(mine)}, max_new_tokens=20)
    assert torch.equal(output.sequences, plain(target, again, max_new_tokens=20))


@pytest.mark.deprecated
def test_a_pipeline_without_a_draft_model() -> None:
    target = cycling(eos=1)
    target.generation_config = SemSpecConfig("lossless", draft="ngram", eos_token_id=1, pad_token_id=PAD)
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer())
    with record_stats() as record:
        written = pipe("Hello", max_new_tokens=24, do_sample=False, return_full_text=False)[0]["generated_text"]
    assert [stats.draft_forwards for stats in record] == [0]
    assert record[0].accepted > 0
    inputs = dict(tokenizer()("Hello", return_tensors="pt", return_token_type_ids=False))
    target.generation_config.semspec = None
    assert written == tokenizer().decode(plain(target, inputs, max_new_tokens=24)[0, 5:], skip_special_tokens=True)


def test_ngrams_that_seldom_fit_are_no_reason_to_warn() -> None:
    with caught() as messages:
        output = looked_up(tiny("llama", 1), prompts((3, 7, 12)), max_new_tokens=60, do_sample=True, top_k=0)
    assert output.stats.tested > 20
    assert output.stats.acceptance_rate < 0.1
    assert messages == []


@pytest.mark.parametrize("source", SOURCES)
def test_under_parse(source: str) -> None:
    target = cycling()
    inputs = prompts((3, 7, 12), seed=2)
    config = SemSpecConfig(
        "parse",
        **JUDGE,
        accept_threshold=2.0,
        prefix_threshold=2.0,
        max_redrafts=2,
        revise_with=LosslessConfig(draft=source, num_draft_tokens=4),
        max_new_tokens=30,
        return_dict_in_generate=True,
    )
    draft = draft_of(target, "near")
    output = target.generate(**inputs, assistant_model=draft, generation_config=config, tokenizer=tokenizer())
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=30))
    assert output.stats.accepted > 0
    check_identities(output.stats)


def test_several_sequences_a_prompt() -> None:
    target = cycling()
    inputs = prompts((3, 7), seed=2)
    output = looked_up(target, inputs, max_new_tokens=20, do_sample=True, num_return_sequences=3)
    assert output.sequences.shape == (6, 27)
    assert output.stats.accepted > 0
    check_identities(output.stats, [20] * 6)


REFUSED: dict[str, tuple[Any, str]] = {
    "a draft model that is not used": ({"draft": "ngram"}, "has no use for assistant_model"),
    "no draft model behind": ({"draft": "ngram+model"}, "pass assistant_model"),
    "none at all": ({}, 'draft="ngram"'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_draft_model_must_be_what_is_asked_for(case: str) -> None:
    fields, match = REFUSED[case]
    target = tiny()
    draft = draft_of(target, "near") if "not used" in case else None
    refuses(target, draft, prompts((4,)), match, generation_config=SemSpecConfig("lossless", **fields))


def test_a_tokenizer_of_no_draft_is_refused() -> None:
    config = SemSpecConfig("lossless", draft="ngram")
    words = {"tokenizer": tokenizer(), "assistant_tokenizer": tokenizer()}
    refuses(tiny(), None, prompts((4,)), "no use for assistant_tokenizer", generation_config=config, **words)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"draft": "lookup"}, '"ngram", "ngram\\+model"'),
        ({"draft": None}, "`draft` must be"),
        ({"max_ngram": 0}, "`max_ngram` must be"),
        ({"max_ngram": 17}, "`max_ngram` must be"),
        ({"draft": "ngram", "num_chains": 2}, "`num_chains` must be 1"),
        ({"draft": "ngram+model", "num_chains": 2}, "`num_chains` must be 1"),
        ({"draft": "ngram", "num_draft_tokens": "auto"}, "give a number"),
    ],
)
def test_fields_are_checked(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LosslessConfig(**fields)


@pytest.mark.parametrize("do_sample", [False, True])
def test_easd_has_nothing_against_what_is_looked_up(do_sample: bool) -> None:
    """A draft that is certain of its token is never uncertain: nothing triggers, until a threshold of 0 lets it."""
    target, inputs = cycling(), prompts((3, 7), seed=2)
    fields: dict[str, Any] = {"draft": "ngram", "max_new_tokens": 30, "do_sample": do_sample}
    zeros = {"draft_entropy_threshold": 0.0, "target_entropy_threshold": 0.0, "top_n": 1, "penalty": 1.0}
    texts = []
    for scheme, more in (("lossless", {}), ("easd", {}), ("easd", zeros)):
        torch.manual_seed(0)
        config = SemSpecConfig(scheme, **fields, **more, return_dict_in_generate=True)
        texts.append(target.generate(**inputs, generation_config=config))
    assert torch.equal(texts[0].sequences, texts[1].sequences)
    assert not texts[1].triggers.any()
    assert texts[2].triggers.any()


@pytest.mark.parametrize("source", ["ngram", "ngram+model"])
def test_an_encoder_decoder_and_a_prompt_with_an_image(source: str) -> None:
    from tests.encoder_models import encoder_decoder, llava, pictures, sources

    texts = (sources((4, 9, 6)), encoder_decoder("t5")), (pictures(((2, 3), (2, 3), (2, 3))), llava())
    for inputs, target in texts:
        draft = draft_of(target, "near") if source == "ngram+model" else None
        config = SemSpecConfig("lossless", draft=source, do_sample=False, max_new_tokens=16)
        with record_stats() as stats:
            output = target.generate(**inputs, assistant_model=draft, generation_config=config)
        assert torch.equal(output, target.generate(**inputs, do_sample=False, max_new_tokens=16))
        assert stats[0].drafted > 0
