"""What a user asks for: the scheme configs, and `SemSpecConfig`, the `GenerationConfig` that carries one of them.

A scheme config is a frozen dataclass. `SemSpecConfig` keeps it as a plain dict in its one extra entry, `semspec`, so
the file it saves is an ordinary `generation_config.json`: stock transformers loads it, and loading never runs code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from transformers import GenerationConfig

from .checks import assign, bad_value, entry_of, integer, listed, nearest, real, sampling_settings, shown
from .smc_config import SMCConfig as SMCConfig
from .smc_config import sampling_fields


@dataclass(frozen=True, kw_only=True)
class LosslessConfig:
    r"""
    Ordinary speculative sampling: the output follows the target's law exactly (arXiv 2211.17192, 2302.01318).

    Args:
        num_draft_tokens (`int` or `"auto"`, *optional*, defaults to 5):
            γ, the tokens drafted a round, in [1, 64]. `"auto"` chooses it each round from the acceptance seen in this
            call and the sizes of the two models, never from a clock. The default and the range are ours.
        num_chains (`int`, *optional*, defaults to 1):
            Chains drafted a round, in [1, 64]. More than one is exact multi-draft verification: one target pass over
            all of them, the same output law. The default is the papers' algorithm; the range is ours.

    Raises:
        ValueError: If a value is of the wrong type or out of its range.
    """

    name: ClassVar[str] = "lossless"

    num_draft_tokens: int | Literal["auto"] = 5
    num_chains: int = 1

    def __post_init__(self) -> None:
        _check_chains(self)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe entry `{"scheme": name, **fields}`; see [`scheme_from_dict`]."""
        return entry_of(self)


