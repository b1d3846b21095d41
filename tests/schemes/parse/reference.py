"""A slow, literal builder of packed blocks: who sees whom."""

from __future__ import annotations

from collections.abc import Sequence


def packed(
    starts: Sequence[int],
    lengths: Sequence[int],
    copies: Sequence[Sequence[int]],
    sizes: Sequence[int],
    window: int | None,
) -> tuple[list[list[int]], list[list[list[bool]]]]:
    """Positions, and for each query whether it sees each key, of packed blocks [text ; copy ; copy ; ...].

    A key is one of the row's text, of a copy, or nothing that anybody but itself sees. A window counts positions.
    """
    text = max(length - start for start, length in zip(starts, lengths, strict=True))
    width, end = text + sum(sizes), max(starts) + text + sum(sizes)
    every_position, every_visible = [], []
    for start, length, prefixes in zip(starts, lengths, copies, strict=True):
        # What stands in each column: (copy or None for text, position), or None.
        tokens: list[tuple[int | None, int] | None] = [(None, n) for n in range(start)]
        tokens += [(None, n) if n < length else None for n in range(start, start + text)]
        for i, (prefix, size) in enumerate(zip(prefixes, sizes, strict=True)):
            tokens += [(i, prefix + j) if prefix >= 0 else None for j in range(size)]
        tokens += [None] * (end - len(tokens))
        visible = []
        for query in range(start, start + width):
            row = []
            for key in range(end):
                row.append(key == query or _packed_sees(tokens[query], tokens[key], prefixes, window))
            visible.append(row)
        every_visible.append(visible)
        every_position.append([token[1] if token else 0 for token in tokens[start : start + width]])
    return every_position, every_visible


def _packed_sees(
    query: tuple[int | None, int] | None,
    key: tuple[int | None, int] | None,
    prefixes: Sequence[int],
    window: int | None,
) -> bool:
    if query is None or key is None:
        return False
    (asker, at), (owner, there) = query, key
    if owner is not None and owner != asker:
        return False  # another copy
    if owner is None and asker is not None and there >= prefixes[asker]:
        return False  # text behind the prefix
    return there <= at and (window is None or at - there < window)
