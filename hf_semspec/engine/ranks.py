"""Processes that decode together: those that hold one model between them, and those that hold it for prompts of their
own each.

Under tensor parallelism all ranks decode the same prompts. What models compute may differ by a bit between them, and
clocks do in any case, so that each would decide for itself: rank 0's logits, seed, choices and verdicts are taken by
all. Where weights are sharded (FSDP, ZeRO-3) every rank must take part in each forward of any, though it decodes other
prompts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import distributed

from .hooks import compute_device

T = TypeVar("T")


class Turns:
    """Lets the forwards of several ranks run together: whoever has none of the model whose turn it is feeds it one
    token that means nothing.

    The draft comes first, so that a pass of the target is run once all ranks are ready for it.

    Args:
        target, draft: the models of this call; the draft may be `None`.
    """

    DONE, TARGET, DRAFT = range(3)

    def __init__(self, target: Any, draft: Any) -> None:
        self.target, self.draft = target, draft
        self.device = compute_device(target)

    def take(self, model: Any) -> None:
        """Wait until it is the turn of `model`."""
        own = self.DRAFT if model is self.draft else self.TARGET
        while (turn := self._turn(own)) != own:
            self._go_along(turn)

    def finish(self) -> None:
        """Go along until all ranks are done."""
        while turn := self._turn(self.DONE):
            self._go_along(turn)

    def _turn(self, wanted: int) -> int:
        wants = torch.tensor(wanted, device=self.device)
        distributed.all_reduce(wants, distributed.ReduceOp.MAX)
        return int(wants)

    def _go_along(self, turn: int) -> None:
        model = self.draft if turn == self.DRAFT else self.target
        ids = torch.zeros((1, 1), dtype=torch.long, device=compute_device(model))
        with torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)


_group: ContextVar[Any] = ContextVar("group", default=None)
_turns: ContextVar[Turns | None] = ContextVar("turns", default=None)


@contextmanager
def in_step(target: Any, draft: Any, synced: bool) -> Iterator[None]:
    """A call whose ranks keep in step; nothing where there is one process.

    Args:
        target, draft: the models of the call; the draft may be `None`.
        synced (`bool`): whether ranks that are done go along with the forwards of the others, also where the call
            fails here.
    """
    turns = Turns(target, draft) if synced and world_size() > 1 else None
    tokens = _group.set(tensor_parallel_group(target, draft)), _turns.set(turns)
    try:
        yield
    finally:
        _group.reset(tokens[0])
        _turns.reset(tokens[1])
        if turns is not None:
            turns.finish()


def world_size() -> int:
    """How many processes there are."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def tensor_parallel_group(*models: Any) -> Any:
    """The processes that hold one of `models` between them, of several groups the largest; `None` where each holds
    its own."""
    sharded = [model for model in models if (getattr(model, "_tp_size", None) or 1) > 1]
    if not sharded or world_size() == 1:
        return None
    mesh = getattr(max(sharded, key=lambda model: int(model._tp_size)), "_device_mesh", None)
    if mesh is None:
        return distributed.group.WORLD
    return (mesh["tp"] if mesh.ndim > 1 else mesh).get_group()


def share(values: T) -> T:
    """What the group's rank 0 has for `values`: a tensor, `None`, or a named tuple of these."""
    group = _group.get()
    return values if group is None else _of_first(values, group)


def _of_first(values: Any, group: Any) -> Any:
    if values is None:
        return None
    if isinstance(values, tuple):
        return type(values)(*(_of_first(part, group) for part in values))
    with torch.inference_mode() if values.is_inference() else torch.no_grad():
        values = values.contiguous()
        distributed.broadcast(values, src=distributed.get_global_rank(group, 0), group=group)
    return values


def share_value(value: T) -> T:
    """What the group's rank 0 has for `value`, a number or flag on the host."""
    group = _group.get()
    if group is None:
        return value
    shared = [value]
    distributed.broadcast_object_list(shared, src=distributed.get_global_rank(group, 0), group=group)
    return shared[0]


def take_turn(model: Any) -> None:
    """Call before each forward of `model`: where ranks go along with one another, wait for its turn."""
    turns = _turns.get()
    if turns is not None:
        turns.take(model)


def takes_turns() -> bool:
    """Whether ranks go along with one another's forwards."""
    return _turns.get() is not None
