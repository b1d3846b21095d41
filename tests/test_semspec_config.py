"""SemSpecConfig: one namespace, its entry, merging, files."""

import copy
import json
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from transformers import GenerationConfig

from hf_semspec.configuration import EASDConfig, LosslessConfig, SemSpecConfig
from hf_semspec.schemes.table import SCHEMES
from tests.configs import EASD, EASD_CONFIGS, FULL, LOSSLESS

pytestmark = pytest.mark.seam


# SemSpecConfig


def test_fields_of_scheme_and_generation_share_one_namespace() -> None:
    config = SemSpecConfig("easd", penalty=1, num_draft_tokens=3, max_new_tokens=7, do_sample=True, temperature=0.5)
    assert config.semspec == {**EASD, "penalty": 1.0, "num_draft_tokens": 3}
    assert config.scheme_config == EASDConfig(penalty=1.0, num_draft_tokens=3)
    assert (config.penalty, config.num_draft_tokens) == (1.0, 3)
    assert (config.max_new_tokens, config.do_sample, config.temperature) == (7, True, 0.5)


def test_the_only_attribute_beside_stocks_is_semspec() -> None:
    assert set(vars(SemSpecConfig("easd"))) - set(vars(GenerationConfig())) == {"semspec"}
    assert type(SemSpecConfig("easd").semspec) is dict


def test_no_scheme_field_hides_one_of_generation_config() -> None:
    stock = set(dir(GenerationConfig())) | set(vars(GenerationConfig()))
    for scheme in (entry.config for entry in SCHEMES.values()):
        assert not {item.name for item in fields(scheme)} & stock


@pytest.mark.parametrize("scheme", [LosslessConfig(num_chains=2), FULL])
def test_scheme_given_as_an_object(scheme: Any) -> None:
    config = SemSpecConfig(scheme, max_new_tokens=7)
    assert config.scheme_config == scheme
    assert config.max_new_tokens == 7
    with pytest.raises(ValueError, match=f"`num_draft_tokens` must be passed in the {type(scheme).__name__}"):
        SemSpecConfig(scheme, num_draft_tokens=3)


@pytest.mark.parametrize("scheme", ["parser", "", "LOSSLESS", None, 5, EASDConfig, {"scheme": "easd"}, ["easd"]])
def test_unknown_schemes(scheme: Any) -> None:
    with pytest.raises(
        ValueError, match='`scheme` must be one of "lossless", "easd", "parse", "smc", "semantic", but is '
    ):
        SemSpecConfig(scheme)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("num_draft_token", "did you mean `num_draft_tokens`?"),
        ("max_new_token", "did you mean `max_new_tokens`?"),
        ("overlap_treshold", "did you mean `overlap_threshold`?"),
        ("semspec_treshold", "did you mean `"),
        ("semspec", "did you mean `"),
        ("_from_model_config", "did you mean `"),
    ],
)
def test_ui_46_unknown_names_are_type_errors_that_name_the_nearest(name: str, part: str) -> None:
    with pytest.raises(TypeError) as error:
        SemSpecConfig("easd", **{name: 5})
    assert name in str(error.value)
    assert part in str(error.value)


def test_fields_of_another_scheme_are_type_errors() -> None:
    with pytest.raises(TypeError, match="`penalty` is a field of \"easd\", not of 'lossless'"):
        SemSpecConfig("lossless", penalty=0.5)


def test_bad_values_are_value_errors() -> None:
    with pytest.raises(ValueError, match=r"`penalty` must be a number in \[0, 1\], but is 2"):
        SemSpecConfig("easd", penalty=2)
    with pytest.raises(ValueError, match="max_new_tokens"):
        SemSpecConfig("easd", max_new_tokens=0)


def test_fields_are_checked_when_set() -> None:
    config = SemSpecConfig("easd")
    config.top_n = 20
    assert config.semspec is not None
    assert config.semspec["top_n"] == 20
    with pytest.raises(ValueError, match="top_n"):
        config.top_n = 0
    assert config.top_n == 20


def test_fields_of_other_schemes_are_no_attributes() -> None:
    config = SemSpecConfig("lossless")
    assert hasattr(config, "num_chains")
    assert not hasattr(config, "penalty")
    with pytest.raises(AttributeError, match="`penalty` is not a field of the scheme 'lossless'"):
        config.penalty = 0.5
    with pytest.raises(AttributeError):
        config.scheme_config = LosslessConfig()  # type: ignore[misc, assignment]


