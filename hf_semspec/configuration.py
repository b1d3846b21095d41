"""What a user asks for: the scheme configs, and `SemSpecConfig`, the `GenerationConfig` that carries one of them.

A scheme config is a frozen dataclass. `SemSpecConfig` keeps it as a plain dict in its one extra entry, `semspec`, so
the file it saves is an ordinary `generation_config.json`: stock transformers loads it, and loading never runs code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, GenerationMixin

from .common.fields import SchemeConfig, bad_value, field_names, shown
from .common.json_files import check_depth, check_generation_values, read_object
from .engine.outputs import DecodingStats
from .engine.request import Request
from .schemes import BUILT_IN, token_level
from .schemes.easd.config import EASDConfig as EASDConfig
from .schemes.lossless.config import LosslessConfig as LosslessConfig
from .schemes.parse.config import PARSEConfig as PARSEConfig
from .schemes.semantic.config import SemanticConfig as SemanticConfig
from .schemes.smc.config import SMCConfig as SMCConfig
from .schemes.table import SCHEMES, Scheme, config_from_entry, find, unknown_name


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
    return config_from_entry("semspec", entry)


class SemSpecConfig(GenerationConfig):
    r"""
    A `GenerationConfig` that makes `generate(assistant_model=...)` run one of this package's schemes.

    The scheme's fields are attributes beside those of `GenerationConfig` and are checked when set, so
    `generate(..., generation_config=config, num_draft_tokens=9)` works as for any other option. What is stored is one
    extra entry, `semspec`, a plain dict. Set it to `None`, or call `generate(..., semspec=None)`, to decode plainly.
    Beside it stands `trace`, which belongs to the process and is never stored.

    Args:
        scheme (`str`, [`LosslessConfig`], [`EASDConfig`], [`PARSEConfig`], [`SMCConfig`] or [`SemanticConfig`]):
            The scheme's name, `"lossless"`, `"easd"`, `"parse"`, `"smc"` or `"semantic"`, or its config; or those of
            a scheme that [`register_scheme`] has added.
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
        name = getattr(scheme, "name", type(scheme).__name__) if isinstance(scheme, SchemeConfig) else scheme
        scheme_class = find(name).config
        own = {name: fields.pop(name) for name in field_names(scheme_class) if name in fields}
        generation_names = _generation_names()
        for name in fields:
            if name not in generation_names:
                valid = [*field_names(scheme_class), *generation_names, "trace"]
                raise TypeError(unknown_name(name, scheme_class.name, valid))
        if isinstance(scheme, SchemeConfig):
            if own:
                raise ValueError(f"`{next(iter(own))}` must be passed in the {scheme_class.__name__}, not beside it.")
            scheme_config: SchemeConfig = scheme
        else:
            scheme_config = scheme_class(**own)
        fields = scheme_config.generation_defaults(fields)
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
        # `generate` offers every entry of the model's own config: one named like another scheme's field is not for us,
        # and a tensor (the `labels` of a trainer's batch) is the model's input.
        foreign = {
            name: kwargs.pop(name)
            for name, value in list(kwargs.items())
            if _is_field(name) and (not hasattr(self, name) or isinstance(value, torch.Tensor))
        }
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
            if any(name not in {*own, *generation_names, "trace"} for name in kwargs):
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


def _expose_fields() -> None:
    """Let `SemSpecConfig` have the fields of all schemes that there are, and no others."""
    names = {name for scheme in SCHEMES.values() for name in field_names(scheme.config)}
    for name, value in list(vars(SemSpecConfig).items()):
        if isinstance(value, _SchemeField) and name not in names:
            delattr(SemSpecConfig, name)
    for name in names - vars(SemSpecConfig).keys():
        setattr(SemSpecConfig, name, _SchemeField(name))


_expose_fields()


_TAKEN = {"scheme", "name", "semspec"}  # beside what `generate` and its config know
_TAKEN |= {"input_ids", "attention_mask", "position_ids", "inputs_embeds", "past_key_values", "cache"}
_named: set[type[SchemeConfig]] = set()  # classes that got their name by being registered


