"""Encoder-decoders (T5, BART and their kin, Whisper) under lossless and easd: plain decoding's text, one run of each
encoder, one early error where the draft does not fit."""

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from hf_semspec import SemSpecConfig, record_stats
from hf_semspec.drafts.weights import weight_bytes
from hf_semspec.engine import encoders
from tests.encoder_models import FAMILIES, RAGGED, encoder_decoder, model, one_of, sources
from tests.helpers import CACHE, TESTING, WEAK_DRAFTS, assisted, first_occurrence, plain, states
from tests.models import DRAFTS, PAD, draft_of
from tests.statistics import deviations

pytestmark = [
    pytest.mark.seam,
    WEAK_DRAFTS,
    pytest.mark.filterwarnings("ignore:The target scores"),
]

KINDS = ("t5", "bart")  # a decoder that knows distances, and one that counts its cache


def plain_rows(target: PreTrainedModel, inputs: dict[str, torch.Tensor], **fields: Any) -> torch.Tensor:
    """What each row writes alone, without padding: (B, longest)."""
    rows = [plain(target, one_of(inputs, row), **fields)[0] for row in range(len(next(iter(inputs.values()))))]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


@pytest.mark.parametrize("scheme", TESTING)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("family", KINDS)
def test_ui56_an_encoder_decoder_writes_plain_text(family: str, draft: str, scheme: str) -> None:
    target = model(family)
    for lengths in ((6,), RAGGED):
        inputs = sources(lengths, seed=1)
        reference = plain_rows(target, inputs, max_new_tokens=16)
        output = assisted(target, draft_of(target, draft), inputs, scheme, max_new_tokens=16)
        assert torch.equal(output, reference)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in KINDS])
def test_their_kin_write_plain_text(family: str) -> None:
    target, inputs = model(family), sources(RAGGED, seed=1)
    with record_stats() as stats:
        output = assisted(target, draft_of(target, "near"), inputs, max_new_tokens=16)
    assert torch.equal(output, plain_rows(target, inputs, max_new_tokens=16))
    assert len({row.accepted for row in stats[0].rows}) > 1, "the rows are to be ragged"


@pytest.mark.parametrize("family", KINDS)
def test_sdpa_writes_plain_text(family: str) -> None:
    target = copy.deepcopy(model(family))
    target.set_attn_implementation("sdpa")
    inputs = sources(RAGGED, seed=1)
    output = assisted(target, draft_of(target, "near"), inputs, max_new_tokens=16)
    assert torch.equal(output, plain_rows(target, inputs, max_new_tokens=16))


