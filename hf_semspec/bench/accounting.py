"""What a run did beside its time: forwards of either model and their seconds, peak memory. Never in a timed run."""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

STATUS, RESET_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class Forwards:
    """Calls of one model.

    Args:
        calls (`int`): forwards.
        tokens (`int`): tokens they read, summed over rows.
        seconds (`float`): wall time inside them, the device's work included.
    """

    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass
class Account:
    """One accounted run.

    Args:
        target, draft (`Forwards`): of either model.
        seconds (`float`): wall time of the whole run.
        peak_bytes (`int`, *optional*): see [`peak_memory`].
    """

    target: Forwards = field(default_factory=Forwards)
    draft: Forwards = field(default_factory=Forwards)
    seconds: float = 0.0
    peak_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: forwards, shares of the time, memory."""
        whole = self.seconds or 1.0
        shares = {"draft": self.draft.seconds / whole, "target": self.target.seconds / whole}
        return {
            "target_forwards": self.target.calls,
            "draft_forwards": self.draft.calls,
            "target_tokens": self.target.tokens,
            "draft_tokens": self.draft.tokens,
            "shares": {**shares, "rest": 1.0 - sum(shares.values())},
            "peak_bytes": self.peak_bytes,
        }


@contextmanager
def accounted(model: PreTrainedModel, draft: PreTrainedModel) -> Iterator[Account]:
    """Count and time the forwards of both models inside the block, and its peak memory.

    `forward` is wrapped on the instance. A hook would do otherwise than a plain run: models with hooks are kept out
    of inference mode.
    """
    account = Account()
    watched = [(model, account.target)] + ([(draft, account.draft)] if draft is not model else [])
    for each, record in watched:
        each.forward = _timed(each.forward, record, each.device)
    start = time.perf_counter()
    try:
        with peak_memory(model.device) as peak:
            start = time.perf_counter()
            yield account
            account.seconds = time.perf_counter() - start
    finally:
        for each, _ in watched:
            del each.forward
    account.peak_bytes = peak.value


def _timed(forward: Any, record: Forwards, device: torch.device) -> Any:
    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        wait(device)
        start = time.perf_counter()
        output = forward(*args, **kwargs)
        wait(device)
        record.seconds += time.perf_counter() - start
        record.calls += 1
        ids = kwargs.get("input_ids", args[0] if args else None)
        record.tokens += 0 if ids is None else ids.numel()
        return output

    return wrapped


def wait(device: torch.device) -> None:
    """Let the device finish what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Peak:
    """The most memory that a block had beside what there was before it, in bytes; `None` where it cannot be told."""

    value: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Peak memory of the block, less what was in use before it.

    On CUDA the allocator's peak. On the CPU the growth of the process's resident set to its high-water mark: freed
    memory is given back to the system and the mark is reset first, so that what earlier runs left behind neither
    hides nor inflates it. Linux with glibc only; `None` elsewhere.
    """
    peak = Peak()
    gc.collect(1)  # what recent runs left in cycles; a whole collection takes longer than a short run
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.value = torch.cuda.max_memory_allocated(device) - before
        return
    held = _reset_peak()
    yield peak
    if held is not None:
        peak.value = max(0, _status("VmHWM") - held)


def _reset_peak() -> int | None:
    """Resident bytes after freed memory was given back and the high-water mark reset; `None` where that cannot be."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        ctypes.CDLL(None).malloc_trim(0)
        RESET_PEAK.write_text("5")
    except (AttributeError, OSError):
        return None
    return _status("VmRSS")


def _status(key: str) -> int:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
