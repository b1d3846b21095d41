"""The fields of a scheme's config: checks of single values, and error messages that name the value, what is allowed,
or the nearest valid name."""

from __future__ import annotations

import difflib
import functools
import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

SAMPLING_SETTINGS = ("do_sample", "temperature", "top_k", "top_p")


def integer(name: str, value: Any, lowest: int, highest: int | None = None, also: str = "") -> int:
    """`value` as an int of the closed range, a ValueError otherwise; `also` names what else the caller allows."""
    # A bool is an Integral to Python, but True where a count is due is a mistake.
    number = int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None
    if number is None or number < lowest or (highest is not None and number > highest):
        allowed = f"an int >= {lowest}" if highest is None else f"an int in [{lowest}, {highest}]"
        raise bad_value(name, value, allowed + also)
    return number


def real(name: str, value: Any, highest: float = math.inf, also: str = "", lowest: float = 0.0) -> float:
    """`value` as a float in [lowest, highest], a ValueError otherwise; NaN is in no range."""
    number = _float(value)
    if number is None or not lowest <= number <= highest:
        open_ended = highest == math.inf
        allowed = f">= {lowest:g} (inf is allowed)" if open_ended else f"in [{lowest:g}, {highest:g}]"
        raise bad_value(name, value, f"a number {allowed}{also}")
    return number


def positive_real(name: str, value: Any, also: str = "") -> float:
    """`value` as a finite float above 0, a ValueError otherwise."""
    number = _float(value)
    if number is None or not 0.0 < number < math.inf:
        raise bad_value(name, value, f"a finite number > 0{also}")
    return number


def _float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def boolean(name: str, value: Any) -> bool:
    """`value` if it is a bool, a ValueError otherwise."""
    if not isinstance(value, bool):
        raise bad_value(name, value, "a bool")
    return value


def within(default: Any, lowest: float, highest: float | None = None) -> Any:
    """A field of numbers in the closed range; without `highest` it has no upper end."""
    return field(default=default, metadata={"within": (lowest, highest)})


def positive(default: Any) -> Any:
    """A field of finite floats above 0."""
    return field(default=default, metadata={"positive": True})


@dataclass(frozen=True, kw_only=True)
class SchemeConfig:
    """What all configs of schemes are: frozen, and each field checked by its type and range when one is made.

    Fields are `int`, `float`, `bool`, `str`, a `Literal`, or one of these beside `None`; others are for a subclass to
    check. Ranges come from [`within`] and [`positive`]; a number without one is at least 0.

    Raises:
        ValueError: If a value is of the wrong type or out of its range.
    """

    name: ClassVar[str]
    reads_encoders: ClassVar[bool] = False  # whether it decodes what an encoder, or an image, has been turned into
    other_tokenizers: ClassVar[bool] = False  # whether its draft may have another tokenizer
    needs_masks: ClassVar[bool] = True  # whether both models must take 4-D masks

    def __post_init__(self) -> None:
        kinds = field_kinds(type(self))
        for item in fields(self):
            assign(self, item.name, checked(item.name, getattr(self, item.name), kinds[item.name], item.metadata))

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe entry `{"scheme": name, **fields}`, infinite numbers as `"inf"`; see [`scheme_from_dict`]."""
        return entry_of(self)

    def resolved_dict(self) -> dict[str, Any]:
        """`to_dict` for people: with what a default of `None` stands for."""
        return self.to_dict()

    def check_call(self, model: Any, generation_config: Any, tokenizer: Any) -> None:
        """Refuse, by a ValueError before any forward, a call that the scheme cannot do."""

    @classmethod
    def generation_defaults(cls, given: dict[str, Any]) -> dict[str, Any]:
        """`given` fields of `GenerationConfig`, with the scheme's own defaults for the others."""
        return given


def field_kinds(scheme: Any) -> dict[str, tuple[Any, ...]]:
    """The types that each field of a config class may have."""
    return _kinds(scheme)


@functools.cache
def _kinds(scheme: Any) -> dict[str, tuple[Any, ...]]:
    hints = get_type_hints(scheme)
    return {
        item.name: get_args(kind) if get_origin(kind := hints[item.name]) in (Union, UnionType) else (kind,)
        for item in fields(scheme)
    }


def checked(name: str, value: Any, kinds: tuple[Any, ...], limits: Mapping[str, Any]) -> Any:
    """`value` of a field of one of `kinds`, in plain Python's types; a ValueError where it is none of them."""
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    if (value is None and NoneType in kinds) or (isinstance(value, str) and value in words):
        return value
    also = "".join(f' or "{word}"' for word in words) + (" or None" if NoneType in kinds else "")
    lowest, highest = limits.get("within", (0, None))
    if int in kinds:
        return integer(name, value, lowest, highest, also)
    if float in kinds:
        if "positive" in limits:
            return positive_real(name, value, also)
        return real(name, value, math.inf if highest is None else highest, also, lowest)
    if bool in kinds:
        return boolean(name, value)
    if str in kinds and (not isinstance(value, str) or not value):
        raise bad_value(name, value, ("None or " if NoneType in kinds else "") + "a text that is not empty")
    if words:
        raise bad_value(name, value, f"one of {listed(words)}")
    return value


def sampling_settings(settings: Any) -> dict[str, Any] | None:
    """`calibrated_for` with its values checked, a ValueError where one is wrong; None stands for unset."""
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise bad_value("calibrated_for", settings, f"None or a dict with keys of {listed(SAMPLING_SETTINGS)}")
    checked: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in SAMPLING_SETTINGS:
            raise ValueError(f"unknown key {shown(name)} in `calibrated_for`; {nearest(name, SAMPLING_SETTINGS)}")
        label = f"calibrated_for[{name!r}]"
        if value is None or (name == "do_sample" and isinstance(value, bool)):
            checked[name] = value
        elif name == "do_sample":
            raise bad_value(label, value, "a bool or None")
        elif name == "top_k":
            checked[name] = integer(label, value, 0)
        else:
            checked[name] = real(label, value, highest=1.0 if name == "top_p" else math.inf)
    return checked


def bad_value(name: str, value: Any, allowed: str) -> ValueError:
    """The error of a value that is not what is allowed."""
    return ValueError(f"`{name}` must be {allowed}, but is {shown(value)}.")


def nearest(name: Any, valid: Iterable[str]) -> str:
    """The valid name most like `name`, as a question to end a message with."""
    best = difflib.get_close_matches(str(name), list(valid), n=1, cutoff=0.0)
    return f"did you mean `{best[0]}`?"


def listed(names: Iterable[str]) -> str:
    """The names, quoted and separated by commas."""
    return ", ".join(f'"{name}"' for name in names)


def shown(value: Any) -> str:
    """`repr`, cut to a length that leaves a message readable."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print ints of more than 4,300 digits.
        return "an int of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."


def assign(config: Any, name: str, value: Any) -> None:
    """Set an attribute of a frozen dataclass, for its `__post_init__`."""
    object.__setattr__(config, name, value)


def field_names(scheme: Any) -> tuple[str, ...]:
    """Names of the fields of a scheme's config."""
    return tuple(item.name for item in fields(scheme))


def entry_of(config: Any) -> dict[str, Any]:
    """JSON-safe `{"scheme": name, **fields}` of a scheme's config, infinite numbers as strings."""
    return {"scheme": config.name, **{item.name: _json_safe(getattr(config, item.name)) for item in fields(config)}}


def _json_safe(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, tuple):
        return list(value)
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return str(value) if isinstance(value, float) and math.isinf(value) else value
