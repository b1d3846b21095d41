"""One rank of several: decodes what tests/engine/test_ranks.py compares, and writes it to a file of its own.

`python -m tests.engine.ranks_worker FOLDER` with the variables that torchrun sets.
"""

import contextlib
import copy
import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_semspec import SemSpecConfig
from hf_semspec.engine import model as engine_model
from hf_semspec.engine import processors, rounds, stopping
from tests.helpers import JUDGE
from tests.models import draft_of, prompts, tiny, tokenizer

SEGMENTS = {"segment_stop": None, "think_end": None, "max_segment_tokens": 4, "revise_chunk": 2}
SAMPLED = {"do_sample": True, "top_k": 30}
CALLS: dict[str, dict[str, Any]] = {
    "lossless": {},
    "sampled": {"scheme": "lossless", **SAMPLED},
    "auto": {"scheme": "lossless", "num_draft_tokens": "auto"},
    "ngram": {"scheme": "lossless", "draft": "ngram+model", **SAMPLED},
    "chains": {"scheme": "lossless", "num_chains": 3, **SAMPLED},
    "easd": {**SAMPLED, "target_entropy_threshold": 0.5, "draft_entropy_threshold": 0.5, "overlap_threshold": 0.2},
    "smc": {"num_particles": 4, "num_draft_tokens": 3, "top_k": 30},
    "parse": {**JUDGE, **SAMPLED, "accept_threshold": 0.5, "prefix_threshold": 0.5},
    "semantic": {**SEGMENTS, **SAMPLED, "scorer": "sequence", "first_segment": "draft"},
}


FEW = ("lossless", "sampled", "chains", "easd", "smc", "parse", "semantic")
FEWER = ("lossless", "sampled", "smc", "parse")


def decoded(
    target: Any, draft: Any, name: str, inputs: Any, *, new: int = 12, eos: int | None = 5, **more: Any
) -> list[list[int]]:
    """The rows of one call, new tokens only."""
    fields = dict(CALLS[name])
    config = SemSpecConfig(fields.pop("scheme", name), max_new_tokens=new, eos_token_id=eos, pad_token_id=0, **fields)
    words = {"tokenizer": tokenizer()} if name in ("parse", "semantic") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = target.generate(**inputs, **words, **more, assistant_model=draft, generation_config=config)
    return ids[:, inputs["input_ids"].shape[1] :].tolist()


def disturbed(model: PreTrainedModel, rank: int) -> PreTrainedModel:
    """A copy that is another on every rank but the first."""
    return draft_of(model, "near", seed=10 + rank, noise=0.1) if rank else copy.deepcopy(model)


class Stop(Exception):
    pass


