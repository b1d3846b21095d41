"""What rounds of a pair take, measured where they run anyway, and kept for as long as both models live."""

from __future__ import annotations

import time
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .costs import CostTable

_tables: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[Any, CostTable]]] = WeakKeyDictionary()


def costs_of(target: Any, draft: Any, *setting: Any) -> CostTable:
    """The table of a pair as it is now: another dtype or device, or another `setting`, has one of its own."""
    tables = _tables.setdefault(target, WeakKeyDictionary()).setdefault(draft, {})
    key = (str(pair_of(target, draft)), *setting)
    return tables.setdefault(key, CostTable())


def pair_of(target: Any, draft: Any) -> dict[str, Any]:
    """What tells a pair from others, JSON-safe, target and draft: number of parameters, dtype, kind of device."""
    models = target, draft
    return {
        "parameters": [sum(weight.numel() for weight in getattr(model, "parameters", tuple)()) for model in models],
        "dtype": [str(model.dtype).removeprefix("torch.") for model in models],
        "device": [model.device.type for model in models],
    }


def check_pair(profile: dict[str, Any], target: Any, draft: Any) -> None:
    """Refuse a `cost_profile` of another pair; one that names none is taken.

    Raises:
        ValueError: names what differs.
    """
    here = pair_of(target, draft)
    for name, value in profile.get("pair", {}).items():
        if name in here and list(value) != here[name]:
            raise ValueError(
                f"`cost_profile` was measured with a target and draft of {name} {list(value)}, and this pair's are "
                f"{here[name]}: run `hf-semspec check --save FILE` with this pair, or leave it out to have it measured"
            )


class RoundClock:
    """Measures rounds into a table: a round lasts until its decision is on the host, so all its work is done by then.

    On CUDA the time of the drafting is what the device says, read once the round is over; on other accelerators it is
    that to queue it.

    Args:
        costs: where it is put.
        device: of the draft.
    """

    def __init__(self, costs: CostTable, device: torch.device) -> None:
        self.costs = costs
        self.device = device
        self._rows = self._width = self._forwards = 0
        self._began: float | None = None
        self._marks: list[Any] = []

    def start(self, rows: int, width: int) -> None:
        """A round begins, of a pass over `width` tokens in each of `rows` rows."""
        self._rows, self._width, self._forwards = rows, width, 0
        self._began, self._marks = time.perf_counter(), []
        self.mark()

    def mark(self) -> None:
        """The drafting begins, or is over."""
        if self.device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        with torch.cuda.device(self.device):
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        self._marks.append(event)

    def drafted(self, forwards: int) -> None:
        """The drafting is over, and took so many forwards of a common kind; 0 if it had more to read."""
        self._forwards = forwards
        if self._began is not None:
            self.mark()

    def stop(self) -> None:
        """The round is over, if one was begun."""
        if self._began is None:
            return
        whole, self._began = time.perf_counter() - self._began, None
        drafting = 0.0
        if len(self._marks) == 2:
            first, last = self._marks
            if self.device.type == "cuda" and not last.query():
                return
            drafting = first.elapsed_time(last) / 1e3 if self.device.type == "cuda" else last - first
        self.costs.add(self._rows, self._width, max(whole - drafting, 1e-9))
        if self._forwards:
            self.costs.add_draft(self._rows, max(drafting / self._forwards, 1e-9))
