"""Contenders: what is to decode, written as `easd:penalty=1,trigger=random` or `mine=easd:penalty=1`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig

from ..common.fields import bad_value, integer, listed, nearest
from ..configuration import SemSpecConfig, scheme_from_dict
from ..schemes.table import SCHEMES, find

TARGET, DRAFT, ASSISTED, BEST_OF, MAJORITY = "target", "draft", "assisted", "best_of", "majority"
# Options that are no fields of `GenerationConfig`, with their defaults.
_OWN: dict[str, dict[str, Any]] = {
    TARGET: {},
    DRAFT: {},
    ASSISTED: {"num_draft_tokens": 5},
    BEST_OF: {"n": 4},
    MAJORITY: {"n": 4},
    "smc": {"vote": None},
}
VOTES = ("majority", "weighted")
# What the run itself sets and reads, and what would end a text where the count of its tokens does not see it.
_RESERVED = (
    *("max_new_tokens", "max_length", "num_return_sequences", "return_dict_in_generate", "semspec"),
    *("stop_strings", "max_time", "eos_token_id", "pad_token_id"),
)


def kinds() -> tuple[str, ...]:
    """What can decode: the models alone, every scheme, and stock's own ways."""
    return (TARGET, DRAFT, *SCHEMES, ASSISTED, BEST_OF, MAJORITY)


_OPENING, _CLOSING = "{[(", "}])"


@dataclass(frozen=True)
class Contender:
    """One way to decode, with its options checked.

    Args:
        name (`str`): unique within a run.
        kind (`str`): one of [`kinds`].
        options (`dict`, *optional*): fields of the scheme or of `GenerationConfig`, and the few options of
            contenders that are no schemes: `n` of `best_of` and `majority`, `num_draft_tokens` of `assisted`, `vote`
            of `smc`.

    Raises:
        ValueError: an unknown kind or option, or a bad value; the message names contender and option.
    """

    name: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.kind not in _OWN:
            try:
                find(self.kind)
            except ValueError as error:
                raise ValueError(f"unknown contender {self.kind!r}; {nearest(self.kind, kinds())} {error}") from None
        for name in _RESERVED:
            if name in self.options:
                raise ValueError(f"contender {self.name!r}: {name} is the same for all contenders of a run")
        try:
            self._check()
        except (TypeError, ValueError) as error:
            raise ValueError(f"contender {self.name!r}: {error}") from None

    def _check(self) -> None:
        for name in ("n", "num_draft_tokens"):
            if name in _OWN.get(self.kind, ()):
                integer(name, self.own(name), 1, 64)
        if self.kind == "smc" and self.own("vote") not in (None, *VOTES):
            raise bad_value("vote", self.own("vote"), f"one of {listed(VOTES)}")
        if self.options.get("do_sample") is False and self.samples_always:
            raise ValueError("do_sample=false: this contender draws samples")
        temperature = self.options.get("temperature", 1.0)
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not temperature > 0:
            raise bad_value("temperature", temperature, "a number > 0")
        fields = {**self.fields, **self.sampling(None)}
        if self.is_scheme:
            SemSpecConfig(self.kind, **fields)
            return
        known = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
        for name in self.fields:
            if name not in known:
                raise ValueError(f"unknown option {name!r}; {nearest(name, [*_OWN[self.kind], *known])}")
        GenerationConfig(**fields)

    @property
    def is_scheme(self) -> bool:
        """Whether it is one of the package's schemes."""
        return self.kind in SCHEMES

    @property
    def needs_draft(self) -> bool:
        """Whether it runs the draft."""
        return self.kind not in (TARGET, MAJORITY)

    @property
    def samples_always(self) -> bool:
        """Whether it has no greedy form."""
        return self.kind in ("smc", BEST_OF, MAJORITY)

    def own(self, name: str) -> Any:
        """The option `name` that is no field of a scheme or of `GenerationConfig`."""
        return self.options.get(name, _OWN[self.kind][name])

    @property
    def fields(self) -> dict[str, Any]:
        """The options that are fields of the scheme or of `GenerationConfig`."""
        own = _OWN.get(self.kind, {})
        return {name: value for name, value in self.options.items() if name not in own}

    def sampling(self, temperature: float | None) -> dict[str, Any]:
        """The sampling options of its calls in a run at `temperature` (`None`: greedy, or 1 where it must sample).

        Nothing is cut off (`top_k=0`, `top_p=1`) unless its own options say so: all contenders face one law.
        """
        own = {name: self.fields[name] for name in ("temperature", "top_k", "top_p") if name in self.fields}
        drawn = self.fields.get("do_sample", temperature is not None or "temperature" in own)
        if not (drawn or self.samples_always):
            # The values that transformers takes for unset: others would be warned about.
            return {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0}
        return {"do_sample": True, "temperature": temperature or 1.0, "top_k": 0, "top_p": 1.0} | own

    def draws(self, temperature: float | None) -> bool:
        """Whether its text depends on the seed."""
        rules = [rule for value in self.fields.values() for rule in (value, getattr(value, "trigger", None))]
        return bool(self.sampling(temperature)["do_sample"]) or "random" in rules

    def resolved(self, temperature: float | None) -> dict[str, Any]:
        """Every option with its value, JSON-safe, for the record."""
        own = {name: self.own(name) for name in _OWN.get(self.kind, ())}
        fields = {**self.fields, **self.sampling(temperature)}
        if not self.is_scheme:
            return {**own, **fields}
        config = SemSpecConfig(self.kind, **fields)
        plain = {name: value for name, value in fields.items() if name not in (config.semspec or {})}
        return {**own, **(config.semspec or {}), **plain}


