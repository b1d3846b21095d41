"""Places where the draft, or the target, has no law: every id masked out, nan, or logits that overflow."""

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel

from hf_semspec import SemSpecConfig
from hf_semspec.drafts import choose
from hf_semspec.drafts.chain import ChainGenerator
from hf_semspec.engine import acceptance
from hf_semspec.engine.gamma import FixedLength
from hf_semspec.engine.processors import CallRandomness, Processors
from hf_semspec.schemes.lossless import block
from hf_semspec.schemes.parse.judge import label_ids
from tests.enumerated import VOCAB, cells, joint
from tests.helpers import EXACT, JUDGE, WEAK_DRAFTS, assisted, exact, new_tokens, plain_rows
from tests.models import draft_of, prompts, tiny, tokenizer
from tests.statistics import deviations

pytestmark = [WEAK_DRAFTS, pytest.mark.filterwarnings("ignore:The target scores")]

PROMPT = torch.tensor([[1, 2, 3]])
DRAWS, NEW = 2000, 4


class Only(LogitsProcessor):
    """Leaves some ids at some columns, and all at the others."""

    def __init__(self, allowed: dict[int, list[int]]) -> None:
        self.allowed = allowed

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids = self.allowed.get(input_ids.shape[1], range(scores.shape[1]))
        left = torch.full_like(scores, -torch.inf)
        left[:, list(ids)] = scores[:, list(ids)]
        return left


def rule(name: str) -> Only:
    """The draft of `name` knows none of what is left in the second column, and some of it in the third."""
    ids = torch.tensor(list(IDS[name]))
    other = int(ids[2] if name == "foreign" else ids[3])
    allowed = {3: ids.tolist(), 4: [other], 5: [0, 1, other], 6: ids.tolist()}
    return Only(allowed)


def small(seed: int, vocab: int = VOCAB) -> PreTrainedModel:
    return tiny("llama", seed, vocab=vocab, hidden=16, heads=2, kv_heads=1, initializer_range=0.3, attention="sdpa")


def shares_all_but_one() -> dict[str, Any]:
    """Tokenizers of target and draft, which lacks the target's id 2 and has others by other ids."""
    return {"tokenizer": tokenizer(size=VOCAB), "assistant_tokenizer": tokenizer(size=VOCAB, permute=1)}


SMALLER = VOCAB - 2
DRAFTS: dict[str, tuple[int, dict[str, Any]]] = {
    "lossless": (SMALLER, {}),
    "token": (SMALLER, {"verification": "token"}),
    "easd": (SMALLER, {}),
    "chains": (SMALLER, {}),
    "auto": (SMALLER, {"num_draft_tokens": "auto"}),
    "ngram": (SMALLER, {"draft": "ngram", "max_ngram": 1}),
    "ngram+model": (SMALLER, {"draft": "ngram+model", "max_ngram": 1}),
    "compiled": (SMALLER, {"compile_draft": True}),
    "foreign": (VOCAB, {}),
    "padded": (VOCAB + 3, {}),
    "parse": (90, {}),
    "semantic": (SMALLER, {}),
    "exact": (SMALLER, {}),
}
# parse asks its questions in the words of a tokenizer.
IDS = {name: (0, 1, 2, 95, 96) if name == "parse" else range(VOCAB) for name in DRAFTS}


def sampled(name: str) -> tuple[PreTrainedModel, torch.Tensor]:
    """The target, and texts under `rule` by the scheme and draft of `name`."""
    size, fields = DRAFTS[name]
    target, draft = small(8, 97 if name == "parse" else VOCAB), small(9, size)
    common = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW, "num_return_sequences": DRAWS, **fields}
    call: dict[str, Any] = shares_all_but_one() if name == "foreign" else {}
    if name == "exact":
        own = {"scorer": "sequence", "residual": "exact", "first_segment": "draft", "max_segment_tokens": 3}
        config = SemSpecConfig("semantic", segment_stop=None, think_end=None, **own, **common)
    else:
        config = exact(name if name in EXACT else "lossless", **common)
    if name == "parse":
        call["tokenizer"] = tokenizer()
    if name != "ngram":
        call["assistant_model"] = draft
    torch.manual_seed(3)
    output = target.generate(PROMPT, logits_processor=[rule(name)], generation_config=config, **call)
    return target, output[:, PROMPT.shape[1] :]


