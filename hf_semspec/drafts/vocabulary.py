"""Whether an id means the same token to target and draft."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ..common.warn_once import warn_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MAX_VOCABULARY_PADDING = 1024


def vocabulary_size(model: PreTrainedModel) -> int:
    """The number of ids `model` scores: `vocab_size` of its text config, padding rows included."""
    return int(model.config.get_text_config().vocab_size)


def check_vocabularies(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    allow_foreign: bool = False,
) -> bool:
    """Check whether an id means the same token to target and draft; runs no forward.

    With both tokenizers their vocabularies decide: they are one if they agree on every id that both have. Without
    them, sizes that differ by at most 1,024 count as one padded vocabulary (one warning a process and pair of sizes).

    Args:
        model (`PreTrainedModel`): the target.
        draft (`PreTrainedModel`): the draft.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): the target's tokenizer.
        assistant_tokenizer (`PreTrainedTokenizerBase`, *optional*): the draft's tokenizer.
        allow_foreign (`bool`): do not raise where they are foreign.

    Returns:
        `bool`: whether the vocabularies are known to be foreign, which only `allow_foreign` allows.

    Raises:
        ValueError: foreign vocabularies, or sizes too far apart to tell; the message says what to pass.
    """
    if assistant_tokenizer is not None and tokenizer is None:
        raise ValueError("`assistant_tokenizer` was passed without `tokenizer`: pass both, or neither.")
    if tokenizer is not None and assistant_tokenizer is not None:
        clash = first_clash(tokenizer, assistant_tokenizer)
        if clash is not None and not allow_foreign:
            raise ValueError(
                f"The draft's tokenizer is foreign to the target's: id {clash[0]} is {clash[1]!r} to the target and "
                f"{clash[2]!r} to the draft. Only lossless and easd draft with the tokens that both have, and parse "
                "takes text across; smc and semantic keep drafted tokens as they are: pass a draft "
                'of the target\'s family, or load_draft(model, quantization="nf4").'
            )
        return clash is not None
    size, draft_size = vocabulary_size(model), vocabulary_size(draft)
    if size == draft_size:
        return False
    if abs(size - draft_size) > MAX_VOCABULARY_PADDING:
        raise ValueError(
            f"The target scores {size} ids and the draft {draft_size}: too far apart to be one padded vocabulary. "
            "Pass `tokenizer` and `assistant_tokenizer`, which decide what the two share, or a draft with the "
            "target's tokenizer."
        )
    warn_once(
        f"The target scores {size} ids and the draft {draft_size}: taken for one vocabulary padded to different "
        "sizes. Pass `tokenizer` and `assistant_tokenizer` to have it checked."
    )
    return False


def once_a_pair(compare: Callable[..., Any]) -> Callable[..., Any]:
    """Remember what `compare` says of two tokenizers while both live and hold as many tokens: to read two
    vocabularies of 100,000 tokens takes longer than a round of decoding."""
    known: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[Any, Any]]] = WeakKeyDictionary()

    @functools.wraps(compare)
    def call(tokenizer: Any, other: Any, *sizes: int) -> Any:
        if tokenizer is None or other is None:
            return compare(tokenizer, other, *sizes)
        found = known.setdefault(tokenizer, WeakKeyDictionary()).setdefault(other, {})
        key = (len(tokenizer), len(other), *sizes)
        if key not in found:
            found[key] = compare(tokenizer, other, *sizes)
        return found[key]

    return call


@once_a_pair
def first_clash(
    tokenizer: PreTrainedTokenizerBase | None, assistant_tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, str, str] | None:
    """The lowest id that both tokenizers have with different tokens: (id, target's token, draft's token); `None`
    where there is none, or not both tokenizers."""
    if tokenizer is assistant_tokenizer or tokenizer is None or assistant_tokenizer is None:
        return None
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    draft_tokens = {index: token for token, index in assistant_tokenizer.get_vocab().items()}
    clashes = [index for index in tokens.keys() & draft_tokens.keys() if tokens[index] != draft_tokens[index]]
    if not clashes:
        return None
    return min(clashes), tokens[min(clashes)], draft_tokens[min(clashes)]
