"""Drafts with another tokenizer: cut to the tokens that both have, exact for the target."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_semspec import SemSpecConfig
from hf_semspec.drafts.other_tokenizer import ForeignGenerator, ForeignModel, encode_after, shared_tokens, spellings
from hf_semspec.drafts.vocabulary import first_clash
from tests.enumerated import cells, joint, law_of_next
from tests.helpers import (
    TESTING,
    WEAK_DRAFTS,
    Forwards,
    assisted,
    caught,
    check_identities,
    new_tokens,
    plain_rows,
    refuses,
)
from tests.models import DRAFTS, PAD, VOCAB, draft_of, prompts, tiny, tokenizer
from tests.statistics import deviations

pytestmark = WEAK_DRAFTS

OWN, FOREIGN = tokenizer(), tokenizer(permute=3)
TABLES = ("model.embed_tokens", "lm_head")


def words(names: list[str], merges: list[tuple[str, str]] = (), **special: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of these tokens, in this order."""
    core = Tokenizer(tokenizer_models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **special)


def translated(model: PreTrainedModel, own: Any, theirs: Any, size: int | None = None) -> PreTrainedModel:
    """`model` in another vocabulary: the same law of the tokens that both tokenizers have."""
    other = tiny("llama", 99, vocab=size or len(theirs), hidden=model.config.hidden_size, heads=4, kv_heads=2)
    weights, ids = model.state_dict(), theirs.get_vocab()
    mine = other.state_dict()
    for name, value in weights.items():
        if name.rpartition(".")[0] not in TABLES:
            mine[name].copy_(value)
    for token, index in own.get_vocab().items():
        if token in ids:
            for table in TABLES:
                mine[f"{table}.weight"][ids[token]] = weights[f"{table}.weight"][index]
    return other


def call(
    target: Any, draft: Any, inputs: Any, kind: str = "lossless", *, pair: Any = (OWN, FOREIGN), **fields: Any
) -> Any:
    given = {"tokenizer": pair[0], "assistant_tokenizer": pair[1]}
    return assisted(target, draft, inputs, kind, call=given, return_dict_in_generate=True, **fields)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama", 1)


@pytest.mark.parametrize(("kind", "lengths"), [*((kind, (3, 7, 12)) for kind in TESTING), ("lossless", (6,))], ids=str)
def test_ui25_greedy_is_plain_greedy_with_equal_sizes_and_other_ids(
    kind: str, lengths: tuple[int, ...], target: PreTrainedModel
) -> None:
    inputs = prompts(lengths, seed=1)
    expected = plain_rows(target, inputs, max_new_tokens=24)
    rates = {}
    for name in DRAFTS:
        draft = translated(draft_of(target, name), OWN, FOREIGN)
        with caught() as messages:
            output = call(target, draft, inputs, kind, max_new_tokens=24)
        assert torch.equal(new_tokens(output, inputs), expected)
        check_identities(output.stats, [24] * len(lengths))
        assert not [message for message in messages if "vocabulary" in message]
        rates[name] = output.stats.acceptance_rate
    assert rates["same"] == 1.0
    assert rates["far"] < rates["near"] < 1.0


