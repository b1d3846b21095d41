"""The turn in which the target goes on where drafted text was dropped: by any token-level scheme."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.fields import SchemeConfig, bad_value, listed
from ..engine.call import CallState
from .table import SCHEMES, Rounds, config_from_entry, find, known


def reviser_config(option: str, value: Any) -> Any:
    """The token-level config that `option` asks for: `None`, a scheme's name, an entry or a config.

    Raises:
        ValueError: it is none of these, or names a scheme that cannot revise.
    """
    config = value
    if isinstance(value, str) and known(value):
        config = SCHEMES[value].config()
    elif isinstance(value, Mapping):
        config = config_from_entry(option, value)
    names = [name for name, scheme in SCHEMES.items() if scheme.rounds is not None]
    if config is None or (isinstance(config, SchemeConfig) and config.name in names):
        return config
    raise bad_value(option, value, f"None, {listed(names)}, or the config of one of these")


def make_rounds(call: CallState, config: Any) -> Rounds:
    """Rounds for `call` of the scheme that `config` is of; for `None` those of plain decoding."""
    make = find("lossless" if config is None else config.name).rounds
    assert make is not None
    return make(call, config)