@dataclass(frozen=True, kw_only=True)
class EASDConfig:
    r"""
    Entropy-aware speculative decoding (arXiv 2512.23765).

    A drafted token that passes the ordinary test is rejected all the same where draft and target are both uncertain
    and agree on what the likely tokens are.

    Args:
        num_draft_tokens (`int` or `"auto"`, *optional*, defaults to 5):
            γ, the tokens drafted a round, in [1, 64]; `"auto"` as in [`LosslessConfig`]. Default and range are ours.
        num_chains (`int`, *optional*, defaults to 1):
            Chains drafted a round, in [1, 64]. With more than one, the token tested for uncertain agreement is the one
            that multi-draft verification accepted. More than one is ours.
        target_entropy_threshold (`float`, *optional*, defaults to 1.0):
            τ_p in nats, >= 0: the target counts as uncertain where the entropy of its processed law is at least this.
            `inf` switches the extra rejection off, which gives `lossless` bit for bit. The authors take percentiles of
            entropies on held-out text; we know of no published value: the default is uncalibrated and ours.
        draft_entropy_threshold (`float`, *optional*, defaults to 1.0):
            τ_q in nats, >= 0, the same for the draft. The default is uncalibrated and ours.
        overlap_threshold (`float`, *optional*, defaults to 0.8):
            ρ >= 0: the two laws agree where at least this share of their `top_n` sets is common; above 1 they never
            do. We know of no published value: the default is ours.
        top_n (`int`, *optional*, defaults to 10):
            N, the size of those sets, in [1, 1000]. We know of no published value: the default is ours.
        penalty (`float`, *optional*, defaults to 0.0):
            What the target's probability of the rejected token is multiplied by before the next one is drawn, in
            [0, 1]. 0 excludes the token (v1 of the paper), 1 draws from the target as it is (v2's abstract read
            literally). That 0 is the default is our choice.
        trigger (`"entropy"` or `"random"`, *optional*, defaults to `"entropy"`):
            What causes the extra rejection: the rule above, or chance alone, the control that an evaluation needs.
            `"random"` is ours.
        trigger_rate (`float`, *optional*, defaults to 0.0):
            Probability of the extra rejection of a token that passed the ordinary test, in [0, 1]. Used by
            `trigger="random"` only. Ours.
        calibrated_for (`dict`, *optional*):
            Sampling settings that the thresholds were calibrated under, some or all of `do_sample`, `temperature`,
            `top_k` and `top_p`. `None` means that the thresholds are not calibrated. Ours.

    Raises:
        ValueError: If a value is of the wrong type or out of its range.
    """

    name: ClassVar[str] = "easd"

    num_draft_tokens: int | Literal["auto"] = 5
    num_chains: int = 1
    target_entropy_threshold: float = 1.0
    draft_entropy_threshold: float = 1.0
    overlap_threshold: float = 0.8
    top_n: int = 10
    penalty: float = 0.0
    trigger: Literal["entropy", "random"] = "entropy"
    trigger_rate: float = 0.0
    calibrated_for: dict[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        _check_chains(self)
        for name in ("target_entropy_threshold", "draft_entropy_threshold", "overlap_threshold"):
            assign(self, name, real(name, getattr(self, name)))
        for name in ("penalty", "trigger_rate"):
            assign(self, name, real(name, getattr(self, name), highest=1.0))
        assign(self, "top_n", integer("top_n", self.top_n, 1, 1000))
        if not isinstance(self.trigger, str) or self.trigger not in ("entropy", "random"):
            raise bad_value("trigger", self.trigger, '"entropy" or "random"')
        assign(self, "calibrated_for", sampling_settings(self.calibrated_for))

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe entry `{"scheme": name, **fields}`, infinite numbers as `"inf"`; see [`scheme_from_dict`]."""
        return entry_of(self)


SchemeConfig = LosslessConfig | EASDConfig | SMCConfig
SCHEME_CONFIGS: dict[str, type[SchemeConfig]] = {"lossless": LosslessConfig, "easd": EASDConfig, "smc": SMCConfig}


def scheme_from_dict(entry: Any) -> SchemeConfig:
    """
    The scheme config that a stored `semspec` entry describes, the inverse of its `to_dict`.

    Args:
        entry (`dict`): `{"scheme": name, **fields}`. Fields that are left out take their defaults; in a field of
            numbers the strings `"inf"` and `"-inf"` stand for those that JSON lacks.

    Returns:
        The scheme config.

    Raises:
        ValueError: If the entry is malformed in any way: no scheme, an unknown scheme or field, a bad value.
    """
    if not isinstance(entry, Mapping):
        raise bad_value("semspec", entry, 'a dict such as {"scheme": "lossless"}')
    if "scheme" not in entry:
        raise bad_value("semspec", dict(entry), f'a dict with a "scheme" entry, one of {listed(SCHEME_CONFIGS)}')
    scheme = _scheme_class(entry["scheme"])
    types = {item.name: item.type for item in fields(scheme)}
    values = {name: value for name, value in entry.items() if name != "scheme"}
    for name, value in values.items():
        if name not in types:
            raise ValueError(f"`semspec`: {_unknown_name(name, scheme, types)}")
        if types[name] == "float" and isinstance(value, str) and value in ("inf", "-inf"):
            values[name] = float(value)
    return scheme(**values)


class SemSpecConfig(GenerationConfig):
    r"""
    A `GenerationConfig` that makes `generate(assistant_model=...)` run one of this package's schemes.

    The scheme's fields are attributes beside those of `GenerationConfig` and are checked when set, so
    `generate(..., generation_config=config, num_draft_tokens=9)` works as for any other option. What is stored is one
    extra entry, `semspec`, a plain dict. Set it to `None`, or call `generate(..., semspec=None)`, to decode plainly.

    Args:
        scheme (`str`, [`LosslessConfig`], [`EASDConfig`] or [`SMCConfig`]):
            The scheme's name, `"lossless"`, `"easd"` or `"smc"`, or its config.
        fields:
            Fields of that scheme (not beside a scheme config, which has them already) and of `GenerationConfig`, in
            one namespace. With `"smc"`, which always samples, `do_sample`, `top_k` and `top_p` default to `True`, 0
            and 1.0.

    Raises:
        TypeError: If a name is neither's; the message names the nearest valid one.
        ValueError: If a value is of the wrong type or out of its range, or a field of the scheme is given beside a
            scheme config.
    """

    semspec: dict[str, Any] | None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Stands for the scheme's fields, which are added below the class."""

    def __init__(self, scheme: str | SchemeConfig, **fields: Any) -> None:
        scheme_class = type(scheme) if isinstance(scheme, SchemeConfig) else _scheme_class(scheme)
        own = {name: fields.pop(name) for name in _field_names(scheme_class) if name in fields}
        generation_names = _generation_names()
        for name in fields:
            if name not in generation_names:
                raise TypeError(_unknown_name(name, scheme_class, [*_field_names(scheme_class), *generation_names]))
        if isinstance(scheme, SchemeConfig):
            if own:
                raise ValueError(f"`{next(iter(own))}` must be passed in the {scheme_class.__name__}, not beside it.")
            scheme_config: SchemeConfig = scheme
        else:
            scheme_config = scheme_class(**own)
        if isinstance(scheme_config, SMCConfig):
            fields = sampling_fields(fields)
        super().__init__(**fields)
        self.semspec = scheme_config.to_dict()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "semspec" and value is not None:
            value = (value if isinstance(value, SchemeConfig) else scheme_from_dict(value)).to_dict()
        super().__setattr__(name, value)

    @property
    def scheme_config(self) -> SchemeConfig:
        """The frozen config of the scheme, rebuilt from the `semspec` entry; AttributeError where that is `None`."""
        entry = self.__dict__.get("semspec")
        if entry is None:
            raise AttributeError("This config has no scheme: its `semspec` entry is None, so it decodes plainly.")
        return scheme_from_dict(entry)

    def update(self, defaults_only: bool = False, allow_custom_entries: bool = False, **kwargs: Any) -> dict[str, Any]:
        """
        Sets the attributes that exist, the scheme's fields included, and returns the rest; as in `GenerationConfig`.

        A new `semspec` entry is set first, so that fields given beside it are read as its own.
        """
        if "semspec" in kwargs and not (defaults_only and self.semspec is not None):
            self.semspec = kwargs.pop("semspec")
        # `generate` offers every entry of the model's own config: one named like another scheme's field is not for us.
        foreign = {name: kwargs.pop(name) for name in list(kwargs) if name in _ALL_FIELDS and not hasattr(self, name)}
        # transformers 4.57 has neither flag and would take them for attributes.
        flags = {"defaults_only": defaults_only, "allow_custom_entries": allow_custom_entries}
        unused = super().update(**{name: True for name, on in flags.items() if on}, **kwargs)
        return {**unused, **foreign}

    def to_dict(self) -> dict[str, Any]:
        """All attributes as a JSON-safe dict, as `GenerationConfig.to_dict`."""
        output: dict[str, Any] = super().to_dict()
        # A file with this mark set loses every entry that stock does not know, ours too, when it is loaded.
        output.pop("_from_model_config", None)
        if output.get("semspec") is None:
            output.pop("semspec", None)
        return output

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """
        Builds a config from the content of a `generation_config.json`; `from_pretrained` ends here.

        Args:
            config_dict (`dict`): Entries of the file. Unknown ones are kept as attributes, as stock does.
            kwargs: Fields of the scheme or of `GenerationConfig`, which beat the stored ones. With
                `return_unused_kwargs=True`, names that are neither are returned as a second value.

        Raises:
            TypeError: If a keyword is no valid name.
            ValueError: If there is no `semspec` entry, it is malformed, or a field of the scheme stands outside it.
        """
        stored = {name: value for name, value in config_dict.items() if name != "_from_model_config"}
        entry = stored.pop("semspec", None)
        if entry is None:
            raise ValueError(
                'This generation config has no "semspec" entry, so it names no scheme: load it with '
                "`GenerationConfig`, or build `SemSpecConfig(scheme, ...)`."
            )
        scheme_config = scheme_from_dict(entry)
        own = {name: getattr(scheme_config, name) for name in _field_names(type(scheme_config))}
        for name in own:
            if name in stored:
                raise ValueError(f'`{name}` is a field of the scheme and belongs inside the "semspec" entry.')

        generation_names = _generation_names()
        return_unused = kwargs.pop("return_unused_kwargs", False)
        kwargs = {name: value for name, value in kwargs.items() if not name.startswith("_")}
        unused: dict[str, Any] = {}
        if return_unused:
            unused = {name: kwargs.pop(name) for name in list(kwargs) if name not in {*own, *generation_names}}
        known = {name: stored.pop(name) for name in list(stored) if name in generation_names}
        config = cls(scheme_config.name, **{**own, **known, **kwargs})
        # Not by setattr: an entry may be named like another scheme's field, which this config refuses to set.
        config.__dict__.update(stored)
        return (config, unused) if return_unused else config


class _SchemeField:
    """A field of the scheme as an attribute of `SemSpecConfig`: read from the `semspec` entry, checked when set."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, config: SemSpecConfig | None, owner: type | None = None) -> Any:
        return self if config is None else getattr(self._scheme_config(config), self.name)

    def __set__(self, config: SemSpecConfig, value: Any) -> None:
        config.semspec = replace(self._scheme_config(config), **{self.name: value}).to_dict()

    def _scheme_config(self, config: SemSpecConfig) -> SchemeConfig:
        scheme_config = config.scheme_config
        if self.name not in _field_names(type(scheme_config)):
            raise AttributeError(f"`{self.name}` is not a field of the scheme {scheme_config.name!r}.")
        return scheme_config


_ALL_FIELDS = tuple(dict.fromkeys(item.name for scheme in SCHEME_CONFIGS.values() for item in fields(scheme)))
for _name in _ALL_FIELDS:
    setattr(SemSpecConfig, _name, _SchemeField(_name))


def _field_names(scheme: type[SchemeConfig]) -> tuple[str, ...]:
    return tuple(item.name for item in fields(scheme))


def _generation_names() -> tuple[str, ...]:
    return tuple(name for name in vars(GenerationConfig()) if not name.startswith("_"))


def _scheme_class(name: Any) -> type[SchemeConfig]:
    if not isinstance(name, str) or name not in SCHEME_CONFIGS:
        raise bad_value("scheme", name, f"one of {listed(SCHEME_CONFIGS)}")
    return SCHEME_CONFIGS[name]


def _unknown_name(name: Any, scheme: type[SchemeConfig], valid: Iterable[str]) -> str:
    others = [other.name for other in SCHEME_CONFIGS.values() if name in _field_names(other)]
    if others:
        return f"`{name}` is a field of {listed(others)}, not of {scheme.name!r}."
    return f"unknown name {shown(name)} for the scheme {scheme.name!r}; {nearest(name, valid)}"


def _check_chains(config: LosslessConfig | EASDConfig) -> None:
    if not (isinstance(config.num_draft_tokens, str) and config.num_draft_tokens == "auto"):
        value = integer("num_draft_tokens", config.num_draft_tokens, 1, 64, also=' or "auto"')
        assign(config, "num_draft_tokens", value)
    assign(config, "num_chains", integer("num_chains", config.num_chains, 1, 64))