def test_rows_out_of_step_need_their_own_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes the equality above more than luck: told nothing of the ragged rows, either decoder writes another
    text."""
    inputs = sources(RAGGED, seed=1)
    for family in KINDS:
        monkeypatch.setitem(encoders.POSITIONS, family, "given")
        monkeypatch.setattr("hf_semspec.engine.sources.Encoded.arguments", _without_positions)
        target = model(family)
        output = assisted(target, draft_of(target, "near"), inputs, max_new_tokens=16)
        reference = plain_rows(target, inputs, max_new_tokens=16)
        assert output.shape != reference.shape or not torch.equal(output, reference)


def _without_positions(source: Any, given: dict[str, Any], name: str, own: Any = encoders.Encoded.arguments) -> Any:
    arguments = own(source, given, name)
    arguments.pop("decoder_position_ids")
    return arguments


@pytest.mark.parametrize("family", KINDS)
def test_a_decoder_that_counts_takes_a_forward_for_each_length(family: str) -> None:
    target, inputs = model(family), sources(RAGGED, seed=1)
    with record_stats() as stats:
        assisted(target, draft_of(target, "near"), inputs, max_new_tokens=16)
    rounds = max(row.rounds for row in stats[0].rows) + 1  # and the prefill
    if family == "bart":
        assert stats[0].target_forwards > rounds
    else:
        assert stats[0].target_forwards <= rounds + 1  # an ended row's last token is fed for the returned cache


def test_each_encoder_runs_once_on_the_same_inputs() -> None:
    target = model("t5")
    draft = draft_of(target, "near")
    inputs = sources(RAGGED)
    seen = {}
    handles = []
    for name, one in (("target", target), ("draft", draft)):
        calls = seen.setdefault(name, [])
        hook = functools.partial(lambda calls, module, args, kwargs: calls.append(kwargs), calls)
        handles.append(one.get_encoder().register_forward_pre_hook(hook, with_kwargs=True))
    try:
        assisted(target, draft, inputs, max_new_tokens=12)
    finally:
        for handle in handles:
            handle.remove()
    assert [len(calls) for calls in seen.values()] == [1, 1]
    for calls in seen.values():
        assert torch.equal(calls[0]["input_ids"], inputs["input_ids"])
        assert torch.equal(calls[0]["attention_mask"], inputs["attention_mask"])


def test_a_draft_with_the_targets_own_encoder_does_not_run_it_again() -> None:
    target = model("t5")
    draft = draft_of(target, "near")
    draft.encoder = target.encoder
    calls = []
    handle = target.encoder.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        output = assisted(target, draft, sources((6,)), max_new_tokens=12)
    finally:
        handle.remove()
    assert len(calls) == 1
    assert torch.equal(output, plain(target, sources((6,)), max_new_tokens=12))


@pytest.mark.parametrize("family", KINDS)
def test_eos_inside_a_block_ends_a_row(family: str) -> None:
    free = encoder_decoder(family, eos=None)
    inputs = sources((6, 8, 5), seed=2)
    text = plain_rows(free, inputs, max_new_tokens=16)
    row, at = next((r, t) for t in range(3, 14) for r in range(3) if first_occurrence(text[r].tolist(), t))
    fields = {"max_new_tokens": 16, "eos_token_id": int(text[row, at]), "pad_token_id": PAD}
    reference = plain_rows(free, inputs, **fields)
    for kind in ("same", "near"):
        output = assisted(free, draft_of(free, kind), inputs, num_draft_tokens=5, **fields)
        assert torch.equal(output, reference)
    assert bool((reference[row, at + 1 :] == PAD).all())


@pytest.mark.parametrize("family", KINDS)
def test_the_decoders_own_prompt_is_read(family: str) -> None:
    target, inputs = model(family), sources(RAGGED, seed=3)
    start = torch.tensor([[5, 6, 7], [8, 9, 10], [11, 12, 13]])
    own = {"decoder_input_ids": start}
    reference = plain(target, inputs, call=own, max_new_tokens=12)
    for draft in ("same", "near"):
        assert torch.equal(assisted(target, draft_of(target, draft), inputs, call=own, max_new_tokens=12), reference)


def test_a_padded_prompt_of_the_decoder_is_read_where_positions_allow_it() -> None:
    start = torch.tensor([[2, PAD, PAD, 5], [2, 8, 9, 10]])
    own = {"decoder_input_ids": start, "decoder_attention_mask": (start != PAD).long()}
    inputs = sources((6, 6), seed=3)
    target = model("t5")
    output = assisted(target, draft_of(target, "near"), inputs, call=own, max_new_tokens=12)
    alone = [
        plain(target, one_of(inputs, row), call={"decoder_input_ids": start[row : row + 1, keep]}, max_new_tokens=12)
        for row, keep in enumerate(([0, 3], [0, 1, 2, 3]))
    ]
    # A start token that is not the model's own is put before it.
    assert torch.equal(output[0, 5:], alone[0][0, 3:])
    assert torch.equal(output[1], alone[1][0])
    own["decoder_input_ids"] = start.clone()
    bart = model("bart")
    with pytest.raises(ValueError, match="hides tokens, and BartForConditionalGeneration counts them"):
        assisted(bart, draft_of(bart, "near"), inputs, call=own, max_new_tokens=4)


@pytest.mark.parametrize("family", KINDS)
def test_scores_logits_and_cache_are_plain_decodings(family: str) -> None:
    target, inputs = model(family), sources((6,), seed=4)
    fields = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 10}
    reference = plain(target, inputs, **fields)
    output = assisted(target, draft_of(target, "near"), inputs, **fields)
    assert torch.equal(output.sequences, reference.sequences)
    for ours, theirs in ((output.scores, reference.scores), (output.logits, reference.logits)):
        assert len(ours) == len(theirs)
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs).float(), rtol=1e-5, atol=1e-5)
    ours, theirs = getattr(output, CACHE), getattr(reference, CACHE)
    assert type(ours) is type(theirs)
    for part in ("self_attention_cache", "cross_attention_cache"):
        pairs = [[pair for layer in states(getattr(one, part)) for pair in layer] for one in (ours, theirs)]
        for mine, other in zip(*pairs, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


def test_the_cache_returned_for_a_batch_holds_every_rows_encoder_states() -> None:
    target, inputs = model("t5"), sources(RAGGED, seed=1)
    fields = {"return_dict_in_generate": True, "max_new_tokens": 16}
    reference = plain(target, inputs, **fields)
    for scheme in ("lossless", "chains"):
        output = assisted(target, draft_of(target, "near"), inputs, scheme, **fields)
        ours, theirs = (states(getattr(one, CACHE).cross_attention_cache) for one in (output, reference))
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine[0], other[0], rtol=0, atol=1e-10)


def test_processors_that_read_the_source_see_it() -> None:
    target, inputs = model("t5"), sources((9,), seed=4)
    fields = {"max_new_tokens": 16, "encoder_repetition_penalty": 1.7, "encoder_no_repeat_ngram_size": 2}
    reference = plain(target, inputs, **fields)
    assert not torch.equal(reference, plain(target, inputs, max_new_tokens=16))
    assert torch.equal(assisted(target, draft_of(target, "near"), inputs, **fields), reference)


@pytest.mark.parametrize("family", KINDS)
def test_samples_follow_the_targets_law(family: str) -> None:
    """Three tokens of a vocabulary of four, many sequences of one source, against the enumerated law; what the draft
    writes alone must not pass."""
    target = encoder_decoder(family, vocab=5, eos=None)
    draft = draft_of(target, "far")
    with torch.no_grad():
        for weight in (target.lm_head.weight, draft.lm_head.weight):
            weight.mul_(0.15)
    inputs = {"input_ids": torch.tensor([[1, 4, 2, 3]])}
    law, wrong = law_of(target, inputs, 3), law_of(draft, inputs, 3)
    fields = {"do_sample": True, "max_new_tokens": 3, "num_return_sequences": 1200, "top_k": 0, "pad_token_id": PAD}
    torch.manual_seed(0)
    cells = []
    for scheme in ("lossless", "chains"):
        ids = assisted(target, draft, inputs, scheme, num_draft_tokens=2, **fields)[:, -3:]
        cells.append(ids @ torch.tensor([25, 5, 1]))
        assert not deviations(cells[-1], law)
    assert deviations(cells[0], wrong)
    alone = plain(draft, inputs, **fields)[:, -3:] @ torch.tensor([25, 5, 1])
    assert deviations(alone, law)


def law_of(one: PreTrainedModel, inputs: dict[str, torch.Tensor], length: int) -> torch.Tensor:
    """Probabilities of all texts of `length` tokens, in lexical order."""
    texts = torch.tensor(list(itertools.product(range(5), repeat=length)))
    start = torch.full((len(texts), 1), one.config.decoder_start_token_id)
    ids = torch.cat([start, texts], dim=1)
    with torch.no_grad():
        logits = one(input_ids=inputs["input_ids"].expand(len(texts), -1), decoder_input_ids=ids).logits
    log_p = functional.log_softmax(logits[:, :-1], dim=-1).gather(2, texts.unsqueeze(-1))
    return log_p.sum(dim=(1, 2)).exp()


def test_easd_triggers_on_an_encoder_decoder() -> None:
    target = model("t5")
    config = SemSpecConfig(
        "easd",
        target_entropy_threshold=0.0,
        draft_entropy_threshold=0.0,
        overlap_threshold=0.0,
        num_draft_tokens=3,
        max_new_tokens=16,
        return_dict_in_generate=True,
    )
    output = target.generate(**sources(RAGGED), assistant_model=draft_of(target, "same"), generation_config=config)
    assert output.stats.trigger_rate > 0.9
    assert int(output.triggers.sum()) == sum(row.triggered for row in output.stats.rows)


def test_the_draft_may_have_another_dtype_vocabulary_or_family() -> None:
    target, inputs = model("t5"), sources(RAGGED, seed=1)
    reference = plain_rows(target, inputs, max_new_tokens=12)
    for draft in (draft_of(target, "near").float(), encoder_decoder("t5", vocab=90), model("bart")):
        assert torch.equal(assisted(target, draft, inputs, max_new_tokens=12), reference)


@pytest.mark.parametrize("family", KINDS)
def test_a_forward_reads_no_encoder_weights(family: str) -> None:
    target = model(family)
    read = [
        *target.get_output_embeddings().parameters(),
        *(
            weight
            for name, weight in target.get_decoder().named_parameters()
            if not any(table in name for table in ("embed_tokens", "embed_positions", "relative_attention_bias"))
        ),
    ]
    biases = [one for name, one in target.named_buffers() if name == "final_logits_bias"]
    assert weight_bytes(target) == sum(weight.numel() * 8 for weight in (*read, *biases))
    output = assisted(target, draft_of(target, "near"), sources((6,)), num_draft_tokens="auto", max_new_tokens=12)
    assert torch.equal(output, plain(target, sources((6,)), max_new_tokens=12))
