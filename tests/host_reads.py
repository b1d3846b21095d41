"""A counter of device-to-host reads, on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose result's size or value the host must know.
READING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2"}


METHODS = ("tolist", "numpy", "item", "__bool__", "__int__", "__index__", "__float__")


class HostReads(TorchDispatchMode):
    """Counts reads outside the models' forwards: by operator, and by the methods that read without one on the CPU."""

    def __init__(self, patch: pytest.MonkeyPatch, *models: torch.nn.Module) -> None:
        super().__init__()
        self.count = 0
        self.depth = 0
        self.where: list[str] = []
        for model in models:
            model.register_forward_pre_hook(self._enter)
            model.register_forward_hook(self._leave)
        for name in METHODS:
            patch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))

    def _enter(self, *_: Any) -> None:
        self.depth += 1

    def _leave(self, *_: Any) -> None:
        self.depth -= 1

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any) -> Any:
            self._read(method.__name__)
            self.depth += 1
            try:
                return method(tensor, *args)
            finally:
                self.depth -= 1

        return call

    def _read(self, name: str) -> None:
        if self.depth == 0:
            self.count += 1
            self.where.append(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        boolean = name in ("aten::index", "aten::index_put_", "aten::index_put") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in READING or boolean:
            self._read(name)
        return func(*args, **(kwargs or {}))