def against(name: str, target: PreTrainedModel, texts: torch.Tensor) -> list[str]:
    """What speaks against texts being drawn from the target."""
    only, table = rule(name), torch.tensor(list(IDS[name]))
    places = torch.zeros(98, dtype=torch.long).scatter(0, table, torch.arange(VOCAB))
    if not torch.isin(texts, table).all():
        return ["ids that are masked out"]

    def step(texts: torch.Tensor) -> torch.Tensor:
        ids = torch.cat([PROMPT.expand(len(texts), -1), table[texts[:, PROMPT.shape[1] :]]], dim=1)
        with torch.no_grad():
            return only(ids, target(ids).logits[:, -1].float())[:, table].softmax(dim=-1).double()

    return deviations(cells(places[texts]), joint(PROMPT, [step] * NEW))


@pytest.mark.parametrize("name", DRAFTS)
def test_texts_follow_the_target_where_the_draft_knows_none_of_the_ids_left(name: str) -> None:
    assert against(name, *sampled(name)) == []


@pytest.mark.parametrize("name", ["lossless", "token", "chains"])
def test_a_sampler_that_multiplies_nan_with_0_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def multiplied(values: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
        return values.mul_(on.unsqueeze(-1))

    for module in (acceptance, block):
        monkeypatch.setattr(module, "switched", multiplied)
    monkeypatch.setattr(choose, "ForcedFirst", lambda inner, *others: inner)  # which drafts the one id without a law
    with pytest.raises(ValueError, match=r"the target model .* without a law"):
        sampled(name)
    draw = CallRandomness.draw

    def silent(self: CallRandomness, law: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return draw(self, law)[0], torch.zeros(len(law), dtype=torch.bool)

    monkeypatch.setattr(CallRandomness, "draw", silent)
    assert against(name, *sampled(name)) != []


@pytest.mark.parametrize("kind", EXACT)
def test_greedy_texts_are_the_targets(kind: str) -> None:
    target, draft = tiny("llama", 0), tiny("llama", 1, vocab=90)
    inputs = prompts((4, 6), vocab=90)
    if kind == "smc":
        pytest.skip("a particle of a draft without a law has no weight")
    call = {"logits_processor": [Only({8: [95, 96], 9: [3, 95], 12: [91]})]}
    got = assisted(target, draft, inputs, kind, call=call, max_new_tokens=12)
    for row, length in enumerate((4, 6)):
        alone = {"input_ids": inputs["input_ids"][row : row + 1, -length:]}
        left = Only({column - 6 + length: ids for column, ids in call["logits_processor"][0].allowed.items()})
        want = target.generate(**alone, logits_processor=[left], max_new_tokens=12, do_sample=False)
        assert torch.equal(new_tokens(got, inputs)[row], want[0, length:])


@pytest.mark.parametrize("tokens", [1, 3])
def test_what_the_draft_cannot_write_ends_its_answer(tokens: int) -> None:
    """Under parse the target judges what there is, and goes on."""
    target, draft = tiny("llama", 0), tiny("llama", 1, vocab=90)
    inputs = prompts((6,), vocab=90)
    config = SemSpecConfig(
        "parse",
        **{**JUDGE, "accept_threshold": 0.0, "prefix_threshold": 0.0},
        max_new_tokens=8,
        return_dict_in_generate=True,
    )
    left = Only({6 + tokens: [95, 96]})
    output = target.generate(
        **inputs, assistant_model=draft, tokenizer=tokenizer(), logits_processor=[left], generation_config=config
    )
    assert output.kept_tokens.tolist() == [tokens]
    assert output.stats.full_accepts == 0, "an answer that could not be finished"
    assert output.sequences[0, 6 + tokens] >= 95
    assert output.sequences.shape[1] == 14


@pytest.mark.parametrize("tokens", [0, 2])
def test_what_the_draft_cannot_write_ends_its_segment(tokens: int) -> None:
    """Under semantic it is judged as far as it goes; where there is nothing of it, the target writes."""
    target, draft = tiny("llama", 0), tiny("llama", 1, vocab=90)
    inputs = prompts((6,), vocab=90)
    own = {"scorer": "random", "accept_rate": 1.0, "first_segment": "draft", "max_segment_tokens": 4}
    config = SemSpecConfig(
        "semantic",
        segment_stop=None,
        think_end=None,
        **own,
        max_new_tokens=8,
        return_dict_in_generate=True,
    )
    left = Only({6 + tokens: [95, 96]})
    output = target.generate(**inputs, assistant_model=draft, logits_processor=[left], generation_config=config)
    first = output.segments[0][0]
    assert (first.source, first.end) == (("draft", 2) if tokens else ("target", 4))
    assert output.sequences[0, 6 + tokens] >= 95


class Spoiled:
    """A model whose logits at its last place are partly `value`, while the block is open."""

    def __init__(self, model: PreTrainedModel, value: float) -> None:
        self.model, self.value = model, value

    def __enter__(self) -> None:
        def spoil(module: Any, args: Any, output: Any) -> Any:
            output.logits = output.logits.clone()
            output.logits[..., -1, 3:5] = self.value
            return output

        self.handle = self.model.register_forward_hook(spoil)

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("kind", EXACT)
def test_ui22_nan_and_inf_are_reported_by_name(kind: str, role: str, do_sample: bool, value: float) -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    inputs = prompts((4, 6))
    model = target if role == "target" else draft
    with Spoiled(model, value), pytest.raises(ValueError, match=rf"the {role} model .* without a law \(nan, \+inf"):
        assisted(target, draft, inputs, kind, max_new_tokens=12, do_sample=do_sample)


def test_a_judge_that_overflows_is_named() -> None:
    """What it says of "Y" would be that it is sure."""
    target, inputs = tiny("llama", 0), prompts((4, 6))
    draft = draft_of(target, "near")
    target.lm_head.weight.data[label_ids(tokenizer(), ("Y", "N"))[0]] = 1e38
    target.lm_head.float()
    target.lm_head.register_forward_pre_hook(lambda module, args: (args[0].abs().float(),))
    config = SemSpecConfig("parse", **{**JUDGE, "accept_threshold": 0.5}, max_new_tokens=6)
    with pytest.raises(ValueError, match=r"the target model .* without a law \(nan, \+inf"):
        target.generate(**inputs, assistant_model=draft, tokenizer=tokenizer(), generation_config=config)


@pytest.mark.parametrize("kind", ["lossless", "chains", "semantic"])
def test_a_half_precision_head_that_overflows_is_named(kind: str) -> None:
    target, draft = small(0), small(1).half()
    with torch.no_grad():
        draft.lm_head.weight.mul_(2e5)
    config = exact(kind, do_sample=True, top_k=0, max_new_tokens=4, num_return_sequences=64)
    with pytest.raises(ValueError, match=r"the draft model .* without a law \(nan, \+inf"):
        target.generate(PROMPT, assistant_model=draft, generation_config=config)


def test_inf_that_a_processor_removes_is_no_fault() -> None:
    target = tiny("llama", 0)
    draft = draft_of(target, "near")
    inputs = prompts((4, 6))
    with Spoiled(draft, torch.inf):
        got = assisted(target, draft, inputs, max_new_tokens=9, remove_invalid_values=True)
    assert torch.equal(new_tokens(got, inputs), plain_rows(target, inputs, max_new_tokens=9))


class MasksAll(LogitsProcessor):
    """Leaves nothing behind the id 2: what no text here holds, but a draft may."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.index_fill(1, torch.tensor([2]), -torch.inf)
        return scores.masked_fill(input_ids[:, -1:] == 2, -torch.inf) if input_ids.shape[1] > 188 else scores


def test_what_is_masked_behind_a_dropped_draft_is_no_fault() -> None:
    """N-grams are looked up whatever the rules; plain decoding never gets to see what stands behind them."""
    ids = torch.tensor([[token for other in range(3, 97) for token in (other, 2)]])
    target, inputs = tiny("llama", 0), {"input_ids": ids}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    fields = {"max_new_tokens": 12, "eos_token_id": None}
    want = target.generate(**inputs, logits_processor=[MasksAll()], do_sample=False, max_new_tokens=12)
    config = SemSpecConfig("lossless", draft="ngram", max_ngram=1, **fields)
    got = target.generate(**inputs, logits_processor=[MasksAll()], generation_config=config)
    assert torch.equal(got, want)


@pytest.mark.parametrize("sampling", [False, True])
def test_candidates_for_stock_end_where_the_law_does(sampling: bool) -> None:
    draft = tiny("llama", 1, vocab=90)
    randomness = CallRandomness(torch.device("cpu")) if sampling else None
    left = Processors([Only({8: [95, 96]})])
    generator = ChainGenerator(draft, 97, left, randomness, FixedLength(5), max_length=64)
    ids, law = generator.get_candidates(torch.randint(0, 90, (1, 6)))
    assert ids.shape[1] == 8
    assert (law is None) == (not sampling)
    assert law is None or law.shape == (1, 2, 97)
    with Spoiled(draft, torch.inf), pytest.raises(ValueError, match="the draft model"):
        generator.get_candidates(ids)


def test_the_law_of_a_position_without_one_is_masked() -> None:
    values = torch.tensor([[torch.nan, 1.0], [0.25, 0.75], [torch.inf, torch.nan]], dtype=torch.float64)
    got = acceptance.switched(values, torch.tensor([False, True, False]))
    assert torch.equal(got, torch.tensor([[0.0, 0.0], [0.25, 0.75], [0.0, 0.0]], dtype=torch.float64))
