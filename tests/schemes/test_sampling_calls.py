"""Whole sampled calls follow the law they should, with common processors on; wrong samplers fail the same test."""

import itertools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_semspec import SemSpecConfig
from hf_semspec.schemes.lossless import decode as lossless
from tests.enumerated import VOCAB, Step, cells, joint, law_of_next
from tests.helpers import WEAK_DRAFTS, check_identities, exact, new_tokens
from tests.models import PAD, draft_of, prompts, row_of, tiny
from tests.statistics import deviations

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]

NEW_TOKENS, DRAWS = 3, 2000

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"top_k": 0},
    "warped": {"temperature": 1.6, "top_k": 4, "top_p": 0.9},
    "history": {"repetition_penalty": 1.5, "temperature": 1.2, "top_k": 0},
}


def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny("llama", 8, vocab=VOCAB, hidden=16, heads=2, kv_heads=1, initializer_range=0.25, attention="sdpa")
    return target, draft_of(target, "near", noise=0.5)


def sample(target: PreTrainedModel, draft: PreTrainedModel, config: SemSpecConfig) -> list[torch.Tensor]:
    """`DRAWS` texts for each of two padded prompts, (DRAWS, new tokens), drawn as rows of one batch."""
    inputs = {name: value.repeat_interleave(DRAWS, dim=0) for name, value in both_prompts().items()}
    output = target.generate(**inputs, assistant_model=draft, generation_config=config)
    check_identities(output.stats, [config.max_new_tokens] * 2 * DRAWS)
    return list(output.sequences[:, inputs["input_ids"].shape[1] :].split(DRAWS))


def both_prompts() -> dict[str, torch.Tensor]:
    inputs = prompts((2, 4), seed=8, vocab=VOCAB)
    # A real token with the pad id: versions differ in whether a repetition penalty counts padding.
    inputs["input_ids"][0, 2] = PAD
    return inputs


def config_of(kind: str, settings: dict[str, Any], **fields: Any) -> SemSpecConfig:
    common = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "return_dict_in_generate": True}
    if kind == "token":
        kind, fields = "lossless", {**fields, "verification": "token"}
    return exact(kind, num_draft_tokens=2, **common, **settings, **fields)


def against(target: PreTrainedModel, texts: list[torch.Tensor], steps: list[Step]) -> list[str]:
    found = []
    for row, drawn in enumerate(texts):
        prompt = row_of(both_prompts(), row)["input_ids"]
        found += deviations(cells(drawn), joint(prompt, steps))
    return found


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", ["lossless", "token", "chains"])
def test_sampled_texts_follow_the_target(kind: str, settings: str) -> None:
    """The joint law of three tokens: the first is the target's own, then a block of two with its bonus or residual."""
    target, draft = pair()
    fields = SETTINGS[settings]
    torch.manual_seed(11)
    texts = sample(target, draft, config_of(kind, fields))
    assert against(target, texts, [lambda ids: law_of_next(target, ids, fields)] * NEW_TOKENS) == []


def test_a_block_goes_on_behind_an_eos() -> None:
    """The law of what is in front of the first EOS, in blocks that are wider than the text that is left."""
    target, draft = pair()
    fields, eos = {"top_k": 0}, 2
    torch.manual_seed(15)
    inputs = {name: value.repeat_interleave(DRAWS, dim=0) for name, value in both_prompts().items()}
    own = {"num_draft_tokens": 4, "eos_token_id": eos, "pad_token_id": eos, "max_new_tokens": 6}
    config = SemSpecConfig("lossless", do_sample=True, return_dict_in_generate=True, **own, **fields)
    output = target.generate(**inputs, assistant_model=draft, generation_config=config)
    assert output.stats.cut > DRAWS / 4

    for row, texts in enumerate(new_tokens(output, inputs).split(DRAWS)):
        prompt = row_of(both_prompts(), row)["input_ids"]

        def step(ids: torch.Tensor, width: int = prompt.shape[1]) -> torch.Tensor:
            law = law_of_next(target, ids, fields)
            ended = (ids[:, width:] == eos).any(dim=1, keepdim=True)
            return torch.where(ended, torch.eye(VOCAB, dtype=law.dtype)[eos], law)

        assert deviations(cells(texts[:, :4]), joint(prompt, [step] * 4)) == []


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("fault", ["accept all", "residual from p"])
def test_wrong_samplers_are_caught(fault: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = pair()
    right = lossless.accept

    def wrong(block: Any, rule: str) -> Any:
        if fault == "accept all":
            block.uniforms.zero_()
            return right(block, rule)
        decision = right(block, rule)
        at = decision.num_accepted[:, None, None].expand(-1, 1, block.log_p.shape[-1])
        return decision._replace(law=block.log_p[:, 0].gather(1, at).squeeze(1).exp())

    monkeypatch.setattr(lossless, "accept", wrong)
    torch.manual_seed(11)
    texts = sample(target, draft, config_of("lossless", {"top_k": 0}, verification=rule))
    assert against(target, texts, [lambda ids: law_of_next(target, ids, {})] * NEW_TOKENS) != []


@pytest.mark.parametrize("trigger", ["never", "always", "random"])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_easd_follows_its_closed_form(penalty: float, trigger: str) -> None:
    """Exclude: P(y) = Σ_{d≠y} min(p,q)(d)·p(y)/(1 − p(d)) + (p − q)_+(y); plain: a·p + (p − q)_+; random: mixed."""
    target, draft = pair()
    fields = {"top_k": 0}
    config = SemSpecConfig(
        "easd",
        num_draft_tokens=1,
        penalty=penalty,
        target_entropy_threshold=torch.inf if trigger == "never" else 0.0,
        draft_entropy_threshold=0.0,
        overlap_threshold=0.0,
        trigger="random" if trigger == "random" else "entropy",
        trigger_rate=0.4,
        max_new_tokens=3,
        do_sample=True,
        return_dict_in_generate=True,
        **fields,
    )
    rate = {"never": 0.0, "always": 1.0, "random": 0.4}[trigger]

    def step(ids: torch.Tensor) -> torch.Tensor:
        p, q = law_of_next(target, ids, fields), law_of_next(draft, ids, fields)
        passed = torch.minimum(p, q)
        if penalty == 1.0:
            redrawn = passed.sum(dim=-1, keepdim=True) * p
        else:
            share = passed / (1 - p)
            redrawn = (share.sum(dim=-1, keepdim=True) - share) * p
        return rate * redrawn + (1 - rate) * passed + (p - q).clamp(min=0)

    torch.manual_seed(12)
    texts = [drawn[:, :2] for drawn in sample(target, draft, config)]
    assert against(target, texts, [lambda ids: law_of_next(target, ids, fields), step]) == []
    if trigger != "never" and penalty == 0.0:
        assert against(target, texts, [lambda ids: law_of_next(target, ids, fields)] * 2) != []


def test_every_text_of_the_cells_is_one_text() -> None:
    texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=NEW_TOKENS)))
    assert torch.equal(cells(texts), torch.arange(VOCAB**NEW_TOKENS))
