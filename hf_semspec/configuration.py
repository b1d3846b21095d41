"""What a user asks for: the scheme configs, and `SemSpecConfig`, the `GenerationConfig` that carries one of them.

A scheme config is a frozen dataclass. `SemSpecConfig` keeps it as a plain dict in its one extra entry, `semspec`, so
the file it saves is an ordinary `generation_config.json`: stock transformers loads it, and loading never runs code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from .common.fields import bad_value, class_of, config_from_entry, field_names, shown, unknown_name
from .common.json_files import check_depth, check_generation_values, read_object
from .schemes.easd.config import EASDConfig as EASDConfig
from .schemes.lossless.config import LosslessConfig as LosslessConfig
from .schemes.parse.config import PARSEConfig as PARSEConfig
from .schemes.revising import TOKEN_LEVEL_CONFIGS
from .schemes.semantic.config import SemanticConfig as SemanticConfig
from .schemes.smc.config import SMCConfig as SMCConfig
from .schemes.smc.config import sampling_fields

SchemeConfig = LosslessConfig | EASDConfig | PARSEConfig | SMCConfig | SemanticConfig
SCHEME_CONFIGS: dict[str, type[SchemeConfig]] = {
    **TOKEN_LEVEL_CONFIGS,
    "parse": PARSEConfig,
    "smc": SMCConfig,
    "semantic": SemanticConfig,
}


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
    scheme: SchemeConfig = config_from_entry("semspec", entry, SCHEME_CONFIGS)
    return scheme


class SemSpecConfig(GenerationConfig):
    r"""
    A `GenerationConfig` that makes `generate(assistant_model=...)` run one of this package's schemes.

    The scheme's fields are attributes beside those of `GenerationConfig` and are checked when set, so
    `generate(..., generation_config=config, num_draft_tokens=9)` works as for any other option. What is stored is one
    extra entry, `semspec`, a plain dict. Set it to `None`, or call `generate(..., semspec=None)`, to decode plainly.
    Beside it stands `trace`, which belongs to the process and is never stored.

    Args:
        scheme (`str`, [`LosslessConfig`], [`EASDConfig`], [`PARSEConfig`], [`SMCConfig`] or [`SemanticConfig`]):
            The scheme's name, `"lossless"`, `"easd"`, `"parse"`, `"smc"` or `"semantic"`, or its config.
        trace (`bool`, *optional*, defaults to `False`):
            Record what happens to every token: the output then has a `trace`, so `return_dict_in_generate` defaults
            to `True`. Text and statistics stay as they are.
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
    trace: bool = False

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Stands for the scheme's fields, which are added below the class."""

    def __init__(self, scheme: str | SchemeConfig, *, trace: bool = False, **fields: Any) -> None:
        scheme_class = type(scheme) if isinstance(scheme, SchemeConfig) else _scheme_class(scheme)
        own = {name: fields.pop(name) for name in field_names(scheme_class) if name in fields}
        generation_names = _generation_names()
        for name in fields:
            if name not in generation_names:
                raise TypeError(
                    unknown_name(
                        name, scheme_class, SCHEME_CONFIGS, [*field_names(scheme_class), *generation_names, "trace"]
                    )
                )
        if isinstance(scheme, SchemeConfig):
            if own:
                raise ValueError(f"`{next(iter(own))}` must be passed in the {scheme_class.__name__}, not beside it.")
            scheme_config: SchemeConfig = scheme
        else:
            scheme_config = scheme_class(**own)
        if isinstance(scheme_config, SMCConfig):
            fields = sampling_fields(fields)
        if trace:
            fields = {"return_dict_in_generate": True, **fields}
        super().__init__(**fields)
        if trace is not False:
            self.trace = trace
        self.semspec = scheme_config.to_dict()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "semspec" and value is not None:
            value = (value if isinstance(value, SchemeConfig) else scheme_from_dict(value)).to_dict()
        if name == "trace" and not isinstance(value, bool):
            raise bad_value("trace", value, "a bool")
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
        output.pop("trace", None)
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
            ValueError: If there is no `semspec` entry, it is malformed, a field of the scheme stands outside it, or
                another entry has a value that is not what its name says, or the name of a method.
        """
        _check_stored(config_dict)
        stored = {name: value for name, value in config_dict.items() if name not in ("_from_model_config", "trace")}
        entry = stored.pop("semspec", None)
        if entry is None:
            raise ValueError(
                'This generation config has no "semspec" entry, so it names no scheme: load it with '
                "`GenerationConfig`, or build `SemSpecConfig(scheme, ...)`."
            )
        scheme_config = scheme_from_dict(entry)
        own = {name: getattr(scheme_config, name) for name in field_names(type(scheme_config))}
        for name in own:
            if name in stored:
                raise ValueError(f'`{name}` is a field of the scheme and belongs inside the "semspec" entry.')

        generation_names = _generation_names()
        return_unused = kwargs.pop("return_unused_kwargs", False)
        kwargs = {name: value for name, value in kwargs.items() if not name.startswith("_")}
        unused: dict[str, Any] = {}
        if return_unused:
            unused = {
                name: kwargs.pop(name) for name in list(kwargs) if name not in {*own, *generation_names, "trace"}
            }
        known = {name: stored.pop(name) for name in list(stored) if name in generation_names}
        try:
            config = cls(scheme_config.name, **{**own, **known, **kwargs})
        except (AttributeError, KeyError, TypeError) as error:
            if any(name not in {*own, *generation_names} for name in kwargs):
                raise
            raise ValueError(f"transformers cannot make a generation config of these entries: {error}") from error
        # Not by setattr: an entry may be named like another scheme's field, which this config refuses to set.
        config.__dict__.update(stored)
        return (config, unused) if return_unused else config

    @classmethod
    def _dict_from_json_file(cls, json_file: str | os.PathLike[str]) -> dict[str, Any]:
        # `from_pretrained` reads by this; stock's own lets some broken files through to errors that name nothing.
        return read_object(json_file)


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
        if self.name not in field_names(type(scheme_config)):
            raise AttributeError(f"`{self.name}` is not a field of the scheme {scheme_config.name!r}.")
        return scheme_config


_ALL_FIELDS = tuple(dict.fromkeys(item.name for scheme in SCHEME_CONFIGS.values() for item in fields(scheme)))
for _name in _ALL_FIELDS:
    setattr(SemSpecConfig, _name, _SchemeField(_name))


def _generation_names() -> tuple[str, ...]:
    return tuple(name for name in vars(GenerationConfig()) if not name.startswith("_"))


def _check_stored(entries: Any) -> None:
    """Refuse what a file may hold that no config could be saved with."""
    if not isinstance(entries, Mapping):
        raise ValueError(f"a generation config must be a dict, but is {shown(entries)}")
    check_depth("this generation config", entries)
    for name in entries:
        # As an attribute it would stand in the place of a method.
        if not isinstance(name, str) or (name not in _ALL_FIELDS and hasattr(SemSpecConfig, name)):
            raise ValueError(
                f"{shown(name)} cannot be an entry of a generation config: it is no name, or that of a method"
            )
    check_generation_values(entries)


def _scheme_class(name: Any) -> type[SchemeConfig]:
    scheme: type[SchemeConfig] = class_of("scheme", name, SCHEME_CONFIGS)
    return scheme
