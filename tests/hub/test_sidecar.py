"""Configs and sidecars on a Hub that is a folder here, and what broken or hostile files of it come to."""

import json
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import EntryNotFoundError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig
from transformers.utils import hub as transformers_hub

from hf_semspec import EASDConfig, SemSpecConfig
from hf_semspec.common.json_files import MOST_BYTES
from hf_semspec.hub.sidecar import Sidecar

SIDECAR = {
    "target": "org/target",
    "draft": "org/draft",
    "calibration": {"percentile": 90.0, "thresholds": {"full": 0.9}},
    "results": {"accuracy": [0.5, 0.25]},
}
COMMIT = "0" * 40
LOCAL = {"local_files_only": True}


class FakeHub:
    """Takes what transformers uploads, and lays it where transformers looks for what it has downloaded before."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.commits: list[tuple[str, dict[str, Any]]] = []

    def folder(self, repo_id: str) -> Path:
        return self.cache / f"models--{repo_id.replace('/', '--')}" / "snapshots" / COMMIT

    def files(self, repo_id: str) -> set[str]:
        return {path.name for path in self.folder(repo_id).iterdir()}

    def create_repo(self, repo_id: str, **_: Any) -> Any:
        self.folder(repo_id).mkdir(parents=True, exist_ok=True)
        (self.folder(repo_id).parents[1] / "refs").mkdir(exist_ok=True)
        (self.folder(repo_id).parents[1] / "refs" / "main").write_text(COMMIT)
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def create_commit(self, repo_id: str, operations: Any, **options: Any) -> str:
        for operation in operations:
            (self.folder(repo_id) / operation.path_in_repo).write_bytes(Path(operation.path_or_fileobj).read_bytes())
        self.commits.append((repo_id, options))
        return "done"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    fake = FakeHub(tmp_path / "cache")
    for name in ("create_repo", "create_commit"):
        call = getattr(fake, name)
        monkeypatch.setattr(huggingface_hub.HfApi, name, lambda _, *a, _call=call, **k: _call(*a, **k))
        if hasattr(transformers_hub, name):  # 4.57
            monkeypatch.setattr(transformers_hub, name, call)
    # A repository without a card gets a new one.
    monkeypatch.setattr(huggingface_hub.ModelCard, "load", no_card)
    return fake


def no_card(*_: Any, **__: Any) -> None:
    raise EntryNotFoundError("no README.md")


def test_a_config_goes_to_the_hub_and_back(hub: FakeHub) -> None:
    config = SemSpecConfig(EASDConfig(top_n=7, overlap_threshold=2), max_new_tokens=9, eos_token_id=[2, 7])
    config.push_to_hub("me/scheme", commit_message="Add a scheme", private=True)
    ((name, options),) = hub.commits
    assert (name, options["commit_message"]) == ("me/scheme", "Add a scheme")
    assert hub.files("me/scheme") == {"generation_config.json", "README.md"}
    loaded = SemSpecConfig.from_pretrained("me/scheme", **LOCAL, cache_dir=hub.cache, num_draft_tokens=3)
    assert type(loaded) is SemSpecConfig
    assert loaded.scheme_config == EASDConfig(top_n=7, overlap_threshold=2, num_draft_tokens=3)
    assert (loaded.max_new_tokens, loaded.eos_token_id) == (9, [2, 7])
    plain = GenerationConfig.from_pretrained("me/scheme", **LOCAL, cache_dir=hub.cache)
    assert plain.semspec == config.semspec


def test_a_repository_without_a_scheme_says_so(hub: FakeHub) -> None:
    GenerationConfig(max_new_tokens=3).push_to_hub("me/plain")
    with pytest.raises(ValueError, match='no "semspec" entry'):
        SemSpecConfig.from_pretrained("me/plain", **LOCAL, cache_dir=hub.cache)


def test_a_sidecar_goes_to_the_hub_and_back_beside_the_config(hub: FakeHub) -> None:
    SemSpecConfig("lossless").push_to_hub("me/scheme")
    SemSpecConfig("lossless").push_to_hub("me/bare")
    Sidecar(**SIDECAR).push_to_hub("me/scheme")
    assert {"generation_config.json", "semspec.json"} <= hub.files("me/scheme")
    assert Sidecar.from_pretrained("me/scheme", **LOCAL, cache_dir=hub.cache) == Sidecar(**SIDECAR)
    assert SemSpecConfig.from_pretrained("me/scheme", **LOCAL, cache_dir=hub.cache).num_draft_tokens == 5
    with pytest.raises(OSError, match=r"semspec\.json|cached files"):
        Sidecar.from_pretrained("me/bare", **LOCAL, cache_dir=hub.cache)


def test_a_sidecar_in_a_folder(tmp_path: Path) -> None:
    Sidecar(draft="org/draft").save_pretrained(tmp_path / "made")
    assert json.loads((tmp_path / "made/semspec.json").read_text()) == {"format": 1, "draft": "org/draft"}
    assert Sidecar.from_pretrained(tmp_path / "made") == Sidecar(draft="org/draft")


def test_a_sidecar_shares_nothing_with_the_caller() -> None:
    report = {"percentile": 90, "rates": [1, 2]}
    sidecar = Sidecar(calibration=report)
    report["rates"].append(3)
    assert sidecar.to_dict()["calibration"] == {"percentile": 90, "rates": [1, 2]}


NEST: Any = 0
for _ in range(40):
    NEST = [NEST]


@pytest.mark.parametrize(
    ("entries", "part"),
    [
        ({}, "`format` must be 1"),
        ({"format": True}, "`format` must be 1"),
        ({"format": 2}, "the one that this version of hf-semspec reads"),
        ({"format": 1, "drafts": "a"}, "did you mean `draft`"),
        ({"format": 1, "draft": 5}, "`draft` must be a Hub id or a folder"),
        ({"format": 1, "draft": ""}, "`draft` must be"),
        ({"format": 1, "draft": "a\nb"}, "`draft` must be"),
        ({"format": 1, "target": "a" * 257}, "`target` must be"),
        ({"format": 1, "results": [1]}, "`results` must be a dict"),
        ({"format": 1, "results": {"a": float("nan")}}, "`results` must be a dict of finite JSON values"),
        ({"format": 1, "results": {"a": NEST}}, "nested deeper than 32"),
        ({"format": 1, "results": {"a": "x" * MOST_BYTES}}, "leave out some"),
        ({"format": 1, "calibration": {"a": object()}}, "`calibration` must be a dict of finite JSON values"),
    ],
    ids=range(13),
)
def test_a_malformed_sidecar_is_named(entries: Any, part: str) -> None:
    with pytest.raises(ValueError) as error:
        Sidecar.from_dict(entries)
    assert part in str(error.value)


# Files that no one here wrote.

ENTRY = '"semspec": {"scheme": "lossless"}'


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "not a JSON file"),
        ("{" + ENTRY, "not a JSON file"),
        ("[" * 100_000, "nested deeper"),
        ('{"semspec": ' + "[" * 500 + "]" * 500 + "}", "nested deeper"),
        ("[1]", "must hold one JSON object"),
        ("{" + ENTRY + ', "max_new_tokens": ' + "9" * 5000 + "}", "not a JSON file"),
        ("{" + ENTRY + ', "max_new_tokens": ' + "9" * 30 + "}", "`max_new_tokens` must be an int of at most 64 bits"),
        ("{" + ENTRY + ', "max_new_tokens": "5"}', "`max_new_tokens` must be an int"),
        ("{" + ENTRY + ', "max_new_tokens": true}', "`max_new_tokens` must be an int"),
        ("{" + ENTRY + ', "max_new_tokens": -5}', "max_new_tokens"),
        ("{" + ENTRY + ', "temperature": {"a": 1}}', "`temperature` must be a number"),
        ("{" + ENTRY + ', "do_sample": "yes"}', "`do_sample` must be true, false"),
        ("{" + ENTRY + ', "eos_token_id": ["2"]}', "`eos_token_id` must be a token id or a list"),
        ("{" + ENTRY + ', "cache_implementation": ["static"]}', "cache_implementation"),
        ("{" + ENTRY + ', "watermarking_config": {"no": 1}}', "these entries"),
        ("{" + ENTRY + ', "to_dict": 1}', "'to_dict' cannot be an entry"),
        ("{" + ENTRY + ', "__class__": "os.system"}', "'__class__' cannot be an entry"),
        ("{" + ENTRY + ', "__setattr__": null}', "'__setattr__' cannot be an entry"),
        ("{" + ENTRY + ', "scheme_config": {}}', "'scheme_config' cannot be an entry"),
        ('{"semspec": {"scheme": "parse", "labels": "Y"}}', "`labels`"),
        ('{"semspec": {"scheme": "parse", "revise_with": {"scheme": "parse"}}}', "scheme"),
        ('{"semspec": {"scheme": "lossless", "num_draft_tokens": 1e999}}', "`num_draft_tokens` must be an int"),
        ('{"semspec": {"scheme": "lossless", "__reduce__": ["os.system", "true"]}}', "did you mean"),
        ('{"semspec": "__import__(\'os\')"}', "`semspec` must be a dict"),
        ('{"semspec": {"scheme": "__import__(\'os\')"}}', "`scheme` must be one of"),
        ("{" + ENTRY + ' , "x": "' + "a" * MOST_BYTES + '"}', "at most 1,048,576 are read"),
    ],
    ids=range(26),
)
def test_a_broken_or_hostile_config_is_named(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with watched() as events, pytest.raises(ValueError) as error:
        SemSpecConfig.from_pretrained(tmp_path)
    assert part in str(error.value)
    assert len(str(error.value)) < 600
    assert events == []


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_bytes(b'{"semspec": \xff\xfe}')
    with pytest.raises(ValueError, match="not a JSON file"):
        SemSpecConfig.from_pretrained(tmp_path)


def test_words_of_a_hub_config_are_words(tmp_path: Path) -> None:
    """What `str.format` or a template would evaluate reaches the judge as it is written."""
    prompt = "{correct.__class__.__mro__} {{7*7}} {0} %s {incorrect}"
    SemSpecConfig("parse", judge_prompt=prompt).save_pretrained(tmp_path)
    assert SemSpecConfig.from_pretrained(tmp_path).judge_prompt == prompt


class watched:
    """The events of the interpreter that run code, start processes or go out, raised inside the block."""

    RISKY = ("exec", "compile", "os.system", "os.exec", "subprocess.Popen", "pickle.find_class", "socket.connect")
    live: list[list[str]] = []  # noqa: RUF012
    hooked = False

    def __enter__(self) -> list[str]:
        if not watched.hooked:  # a hook stays for the life of the process
            sys.addaudithook(lambda event, _: [seen.append(event) for seen in watched.live if event in watched.RISKY])
            watched.hooked = True
        self.events: list[str] = []
        watched.live.append(self.events)
        return self.events

    def __exit__(self, *_: object) -> None:
        watched.live.remove(self.events)


def test_the_watch_sees_code_that_runs() -> None:
    with watched() as events:
        eval("1 + 1")
    assert "compile" in events
    assert "exec" in events


NAMES = [*vars(GenerationConfig()), "to_dict", "__dict__", "semspec", "num_draft_tokens", "penalty", "house_rule"]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**40), 10**40)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["inf", "__import__('os').system('true')", "{0.__class__}", "static", "dynamic", "random"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
ENTRIES = st.dictionaries(
    st.sampled_from(["scheme", "num_draft_tokens", "num_chains", "labels", "revise_with", "power", "calibrated_for"]),
    VALUES | st.sampled_from(["lossless", "easd", "parse", "smc"]),
    max_size=4,
)
FILES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5)
FUZZ = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# 5.17 deprecates one of the entries.
@pytest.mark.filterwarnings("ignore::FutureWarning")
@FUZZ
@given(file=FILES, entry=ENTRIES | st.just({"scheme": "lossless"}) | VALUES)
def test_fuzzed_files_give_a_config_that_saves_or_a_value_error(
    tmp_path: Path, file: dict[str, Any], entry: Any
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({**file, "semspec": entry}))
    with watched() as events:
        try:
            config = SemSpecConfig.from_pretrained(tmp_path)
        except ValueError:
            config = None
    assert events == []
    if config is not None:
        assert type(config) is SemSpecConfig
        again = SemSpecConfig.from_dict(json.loads(config.to_json_string()))
        assert again.scheme_config == config.scheme_config


@FUZZ
@given(
    text=st.text(max_size=40)
    | st.binary(max_size=40)
    | st.builds(json.dumps, st.dictionaries(st.sampled_from([*SIDECAR, "format", "x"]), VALUES | st.just(1)))
)
def test_fuzzed_sidecars_give_a_sidecar_or_a_value_error(tmp_path: Path, text: Any) -> None:
    (tmp_path / "semspec.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with watched() as events:
        try:
            sidecar = Sidecar.from_pretrained(tmp_path)
        except ValueError:
            sidecar = None
    assert events == []
    if sidecar is not None:
        assert Sidecar.from_dict(sidecar.to_dict()) == sidecar