def test_semspec_is_checked_and_stored_as_a_dict() -> None:
    config = SemSpecConfig("lossless")
    config.semspec = {"scheme": "easd", "top_n": 3}
    assert config.semspec == {**EASD, "top_n": 3}
    config.semspec = FULL  # type: ignore[assignment]
    assert type(config.semspec) is dict
    assert config.scheme_config == FULL
    with pytest.raises(ValueError, match="did you mean"):
        config.semspec = {"scheme": "easd", "to_n": 3}


def test_semspec_none_is_plain_decoding() -> None:
    config = SemSpecConfig("easd")
    assert config.update(semspec=None) == {}
    assert config.semspec is None
    assert not hasattr(config, "num_draft_tokens")
    assert not hasattr(config, "scheme_config")
    assert "semspec" not in config.to_dict()
    assert "SemSpecConfig" in repr(config)
    assert config == GenerationConfig()
    config.update(semspec={"scheme": "lossless"})
    assert config.num_draft_tokens == 5


def test_update_sets_scheme_fields_and_returns_the_rest() -> None:
    config = SemSpecConfig("lossless", max_new_tokens=3)
    unused = config.update(num_draft_tokens=9, max_new_tokens=4, penalty=0.5, attention_mask=1)
    assert unused == {"penalty": 0.5, "attention_mask": 1}
    assert (config.num_draft_tokens, config.max_new_tokens) == (9, 4)
    with pytest.raises(ValueError, match="num_draft_tokens"):
        config.update(num_draft_tokens=99)


def test_update_reads_fields_by_the_new_entry_in_any_order() -> None:
    config = SemSpecConfig("lossless")
    assert config.update(penalty=0.5, semspec={"scheme": "easd"}, top_n=3) == {}
    assert config.scheme_config == EASDConfig(penalty=0.5, top_n=3)


