"""Laws of what is written where drafts are looked up in the text; wrong samplers must fail."""

import itertools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_semspec.engine.acceptance import accept_chains
from hf_semspec.schemes.lossless import decode as lossless
from tests.drafts.shared import SOURCES, looked_up
from tests.enumerated import VOCAB, cells, joint, law_of_next
from tests.helpers import WEAK_DRAFTS, new_tokens
from tests.models import PAD, draft_of, tiny
from tests.statistics import deviations
from tests.toy import Toy, assert_exact, committed

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]


class PointMass(Toy):
    """The drafted token is a function of the prefix, as what is looked up is."""

    def at(self, prefix: tuple[int, ...]) -> Any:
        p, _, coin = super().at(prefix)
        found = sum(prefix) % self.vocab
        return p, [float(token == found) for token in range(self.vocab)], coin


def excluded_nothing(log_p: Any, log_q: Any, drafts: Any, uniforms: Any) -> Any:
    """The usual mistake: after a rejection, draw from p with the rejected token still in it."""
    decision = accept_chains(log_p, log_q, drafts, uniforms)
    at = decision.num_accepted[:, None, None].expand(-1, 1, log_p.shape[-1])
    return decision._replace(law=log_p[:, 0].gather(1, at).squeeze(1).exp())


@pytest.mark.parametrize("seed", range(4))
def test_a_round_with_certain_drafts_follows_the_target(seed: int) -> None:
    """Every way the uniforms can fall, to 1e-9."""
    toy = PointMass(4, seed, ("free", "free", "masked target", "certain"))
    assert_exact(committed(toy, accept_chains, 1, 2), toy.joint(3))
    with pytest.raises(AssertionError):
        assert_exact(committed(toy, excluded_nothing, 1, 2), toy.joint(3))


DRAWS = 1000
LAW: dict[str, Any] = {"top_k": 0, "temperature": 0.8}


def drawn(source: str) -> tuple[PreTrainedModel, list[torch.Tensor], list[torch.Tensor]]:
    """A target, two prompts in which much is found, and DRAWS texts of three tokens for each."""
    target = tiny("llama", 8, vocab=VOCAB, hidden=16, heads=2, kv_heads=1, initializer_range=0.25, attention="sdpa")
    ids = torch.tensor([[PAD, PAD, 2, 3, 4, 1, 0, 2, 3], [4, 3, 2, 1, 0, 4, 3, 2, 4]])
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    inputs = {"input_ids": ids.repeat_interleave(DRAWS, 0), "attention_mask": mask.repeat_interleave(DRAWS, 0)}
    draft = draft_of(target, "near", noise=0.5)
    torch.manual_seed(11)
    output = looked_up(target, inputs, source, draft, num_draft_tokens=2, max_new_tokens=3, do_sample=True, **LAW)
    assert output.stats.tested >= DRAWS
    return target, [ids[:1, 2:], ids[1:]], list(new_tokens(output, inputs).split(DRAWS))


def against(target: PreTrainedModel, starts: list[torch.Tensor], texts: list[torch.Tensor]) -> list[str]:
    steps = [lambda ids: law_of_next(target, ids, LAW)] * 3
    laws = (joint(start, steps) for start in starts)
    return list(itertools.chain(*(deviations(cells(own), law) for own, law in zip(texts, laws, strict=True))))


@pytest.mark.parametrize("source", SOURCES)
def test_sampled_texts_follow_the_target(source: str) -> None:
    assert against(*drawn(source)) == []


@pytest.mark.parametrize("fault", ["accept all", "residual from p"])
def test_wrong_samplers_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = lossless.accept

    def wrong(block: Any, rule: str) -> Any:
        if fault == "accept all":
            block.uniforms.zero_()
            return right(block, rule)
        return excluded_nothing(block.log_p, block.draft.log_q, block.draft.ids, block.uniforms)

    monkeypatch.setattr(lossless, "accept", wrong)
    assert against(*drawn("ngram")) != []
