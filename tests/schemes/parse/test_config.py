"""The config of `parse`: its values, the nested scheme that revises, and how both are stored."""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from hf_semspec import EASDConfig, LosslessConfig, PARSEConfig, SemSpecConfig
from hf_semspec.configuration import scheme_from_dict

pytestmark = pytest.mark.seam

words = st.text(min_size=1, max_size=9).filter(str.strip)
thresholds = st.floats(0, 3) | st.just(math.inf)
revisers = st.one_of(
    st.none(),
    st.builds(LosslessConfig, num_draft_tokens=st.integers(1, 64) | st.just("auto"), num_chains=st.integers(1, 64)),
    st.builds(EASDConfig, target_entropy_threshold=thresholds, calibrated_for=st.just({"do_sample": False})),
)
configs = st.builds(
    PARSEConfig,
    segment_tokens=st.integers(1, 10_000),
    accept_threshold=thresholds,
    prefix_threshold=thresholds,
    boundary=st.sampled_from(["first_fail", "longest", "cascade", "random"]),
    single_pass=st.booleans(),
    judge_prompt=words,
    full_judge_prompt=words,
    labels=st.tuples(words, words).filter(lambda pair: pair[0] != pair[1]),
    revise_with=revisers,
    draft_ngram=st.booleans(),
    max_redrafts=st.integers(0, 64),
    max_packed_tokens=st.integers(1, 10**9),
)


def test_defaults_are_the_ones_on_record() -> None:
    stored = SemSpecConfig("parse").semspec
    assert stored == PARSEConfig().to_dict()
    assert stored["revise_with"] == LosslessConfig().to_dict()
    assert (stored["accept_threshold"], stored["prefix_threshold"], stored["segment_tokens"]) == (0.9, 0.7, 48)
    assert stored["max_redrafts"] == 0
    json.dumps(stored, allow_nan=False)


@given(configs)
def test_round_trip_through_json(config: PARSEConfig) -> None:
    assert scheme_from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config
    stored = SemSpecConfig(config)
    for item in fields(config):
        assert getattr(stored, item.name) == getattr(config, item.name), item.name
    again = SemSpecConfig.from_dict(json.loads(stored.to_json_string(use_diff=False)))
    assert again.scheme_config == config
    assert hash(config) == hash(scheme_from_dict(config.to_dict()))


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        *(("segment_tokens", value, "an int >= 1") for value in (0, -1, 2.0, True, "8", None)),
        *(("max_redrafts", value, r"an int in \[0, 64\]") for value in (-1, 65, 1.0, True, None)),
        *(("max_packed_tokens", value, "an int >= 1") for value in (0, 1e4, None, True)),
        *(("accept_threshold", value, "a number >= 0") for value in (-0.1, math.nan, "0.9", None, True)),
        *(("prefix_threshold", value, "a number >= 0") for value in (-0.1, math.nan, "0.9", None, True)),
        *(("boundary", value, '"first_fail", "longest"') for value in ("first", "", None, 1, ["longest"])),
        *(("single_pass", value, "a bool") for value in (0, 1, "yes", None)),
        *(("draft_ngram", value, "a bool") for value in (0, 1, "yes", None)),
        *(("judge_prompt", value, "a text that is not empty") for value in ("", "  \n", None, 3)),
        *(("full_judge_prompt", value, "a text that is not empty") for value in ("", "  \n", None, 3)),
        *(
            ("labels", value, 'such as \\("Yes", "No"\\)')
            for value in ("YN", ("Y",), ("Y", "Y"), ("Y", ""), ("Y", "N", "?"), ("Y", 1), None, {"Y": "N"})
        ),
        *(("revise_with", value, "None, .*lossless") for value in ("parse", "smc", "", 1, True, SemSpecConfig)),
    ],
)
def test_bad_values_name_value_and_range(name: str, value: Any, allowed: str) -> None:
    for make in (PARSEConfig, lambda **given: SemSpecConfig("parse", **given)):
        with pytest.raises(ValueError, match=f"`{name}` must be .*{allowed}"):
            make(**{name: value})
    stored = SemSpecConfig("parse")
    with pytest.raises(ValueError, match=f"`{name}` must be .*{allowed}"):
        setattr(stored, name, value)
    assert stored.scheme_config == PARSEConfig()


def test_the_scheme_that_revises_may_be_a_name_a_config_or_an_entry() -> None:
    for value, wanted in (
        ("lossless", LosslessConfig()),
        ("easd", EASDConfig()),
        (EASDConfig(penalty=0.5), EASDConfig(penalty=0.5)),
        ({"scheme": "lossless", "num_draft_tokens": 9}, LosslessConfig(num_draft_tokens=9)),
        (None, None),
    ):
        for config in (PARSEConfig(revise_with=value), SemSpecConfig("parse", revise_with=value).scheme_config):
            assert config.revise_with == wanted
    config = SemSpecConfig("parse")
    config.revise_with = "easd"
    assert config.semspec["revise_with"]["scheme"] == "easd"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"revise_with": {"num_draft_tokens": 3}}, "scheme"),
        ({"revise_with": {"scheme": "losless"}}, "lossless"),
        ({"revise_with": {"scheme": "parse"}}, "lossless"),
        ({"revise_with": {"scheme": "lossless", "num_drafts": 3}}, "num_draft_tokens"),
        ({"revise_with": {"scheme": "lossless", "num_draft_tokens": 0}}, r"`num_draft_tokens` must be .*\[1, 64\]"),
        ({"segment_token": 3}, "segment_tokens"),
    ],
)
def test_malformed_entries_name_what_is_meant(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scheme_from_dict({"scheme": "parse", **entry})


@given(
    st.dictionaries(
        st.sampled_from([item.name for item in fields(PARSEConfig)]) | st.text(max_size=4),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
            max_leaves=4,
        ),
        max_size=4,
    )
)
def test_any_entry_gives_a_config_or_a_value_error(entry: dict[str, Any]) -> None:
    try:
        config = scheme_from_dict({"scheme": "parse", **entry})
    except ValueError:
        return
    assert isinstance(config, PARSEConfig)
    assert scheme_from_dict(config.to_dict()) == config


def test_unknown_names_and_fields_of_others() -> None:
    with pytest.raises(TypeError, match="segment_tokens"):
        SemSpecConfig("parse", segment_token=3)
    with pytest.raises(TypeError, match="num_draft_tokens"):
        SemSpecConfig("parse", num_draft_tokens=3)
    with pytest.raises(ValueError, match="not beside it"):
        SemSpecConfig(PARSEConfig(), segment_tokens=3)


def test_files_are_read_by_stock_and_by_us(tmp_path: Path) -> None:
    SemSpecConfig("parse", accept_threshold=math.inf, labels=["Yes", "No"], revise_with=None).save_pretrained(tmp_path)
    for kind in (GenerationConfig, SemSpecConfig):
        stored = kind.from_pretrained(tmp_path).semspec
        assert stored["accept_threshold"] == "inf"
        assert scheme_from_dict(stored).labels == ("Yes", "No")
        assert scheme_from_dict(stored).revise_with is None