def test_generate_merges_the_models_config_without_touching_the_scheme() -> None:
    if "defaults_only" not in GenerationConfig.update.__code__.co_varnames:
        pytest.skip("this transformers merges without update's flags")
    model_config = GenerationConfig(eos_token_id=3, penalty=0.5, house_rule=1, semspec={"scheme": "easd"})
    config = SemSpecConfig("lossless", num_draft_tokens=3)
    config.update(**model_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    assert config.scheme_config == LosslessConfig(num_draft_tokens=3)
    assert (config.eos_token_id, config.house_rule) == (3, 1)


def test_copies_are_equal_and_independent() -> None:
    config = SemSpecConfig(FULL, max_new_tokens=7)
    for twin in (copy.deepcopy(config), copy.copy(config), pickle.loads(pickle.dumps(config))):
        assert type(twin) is SemSpecConfig
        assert twin == config
        assert hash(twin) == hash(config)
        twin.num_chains = 9
        assert config.num_chains == 3
        assert twin != config


def test_equality_includes_the_scheme() -> None:
    assert SemSpecConfig("easd") == SemSpecConfig(EASDConfig())
    assert SemSpecConfig("easd") != SemSpecConfig("lossless")
    assert SemSpecConfig("easd") != SemSpecConfig("easd", top_n=9)
    assert SemSpecConfig("easd") != SemSpecConfig("easd", max_new_tokens=9)
    assert SemSpecConfig("easd") != GenerationConfig()


def test_dict_views() -> None:
    config = SemSpecConfig(FULL, max_new_tokens=7)
    assert config.to_dict()["semspec"] == FULL.to_dict()
    assert set(config.to_diff_dict()) - {"transformers_version"} == {"semspec", "max_new_tokens"}
    assert json.loads(config.to_json_string())["semspec"] == FULL.to_dict()
    assert json.loads(config.to_json_string(use_diff=False))["semspec"] == FULL.to_dict()
    assert repr(config).startswith("SemSpecConfig {")
    assert '"top_n": 7' in repr(config)
    config.to_dict()["semspec"]["top_n"] = 1
    assert config.top_n == 7


# Files


@given(EASD_CONFIGS)
def test_from_dict_round_trip(scheme: EASDConfig) -> None:
    config = SemSpecConfig(scheme, max_new_tokens=7)
    text = config.to_json_string()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert SemSpecConfig.from_dict(json.loads(text)) == config


def test_ui_46_files_round_trip(tmp_path: Path) -> None:
    config = SemSpecConfig(FULL, max_new_tokens=7, eos_token_id=[2, 7])
    config.save_pretrained(tmp_path)
    file = json.loads((tmp_path / "generation_config.json").read_text())
    assert set(file) == {"semspec", "max_new_tokens", "eos_token_id", "transformers_version"}
    assert file["semspec"] == FULL.to_dict()

    loaded = SemSpecConfig.from_pretrained(tmp_path)
    assert type(loaded) is SemSpecConfig
    assert loaded == config
    assert loaded.scheme_config == FULL

    plain = GenerationConfig.from_pretrained(tmp_path)
    assert type(plain) is GenerationConfig
    assert plain.semspec == FULL.to_dict()
    assert plain == config
    plain.save_pretrained(tmp_path / "again")
    assert SemSpecConfig.from_pretrained(tmp_path / "again") == config


def test_a_saved_config_never_carries_the_mark_that_loses_our_entry(tmp_path: Path) -> None:
    config = SemSpecConfig("easd")
    config.update(_from_model_config=True)  # as `generate` does when the model's config was made from its architecture
    assert config._from_model_config
    config.save_pretrained(tmp_path)
    assert "_from_model_config" not in (tmp_path / "generation_config.json").read_text()
    assert GenerationConfig.from_pretrained(tmp_path).semspec == EASD


def test_the_mark_in_a_file_does_not_lose_our_entry() -> None:
    config = SemSpecConfig.from_dict({"semspec": {"scheme": "easd"}, "_from_model_config": True, "max_new_tokens": 7})
    assert not config._from_model_config
    assert (config.semspec, config.max_new_tokens) == (EASD, 7)


def test_from_pretrained_arguments_beat_stored_values(tmp_path: Path) -> None:
    SemSpecConfig("easd", num_draft_tokens=5, max_new_tokens=7).save_pretrained(tmp_path)
    loaded = SemSpecConfig.from_pretrained(tmp_path, num_draft_tokens=9, max_new_tokens=8, local_files_only=True)
    assert (loaded.num_draft_tokens, loaded.max_new_tokens) == (9, 8)
    with pytest.raises(TypeError, match="did you mean `num_draft_tokens`"):
        SemSpecConfig.from_pretrained(tmp_path, num_draft_token=9)
    with pytest.raises(ValueError, match="num_draft_tokens"):
        SemSpecConfig.from_pretrained(tmp_path, num_draft_tokens=0)
    loaded, unused = SemSpecConfig.from_pretrained(tmp_path, top_n=3, foo=1, return_unused_kwargs=True)
    assert loaded.top_n == 3
    assert unused == {"foo": 1}


def test_unknown_entries_of_a_file_are_kept(tmp_path: Path) -> None:
    entries = {"semspec": {"scheme": "lossless"}, "house_rule": [1], "penalty": 0.5, "_commit_hash": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(entries))
    config = SemSpecConfig.from_pretrained(tmp_path)
    assert config.house_rule == [1]
    assert config.to_diff_dict()["penalty"] == 0.5
    assert config == GenerationConfig.from_pretrained(tmp_path).__class__(**{**entries, "semspec": LOSSLESS})


@pytest.mark.parametrize("entries", [{}, {"max_new_tokens": 7}, {"semspec": None}])
def test_a_file_without_our_entry_says_so(tmp_path: Path, entries: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(entries))
    with pytest.raises(ValueError, match='no "semspec" entry'):
        SemSpecConfig.from_pretrained(tmp_path)


def test_scheme_fields_outside_the_entry_are_errors() -> None:
    with pytest.raises(
        ValueError, match='`num_draft_tokens` is a field of the scheme and belongs inside the "semspec"'
    ):
        SemSpecConfig.from_dict({"semspec": {"scheme": "easd"}, "num_draft_tokens": 9})


def test_malformed_files_are_value_errors() -> None:
    with pytest.raises(ValueError, match="did you mean `top_n`"):
        SemSpecConfig.from_dict({"semspec": {"scheme": "easd", "topn": 9}})


def test_from_dict_leaves_its_argument_alone() -> None:
    entries = {"semspec": {"scheme": "easd", "overlap_threshold": "inf"}, "house_rule": 1, "max_new_tokens": 7}
    before = copy.deepcopy(entries)
    SemSpecConfig.from_dict(entries, top_n=3)
    assert entries == before
