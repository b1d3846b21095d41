"""Users' reports about streaming, scores, statistics and cost (their numbers are in the test names)."""

import copy
import gc
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, TextIteratorStreamer, TextStreamer

from hf_semspec import LosslessConfig, SemSpecConfig
from tests.helpers import (
    EXACT,
    TESTING,
    WEAK_DRAFTS,
    Forwards,
    Inputs,
    Recorder,
    asked,
    assisted,
    check_identities,
    first_occurrence,
    new_tokens,
    plain,
)
from tests.models import DRAFTS, PAD, draft_of, prompts, tiny, tokenizer

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("name", DRAFTS)
def test_ui48_the_streamer_is_called_as_by_plain_decoding(kind: str, name: str) -> None:
    target = tiny("llama", 1)
    inputs = prompts((5,), seed=2)
    text = plain(target, inputs, max_new_tokens=20)[0, 5:].tolist()
    eos = next(token for i, token in enumerate(text) if i > 6 and first_occurrence(text, i))
    for fields in ({}, {"eos_token_id": eos}):
        streams = []
        for run in (plain, assisted):
            models = (target,) if run is plain else (target, draft_of(target, name))
            args = () if run is plain else (kind,)
            streamer = Recorder()
            output = run(*models, inputs, *args, call={"streamer": streamer}, max_new_tokens=20, **fields)
            assert streamer.ids() == output[0].tolist()
            assert streamer.ends == 1
            streams.append(streamer.puts)
        assert [value.shape for value in streams[0]] == [value.shape for value in streams[1]]
        assert all(torch.equal(*pair) for pair in zip(*streams, strict=True))


def test_ui48_text_streamers_write_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny("llama", 1)
    inputs = prompts((5,), seed=2)
    written = []
    for run in (plain, assisted):
        models = (target,) if run is plain else (target, draft_of(target, "near"))
        output = run(
            *models, inputs, call={"streamer": TextStreamer(tokenizer(), skip_prompt=True)}, max_new_tokens=20
        )
        written.append(capsys.readouterr().out)
    assert written[0] == written[1]
    assert written[1].rstrip("\n") == tokenizer().decode(output[0, 5:])


def test_ui48_a_batch_with_a_streamer_is_stocks_error() -> None:
    target = tiny("llama", 1)
    inputs = prompts((5, 3), seed=2)
    with pytest.raises(ValueError, match="batch size 1"):
        plain(target, inputs, call={"streamer": TextStreamer(tokenizer())}, max_new_tokens=4)
    with pytest.raises(ValueError, match="batch size 1"):
        assisted(
            target, draft_of(target, "near"), inputs, call={"streamer": TextStreamer(tokenizer())}, max_new_tokens=4
        )


class FailsAt(LogitsProcessor):
    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= self.width:
            raise RuntimeError("the processor failed")
        return scores


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("width", [5, 11])
def test_ui48_the_streamer_is_closed_on_error(kind: str, width: int) -> None:
    """A reader in another thread must not wait for ever, and gets kept tokens only."""
    target = tiny("llama", 1)
    inputs = prompts((5,), seed=2)
    expected = plain(target, inputs, max_new_tokens=20)[0].tolist()
    streamer = Recorder()
    call = {"streamer": streamer, "logits_processor": LogitsProcessorList([FailsAt(width)])}
    with pytest.raises(RuntimeError, match="the processor failed"):
        assisted(target, draft_of(target, "near"), inputs, kind, call=call, max_new_tokens=20)
    assert streamer.ends == 1
    assert streamer.ids() == expected[: len(streamer.ids())]
    reader = TextIteratorStreamer(tokenizer(), skip_prompt=True, timeout=5)
    with pytest.raises(RuntimeError, match="the processor failed"):
        assisted(target, draft_of(target, "near"), inputs, kind, call={**call, "streamer": reader}, max_new_tokens=20)
    assert isinstance("".join(reader), str)


