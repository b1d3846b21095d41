"""The config of `smc`: its values, the sampling options that go with it, and how both are stored."""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from hf_semspec import SemSpecConfig, SMCConfig
from hf_semspec.configuration import scheme_from_dict
from hf_semspec.schemes.smc.weights import RESAMPLINGS, SELECTIONS

pytestmark = pytest.mark.seam

SMC = {
    "scheme": "smc",
    "num_particles": 8,
    "num_draft_tokens": 8,
    "ess_threshold": 0.5,
    "resampling": "systematic",
    "power": 1.0,
    "select": "sample",
    "draft_temperature": None,
    "compile_draft": False,
}


def test_defaults() -> None:
    assert SMCConfig().to_dict() == SMC
    assert SemSpecConfig("smc").semspec == SMC


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        *(("num_particles", value, r"an int in \[1, 256\]") for value in (0, 257, 2.0, True, "8", None, "auto")),
        *(("num_draft_tokens", value, r"an int in \[1, 64\]") for value in (0, 65, 2.0, True, "8", None, "auto")),
        *(("ess_threshold", value, r"a number in \[0, 1\]") for value in (-0.1, 1.1, math.nan, math.inf, "0.5", True)),
        *(("power", value, "a finite number > 0") for value in (0, -1, math.inf, math.nan, "1", None, True)),
        *(("draft_temperature", value, "a finite number > 0 or None") for value in (0, -1, math.inf, math.nan, "1")),
        *(("resampling", value, '"systematic", "multinomial"') for value in ("Systematic", "", None, 1, ["residual"])),
        *(("select", value, '"sample", "best"') for value in ("worst", None, 1)),
    ],
)
def test_bad_values_name_value_and_range(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be .*{allowed}"):
        SMCConfig(**{name: value})
    with pytest.raises(ValueError, match=f"`{name}` must be .*{allowed}"):
        SemSpecConfig("smc", **{name: value})


def test_automatic_draft_lengths_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="accepts every drafted token"):
        SMCConfig(num_draft_tokens="auto")  # type: ignore[arg-type]


@given(
    st.builds(
        SMCConfig,
        num_particles=st.integers(1, 256),
        num_draft_tokens=st.integers(1, 64),
        ess_threshold=st.floats(0, 1),
        resampling=st.sampled_from(RESAMPLINGS),
        power=st.floats(1e-3, 10),
        select=st.sampled_from(SELECTIONS),
        draft_temperature=st.none() | st.floats(1e-3, 10),
    )
)
def test_round_trip(config: SMCConfig) -> None:
    assert scheme_from_dict(json.loads(json.dumps(config.to_dict()))) == config
    stored = SemSpecConfig(config)
    assert all(getattr(stored, item.name) == getattr(config, item.name) for item in fields(config))


def test_it_samples_from_the_whole_law_unless_told_otherwise() -> None:
    config = SemSpecConfig("smc")
    assert (config.do_sample, config.top_k, config.top_p) == (True, 0, 1.0)
    config = SemSpecConfig("smc", top_k=20, top_p=0.9, temperature=0.5, do_sample=True)
    assert (config.do_sample, config.top_k, config.top_p, config.temperature) == (True, 20, 0.9, 0.5)
    config = SemSpecConfig(SMCConfig(), do_sample=None, top_k=None, top_p=None)
    assert (config.do_sample, config.top_k, config.top_p) == (True, 0, 1.0)
    for scheme in ("lossless", "easd"):
        assert SemSpecConfig(scheme).do_sample == GenerationConfig().do_sample


def test_greedy_decoding_is_an_error() -> None:
    for make in (lambda: SemSpecConfig("smc", do_sample=False), lambda: SemSpecConfig(SMCConfig(), do_sample=False)):
        with pytest.raises(ValueError, match=r"`do_sample` must be True for smc.*lossless"):
            make()


def test_files_keep_the_sampling_options(tmp_path: Path) -> None:
    SemSpecConfig("smc", num_particles=3, power=2.0).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "generation_config.json").read_text())
    assert stored["do_sample"] is True
    assert stored["top_k"] == 0
    for kind in (GenerationConfig, SemSpecConfig):
        loaded = kind.from_pretrained(tmp_path)
        assert loaded.semspec == {**SMC, "num_particles": 3, "power": 2.0}
        assert (loaded.do_sample, loaded.top_k, loaded.top_p) == (True, 0, 1.0)
