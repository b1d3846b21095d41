"""Tokens as text: what each one adds, where a character may take several."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from . import COMMITTED, DROPPED, Row

CONTEXT = 8
# A character of UTF-8 takes at most four bytes, hence at most four tokens.
MOST_PARTS = 4
_JOINERS = "\u200c\u200d"


@dataclass(frozen=True)
class Piece:
    """What a token adds to the text.

    Args:
        text: with several parts, what all of them spell together.
        part, parts: which of the tokens that share a character this is, from 1.
    """

    text: str
    part: int = 1
    parts: int = 1


class Speller:
    """Spells ids with `tokenizer`, or without one (`None`) as numbers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def text(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        if self.tokenizer is None:
            return " ".join(_number(token) for token in ids)
        decoded = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(decoded).encode("utf-8", "replace").decode("utf-8")

    def pieces(self, before: Sequence[int], ids: Sequence[int]) -> list[Piece]:
        """What each of `ids` adds behind `before`. Tokens are held back until their last character is complete."""
        if self.tokenizer is None:
            return [Piece(_number(token)) for token in ids]
        together = [*before[-CONTEXT:], *ids]
        start = read = len(together) - len(ids)
        start = max(start - CONTEXT, 0)
        pieces: list[Piece] = []
        for end in range(read + 1, len(together) + 1):
            head, both = self.text(together[start:read]), self.text(together[start:end])
            text = both[len(head) :] if both.startswith(head) else both
            parts = end - read
            if text.endswith("\ufffd") and parts < MOST_PARTS and end < len(together):
                continue
            text = text or _number(together[end - 1])
            pieces += [Piece(text, part, parts) for part in range(1, parts + 1)]
            start, read = read, end
        return pieces


def _number(token: int) -> str:
    return f"⟨{token}⟩"


def visible(text: str) -> str:
    """`text` with its control and direction characters written out, line breaks and tabs as they are."""
    return "".join(
        f"⟨U+{ord(one):04X}⟩"
        if one not in "\n\t" + _JOINERS and unicodedata.category(one) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
        else one
        for one in text
    )


def spoken(text: str) -> str:
    """`text` in quotes for a label, with blanks that would not be heard or seen named."""
    names = {"\n": "line break", "\t": "tab", " ": "space"}
    if text and not text.strip(" \n\t"):
        kinds = dict.fromkeys(names[one] for one in text)
        return " and ".join(f"{sum(names[c] == kind for c in text)} × {kind}" for kind in kinds).replace("1 × ", "")
    return f"“{visible(text).replace(chr(10), '↵').replace(chr(9), '⇥')}”"


def spell(row: Row, speller: Speller) -> list[Piece]:
    """What each event's token adds behind the committed ones before it, and behind the dropped ones of its block."""
    pieces: dict[int, Piece] = {}
    committed = [i for i, event in enumerate(row.events) if event.kind in COMMITTED]
    own = speller.pieces(row.prompt, [row.events[i].token for i in committed])
    pieces.update(zip(committed, own, strict=True))
    text = list(row.prompt)
    i = 0
    while i < len(row.events):
        if row.events[i].kind in COMMITTED:
            text.append(row.events[i].token)
            i += 1
            continue
        end = i
        while end < len(row.events) and row.events[end].kind in DROPPED:
            end += 1
        block = [row.events[at].token for at in range(i, end)]
        pieces.update(zip(range(i, end), speller.pieces(text, block), strict=True))
        i = end
    return [pieces[at] for at in range(len(row.events))]


def shown(piece: Piece) -> str:
    """A token's text as HTML: line breaks are drawn and made; a character is drawn at its last token."""
    if piece.part < piece.parts:
        return '<i class="nl part">‥</i>'
    return escape(visible(piece.text)).replace("\n", '<i class="nl">↵</i>\n').replace("\t", '<i class="nl">⇥</i>\t')


def spoken_piece(piece: Piece) -> str:
    """A token's text for labels and tables."""
    return spoken(piece.text) + (f" ({piece.part} of {piece.parts})" if piece.parts > 1 else "")