def scored(
    target: PreTrainedModel, inputs: Inputs, *, draft: Any = None, kind: str = "lossless", **fields: Any
) -> Any:
    fields = {
        "max_new_tokens": 16,
        "output_scores": True,
        "output_logits": True,
        "return_dict_in_generate": True,
        **fields,
    }
    return plain(target, inputs, **fields) if draft is None else assisted(target, draft, inputs, kind, **fields)


@pytest.mark.parametrize("kind", [*TESTING, "parse"])
@pytest.mark.parametrize("lengths", [(5,), (4, 9, 6)])
@pytest.mark.parametrize("fields", [{}, {"repetition_penalty": 1.3, "suppress_tokens": [5, 6]}])
def test_ui50_scores_and_logits_are_plain_decodings(
    kind: str, lengths: tuple[int, ...], fields: dict[str, Any]
) -> None:
    target = tiny("llama", 2, attention="sdpa")
    inputs = prompts(lengths, seed=2)
    text = new_tokens(plain(target, inputs, max_new_tokens=16, **fields), inputs)[0].tolist()
    eos = next(token for i, token in enumerate(text) if i > 6 and first_occurrence(text, i))
    for ends in ({}, {"eos_token_id": eos}):
        expected = scored(target, inputs, **fields, **ends)
        for name in ("near", "far"):
            output = scored(target, inputs, draft=draft_of(target, name), kind=kind, **fields, **ends)
            assert torch.equal(output.sequences, expected.sequences)
            new = new_tokens(output, inputs)
            live = (
                torch.stack([(new[:, :t] != eos).all(dim=1) for t in range(new.shape[1])])
                if ends
                else torch.ones(new.shape[1], len(lengths), dtype=torch.bool)
            )
            for field in ("scores", "logits"):
                ours, theirs = getattr(output, field), getattr(expected, field)
                assert len(ours) == len(theirs) == new.shape[1]
                for got, want, alive in zip(ours, theirs, live, strict=True):
                    assert got.shape == want.shape
                    assert got.dtype == want.dtype == torch.float32
                    assert torch.allclose(got[alive], want[alive], atol=1e-4)
                    assert got[~alive].eq(0).all()
                    assert not got.requires_grad
            if not ends:
                transition = target.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
                wanted = target.compute_transition_scores(expected.sequences, expected.scores, normalize_logits=True)
                assert torch.allclose(transition, wanted, atol=1e-4)


@pytest.mark.parametrize("kind", EXACT)
def test_ui50_values_equal_a_teacher_forced_pass_when_sampling(kind: str) -> None:
    target = tiny("llama", 2)
    inputs = prompts((5,), seed=2)
    torch.manual_seed(3)
    output = scored(
        target, inputs, draft=draft_of(target, "near"), kind=kind, do_sample=True, temperature=0.7, top_k=5
    )
    with torch.no_grad():
        forced = target(output.sequences).logits[0, 4:-1]
    assert torch.allclose(torch.cat(output.logits), forced.float(), atol=1e-4)
    for scores, raw, token in zip(output.scores, forced, new_tokens(output, inputs)[0], strict=True):
        kept = scores[0].isfinite()
        assert kept.sum() == 5
        assert kept[token]
        assert torch.allclose(scores[0][kept], (raw.float() / 0.7)[kept], atol=1e-4)


