import json
import math
from dataclasses import FrozenInstanceError, fields
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_semspec.configuration import EASDConfig, LosslessConfig, scheme_from_dict
from hf_semspec.schemes.table import SCHEMES
from tests.configs import CALIBRATED, COUNTS, EASD, EASD_CONFIGS, FULL, LOSSLESS, NON_NEGATIVE

pytestmark = pytest.mark.seam

BAD_COUNTS = [0, -1, 65, 10**30, pytest.param(10**5000, id="huge"), True, 5.0, "5", "AUTO", None, [5], math.nan]
LOSSLESS_CONFIGS = st.builds(LosslessConfig, num_draft_tokens=COUNTS | st.just("auto"), num_chains=COUNTS) | st.builds(
    LosslessConfig,
    num_draft_tokens=COUNTS,
    draft=st.sampled_from(["ngram", "ngram+model"]),
    max_ngram=st.integers(1, 16),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["inf", "-inf"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


# Scheme configs


def test_defaults() -> None:
    assert LosslessConfig().to_dict() == LOSSLESS
    assert EASDConfig().to_dict() == EASD


@pytest.mark.parametrize("config", [LosslessConfig(), EASDConfig()])
def test_scheme_configs_are_frozen_keyword_only_and_hashable(config: Any) -> None:
    with pytest.raises(FrozenInstanceError):
        config.num_draft_tokens = 3
    with pytest.raises(TypeError):
        type(config)(3)
    assert hash(config) == hash(type(config)())
    assert {config: 1}[type(config)()] == 1


def test_configs_with_settings_are_hashable() -> None:
    assert hash(FULL) == hash(scheme_from_dict(FULL.to_dict()))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_field_is_documented(scheme: str) -> None:
    doc = SCHEMES[scheme].config.__doc__ or ""
    for item in fields(SCHEMES[scheme].config):
        assert f"\n        {item.name} (" in doc
    assert "uncalibrated" in (EASDConfig.__doc__ or "")


@pytest.mark.parametrize("name", ["num_draft_tokens", "num_chains"])
@pytest.mark.parametrize("scheme", [LosslessConfig, EASDConfig])
@pytest.mark.parametrize("value", BAD_COUNTS)
def test_bad_counts_name_value_and_range(scheme: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"`{name}` must be an int in \[1, 64\].*but is ") as error:
        scheme(**{name: value})
    assert len(str(error.value)) < 250


def test_only_num_draft_tokens_may_be_auto() -> None:
    assert LosslessConfig(num_draft_tokens="auto").num_draft_tokens == "auto"
    with pytest.raises(ValueError, match="num_chains"):
        LosslessConfig(num_chains="auto")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("target_entropy_threshold", -0.1, "a number >= 0 (inf is allowed)"),
        ("target_entropy_threshold", math.nan, "a number >= 0 (inf is allowed)"),
        ("target_entropy_threshold", -math.inf, "a number >= 0 (inf is allowed)"),
        ("draft_entropy_threshold", "inf", "a number >= 0 (inf is allowed)"),
        ("draft_entropy_threshold", True, "a number >= 0 (inf is allowed)"),
        ("draft_entropy_threshold", 10**400, "a number >= 0 (inf is allowed)"),
        ("overlap_threshold", None, "a number >= 0 (inf is allowed)"),
        ("overlap_threshold", 1j, "a number >= 0 (inf is allowed)"),
        ("top_n", 0, "an int in [1, 1000]"),
        ("top_n", 1001, "an int in [1, 1000]"),
        ("top_n", False, "an int in [1, 1000]"),
        ("penalty", 1.01, "a number in [0, 1]"),
        ("penalty", -1e-9, "a number in [0, 1]"),
        ("penalty", math.nan, "a number in [0, 1]"),
        ("penalty", False, "a number in [0, 1]"),
        ("trigger_rate", math.inf, "a number in [0, 1]"),
        ("trigger_rate", "0.5", "a number in [0, 1]"),
        ("trigger", "none", 'one of "entropy", "random"'),
        ("trigger", None, 'one of "entropy", "random"'),
        ("trigger", ["entropy"], 'one of "entropy", "random"'),
        ("calibrated_for", "greedy", "None or a dict with keys of"),
        ("calibrated_for", [("top_k", 1)], "None or a dict with keys of"),
    ],
)
def test_bad_easd_values_name_value_and_range(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError) as error:
        EASDConfig(**{name: value})
    assert str(error.value).startswith(f"`{name}` must be {allowed}")
    assert f"but is {repr(value)[:70]}" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"do_sample": 1}, "a bool or None"),
        ({"top_k": -1}, "an int >= 0"),
        ({"top_k": 5.0}, "an int >= 0"),
        ({"top_p": 1.5}, "a number in [0, 1]"),
        ({"temperature": -1}, "a number >= 0"),
        ({"temperature": "hot"}, "a number >= 0"),
        ({"topk": 5}, "did you mean `top_k`?"),
        ({5: 5}, "did you mean"),
    ],
)
def test_bad_calibration_settings(settings: Any, part: str) -> None:
    with pytest.raises(ValueError) as error:
        EASDConfig(calibrated_for=settings)
    assert "calibrated_for" in str(error.value)
    assert part in str(error.value)