def test_a_wrong_table_is_seen(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output stays right whatever the draft is told; that nothing is accepted gives a wrong table away."""
    draft = translated(draft_of(target, "same"), OWN, FOREIGN)
    inputs = prompts((3, 7, 12), seed=1)
    right = ForeignModel.__init__

    def wrong(self: Any, shared: dict[int, int], *args: Any) -> None:
        turned = dict(zip(shared, [*list(shared.values())[1:], next(iter(shared.values()))], strict=True))
        right(self, turned, *args)

    monkeypatch.setattr(ForeignModel, "__init__", wrong)
    output = call(target, draft, inputs, max_new_tokens=24)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=24))
    assert output.stats.acceptance_rate < 0.5


# A target with tokens of two characters; the draft knows none of these, and has some of its own.
LETTERS = list("abcdefgh")
MERGES = [("a", "b"), ("c", "d"), ("e", "f")]
WIDE = words(["<pad>", "<eos>", *LETTERS, "ab", "cd", "ef"], MERGES, pad_token="<pad>", eos_token="<eos>")
NARROW = words(["x", "</s>", *reversed(LETTERS), "gh"], [("g", "h")], eos_token="</s>")


def partial(seed: int = 3) -> tuple[PreTrainedModel, PreTrainedModel]:
    wide = tiny("llama", seed, vocab=len(WIDE))
    return wide, translated(draft_of(wide, "near"), WIDE, NARROW)


def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What the generator drafted in each round: texts of the target's ids, drafts, counts, laws."""
    rounds: list[Any] = []
    right = ForeignGenerator.propose

    def spied(self: Any, canvas: Any, live: Any, counts: Any) -> Any:
        texts = canvas.texts(live)
        draft = right(self, canvas, live, counts)
        rounds.append((texts, draft, counts))
        return draft

    monkeypatch.setattr(ForeignGenerator, "propose", spied)
    return rounds


@pytest.mark.parametrize("chains", [1, 3])
def test_the_law_is_the_drafts_own_renormalised_over_shared_tokens(
    chains: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every round of a ragged batch, whatever was cut back before: read anew, from the draft's ids for the text."""
    target, draft = partial()
    rounds = recorded(monkeypatch)
    inputs = prompts((3, 7, 5), seed=2, vocab=len(WIDE))
    fields = {"do_sample": True, "top_k": 0, "max_new_tokens": 20, "num_chains": chains}
    output = call(target, draft, inputs, pair=(WIDE, NARROW), **fields)
    check_identities(output.stats, [20] * 3)
    shared = shared_tokens(WIDE, NARROW, len(WIDE), len(NARROW))
    assert sorted(shared) == [1, *range(2, 10)], "the letters, and EOS for EOS"
    checked = 0
    for texts, drafted, counts in rounds:
        for row, text in enumerate(texts):
            for chain, t in itertools.product(range(chains), range(counts[row])):
                before = [*text, *drafted.ids[row, chain, :t].tolist()]
                own = [piece for token in before for piece in read_as(token)]
                with torch.no_grad():
                    logits = draft(torch.tensor([own])).logits[0, -1]
                expected = torch.zeros(len(WIDE), dtype=logits.dtype)
                expected[list(shared)] = logits[list(shared.values())].softmax(-1)
                torch.testing.assert_close(
                    drafted.log_q[row, chain, t].exp().to(expected), expected, atol=1e-5, rtol=0
                )
                checked += 1
    assert checked > 60


def read_as(token: int) -> list[int]:
    name = WIDE.convert_ids_to_tokens(token)
    ids = NARROW.get_vocab()
    if name == "<pad>":
        return [0]  # no token of the draft spells it: its own first id stands there
    return [ids["</s>"]] if name == "<eos>" else [ids[letter] for letter in name]


def test_tokens_that_the_draft_lacks_come_from_the_target() -> None:
    target, draft = partial()
    inputs = prompts((3, 7, 5), seed=2, vocab=len(WIDE))
    output = call(target, draft, inputs, pair=(WIDE, NARROW), max_new_tokens=40)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=40))
    assert (new_tokens(output, inputs) >= 10).any()
    check_identities(output.stats, [40] * 3)


def test_a_draft_that_begins_with_bos_gets_one() -> None:
    target, _ = partial()
    started = words(["<s>", "</s>", *LETTERS], bos_token="<s>", eos_token="</s>")
    started.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    draft = tiny("llama", 4, vocab=len(started))
    inputs = prompts((3,), seed=2, vocab=10)
    with Forwards(draft) as spy:
        output = call(target, draft, inputs, pair=(WIDE, started), max_new_tokens=20)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=20))
    first = spy.kwargs[0]["input_ids"][0].tolist()
    assert first[:4] == [0, *inputs["input_ids"][0].tolist()], "the letters have the same ids in both"


def test_the_drafts_context_counts_its_own_tokens() -> None:
    """Text past the context is decoded plainly; two letters of a token are two for the draft."""
    target = tiny("llama", 3, vocab=len(WIDE))
    draft = tiny("gpt2", 5, vocab=len(NARROW), positions=24)
    for lengths in ((20,), (3, 12, 9)):
        inputs = prompts(lengths, seed=2, vocab=len(WIDE))
        with caught() as messages:
            output = call(target, draft, inputs, pair=(WIDE, NARROW), num_draft_tokens=4, max_new_tokens=40)
        assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=40))
        assert len([message for message in messages if "context of 24" in message]) == 1
        assert output.stats.plain > 15 * len(lengths)
        check_identities(output.stats, [40] * len(lengths))


def test_behind_ngrams(target: PreTrainedModel) -> None:
    inputs = prompts((3, 7, 12), seed=1)
    draft = translated(draft_of(target, "near"), OWN, FOREIGN)
    config = SemSpecConfig("lossless", draft="ngram+model", max_new_tokens=30, return_dict_in_generate=True)
    given = {"tokenizer": OWN, "assistant_tokenizer": FOREIGN}
    output = target.generate(**inputs, **given, assistant_model=draft, generation_config=config)
    assert torch.equal(new_tokens(output, inputs), plain_rows(target, inputs, max_new_tokens=30))
    assert output.stats.draft_forwards > 0
    check_identities(output.stats, [30] * 3)


SMALL, DRAWS = 5, 1000
FIVE = words(["a", "b", "c", "d", "e"])
OTHERS = words(["q", "d", "b", "r", "a", "c"])  # no "e", two of its own, other ids
PLAIN = {"top_k": 0}


