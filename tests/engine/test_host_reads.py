"""One device-to-host read a round: anything more would stall an accelerator (counted here on the CPU)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_semspec import SemSpecConfig
from tests.helpers import EXACT, WEAK_DRAFTS, assisted
from tests.models import draft_of, prompts, tiny, tokenizer

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]

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


def count(kind: str, name: str, limit: int, lengths: tuple[int, ...], **fields: Any) -> tuple[int, int, list[str]]:
    target = tiny("gemma3", 0)
    draft = draft_of(target, name)
    inputs = prompts(lengths)
    with pytest.MonkeyPatch.context() as patch, HostReads(patch, target, draft) as reads:
        output = assisted(target, draft, inputs, kind, max_new_tokens=limit, return_dict_in_generate=True, **fields)
    # A token that the draft of parse or semantic writes alone is a round of its own.
    alone = {"parse": limit, "semantic": output.stats.draft_forwards}.get(kind, 0)
    return reads.count, output.stats.target_forwards + alone, reads.where


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8},
        {"num_draft_tokens": "auto", "output_scores": True},
        {"repetition_penalty": 1.2},
    ],
)
@pytest.mark.parametrize("lengths", [(5,), (3, 9, 6)])
@pytest.mark.parametrize("kind", EXACT)
def test_one_host_read_a_round(kind: str, lengths: tuple[int, ...], fields: dict[str, Any]) -> None:
    """Reads of the call itself (checks of its arguments) are the same in a short and in a long one."""
    if kind == "smc" and "num_draft_tokens" in fields:
        fields = {**fields, "num_draft_tokens": 2}
    short, few, _ = count(kind, "near", 12, lengths, **fields)
    long, many, where = count(kind, "near", 48, lengths, **fields)
    assert many > few
    assert long - short <= many - few, where


@pytest.mark.parametrize("kind", ["ngram", "ngram+model", "foreign"])
def test_one_host_read_a_round_with_other_drafts(kind: str) -> None:
    """What is looked up, and what a draft of another tokenizer reads, is known from the ids that were committed."""
    reads, forwards = [], []
    for limit in (12, 40):
        target = tiny("llama", 0)
        call: dict[str, Any] = {} if kind == "ngram" else {"assistant_model": draft_of(target, "near")}
        if kind == "foreign":
            call |= {"tokenizer": tokenizer(), "assistant_tokenizer": tokenizer(permute=3)}
        config = SemSpecConfig(
            "lossless",
            draft="model" if kind == "foreign" else kind,
            max_new_tokens=limit,
            return_dict_in_generate=True,
        )
        models = [model for model in (target, call.get("assistant_model")) if model is not None]
        with pytest.MonkeyPatch.context() as patch, HostReads(patch, *models) as counted:
            output = target.generate(**prompts((3, 9, 6)), **call, generation_config=config)
        reads.append(counted.count)
        forwards.append(output.stats.target_forwards)
    assert reads[1] - reads[0] <= forwards[1] - forwards[0], counted.where
