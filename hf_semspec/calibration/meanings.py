"""Which continuations mean the same, and how often a model says what each of them means."""

from collections.abc import Callable, Sequence

import torch

SIMILAR = 0.98  # cosine above which two mean hidden states count as one meaning
Equivalence = str | Callable[[str, str], bool]


def meanings(texts: Sequence[str], features: torch.Tensor, equivalence: Equivalence) -> list[int]:
    """A number for the meaning of each text; each is compared with the first text of every meaning found so far.

    Args:
        features: (texts, size) mean hidden states, all of one model.
        equivalence: `"exact"`: the same text up to white space; `"hidden"`: hidden states whose cosine, after the
            mean over all is taken off, is at least `SIMILAR` (ours); or a function of two texts.
    """
    if equivalence == "exact":
        forms = [" ".join(text.split()) for text in texts]
        return [forms.index(form) for form in forms]
    directions = torch.nn.functional.normalize(features.double() - features.double().mean(dim=0), dim=1)
    found: list[int] = []  # the first text of each meaning
    numbers = []
    for i, text in enumerate(texts):
        if callable(equivalence):
            same = next((n for n in found if equivalence(texts[n], text)), None)
        else:
            close = (directions[found] @ directions[i] >= SIMILAR).nonzero() if found else torch.empty(0, 1)
            same = found[int(close[0])] if len(close) else None
        if same is None:
            found.append(i)
        numbers.append(i if same is None else same)
    return numbers


def shares(asked: Sequence[int], said: Sequence[int]) -> list[float]:
    """For each meaning in `asked`, its share in `said`."""
    return [said.count(number) / len(said) for number in asked]