def drawn() -> tuple[PreTrainedModel, torch.Tensor, torch.Tensor]:
    """A target, two prompts, and texts of three tokens for each, (2 * DRAWS, 3)."""
    target = tiny("llama", 8, vocab=SMALL, hidden=16, heads=4, kv_heads=2, initializer_range=0.25, attention="sdpa")
    draft = translated(draft_of(target, "near", noise=0.5), FIVE, OTHERS)
    ids = torch.tensor([[2, 3, 4], [4, 1, 2]])
    rows = ids.repeat_interleave(DRAWS, 0)
    inputs = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
    torch.manual_seed(11)
    fields = {"do_sample": True, "num_draft_tokens": 2, "max_new_tokens": 3, **PLAIN}
    output = call(target, draft, inputs, pair=(FIVE, OTHERS), **fields)
    assert output.stats.tested >= 2 * DRAWS
    return target, ids, new_tokens(output, inputs)


def against(target: PreTrainedModel, ids: torch.Tensor, texts: torch.Tensor) -> list[str]:
    found = []
    for row, own in enumerate(texts.split(DRAWS)):
        law = joint(ids[row : row + 1], [lambda text: law_of_next(target, text, PLAIN)] * 3)
        found += deviations(cells(own), law)
    return found


def test_sampled_texts_follow_the_target() -> None:
    assert against(*drawn()) == []


@pytest.mark.parametrize("fault", ["not renormalised", "drawn from other ids"])
def test_wrong_samplers_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ForeignGenerator.propose

    def wrong(self: Any, canvas: Any, live: Any, counts: Any) -> Any:
        draft = right(self, canvas, live, counts)
        if fault == "not renormalised":
            draft.log_q -= 0.7  # as if half of the draft's law lay on tokens that the target lacks
            return draft
        draft.ids = (draft.ids + 1) % 4
        canvas.write(live, 0, draft.ids)
        return draft

    monkeypatch.setattr(ForeignGenerator, "propose", wrong)
    assert against(*drawn()) != []


class TestSharedTokens:
    def test_tokens_go_by_their_text(self) -> None:
        byte_level = words(["Ġthe", "Ċ", "x", "Ġa"])
        pieces = Plain(["▁a", "y", "▁the", "<0x0A>", "Ġ"])
        assert shared_tokens(byte_level, pieces, 4, 5) == {0: 2, 1: 3, 3: 0}
        assert shared_tokens(pieces, byte_level, 5, 4) == {0: 3, 2: 0, 3: 1}
        assert spellings(pieces, 2) == {" a": 0, "y": 1}

    def test_ids_beyond_either_model_are_left_out(self) -> None:
        assert shared_tokens(OWN, FOREIGN, 50, 60).keys() == {
            index for token, index in OWN.get_vocab().items() if index < 50 and FOREIGN.get_vocab()[token] < 60
        }

    def test_ends_stand_for_one_another(self) -> None:
        mine = words(["a", "<end>"], eos_token="<end>")
        theirs = words(["</s>", "b", "a"], eos_token="</s>")
        assert shared_tokens(mine, theirs, 2, 3) == {0: 2, 1: 0}

    def test_it_is_worked_out_once_a_pair(self) -> None:
        mine, theirs = words(["a", "b"]), words(["b", "a"])
        assert shared_tokens(mine, theirs, 2, 2) is shared_tokens(mine, theirs, 2, 2)
        assert shared_tokens(mine, theirs, 2, 1) == {1: 0}
        assert first_clash(mine, theirs) == (0, "a", "b")
        theirs.add_tokens(["c"])
        assert shared_tokens(mine, theirs, 2, 2) is not None
        assert len(shared_tokens(mine, copy.deepcopy(mine), 2, 2)) == 2


class Plain:
    """As much of a tokenizer as the comparison reads."""

    bos_token_id = eos_token_id = None

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def get_vocab(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}


@pytest.mark.parametrize("kind", TESTING)
def test_ui25_nothing_shared_is_an_error(kind: str) -> None:
    other = words([f"<{index}>" for index in range(VOCAB)])
    fields = {"num_chains": 3} if kind == "chains" else {}
    config = SemSpecConfig("easd" if kind == "easd" else "lossless", max_new_tokens=4, **fields)
    given = {"tokenizer": OWN, "assistant_tokenizer": other}
    refuses(tiny(), tiny(seed=1), prompts((4,)), "shares no token", generation_config=config, **given)


def test_ui25_smc_refuses_other_tokenizers_by_name() -> None:
    config = SemSpecConfig("smc", max_new_tokens=4, pad_token_id=PAD)
    given = {"tokenizer": OWN, "assistant_tokenizer": FOREIGN}
    refuses(tiny(), tiny(seed=1), prompts((4,)), "foreign.*smc", generation_config=config, **given)


def test_encoding_keeps_what_stands_before() -> None:
    assert encode_after(NARROW, NARROW("a")["input_ids"], "gh") == NARROW("gh")["input_ids"]