def register_scheme(
    name: str,
    config_class: type[SchemeConfig],
    *,
    accept: token_level.Rule | None = None,
    decode: Callable[[Request], tuple[Any, DecodingStats]] | None = None,
) -> None:
    """
    Adds a scheme of one's own: `SemSpecConfig(name, ...)` and stored configs that name it then run it.

    Args:
        name (`str`): What it is called, an identifier.
        config_class (`type`): A frozen keyword-only dataclass whose fields all have defaults, a subclass of
            [`TokenLevelConfig`] with `accept`, of [`SchemeConfig`] with `decode`. Its fields become attributes of
            `SemSpecConfig`.
        accept (`Callable`, *optional*): The rule of a token-level scheme: gets the scored [`Block`] of a round, of one
            chain, and the config, and returns the [`Acceptance`]. Everything else is done for it.
        decode (`Callable`, *optional*): A whole loop instead: from a `Request` to the output and its statistics.

    Raises:
        ValueError: If the name is taken, the class is not as said, a field is named like something else that
            `SemSpecConfig` or `GenerationConfig` has, or not exactly one of `accept` and `decode` is given.
    """
    base = SchemeConfig if accept is None else token_level.TokenLevelConfig
    if not isinstance(name, str) or not name.isidentifier():
        raise bad_value("name", name, 'an identifier, such as "fly"')
    if name in SCHEMES:
        way = f" (its module may have been imported already), or unregister_scheme({name!r}) first"
        raise ValueError(
            f"`name` {name!r} is taken by a scheme: choose another name{'' if name in BUILT_IN else way}."
        )
    if not callable(accept or decode) or (accept is None) == (decode is None):
        raise ValueError("pass exactly one of `accept`, a rule, and `decode`, a whole loop.")
    if not isinstance(config_class, type) or not issubclass(config_class, base):
        raise bad_value("config_class", config_class, f"a frozen keyword-only dataclass that inherits {base.__name__}")
    if "__dataclass_fields__" not in vars(config_class):
        raise ValueError(f"`{config_class.__name__}` must be decorated with @dataclass(frozen=True, kw_only=True).")
    if accept is not None and issubclass(config_class, token_level.ChainsConfig):
        raise ValueError(f"`{config_class.__name__}` has `num_chains`, but a rule gets one: inherit TokenLevelConfig.")
    taken = _TAKEN | {*_generation_names(), *signature(GenerationMixin.generate).parameters}
    for own in field_names(config_class):
        if own in taken or (hasattr(SemSpecConfig, own) and not _is_field(own)):
            raise ValueError(f"the field `{own}` means something else to SemSpecConfig: give it another name.")
    if vars(config_class).get("name", name) != name:
        raise ValueError(f"`{config_class.__name__}.name` is {config_class.name!r}: leave it out, or set {name!r}.")
    try:
        config_class()
    except TypeError as error:
        raise ValueError(f"`{config_class.__name__}` must have a default for every field ({error}).") from None
    if "name" not in vars(config_class):
        _named.add(config_class)
        config_class.name = name
    if accept is not None:
        SCHEMES[name] = token_level.scheme(config_class, partial(token_level.RuleRounds, accept))
    elif decode is not None:
        SCHEMES[name] = Scheme(config_class, decode)
    _expose_fields()


def unregister_scheme(name: str) -> None:
    """
    Takes a scheme that [`register_scheme`] has added out again, with its fields.

    Raises:
        ValueError: If there is none of this name, or it is built in.
    """
    if name in BUILT_IN or name not in SCHEMES:
        raise bad_value("name", name, "the name of a scheme that register_scheme has added")
    config_class = SCHEMES.pop(name).config
    if config_class in _named:
        _named.remove(config_class)
        del config_class.name
    _expose_fields()


def _is_field(name: str) -> bool:
    return isinstance(vars(SemSpecConfig).get(name), _SchemeField)


def _generation_names() -> tuple[str, ...]:
    return tuple(name for name in vars(GenerationConfig()) if not name.startswith("_"))


def _check_stored(entries: Any) -> None:
    """Refuse what a file may hold that no config could be saved with."""
    if not isinstance(entries, Mapping):
        raise ValueError(f"a generation config must be a dict, but is {shown(entries)}")
    check_depth("this generation config", entries)
    for name in entries:
        # As an attribute it would stand in the place of a method.
        if not isinstance(name, str) or (not _is_field(name) and hasattr(SemSpecConfig, name)):
            raise ValueError(
                f"{shown(name)} cannot be an entry of a generation config: it is no name, or that of a method"
            )
    check_generation_values(entries)
