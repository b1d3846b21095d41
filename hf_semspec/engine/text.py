"""Tokenizers, and the text of tokens."""

from collections.abc import Sequence
from typing import Any

from transformers import AutoTokenizer


def find_tokenizer(model: Any, tokenizer: Any, use: str = "the scheme parse asks the target in words") -> Any:
    """The call's tokenizer, or the one in the folder that `model` came from; nothing is downloaded. `use` is what it
    is needed for.

    Raises:
        ValueError: there is neither.
    """
    if tokenizer is not None:
        return tokenizer
    path = getattr(model.config, "_name_or_path", "")
    try:
        if not path:
            raise OSError("the model was not loaded from a folder")
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"{use} and found no tokenizer for {type(model).__name__} ({error}): pass tokenizer=... to generate"
        ) from error


def anchor(tokenizer: Any) -> list[int]:
    """Something to stand before a token: at the start of a text some tokenizers drop a leading space."""
    ids: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
    return ids


class TokenTexts:
    """The text of each token behind others, see [`anchor`]."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._anchor = anchor(tokenizer)
        self._pieces: dict[int, str] = {}

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each of `ids`."""
        for token in set(ids) - self._pieces.keys():
            before, both = (
                self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
                for tokens in (self._anchor, [*self._anchor, token])
            )
            self._pieces[token] = both[len(before) :]
        return [self._pieces[token] for token in ids]

    def __call__(self, ids: Sequence[int]) -> str:
        """Their joined text."""
        return "".join(self.pieces(ids))


def no_texts(ids: Sequence[int]) -> str:
    """Stands for [`TokenTexts`] where nothing depends on the text."""
    return ""