def test_limits_of_the_ranges_are_allowed() -> None:
    for value in (1, 64):
        assert LosslessConfig(num_draft_tokens=value, num_chains=value).num_chains == value
    config = EASDConfig(overlap_threshold=math.inf, top_n=1000, penalty=1.0, trigger_rate=1.0)
    assert (config.overlap_threshold, config.top_n) == (math.inf, 1000)
    assert EASDConfig(target_entropy_threshold=0.0, overlap_threshold=0.0).overlap_threshold == 0.0


def test_numbers_become_plain_python() -> None:
    config = EASDConfig(
        num_draft_tokens=np.int64(3),  # type: ignore[arg-type]
        penalty=1,
        target_entropy_threshold=np.float32(0.5),  # type: ignore[arg-type]
        overlap_threshold=Fraction(1, 2),  # type: ignore[arg-type]
        calibrated_for={"temperature": np.float32(0.5), "top_k": np.int32(5)},
    )
    assert type(config.num_draft_tokens) is int
    assert type(config.penalty) is float
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()


def test_configs_keep_their_own_copy_of_the_settings() -> None:
    settings = dict(CALIBRATED)
    config = EASDConfig(calibrated_for=settings)
    settings["top_k"] = 1
    config.to_dict()["calibrated_for"]["top_k"] = 2
    assert config.calibrated_for == CALIBRATED


# Stored entries


@given(LOSSLESS_CONFIGS | EASD_CONFIGS)
def test_scheme_round_trip(config: Any) -> None:
    text = json.dumps(config.to_dict(), allow_nan=False)
    assert scheme_from_dict(json.loads(text)) == config


def test_infinities_are_stored_as_strings() -> None:
    assert FULL.to_dict()["target_entropy_threshold"] == "inf"
    assert scheme_from_dict({"scheme": "easd", "overlap_threshold": "inf"}) == EASDConfig(overlap_threshold=math.inf)
    # Python's own reader turns the bare word Infinity into the number.
    assert scheme_from_dict({"scheme": "easd", "overlap_threshold": math.inf}).to_dict()["overlap_threshold"] == "inf"
    with pytest.raises(ValueError, match="but is -inf"):
        scheme_from_dict({"scheme": "easd", "overlap_threshold": "-inf"})


def test_missing_fields_take_their_defaults() -> None:
    assert scheme_from_dict({"scheme": "easd", "top_n": 5}) == EASDConfig(top_n=5)


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        (None, "a dict such as"),
        ("easd", "a dict such as"),
        ([["scheme", "easd"]], "a dict such as"),
        (LosslessConfig(), "a dict such as"),
        ({}, '"scheme" entry, one of "lossless", "easd", "parse", "smc", "semantic"'),
        ({"num_draft_tokens": 5}, '"scheme" entry'),
        ({"scheme": None}, '`scheme` must be one of "lossless", "easd", "parse", "smc", "semantic", but is None'),
        ({"scheme": "Lossless"}, "`scheme` must be one of"),
        ({"scheme": ["easd"]}, "`scheme` must be one of"),
        ({"scheme": "easd", "top": 5}, "did you mean `top_n`?"),
        ({"scheme": "easd", "semspec_treshold": 5}, "did you mean `"),
        ({"scheme": "easd", "": 5}, "did you mean `"),
        ({"scheme": "easd", 5: 5}, "did you mean `"),
        ({"scheme": "easd", "name": "easd"}, "did you mean `"),
        ({"scheme": "lossless", "penalty": 0.5}, "`penalty` is a field of \"easd\", not of 'lossless'"),
        ({"scheme": "lossless", "num_chains": True}, "`num_chains` must be an int"),
        ({"scheme": "lossless", "num_chains": "inf"}, "`num_chains` must be an int"),
        ({"scheme": "easd", "penalty": "0.5"}, "`penalty` must be a number"),
    ],
)
def test_malformed_entries(entry: Any, part: str) -> None:
    with pytest.raises(ValueError) as error:
        scheme_from_dict(entry)
    assert part in str(error.value)


@given(
    JSON
    | st.dictionaries(st.sampled_from([*EASD, "other"]), JSON | st.sampled_from(["lossless", "easd"]))
    | st.builds(
        lambda scheme, values: {**values, "scheme": scheme},
        st.sampled_from(sorted(SCHEMES)),
        st.dictionaries(st.sampled_from(sorted(EASD)), JSON | COUNTS | NON_NEGATIVE, max_size=3),
    )
)
def test_fuzzed_entries_give_a_config_or_a_value_error(entry: Any) -> None:
    try:
        config = scheme_from_dict(entry)
    except ValueError:
        return
    assert scheme_from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config
