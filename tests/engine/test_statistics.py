"""The statistics of a call, and the forwards that they count."""

import json
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_semspec import LosslessConfig, SemSpecConfig, record_stats
from tests.helpers import (
    EXACT,
    WEAK_DRAFTS,
    Forwards,
    RowLengths,
    asked,
    assisted,
    check_identities,
    first_occurrence,
    new_tokens,
    plain,
)
from tests.models import DRAFTS, PAD, draft_of, prompts, tiny

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]


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
    assert (row.plain, row.rounds, row.drafted, row.tested, row.untested) == (1, 4, 16, 14, 2)
    assert (row.accepted, row.rejected, row.residual, row.bonus, row.cut) == (12, 2, 2, 1, 2)
    assert row.histogram == [0, 0, 1, 2, 1]
    assert row.acceptance_rate == pytest.approx(12 / 14)
    assert row.mean_accepted_length == pytest.approx(12 / 4)
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
        assert marked == row.triggered
    assert output.stats.triggered > 0
    assert 0 < output.stats.trigger_rate <= 1
    assert output.stats.mean_target_entropy > 0


@pytest.mark.parametrize("ends", [{"eos_token_id": list(range(2, 40))}, {}])
@pytest.mark.parametrize("do_sample", [False, True])
def test_triggers_and_acceptance_are_counted_up_to_the_rows_end(do_sample: bool, ends: dict[str, Any]) -> None:
    """Short answers would shift the rate that a control copies. Without an EOS all rows go on until the last ends."""
    target, lengths = tiny("llama", 2), tuple(range(3, 13))
    inputs = prompts(lengths, seed=2)
    fields = {"max_new_tokens": 25, "do_sample": do_sample, "return_dict_in_generate": True, **ends}
    config = SemSpecConfig("easd", num_draft_tokens=6, trigger="random", trigger_rate=0.4, penalty=1.0, **fields)
    stops = [] if ends else [RowLengths([14 + row % 3 for row in range(10)])]
    torch.manual_seed(0)
    output = target.generate(
        **inputs, assistant_model=draft_of(target, "near"), generation_config=config, stopping_criteria=stops
    )
    new, eos = new_tokens(output, inputs), ends.get("eos_token_id", [])
    held = [next((t + 1 for t, token in enumerate(row) if token in eos), len(row)) for row in new.tolist()]
    check_identities(output.stats, held)
    for row, triggers, h_p, length in zip(
        output.stats.rows, output.triggers, output.target_entropies, held, strict=True
    ):
        assert row.triggered == int(triggers.sum())
        assert row.tested == int((~h_p[:length].isnan()).sum())
    assert output.stats.cut > 0 and output.stats.triggered > 0


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


def test_stats_are_json() -> None:
    target = tiny("llama", 4)
    with record_stats() as stats:
        assisted(target, draft_of(target, "near"), prompts((6, 3)), max_new_tokens=9)
        assisted(target, draft_of(target, "near"), prompts((6,)), max_new_tokens=1)
    for entry in stats:
        values = json.loads(json.dumps(entry.to_dict(), allow_nan=False))
        assert values["scheme"] == "lossless"
        assert values["emitted"] == sum(row["emitted"] for row in values["rows"])
