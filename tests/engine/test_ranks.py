import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from hf_semspec import SemSpecConfig
from hf_semspec.engine import ranks
from tests.engine.ranks_worker import CALLS, FEW, FEWER
from tests.helpers import VERSION, refuses
from tests.models import draft_of, prompts, tiny

SECONDS = 200
Found = list[dict[str, Any]]

pytestmark = pytest.mark.skipif(VERSION.major < 5, reason="the worker shards as transformers 5 does")


def run(size: int, root: Path) -> list[dict[str, dict[str, Any]]]:
    """What each of `size` gloo processes has found; four are started as a user would."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    arguments = ["-m", "tests.engine.ranks_worker", str(root)]
    if size > 2:
        launched = [["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), *arguments]]
        own = [environment]
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        environment |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        launched = [arguments] * size
        own = [{**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    started = [
        subprocess.Popen(
            [sys.executable, *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command, env in zip(launched, own, strict=True)
    ]
    try:
        for process in started:
            said, _ = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, said[-4000:]
    finally:
        for process in started:
            process.kill()
    return [json.loads((root / f"rank{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.grid)])
def size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def found(size: int, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run(size, tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def sharing(found: list[dict[str, dict[str, Any]]]) -> Found:
    return [one["tensor_parallel"] for one in found]


@pytest.fixture
def synced(found: list[dict[str, dict[str, Any]]]) -> Found:
    return [one["fully_sharded"] for one in found]


class TestTensorParallel:
    """The ranks' seeds, and every weight that is not sharded, differ."""

    def test_every_rank_commits_the_same_tokens(self, sharing: Found) -> None:
        names = [f"target {name}" for name in (CALLS if len(sharing) > 2 else FEW)]
        names += [f"{which} {name}" for which in ("draft", "both") for name in ("lossless", "sampled")]
        for name in [*names, "first rounds"]:
            assert sharing[0][name] == sharing[-1][name] != [], name
            assert all(one[name] == sharing[0][name] for one in sharing), name

    def test_greedy_tokens_are_those_of_one_process(self, sharing: Found) -> None:
        for which in ("target", "draft", "both"):
            assert sharing[0][f"{which} lossless"] == sharing[0]["alone"], which

    def test_rank_0_watches_the_clock(self, sharing: Found) -> None:
        for one in sharing:
            assert len(one["out of time"][0]) == 1
            assert len(one["others out of time"][0]) == 12

    def test_without_the_broadcasts_ranks_decide_for_themselves(self, sharing: Found) -> None:
        assert any(one["control"] != sharing[0]["control"] for one in sharing)

    def test_groups_keep_to_themselves(self, sharing: Found) -> None:
        if len(sharing) < 4:
            pytest.skip("two groups take four processes")
        for name in ("lossless", "sampled", "smc"):
            rows = [one[f"groups {name}"] for one in sharing]
            assert rows[0] == rows[1] and rows[2] == rows[3] and rows[0] != rows[2], name
        assert all(one["groups lossless"] == one["groups alone"] for one in sharing)


class TestSyncedGPUs:
    """Prompts and lengths of each rank's own, and one rank that fails."""

    def test_tokens_are_those_of_whole_models(self, synced: Found) -> None:
        names = list(CALLS) if len(synced) > 2 else list(FEWER)
        for one in synced:
            assert list(one["whole"]) == names
            assert one["sharded"] == one["whole"]
            assert one["whole draft"] == one["whole"]["lossless"]
            assert one.get("sharded as before", one["whole"]) == one["whole"]
        assert ("sharded as before" in synced[0]) == (len(synced) > 2)

    def test_all_ranks_run_the_same_forwards_for_texts_of_unequal_length(self, synced: Found) -> None:
        assert all(one["forwards"] == synced[0]["forwards"] for one in synced)
        lengths = [len(one["whole"]["lossless"][0]) for one in synced]
        assert len(set(lengths)) > 1

    def test_a_rank_that_fails_goes_along_until_the_others_are_done(self, synced: Found) -> None:
        assert synced[0]["beside a failure"] == "failed"
        for one in synced[1:]:
            assert one["beside a failure"] == one["whole"]["lossless"]


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda *_: 2)


@pytest.mark.usefixtures("two_processes")
def test_synced_gpus_refuses_what_text_alone_cannot_go_along_with() -> None:
    target = tiny()
    config = SemSpecConfig("lossless", max_new_tokens=4, compile_draft=True)
    call = {"generation_config": config, "synced_gpus": True}
    refuses(target, draft_of(target, "near"), prompts((4,)), "synced_gpus=True .* compile_draft=True", **call)
    call["generation_config"] = SemSpecConfig("lossless", max_new_tokens=4)
    target.config.vision_config = target.config
    refuses(target, draft_of(target, "near"), prompts((4,)), "synced_gpus=True .* a model with images", **call)


class Mesh:
    """What a model's mesh looks like."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.ndim = len(names)

    def __getitem__(self, name: str) -> "Mesh":
        return Mesh(name)

    def get_group(self) -> str:
        (name,) = self.names
        return name


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize(("names", "group"), [(("tp",), "tp"), (("pp", "fsdp", "tp"), "tp"), (("other",), "other")])
def test_the_group_is_that_of_the_models_mesh(names: tuple[str, ...], group: str) -> None:
    whole, sharded = tiny(), tiny()
    sharded._tp_size, sharded._device_mesh = 2, Mesh(*names)
    assert ranks.tensor_parallel_group(whole, None) is None
    assert ranks.tensor_parallel_group(whole, sharded) == ranks.tensor_parallel_group(sharded, None) == group


def test_one_process_shares_and_waits_for_nothing() -> None:
    values, called = torch.tensor([1.0]), list[Callable[..., Any]]()
    with ranks.in_step(tiny(), called.append, synced=True):
        assert ranks.share(values) is values
        assert ranks.share_value(3) == 3
        assert not ranks.takes_turns()
        ranks.take_turn(called.append)
    assert not called