class Collected:
    """A streamer."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        pass


@contextlib.contextmanager
def not_shared() -> Iterator[None]:
    """Every rank decides for itself."""
    with contextlib.ExitStack() as stack:
        for module in (engine_model, rounds, stopping, processors):
            for name in ("share", "share_value"):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, lambda value: value))
        yield


def first_rounds(target: Any, draft: Any, inputs: Any) -> list[int]:
    """What is decoded in the first six passes of the target, which are of one shape whatever is accepted: without the
    broadcasts ranks would wait for one another for ever where their texts end."""
    seen, streamer = [0], Collected()

    def stop(*args: Any) -> None:
        seen[0] += 1
        if seen[0] > 6:
            raise Stop

    handle = target.register_forward_pre_hook(stop)
    with contextlib.suppress(Stop):
        decoded(target, draft, "sampled", inputs, new=60, eos=None, streamer=streamer)
    handle.remove()
    return streamer.ids


def tensor_parallel(rank: int, size: int, root: Path) -> dict[str, Any]:
    """Calls of a pair of which one model or both are sharded; `alone` is what one process decodes greedily."""
    target = tiny(heads=4, kv_heads=4, seed=3)
    draft = draft_of(target, "near")
    if rank == 0:
        target.save_pretrained(root / "target")
        draft.save_pretrained(root / "draft")
    distributed.barrier()

    def sharded(name: str, **kwargs: Any) -> Any:
        options = {"dtype": torch.float64, "attn_implementation": "eager", "tp_plan": "auto", **kwargs}
        return AutoModelForCausalLM.from_pretrained(root / name, **options).eval()

    inputs, wide, slim = prompts((5, 9)), sharded("target"), sharded("draft")
    found: dict[str, Any] = {"alone": decoded(target, draft, "lossless", inputs)}
    torch.manual_seed(rank)
    own = disturbed(draft, rank)
    for name in CALLS if size > 2 else FEW:
        found[f"target {name}"] = decoded(wide, own, name, inputs)
    for name in ("lossless", "sampled"):
        found[f"draft {name}"] = decoded(disturbed(target, rank), slim, name, inputs)
        found[f"both {name}"] = decoded(wide, slim, name, inputs)
    one = prompts((5,))
    found["others out of time"] = decoded(wide, own, "lossless", one, max_time=1e-9 if rank else 1e9)
    found["out of time"] = decoded(wide, own, "lossless", one, max_time=1e9 if rank else 1e-9)
    found["first rounds"] = first_rounds(wide, own, one)
    with not_shared():
        found["control"] = first_rounds(wide, own, one)
    if size == 4:  # two groups, each with prompts of its own, whose ranks hold half of each layer's half
        group, whole = rank // 2, prompts((5 + rank // 2, 7)[: 1 + rank // 2], seed=rank // 2)
        from transformers.distributed import DistributedConfig

        halves = sharded("target", tp_plan=None, distributed_config=DistributedConfig(tp_size=2, fsdp_size=2))
        for name in ("lossless", "sampled", "smc"):
            found[f"groups {name}"] = decoded(halves, own, name, whole, new=8 + 8 * group)
        found["groups alone"] = decoded(target, draft, "lossless", whole, new=8 + 8 * group)
    return found


def shard(model: PreTrainedModel) -> PreTrainedModel:
    """By FSDP2."""
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def shard_as_before(model: PreTrainedModel) -> FullyShardedDataParallel:
    """By FSDP1."""
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda one: one in list(model.model.layers))
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))


def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    raise Stop


def fully_sharded(rank: int, size: int, root: Path) -> dict[str, Any]:
    """Calls with prompts of each rank's own, with models that are whole and with sharded ones."""
    target = tiny(seed=3)
    draft = draft_of(target, "near")
    inputs, new = prompts((4 + rank, 6), seed=rank), 4 + 9 * rank % 20

    def calls(target: Any, draft: Any, **more: Any) -> dict[str, Any]:
        found = {}
        for name in CALLS if size > 2 else FEWER:
            torch.manual_seed(rank)
            found[name] = decoded(target, draft, name, inputs, new=new, **more)
        return found

    found = {"whole": calls(target, draft)}
    pair = shard(copy.deepcopy(target)), shard(copy.deepcopy(draft))
    counts = [0, 0]

    def count(index: int) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            counts[index] += 1

        return hook

    for index, one in enumerate(pair):
        one.register_forward_pre_hook(count(index))
    found["sharded"] = calls(*pair, synced_gpus=True)
    found["forwards"] = list(counts)
    found["whole draft"] = decoded(pair[0], draft, "lossless", inputs, new=new, synced_gpus=True)
    try:
        fails = {"logits_processor": [broken]} if rank == 0 else {}
        found["beside a failure"] = decoded(*pair, "lossless", inputs, new=new, synced_gpus=True, **fails)
    except Stop:
        found["beside a failure"] = "failed"
    if size == 4:
        old = [shard_as_before(copy.deepcopy(one)) for one in (target, draft)]
        with contextlib.ExitStack() as stack:
            for one in old:
                one(input_ids=inputs["input_ids"])  # the first forward of all goes through the wrapper
                stack.enter_context(FullyShardedDataParallel.summon_full_params(one, recurse=False, writeback=False))
            found["sharded as before"] = calls(old[0], old[1].module, synced_gpus=True)
    return found


if __name__ == "__main__":
    rank, size, root = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    results = {part.__name__: part(rank, size, root) for part in (tensor_parallel, fully_sharded)}
    (root / f"rank{rank}.json").write_text(json.dumps(results))
    distributed.barrier()
    distributed.destroy_process_group()
