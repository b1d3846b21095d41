"""What may revise for `parse` and `semantic`: any token-level scheme."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..common.fields import bad_value, config_from_entry, listed
from ..engine.call import CallState
from ..engine.outputs import DecodingStats
from ..engine.rounds import Speculation
from .easd.config import EASDConfig
from .lossless.config import LosslessConfig

TOKEN_LEVEL_CONFIGS: dict[str, type[LosslessConfig] | type[EASDConfig]] = {
    "lossless": LosslessConfig,
    "easd": EASDConfig,
}


def token_level(name: str, value: Any) -> LosslessConfig | EASDConfig | None:
    """The token-level config that the option `name` asks for: `None`, a scheme's name, an entry or a config.

    Raises:
        ValueError: it is none of these.
    """
    if value is None or isinstance(value, (LosslessConfig, EASDConfig)):
        return value
    if isinstance(value, Mapping):
        nested: LosslessConfig | EASDConfig = config_from_entry(name, value, TOKEN_LEVEL_CONFIGS)
        return nested
    if isinstance(value, str) and value in TOKEN_LEVEL_CONFIGS:
        return TOKEN_LEVEL_CONFIGS[value]()
    raise bad_value(name, value, f"None, {listed(TOKEN_LEVEL_CONFIGS)}, a LosslessConfig or an EASDConfig")


class Reviser(Protocol):
    """Rounds of a token-level scheme, and what its record adds to the output."""

    with_laws: bool

    def run(self, state: Speculation) -> None:
        """Rounds until no row of `state` is open."""

    def attach(self, output: Any, stats: DecodingStats) -> None:
        """Put the scheme's record on the output."""


MakeReviser = Callable[[CallState, Any], Reviser]