def script(draft: PreTrainedModel, proposals: dict[int, int]) -> None:
    """Make `draft` propose `proposals[i]` for the token at position `i`, with near certainty."""

    def propose(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        positions = kwargs["position_ids"]
        positions = positions[:, -output.logits.shape[1] :]
        output.logits.fill_(-50.0)
        for row, line in enumerate(positions.expand(output.logits.shape[0], -1).tolist()):
            for column, position in enumerate(line):
                output.logits[row, column, proposals.get(position + 1, 1)] = 50.0
        return output

    draft.register_forward_hook(propose, with_kwargs=True)


@pytest.mark.parametrize("kind", ["lossless", "easd"])
def test_ui51_known_pattern_gives_exact_numbers(kind: str) -> None:
    """Accept three and reject; accept all four; accept two and reject; EOS in the middle of a block."""
    # The first token is the target's own; then rounds of 3 + 1, 4 + 1, 2 + 1, and one that ends at its third token.
    end = 1 + 4 + 5 + 3 + 3
    for seed in range(50):
        target, inputs = tiny("llama", seed), prompts((5,), seed=seed)
        text = plain(target, inputs, max_new_tokens=30)[0, 5:].tolist()
        if first_occurrence(text, end - 1):
            break
    wrong = {1 + 3, 1 + 4 + 5 + 2}
    draft = draft_of(target, "same")
    script(draft, {5 + i: 96 - token if i in wrong else token for i, token in enumerate(text)})
    fields = {"num_draft_tokens": 4, "max_new_tokens": 30, "return_dict_in_generate": True}
    eos = text[end - 1]
    output = assisted(target, draft, inputs, kind, eos_token_id=eos, **fields)
    assert new_tokens(output, inputs)[0].tolist() == text[:end]
    check_identities(output.stats, [end])
    (row,) = output.stats.rows
    assert (row.plain, row.rounds, row.drafted, row.tested, row.untested) == (1, 4, 16, 15, 1)
    assert (row.accepted, row.rejected, row.residual, row.bonus, row.cut) == (13, 2, 2, 2, 2)
    assert row.histogram == [0, 0, 1, 1, 2]
    assert row.acceptance_rate == pytest.approx(13 / 15)
    assert row.mean_accepted_length == pytest.approx(13 / 4)
    assert output.stats.target_forwards == 5


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("do_sample", [False, True])
def test_ui51_figures_add_up_for_every_row(kind: str, name: str, do_sample: bool) -> None:
    target = tiny("llama", 2)
    inputs = prompts((4, 9, 6), seed=2)
    draft = draft_of(target, name)
    torch.manual_seed(0)
    fields = {
        "max_new_tokens": 19,
        "do_sample": do_sample,
        "return_dict_in_generate": True,
        "eos_token_id": list(range(2, 8)),
    }
    with Forwards(target) as of_target, Forwards(draft) as of_draft:
        output = assisted(target, draft, inputs, kind, **fields)
    new = new_tokens(output, inputs)
    lengths = [next((t + 1 for t, token in enumerate(row) if 2 <= token < 8), len(row)) for row in new.tolist()]
    assert all(row[length:].eq(PAD).all() for row, length in zip(new, lengths, strict=True))
    stats = output.stats
    check_identities(stats, lengths)
    assert (stats.target_forwards, stats.draft_forwards) == (of_target.calls, of_draft.calls)
    assert (stats.target_tokens, stats.draft_tokens) == (of_target.tokens, of_draft.tokens)
    assert stats.to_dict()["rows"][0]["emitted"] == lengths[0]


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("trigger", [{}, {"trigger": "random", "trigger_rate": 0.5}])
def test_ui51_figures_of_easd_with_triggers(trigger: dict[str, Any], chains: int, do_sample: bool) -> None:
    target = tiny("llama", 2)
    inputs = prompts((4, 9), seed=2)
    config = SemSpecConfig(
        "easd",
        num_draft_tokens=4,
        num_chains=chains,
        target_entropy_threshold=0.5,
        draft_entropy_threshold=0.5,
        overlap_threshold=0.2,
        max_new_tokens=25,
        do_sample=do_sample,
        return_dict_in_generate=True,
        **trigger,
    )
    torch.manual_seed(0)
    output = target.generate(**inputs, assistant_model=draft_of(target, "near"), generation_config=config)
    check_identities(output.stats, [25, 25])
    assert output.triggers.shape == (2, 25)
    assert output.triggers.dtype == torch.bool
    for marked, row in zip(output.triggers.sum(dim=1).tolist(), output.stats.rows, strict=True):
        assert marked <= row.triggered <= marked + row.cut  # the token of a trigger may lie past the length limit
    assert output.stats.triggered > 0
    assert 0 < output.stats.trigger_rate <= 1
    assert output.stats.mean_target_entropy > 0


def test_stats_are_no_items_of_the_output() -> None:
    """Pipelines iterate over the items, and break on what is no tensor."""
    target = tiny("llama", 2)
    output = assisted(target, draft_of(target, "near"), prompts((5,)), max_new_tokens=4, return_dict_in_generate=True)
    assert not {"stats", "triggers"} & set(output.keys())
    assert isinstance(assisted(target, draft_of(target, "near"), prompts((5,)), max_new_tokens=4), torch.Tensor)


@pytest.mark.parametrize("kind", ["lossless", "easd"])
def test_ui52_forwards_and_tokens_of_a_perfect_draft(kind: str) -> None:
    target = tiny("llama", 2)
    draft = draft_of(target, "same")
    inputs = prompts((7,), seed=2)
    with Forwards(target) as of_target, Forwards(draft) as of_draft:
        assisted(target, draft, inputs, kind, num_draft_tokens=5, max_new_tokens=60)
    assert of_target.calls <= 11
    assert of_draft.tokens <= 60 + 7
    assert [width for width in of_target.widths if width > 6] == [7], "the prompt is read once"
    assert len([width for width in of_draft.widths if width > 2]) == 1, "and the draft never re-reads"
    assert all(shape[1] <= 6 for shape in of_target.logits + of_draft.logits), "no logits of the whole prompt"


@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_ui52_one_forward_judges_and_nothing_is_read_again(threshold: float) -> None:
    """The draft writes once and drafts on from its own cache; the target reads prompt and answer once."""
    target = tiny("llama", 2)
    draft = draft_of(target, "same")
    inputs = prompts((7,), seed=2)
    revise = LosslessConfig(num_draft_tokens=5)
    fields = {"revise_with": revise, "max_new_tokens": 60, "return_dict_in_generate": True}
    with Forwards(target) as of_target, Forwards(draft) as of_draft:
        output = assisted(target, draft, inputs, "parse", accept_threshold=threshold, **fields)
    assert of_target.widths[0] == 7 + 60 + asked(output)
    assert of_target.calls == (1 if threshold == 0 else 11)
    assert all(width <= 6 for width in of_target.widths[1:])
    writing = 7 + 59
    assert of_draft.tokens == writing if threshold == 0 else writing < of_draft.tokens <= writing + 60 + 10
    assert [width for width in of_draft.widths if width > 2] == [7], "the prompt is read once by the draft"
    assert of_target.logits[0][1] == output.boundaries.shape[1], "one row of logits a verdict"


def live_tensors() -> tuple[int, int]:
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
    return len(tensors), sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("kind", ["easd", "chains", "smc", "parse"])
def test_ui53_nothing_outlives_a_call(kind: str) -> None:
    target = tiny("llama", 2)
    draft = draft_of(target, "near")
    inputs = prompts((7, 3), seed=2)

    def call() -> None:
        assisted(target, draft, inputs, kind, max_new_tokens=4, output_scores=True, return_dict_in_generate=True)

    call()
    kept = [(set(vars(part)), set(vars(part.config)), part.generation_config.to_dict()) for part in (target, draft)]
    settings = [copy.deepcopy(part.config.to_dict()) for part in (target, draft)]
    before = live_tensors()
    for _ in range(30):
        call()
    assert live_tensors() == before
    assert kept == [
        (set(vars(part)), set(vars(part.config)), part.generation_config.to_dict()) for part in (target, draft)
    ]
    assert settings == [part.config.to_dict() for part in (target, draft)]
    assert all(not m._forward_hooks and not m._forward_pre_hooks for part in (target, draft) for m in part.modules())