def parse_contenders(texts: str | Iterable[str], also: Iterable[Contender] = ()) -> list[Contender]:
    """The contenders that `texts` name, each text one of them or several with commas between.

    A part between commas that is `option=value` belongs to the contender before it once that has a colon; a part that
    holds a colon, or names a contender, begins the next one. Values are JSON where they are JSON, else text; a scheme
    as a value is written `{easd:penalty=1}`. The target is put first if it is not among them. `also` are appended.

    Raises:
        ValueError: as [`Contender`]; or two contenders of one name.
    """
    texts = [texts] if isinstance(texts, str) else texts
    contenders = [*(contender for text in texts for contender in _contenders(text)), *also]
    names = [contender.name for contender in contenders]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two contenders are called {name!r}: name one, as in other={name}")
    if not any(contender.kind == TARGET and not contender.options for contender in contenders):
        if TARGET in names:
            raise ValueError(f"{TARGET!r} is the name of the plain target, which all others are compared with")
        contenders.insert(0, Contender(TARGET, TARGET))
    return contenders


def reference_of(contenders: Iterable[Contender]) -> Contender:
    """The plain target among the contenders."""
    return next(contender for contender in contenders if contender.kind == TARGET and not contender.options)


def _contenders(text: str) -> Iterator[Contender]:
    parts: list[list[str]] = []
    for part in split(text, ","):
        continues = parts and len(split(parts[-1][0], ":")) > 1 and "=" in part and len(split(part, ":")) == 1
        if continues:
            parts[-1].append(part)
        else:
            parts.append([part])
    for first, *rest in parts:
        head, *options = split(first, ":", 1)
        name, *kind = split(head, "=", 1)
        pairs = dict(_option(option) for option in [*options, *rest])
        shown = ",".join([first, *rest]).strip()
        yield Contender(name.strip() if kind else shown, (kind or [name])[0].strip(), pairs)


def _option(text: str) -> tuple[str, Any]:
    name, *value = split(text, "=", 1)
    if not value or not name.strip().isidentifier():
        raise ValueError(f"option {text!r}: must be NAME=VALUE")
    return name.strip(), read_value(value[0].strip())


def read_value(text: str) -> Any:
    """A value as the command line writes it: JSON, `inf`, `{scheme:option=value,...}`, or text as it stands."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        if text.startswith("{") and text.endswith("}"):
            scheme, *options = split(text[1:-1], ":", 1)
            entries = dict(_option(option) for part in options for option in split(part, ","))
            return scheme_from_dict({"scheme": scheme.strip(), **entries})
        return float(text) if text in ("inf", "-inf") else text
    return scheme_from_dict(value) if isinstance(value, dict) and "scheme" in value else value


def split(text: str, mark: str, most: int = -1) -> list[str]:
    """`text.split(mark, most)`, blind to what stands in brackets or double quotes."""
    parts, depth, quoted = [""], 0, False
    for character in text:
        quoted ^= character == '"'
        if not quoted:
            depth += (character in _OPENING) - (character in _CLOSING)
        if character == mark and depth == 0 and not quoted and most != 0:
            parts.append("")
            most -= 1
        else:
            parts[-1] += character
    return parts
