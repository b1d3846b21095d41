"""Drafts of a model with another tokenizer: its law is cut to the tokens that both vocabularies have, which costs
acceptance but never exactness."""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from ..engine.cache import text_config
from ..engine.mapped_model import MappedModel
from ..engine.model import context_of
from ..engine.text import TokenTexts, anchor
from ..engine.tokens import Canvas
from .chain import ChainGenerator
from .vocabulary import once_a_pair

# How the two common kinds of vocabulary write a space and a line break.
_BYTE_LEVEL = {"Ġ": " ", "Ċ": "\n"}
_SENTENCES = {"▁": " ", "<0x0A>": "\n"}


def spellings(tokenizer: Any, size: int) -> dict[str, int]:
    """The tokens of `tokenizer` with an id below `size`, spaces and line breaks written as such."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    marked = {mark: sum(token.startswith(mark) for token in vocabulary) for mark in ("Ġ", "▁")}
    signs = _SENTENCES if marked["▁"] > marked["Ġ"] else _BYTE_LEVEL
    spelled = {}
    for token, index in vocabulary.items():
        if index < size:
            for sign, text in signs.items():
                token = token.replace(sign, text)
            spelled[token] = index
    return spelled


@once_a_pair
def shared_tokens(tokenizer: Any, own: Any, vocabulary: int, own_vocabulary: int) -> dict[int, int]:
    """For each id of the target whose token the draft has too, the draft's id.

    The two BOS tokens, and the two EOS tokens, stand for one another where the draft does not have the target's.

    Args:
        tokenizer, own: the target's and the draft's tokenizer.
        vocabulary, own_vocabulary (`int`): how many ids the two models score.

    Raises:
        ValueError: no token is shared.
    """
    theirs = spellings(own, own_vocabulary)
    shared = {index: theirs[token] for token, index in spellings(tokenizer, vocabulary).items() if token in theirs}
    if not shared:
        raise ValueError(
            "The draft's tokenizer shares no token with the target's, so it can propose nothing: pass a draft of the "
            'target\'s family, load_draft(model, quantization="nf4"), or the scheme parse, which takes text across.'
        )
    for role in ("bos_token_id", "eos_token_id"):
        index, other = getattr(tokenizer, role), getattr(own, role)
        if index is not None and other is not None and index < vocabulary and other < own_vocabulary:
            shared.setdefault(index, other)
    return shared


class ForeignModel(MappedModel):
    """A draft model with another tokenizer, which speaks the target's vocabulary as far as it knows it.

    Args:
        shared: for each id of the target that the draft knows, the draft's id.
        draft, vocabulary, device, batch, last_position: as [`MappedModel`].
    """

    def __init__(
        self,
        shared: dict[int, int],
        draft: Any,
        vocabulary: int,
        device: torch.device | None,
        batch: int,
        last_position: int,
    ) -> None:
        super().__init__(draft, vocabulary, device, batch, last_position)
        self.ids = torch.tensor(list(shared), device=self.law_device)
        self.owns = torch.tensor(list(shared.values()), device=self.law_device)
        own = torch.arange(self.own_vocabulary, device=self.law_device)
        self.table = torch.cat([own.new_full((vocabulary,), self.substitute), own])
        self.table[self.ids] = self.owns

    def _known(self, ids: torch.Tensor) -> torch.Tensor:
        """The draft's ids for ids of the target; ids of the draft's own are counted on from behind those."""
        return self.table[ids]

    def _mapped(self, logits: torch.Tensor) -> torch.Tensor:
        """The draft's logits on the target's vocabulary, -inf for what the draft does not know."""
        laws = logits.new_full((*logits.shape[:-1], self.vocabulary), -torch.inf)
        laws[..., self.ids] = logits[..., self.owns]
        return laws


class ForeignGenerator(ChainGenerator):
    """A [`ChainGenerator`] whose draft has another tokenizer.

    The draft reads each token of the text as its own token where it has that one, else as its own tokens for the same
    text; so its columns are not the target's, and the ids that it reads are kept here.

    Args:
        draft: a causal LM.
        tokenizers: the target's and the draft's.
        texts: for each row to be drafted for, by its index in the call and in the batch's order, the ids it begins
            with.
        others: as [`ChainGenerator`].

    Raises:
        ValueError: the two share no token.
    """

    def __init__(
        self,
        draft: Any,
        tokenizers: tuple[Any, Any],
        texts: dict[int, list[int]],
        vocabulary: int,
        *args: Any,
        device: torch.device,
        **kwargs: Any,
    ) -> None:
        self.own, self.text = tokenizers[1], TokenTexts(tokenizers[0])
        self.shared: dict[int, int] = shared_tokens(*tokenizers, vocabulary, int(text_config(draft).vocab_size))
        context = context_of(draft) or sys.maxsize
        decoder = ForeignModel(self.shared, draft, vocabulary, device, len(texts), context - 1)
        kwargs |= {"batch": len(texts), "device": device, "decoder": decoder}
        super().__init__(draft, vocabulary, *args, **kwargs)
        self.context = context
        self.own_vocabulary = vocabulary  # what it lacks is read as text, not replaced
        self.order = list(texts)
        self.texts: dict[int, list[int]] = {}
        self.before_last = dict.fromkeys(texts, 0)
        self._pieces: dict[int, list[int]] = {}
        first = self.own("a")["input_ids"][:1]
        for row, ids in texts.items():
            wants = first == [self.own.bos_token_id] and self._spelled(ids[0]) != first
            self.texts[row] = list(first) if wants else []
            self.learn(row, ids)

    def learn(self, row: int, ids: Sequence[int]) -> None:
        """Append `ids`, the target's, to the text of `row`."""
        for token in ids:
            self.before_last[row] = len(self.texts[row])
            self.texts[row] += self._spelled(token)

    def _spelled(self, token: int) -> list[int]:
        """The draft's ids for a token of the target."""
        if token in self.shared:
            return [self.shared[token]]
        if token not in self._pieces:
            pieces = encode_after(self.own, anchor(self.own), self.text([token]))
            known = all(piece < self.decoder.own_vocabulary for piece in pieces)
            self._pieces[token] = pieces if pieces and known else [self.decoder.substitute]
        return self._pieces[token]

    def lengths(self, canvas: Canvas, live: Sequence[int]) -> list[int]:
        """How many ids the draft reads of each of the rows `live`."""
        return [len(self.texts[row]) for row in live]

    def read(self, canvas: Canvas, live: Sequence[int], back: int) -> torch.Tensor:
        """The last `back` of these, as the decoder takes them: (rows * chains, back)."""
        rows = [self.texts[row][-back:] for row in live]
        rows = [[self.decoder.substitute] * (back - len(ids)) + ids for ids in rows]
        own = torch.tensor(rows, device=self.device) + self.decoder.vocabulary
        return own.repeat_interleave(self.chains, dim=0)

    def commit(self, lengths: Sequence[int]) -> None:
        """Roll back to what was committed; what the last token of a row is spelled with was never fed."""
        settled = [self.before_last[row] for row in self.order]
        self.filled = [min(filled, length) for filled, length in zip(self.filled, settled, strict=True)]
        self.settle()

    def select(self, rows: list[int]) -> None:
        """Keep only `rows` of the current batch."""
        super().select(rows)
        self.order = [self.order[row] for row in rows]

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Refused: transformers has its own generator for two tokenizers."""
        raise NotImplementedError(
            "ForeignGenerator serves our own loop: leave it to transformers to draft with two tokenizers in its own"
        )


def encode_after(tokenizer: Any, before: list[int], text: str) -> list[int]:
    """The ids of `text` where it follows the ids `before`: as far as they spell just that, and leave `before` as it
    is."""

    def spelled(ids: list[int]) -> str:
        decoded: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return decoded

    start = spelled(before)
    joined: list[int] = tokenizer(start + text, add_special_tokens=False)["input_ids"]
    alone: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    after = joined[len(before) :] if joined[: len(before)] == before else alone
    for ids in (after, alone):
        if spelled(before + ids) == start + text:
            return ids
    for length in range(len(alone), 0, -1):
        if (start + text).startswith(spelled(before + alone[:length])):
            return alone[:length]
    return []
