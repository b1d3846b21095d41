"""What is read from files that others wrote: JSON within limits, and values that are what their names say."""

from __future__ import annotations

import json
import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .fields import bad_value, shown

MOST_BYTES = 1 << 20
MOST_DEPTH = 32
_INT64 = 1 << 63

_INTEGERS = (
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "num_return_sequences", "top_k"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_assistant_tokens", "max_matching_ngram_size"),
    "num_beam_groups",
)
_NUMBERS = (
    *("temperature", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "max_time"),
    *("repetition_penalty", "encoder_repetition_penalty", "length_penalty", "diversity_penalty", "penalty_alpha"),
    *("guidance_scale", "assistant_confidence_threshold"),
)
_BOOLS = (
    *("do_sample", "use_cache", "return_dict_in_generate", "output_scores", "output_logits", "output_attentions"),
    *("output_hidden_states", "remove_invalid_values", "renormalize_logits", "is_assistant", "token_healing"),
)
_ID_LISTS = (
    *("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id"),
    *("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
)


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in a file: plain values, nothing is run.

    Args:
        path: The file, in UTF-8.

    Raises:
        ValueError: If the file is over a MiB, no JSON, nested deeper than 32 levels, or not one object.
    """
    size = os.path.getsize(path)
    if size > MOST_BYTES:
        raise ValueError(f"{path} has {size:,} bytes: at most {MOST_BYTES:,} are read")
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is nested deeper than {MOST_DEPTH} levels") from None
    except ValueError as error:  # no UTF-8, no JSON, or an int of thousands of digits
        raise ValueError(f"{path} is not a JSON file that can be read: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold one JSON object, but holds {shown(value)}")
    check_depth(str(path), value)
    return value


def check_depth(name: str, value: Any) -> None:
    """A ValueError that names `name` where dicts and lists are nested deeper than 32 levels."""
    level = [value]
    for _ in range(MOST_DEPTH):
        containers = [item for item in level if isinstance(item, Mapping | list)]
        level = [inner for item in containers for inner in (item.values() if isinstance(item, Mapping) else item)]
        if not level:
            return
    raise ValueError(f"{name} is nested deeper than {MOST_DEPTH} levels")


def check_generation_values(entries: Mapping[str, Any]) -> None:
    """Checks the types of stored fields of `GenerationConfig`, which its constructor takes as they come.

    Args:
        entries: Fields by name; those that are not listed here are left to the constructor.

    Raises:
        ValueError: If a value is of the wrong type, or an int beyond 64 bits; it names the field.
    """
    for name, value in entries.items():
        if value is None:
            continue
        if name in _INTEGERS and not _is_int64(value):
            raise bad_value(name, value, "an int of at most 64 bits, or null")
        if name in _NUMBERS and (isinstance(value, bool) or not isinstance(value, numbers.Real) or _is_huge(value)):
            raise bad_value(name, value, "a number, or null")
        if name in _BOOLS and not isinstance(value, bool):
            raise bad_value(name, value, "true, false, or null")
        if name in _ID_LISTS:
            ids = value if isinstance(value, list | tuple) else [value]
            if not all(_is_int64(one) for one in ids):
                raise bad_value(name, value, "a token id or a list of them, or null")


def _is_int64(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_INT64 <= value < _INT64


def _is_huge(value: Any) -> bool:
    return isinstance(value, int) and not -_INT64 <= value < _INT64
