"""Checks of single values, and error messages that name the value, what is allowed, or the nearest valid name."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

SAMPLING_SETTINGS = ("do_sample", "temperature", "top_k", "top_p")


def integer(name: str, value: Any, lowest: int, highest: int | None = None, also: str = "") -> int:
    """`value` as an int of the closed range, a ValueError otherwise; `also` names what else the caller allows."""
    # A bool is an Integral to Python, but True where a count is due is a mistake.
    number = int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None
    if number is None or number < lowest or (highest is not None and number > highest):
        allowed = f"an int >= {lowest}" if highest is None else f"an int in [{lowest}, {highest}]"
        raise bad_value(name, value, allowed + also)
    return number


def real(name: str, value: Any, highest: float = math.inf) -> float:
    """`value` as a float in [0, highest], a ValueError otherwise; NaN is in no range."""
    allowed = "a number >= 0 (inf is allowed)" if highest == math.inf else f"a number in [0, {highest:g}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise bad_value(name, value, allowed)
    try:
        number = float(value)
    except OverflowError:
        raise bad_value(name, value, allowed) from None
    if not 0.0 <= number <= highest:
        raise bad_value(name, value, allowed)
    return number


def boolean(name: str, value: Any) -> bool:
    """`value` if it is a bool, a ValueError otherwise."""
    if not isinstance(value, bool):
        raise bad_value(name, value, "a bool")
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


def class_of(name: str, value: Any, classes: Mapping[str, Any]) -> Any:
    """The config class called `value`, a ValueError that names the option `name` otherwise."""
    if not isinstance(value, str) or value not in classes:
        raise bad_value(name, value, f"one of {listed(classes)}")
    return classes[value]


def unknown_name(name: Any, scheme: Any, classes: Mapping[str, Any], valid: Iterable[str]) -> str:
    """What to say of a name that `scheme` lacks: which scheme has it, or the nearest valid one."""
    others = [other.name for other in classes.values() if name in field_names(other)]
    if others:
        return f"`{name}` is a field of {listed(others)}, not of {scheme.name!r}."
    return f"unknown name {shown(name)} for the scheme {scheme.name!r}; {nearest(name, valid)}"


def config_from_entry(name: str, entry: Any, classes: Mapping[str, Any]) -> Any:
    """The config that `entry`, a dict as `entry_of` gives it, describes; a ValueError that names the option `name`
    where it is malformed."""
    if not isinstance(entry, Mapping):
        raise bad_value(name, entry, 'a dict such as {"scheme": "lossless"}')
    if "scheme" not in entry:
        raise bad_value(name, dict(entry), f'a dict with a "scheme" entry, one of {listed(classes)}')
    scheme = class_of("scheme", entry["scheme"], classes)
    types = {item.name: item.type for item in fields(scheme)}
    values = {key: value for key, value in entry.items() if key != "scheme"}
    for key, value in values.items():
        if key not in types:
            raise ValueError(f"`{name}`: {unknown_name(key, scheme, classes, types)}")
        if types[key] == "float" and isinstance(value, str) and value in ("inf", "-inf"):
            values[key] = float(value)
    return scheme(**values)


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
