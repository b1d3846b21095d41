"""Where a round's time goes: forwards of either model, and the named parts of everything else."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hf_semspec.bench.accounting import wait
from hf_semspec.bench.progress import Progress, silent
from hf_semspec.bench.rivals import wanted_way
from hf_semspec.bench.subject import Subject
from hf_semspec.evaluation.contenders import Contender as Wanted

DRAFT, TARGET, WRITES = "draft forwards", "target forwards", "cache writes"
LOOP, PREPARES = "the rest of the loop", "`generate` prepares"
# Part -> what is timed for it, as module:name or module:class.name. A part's time is its own: what it calls that has
# a part too is not counted twice. The cache is written inside the forwards, and taken out of them here.
PARTS: dict[str, tuple[str, ...]] = {
    WRITES: ("engine.cache:RaggedCache.update",),
    "cache moves": (
        "engine.cache:RaggedCache.plan",
        "engine.cache:RaggedCache.select",
        "engine.cache:RaggedCache.copy_rows",
        "engine.cache:RaggedCache.load",
        "engine.cache:RaggedCache.rows",
    ),
    "masks": ("engine.masks:Masks.__call__", "engine.masks:Masks.packed"),
    "ids": ("engine.tokens:Canvas.read", "engine.tokens:Canvas.write", "engine.tokens:Canvas.copy_chains"),
    "processors": ("engine.processors:Processors.__call__", "engine.processors:BlockProcessors.__call__"),
    "drawing": (
        "engine.processors:CallRandomness.draw",
        "engine.processors:CallRandomness.uniforms",
        "drafts.chain:ChainGenerator._pick",
        "schemes.smc.drafts:ParticleGenerator._pick",
    ),
    "laws": (
        "engine.rounds:Speculation._score",
        "schemes.smc.population:Particles._scored",
        "drafts.chain:ChainGenerator._draft",
    ),
    "acceptance": ("schemes.lossless.decode:accept", "schemes.easd.decode:accept"),
    "entropies": ("schemes.easd.decode:uncertain_agreements",),
    "weights and resampling": (
        "schemes.smc.decode:log_increments",
        "schemes.smc.decode:resample",
        "schemes.smc.decode:log_normaliser",
    ),
    "output": ("engine.call:CallState.output", "schemes.smc.population:Particles.output"),
    "host read": ("engine.rounds:read_columns", "schemes.smc.population:read_columns"),
    "ends": ("engine.stopping:StopRules.cut",),
    "commit": ("engine.rounds:Speculation.commit", "schemes.smc.population:Particles.commit"),
    LOOP: ("integration.register:generation_utils.GenerationMixin._semspec_decoding",),
}


class Clock:
    """Seconds by part, each part's own: while an inner part runs, the outer one's clock stands still."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._since = 0.0

    def enter(self, part: str) -> None:
        """Begin `part` inside what runs now."""
        self._book()
        self._running.append(part)

    def leave(self) -> None:
        """End the innermost part."""
        self._book()
        self._running.pop()

    def _book(self) -> None:
        now = time.perf_counter()
        if self._running:
            part = self._running[-1]
            self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now

    def timed(self, function: Any, part: str, device: torch.device | None = None) -> Any:
        """`function`, timed as `part`; with a `device` its work is waited for."""

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if device is not None:
                wait(device)
            self.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                if device is not None:
                    wait(device)
                self.leave()

        return wrapped


@contextmanager
def clocked(subject: Subject) -> Iterator[Clock]:
    """A clock on the forwards of both models and on every part of [`PARTS`]."""
    clock, changed = Clock(), []
    for part, names in PARTS.items():
        for name in names:
            owner, attribute = resolve(name) or (None, "")
            if owner is None:
                continue
            changed.append((owner, attribute, getattr(owner, attribute)))
            setattr(owner, attribute, clock.timed(getattr(owner, attribute), part))
    models = ((subject.model, TARGET), (subject.draft, DRAFT))
    for model, part in models:
        model.forward = clock.timed(model.forward, part, model.device)
    try:
        yield clock
    finally:
        for owner, attribute, original in reversed(changed):
            setattr(owner, attribute, original)
        for model, _ in models:
            del model.forward


def resolve(name: str) -> tuple[Any, str] | None:
    """What holds the function that `name` of [`PARTS`] stands for, and the attribute; `None` where it is gone, whose
    time then counts as that of whoever does its work."""
    module, path = name.split(":")
    try:
        owner: Any = importlib.import_module(f"hf_semspec.{module}")
    except ModuleNotFoundError:
        return None
    *outer, attribute = path.split(".")
    for each in outer:
        owner = getattr(owner, each, None)
    # Its own attribute: an inherited one would be timed twice, and put back in the wrong place.
    return (owner, attribute) if owner is not None and attribute in vars(owner) else None


def profile(
    subject: Subject,
    wanted: Sequence[Wanted],
    *,
    new_tokens: int = 64,
    repeats: int = 3,
    batch: int = 1,
    seed: int = 0,
    report: Progress = silent,
) -> list[dict[str, Any]]:
    """Split a round of every scheme into its parts, over all rounds of a call and the median call.

    Args:
        subject (`Subject`): the pair.
        wanted (`Sequence[Contender]`): schemes.
        new_tokens (`int`): of each call.
        repeats (`int`): calls, after one that is dropped.
        batch (`int`): rows.
        seed (`int`): of the draws.
        report (`Callable[[str], None]`): told what runs next.

    Returns:
        `list[dict]`: `name`, `rounds`, `milliseconds` a round by part (prefill and what `generate` prepares are dealt
        out to the rounds), and `outside`, the share of the time outside both models' forwards.
    """
    rows = []
    given = subject.batch(batch, 0)
    for each in wanted:
        way = wanted_way(subject, each)
        calls = []
        for turn in range(-1, repeats):
            report(f"profile of {way.name}, call {max(turn + 1, 0)} of {repeats}")
            torch.manual_seed(seed)
            with clocked(subject) as clock:
                clock.enter(PREPARES)
                output = way.decode(given, new_tokens)
                clock.leave()
            if turn >= 0:
                calls.append((sum(clock.seconds.values()), clock.seconds, output))
        total, seconds, output = sorted(calls, key=lambda call: call[0])[len(calls) // 2]
        rounds = max(row.rounds for row in output.stats.rows)
        inside = sum(seconds.get(part, 0.0) for part in (DRAFT, TARGET, WRITES))
        rows.append(
            {
                "name": way.name,
                "options": way.options,
                "rounds": rounds,
                "target_forwards": output.stats.target_forwards,
                "draft_forwards": output.stats.draft_forwards,
                "milliseconds": {part: 1e3 * value / max(rounds, 1) for part, value in seconds.items()},
                "outside": 1 - inside / total,
            }
        )
    return rows
