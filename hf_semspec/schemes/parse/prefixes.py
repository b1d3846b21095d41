"""Prefixes of a drafted answer: where they end, how many are judged in one packed pass, and which one is kept."""

from collections.abc import Sequence

SENTENCE_ENDS = (".", "!", "?")
WIDE_SENTENCE_ENDS = ("。", "！", "？")  # no white space follows these


def ends_of(pieces: Sequence[str]) -> list[bool]:
    """For each token of a text, given as its own text, whether a line or a sentence ends with it.

    A line ends with a newline anywhere in the token; a sentence with its mark, if white space follows one that is not
    full-width.
    """
    following = [*pieces[1:], ""][: len(pieces)]
    return [
        "\n" in piece
        or piece.rstrip().endswith(WIDE_SENTENCE_ENDS)
        or (piece.rstrip().endswith(SENTENCE_ENDS) and (piece[-1:].isspace() or after[:1].isspace()))
        for piece, after in zip(pieces, following, strict=True)
    ]


def boundaries(pieces: Sequence[str], segment_tokens: int) -> list[int]:
    """Lengths, in tokens, of the prefixes that are judged, increasing; the last one is the whole text.

    Each lies `segment_tokens` behind the one before, moved forward to the next end of a line or sentence if one comes
    within as many tokens again; the text's last token always ends a prefix (★ ours where arXiv 2605.04263 is silent).

    Args:
        pieces: the text of each token.
        segment_tokens (`int`): Δ >= 1.
    """
    ends, lengths, total = ends_of(pieces), list[int](), len(pieces)
    due = segment_tokens
    while due < total:
        reach = range(due, min(due + segment_tokens, total + 1))
        length = next((n for n in reach if ends[n - 1]), due)
        if length < total:
            lengths.append(length)
        due = length + segment_tokens
    return [*lengths, total] if total else []


def segment_ended(pieces: Sequence[str], segment_tokens: int) -> bool:
    """Whether a text that is still being written has reached its first boundary."""
    return len(pieces) >= 2 * segment_tokens or any(ends_of(pieces)[segment_tokens - 1 :])


def kept_prefix(confidences: Sequence[float], rule: str, threshold: float, uniform: float) -> int:
    """How many of the prefixes c_1..c_m the kept one spans, 0 for none; nan, a prefix that was not judged, is not
    valid.

    Args:
        confidences: c_i in [0, 1].
        rule: `"first_fail"`: max{k : c_1..c_k all >= τ}; `"longest"`: max{k : c_k >= τ}; `"cascade"`: 0; `"random"`:
            uniform on the widest interval of [0, m] centred at what `"first_fail"` gives, hence of the same mean.
        threshold: τ.
        uniform: in [0, 1), used by `"random"`.
    """
    valid = [confidence >= threshold for confidence in confidences]
    if rule == "cascade":
        return 0
    if rule == "longest":
        return max((k for k, ok in enumerate(valid, start=1) if ok), default=0)
    first = valid.index(False) if False in valid else len(valid)
    if rule == "first_fail":
        return first
    spread = min(first, len(valid) - first)
    return first - spread + int(uniform * (2 * spread + 1))


def monotonicity_violations(confidences: Sequence[float], threshold: float) -> int:
    """How often a prefix passes though the one before it, a part of it, fails; nan, not judged, does neither."""
    pairs = zip(confidences, confidences[1:], strict=False)
    return sum(before < threshold <= after for before, after in pairs)
