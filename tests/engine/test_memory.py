"""What calls keep: nothing from one to the next, and within one little more than plain decoding does."""

import copy
import ctypes
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import WEAK_DRAFTS, assisted, plain
from tests.models import draft_of, prompts, tiny

pytestmark = WEAK_DRAFTS

STATM = Path("/proc/self/statm")
SCHEMES = (
    ("lossless", {}),
    ("easd", {"do_sample": True}),
    ("chains", {"do_sample": True, "compile_draft": True}),
    ("smc", {}),
    ("semantic", {}),
    ("parse", {}),
)


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made inside that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def _freed(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {id(part.untyped_storage()) for part in _tensors((args, kwargs))}
        for part in _tensors(out):
            storage = part.untyped_storage()
            if storage not in self.seen and id(storage) not in given:
                self.seen.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (part for part in torch.utils._pytree.tree_leaves(tree) if isinstance(part, torch.Tensor))


def peak(run: Callable[[], Any]) -> int:
    gc.collect()
    with LiveBytes() as live:
        run()
    return live.peak


def resident() -> float:
    """Megabytes of this process that are in memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what earlier tests have freed would hide the growth
    return int(STATM.read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def growth(calls: int, keep: list[Any] | None = None) -> float:
    """Megabytes that so many calls, all schemes in turns, take more than 20 did; `keep` gets what they return."""
    target = tiny("llama", 0, vocab=4096, hidden=32, layers=1, dtype=torch.float32)
    draft, inputs = draft_of(target, "near"), prompts((6, 6))
    before = 0.0
    for number in range(calls):
        if number == 20:
            before = resident()
        kind, fields = SCHEMES[number % len(SCHEMES)]
        scored = {"return_dict_in_generate": True, "output_scores": True}
        output = assisted(target, draft, inputs, kind, max_new_tokens=3, **scored, **fields)
        if keep is not None:
            keep.append(output)
    return resident() - before


@pytest.mark.skipif(
    not STATM.exists() or not hasattr(ctypes.CDLL(None), "malloc_trim"),
    reason="reads a process's memory as Linux with glibc shows it",
)
def test_two_hundred_calls_leave_the_process_no_larger_than_twenty() -> None:
    """Three columns of scores of two rows are 0.1 MB a call: kept, they show after 60 calls already."""
    kept: list[Any] = []
    assert growth(80, kept) > 5
    kept.clear()
    assert growth(200) < 4


SMALL = {"vocab": 1000, "hidden": 64, "positions": 512, "dtype": torch.float32}
ROWS, PROMPT, NEW, GAMMA = 2, 40, 60, 3
COLUMN = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, bytes


@pytest.mark.parametrize(("kind", "fields"), SCHEMES[:4], ids=[kind for kind, _ in SCHEMES[:4]])
def test_a_call_needs_little_more_than_plain_decoding(kind: str, fields: dict[str, Any]) -> None:
    """The caches of both models, half of them again while they grow or are repeated, and ten blocks of laws.

    What `parse` needs to judge packed prefixes is bounded by its own field.
    """
    target = tiny("llama", 0, **SMALL)
    draft, inputs = draft_of(target, "near"), prompts((PROMPT,) * ROWS)
    chains = 3 if kind in ("chains", "smc") else 1
    caches = 2 * ROWS * chains * COLUMN * (-(-(PROMPT + NEW) // 64) * 64)
    laws = ROWS * chains * (GAMMA + 1) * SMALL["vocab"] * 4
    allowed = peak(lambda: plain(target, inputs, max_new_tokens=NEW)) + 1.5 * caches + 10 * laws

    def run(**more: Any) -> None:
        assisted(target, draft, inputs, kind, max_new_tokens=NEW, **fields, **more)

    assert peak(run) < allowed
    if kind == "lossless":
        returned = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        assert peak(lambda: run(**returned)) > allowed, "what is returned is counted too"


def live_tensors() -> tuple[int, int]:
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
    return len(tensors), sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.seam
@pytest.mark.parametrize("kind", ["easd", "chains", "smc", "parse"])
def test_ui53_nothing_outlives_a_call(kind: str) -> None:
    target = tiny("llama", 2)
    draft = draft_of(target, "near")
    inputs = prompts((7, 3), seed=2)

    def call() -> None:
        assisted(target, draft, inputs, kind, max_new_tokens=4, output_scores=True, return_dict_in_generate=True)

    call()
    kept = [(set(vars(part)), set(vars(part.config)), part.generation_config.to_dict()) for part in (target, draft)]
    settings = [copy.deepcopy(part.config.to_dict()) for part in (target, draft)]
    before = live_tensors()
    for _ in range(30):
        call()
    assert live_tensors() == before
    assert kept == [
        (set(vars(part)), set(vars(part.config)), part.generation_config.to_dict()) for part in (target, draft)
    ]
    assert settings == [part.config.to_dict() for part in (target, draft)]
    assert all(not m._forward_hooks and not m._forward_pre_hooks for part in (target, draft) for m in part.modules())
