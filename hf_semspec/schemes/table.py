"""The schemes by name, those that users register among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from ..common.fields import SchemeConfig, bad_value, field_kinds, listed, nearest, shown
from ..engine.call import CallState
from ..engine.outputs import DecodingStats
from ..engine.request import Request
from ..engine.rounds import Speculation

ENTRY_POINTS = "hf_semspec.schemes"


class Rounds:
    """Rounds of a token-level scheme over rows of a call, and what its record adds to the output.

    Args:
        call: the call.
        config: the scheme's config.
    """

    with_laws = False

    def __init__(self, call: CallState, config: Any) -> None:
        self.call, self.config = call, config

    def run(self, state: Speculation) -> None:
        """Rounds until no row of `state` is open."""
        raise NotImplementedError

    def attach(self, output: Any, stats: DecodingStats) -> None:
        """Put the scheme's record on the output; nothing where the statistics say all."""


@dataclass(frozen=True)
class Scheme:
    """A scheme.

    Args:
        config: its config class.
        decode: runs one call of `generate`.
        rounds: of a token-level scheme, its rounds for a call and its config; such a scheme can revise for others.
    """

    config: type[SchemeConfig]
    decode: Callable[[Request], tuple[Any, DecodingStats]]
    rounds: Callable[[CallState, Any], Rounds] | None = None


SCHEMES: dict[str, Scheme] = {}


def known(name: Any) -> bool:
    """Whether there is a scheme called `name`; of one that is not known an installed package may bring it."""
    if isinstance(name, str) and name not in SCHEMES:
        for entry in entry_points(group=ENTRY_POINTS, name=name):
            entry.load()
    return isinstance(name, str) and name in SCHEMES


def find(name: Any, option: str = "scheme") -> Scheme:
    """The scheme called `name`, see [`known`].

    Raises:
        ValueError: there is none; the message names the option, what there is, and how to get another.
    """
    if not known(name):
        error = bad_value(option, name, f"one of {listed(SCHEMES)}")
        if not isinstance(name, str):
            raise error
        raise ValueError(
            f"{error} Register a scheme of your own first: import its module, name its file with --scheme-file on the "
            f"command line, or install a package that has it as an entry point of the group {ENTRY_POINTS!r}."
        )
    return SCHEMES[name]


def unknown_name(name: Any, scheme: str, valid: Iterable[str]) -> str:
    """What to say of a name that the scheme called `scheme` lacks: which one has it, or the nearest valid name."""
    others = [other for other, entry in SCHEMES.items() if name in field_kinds(entry.config)]
    if others:
        return f"`{name}` is a field of {listed(others)}, not of {scheme!r}."
    return f"unknown name {shown(name)} for the scheme {scheme!r}; {nearest(name, valid)}"


def config_from_entry(option: str, entry: Any) -> SchemeConfig:
    """The config that `entry`, a dict as `SchemeConfig.to_dict` gives it, describes.

    Raises:
        ValueError: it is malformed; the message names the option.
    """
    if not isinstance(entry, Mapping):
        raise bad_value(option, entry, 'a dict such as {"scheme": "lossless"}')
    if "scheme" not in entry:
        raise bad_value(option, dict(entry), f'a dict with a "scheme" entry, one of {listed(SCHEMES)}')
    scheme = find(entry["scheme"]).config
    kinds = field_kinds(scheme)
    values = {key: value for key, value in entry.items() if key != "scheme"}
    for key, value in values.items():
        if key not in kinds:
            raise ValueError(f"`{option}`: {unknown_name(key, scheme.name, kinds)}")
        if float in kinds[key] and isinstance(value, str) and value in ("inf", "-inf"):
            values[key] = float(value)
    return scheme(**values)
