"""register_scheme: what it refuses, how a scheme is found again, and a whole loop."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from hf_semspec import LosslessConfig, SemSpecConfig, cli, register_scheme, unregister_scheme
from hf_semspec.configuration import scheme_from_dict
from hf_semspec.schemes import Acceptance, Block, SchemeConfig, TokenLevelConfig, next_law, positive, stop, within
from hf_semspec.schemes.table import SCHEMES
from tests.helpers import WEAK_DRAFTS
from tests.models import draft_of, prompts, tiny
from tests.own_schemes import FILES, left_as_found, loaded, registered

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]

FLY = loaded("fly")


@pytest.fixture(autouse=True)
def _left_as_found() -> Iterator[None]:
    with left_as_found():
        yield


@dataclass(frozen=True, kw_only=True)
class OwnConfig(TokenLevelConfig):
    slack: float = within(0.5, 0, 1)
    weight: float = positive(2.0)
    often: int = within(3, 1, 9)
    mode: Literal["a", "b"] = "a"


def take_all(block: Block, config: Any) -> Acceptance:
    """Every drafted token stands."""
    accepted, outcome = stop(torch.ones_like(block.drafts, dtype=torch.bool), block.valid)
    if block.choices is not None:
        return Acceptance(accepted, outcome, token=block.choices.gather(-1, accepted[:, None]).squeeze(-1))
    return Acceptance(accepted, outcome, law=next_law(block.log_p, block.log_q, accepted, outcome))


def own() -> None:
    register_scheme("own", OwnConfig, accept=take_all)


# What is refused


@pytest.mark.parametrize("name", ["two words", "", 3, None, "fly-2"])
def test_a_name_must_be_an_identifier(name: Any) -> None:
    with pytest.raises(ValueError, match="`name` must be an identifier"):
        register_scheme(name, OwnConfig, accept=take_all)


def test_a_name_that_is_taken() -> None:
    with pytest.raises(ValueError, match="`name` 'easd' is taken by a scheme: choose another name"):
        register_scheme("easd", OwnConfig, accept=take_all)
    own()
    with pytest.raises(ValueError, match=r"'own' is taken by a scheme: .* unregister_scheme\('own'\) first"):
        own()
    unregister_scheme("own")
    own()


@pytest.mark.parametrize("ways", [{}, {"accept": take_all, "decode": take_all}, {"accept": 3}, {"decode": "no"}])
def test_exactly_one_way_to_decode(ways: Any) -> None:
    with pytest.raises(ValueError, match="exactly one of `accept`"):
        register_scheme("own", OwnConfig, **ways)


def test_a_config_must_be_a_frozen_dataclass_of_ours() -> None:
    class Undecorated(TokenLevelConfig):
        pass

    @dataclass(frozen=True, kw_only=True)
    class Other:
        pass

    for wrong, message in ((Undecorated, "must be decorated with @dataclass"), (Other, "inherits TokenLevelConfig")):
        with pytest.raises(ValueError, match=message):
            register_scheme("own", wrong, accept=take_all)
    with pytest.raises(ValueError, match="`config_class` must be a frozen keyword-only dataclass"):
        register_scheme("own", OwnConfig(), accept=take_all)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="inherits SchemeConfig"):
        register_scheme("own", Other, decode=take_all)  # type: ignore[arg-type, type-var]


def config_with(name: str, kind: Any = int, value: Any = 1) -> Any:
    made = type("Made", (TokenLevelConfig,), {"__annotations__": {name: kind}, name: value})
    return dataclass(frozen=True, kw_only=True)(made)


@pytest.mark.parametrize(
    "name", ["top_k", "attention_mask", "streamer", "trace", "update", "scheme_config", "scheme", "name", "semspec"]
)
def test_a_field_that_means_something_else(name: str) -> None:
    with pytest.raises(ValueError, match=f"the field `{name}` means something else .*: give it another name"):
        register_scheme("own", config_with(name), accept=take_all)
    assert "own" not in SCHEMES


def test_every_field_needs_a_default_and_a_good_one() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Made(TokenLevelConfig):
        slack: float

    with pytest.raises(ValueError, match=r"`Made` must have a default for every field .*slack"):
        register_scheme("own", Made, accept=take_all)
    bad = config_with("slack", float, within(2.0, 0, 1))
    with pytest.raises(ValueError, match=r"`slack` must be a number in \[0, 1\], but is 2.0"):
        register_scheme("own", bad, accept=take_all)
    good = config_with("slack", float, within(0.5, 0, 1))
    register_scheme("own", good, accept=take_all)
    assert SemSpecConfig("own").slack == 0.5


def test_a_class_refused_under_one_name_can_be_registered_under_another() -> None:
    refused = config_with("top_k")
    with pytest.raises(ValueError, match="top_k"):
        register_scheme("own", refused, accept=take_all)
    assert "name" not in vars(refused)


def test_a_config_may_inherit_from_that_of_another_scheme() -> None:
    parent = config_with("slack", float, within(0.5, 0, 1))

    @dataclass(frozen=True, kw_only=True)
    class Child(parent):  # type: ignore[misc, valid-type]
        other_slack: float = within(0.5, 0, 1)

    register_scheme("own", Child, accept=take_all)
    assert SemSpecConfig("own", slack=0.25).semspec["scheme"] == "own"
    with pytest.raises(ValueError, match=r"`Child.name` is 'own': leave it out, or set 'other'"):
        register_scheme("other", Child, accept=take_all)
    unregister_scheme("own")
    register_scheme("other", Child, accept=take_all)  # it had its name by being registered alone
    assert SemSpecConfig("other").semspec["scheme"] == "other"


def test_a_rule_of_one_chain_has_no_use_for_several() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Child(LosslessConfig):
        slack: float = within(0.5, 0, 1)

    with pytest.raises(ValueError, match="`Child` has `num_chains`, but a rule gets one"):
        register_scheme("own", Child, accept=take_all)
    assert LosslessConfig.name == "lossless"


def test_ranges_of_floats_have_lower_ends() -> None:
    register_scheme("own", config_with("slack", float, within(-0.5, -1, 1)), accept=take_all)
    assert SemSpecConfig("own").slack == -0.5
    with pytest.raises(ValueError, match=r"`slack` must be a number in \[-1, 1\], but is -1.5"):
        SemSpecConfig("own", slack=-1.5)


def test_a_config_of_a_scheme_that_is_not_registered_is_an_error_that_says_how() -> None:
    with pytest.raises(ValueError, match="Register a scheme of your own first"):
        SemSpecConfig(config_with("slack", float, within(0.5, 0, 1))())


@pytest.mark.parametrize(
    ("field_name", "value", "range_of_it"),
    [
        ("slack", 1.5, r"a number in \[0, 1\]"),
        ("slack", "much", r"a number in \[0, 1\]"),
        ("weight", 0, "a finite number > 0"),
        ("often", 10, r"an int in \[1, 9\]"),
        ("often", True, r"an int in \[1, 9\]"),
        ("mode", "c", 'one of "a", "b"'),
        ("num_draft_tokens", 0, r"an int in \[1, 64\]"),
    ],
)
def test_bad_values_are_named_with_their_range(field_name: str, value: Any, range_of_it: str) -> None:
    own()
    config = SemSpecConfig("own")
    message = f"`{field_name}` must be {range_of_it}.*, but is {value!r}"
    for attempt in (
        lambda: OwnConfig(**{field_name: value}),
        lambda: SemSpecConfig("own", **{field_name: value}),
        lambda: setattr(config, field_name, value),
        lambda: scheme_from_dict({"scheme": "own", field_name: value}),
    ):
        with pytest.raises(ValueError, match=message):
            attempt()


def test_an_unknown_field_is_told_the_nearest() -> None:
    own()
    with pytest.raises(TypeError, match="'slak' for the scheme 'own'; did you mean `slack`"):
        SemSpecConfig("own", slak=0.1)


def test_unregistering_takes_the_fields_back() -> None:
    config = SemSpecConfig("lossless")
    with pytest.raises(ValueError, match="`name` must be the name of a scheme that register_scheme has added"):
        unregister_scheme("own")
    with pytest.raises(ValueError, match="but is 'easd'"):
        unregister_scheme("easd")
    own()
    assert hasattr(SemSpecConfig, "slack")
    with pytest.raises(AttributeError, match="`slack` is not a field of the scheme 'lossless'"):
        config.slack = 0.1
    unregister_scheme("own")
    assert not hasattr(SemSpecConfig, "slack")
    assert hasattr(SemSpecConfig, "num_draft_tokens")
    with pytest.raises(ValueError, match='`scheme` must be one of "lossless"'):
        SemSpecConfig("own")


# How it is found again


def test_a_file_keeps_it(tmp_path: Path) -> None:
    own()
    SemSpecConfig("own", slack=0.25, max_new_tokens=9).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "generation_config.json").read_text())
    assert (stored["semspec"]["scheme"], stored["semspec"]["slack"]) == ("own", 0.25)
    config = SemSpecConfig.from_pretrained(tmp_path)
    assert config.scheme_config == OwnConfig(slack=0.25)
    assert config.max_new_tokens == 9
    unregister_scheme("own")
    with pytest.raises(ValueError, match="but is 'own'") as error:
        SemSpecConfig.from_pretrained(tmp_path)
    for way in ("import its module", "--scheme-file", "entry point of the group 'hf_semspec.schemes'"):
        assert way in str(error.value)
    assert error.value.__cause__ is None


PACKAGE = """
from dataclasses import dataclass
from hf_semspec import register_scheme
from hf_semspec.schemes import TokenLevelConfig

@dataclass(frozen=True, kw_only=True)
class Config(TokenLevelConfig):
    depth: int = 1

def accept(block, config):
    raise NotImplementedError

register_scheme("packaged", Config, accept=accept)
"""


def test_an_installed_package_is_loaded_for_an_unknown_name_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packaged_scheme.py").write_text(PACKAGE)
    (tmp_path / "forgetful_scheme.py").write_text("")
    info = tmp_path / "packaged_scheme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: packaged-scheme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[hf_semspec.schemes]\npackaged = packaged_scheme\nforgetful = forgetful_scheme\n"
        "lossless = a_module_that_is_not_there\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "packaged_scheme", raising=False)
    SemSpecConfig("lossless")
    assert "packaged_scheme" not in sys.modules
    assert SemSpecConfig("packaged", depth=2).depth == 2
    with pytest.raises(ValueError, match="but is 'forgetful'"):
        SemSpecConfig("forgetful")


class TestSchemeFile:
    """--scheme-file, in processes of their own where a process would keep what the file has registered."""

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        root = Path(__file__).parents[1]
        env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        start = [sys.executable, "-c", "import sys; from hf_semspec.cli import main; sys.exit(main())"]
        return subprocess.run([*start, *words], capture_output=True, text=True, cwd=root, env=env, check=False)

    def lab(self) -> list[str]:
        lab = FILES.parent / "arithmetic_lab"
        return ["--model", str(lab / "target"), "--draft", str(lab / "draft"), "--device", "cpu"]

    def test_generate(self) -> None:
        file = str(FILES / "fly.py")
        words = ["--prompt", "12+34", "--scheme", "fly", "--set", "threshold=0", "--max-new-tokens", "12"]
        done = self.run("generate", *self.lab(), "--scheme-file", file, *words)
        assert done.returncode == 0, done.stderr
        assert "fly" in done.stdout

    def test_eval_with_two(self, tmp_path: Path) -> None:
        files = [word for name in ("fly", "cactus") for word in ("--scheme-file", str(FILES / f"{name}.py"))]
        task = ["--task", "jsonl", "--path", str(FILES.parent / "arithmetic_lab" / "heldout.jsonl"), "--limit", "2"]
        words = ["--schemes", "target,fly:window=2,cactus:delta=1", "--max-new-tokens", "8", "--out", str(tmp_path)]
        done = self.run(*files, "eval", *self.lab(), *task, *words)
        assert done.returncode == 0, done.stderr
        rows = json.loads((tmp_path / "results.json").read_text())["contenders"]
        assert [row["name"] for row in rows] == ["target", "fly:window=2", "cactus:delta=1"]
        assert ["acceptance_rate" not in row for row in rows] == [True, False, False]

    @pytest.mark.parametrize("name", ["nothing.py", "notes.txt"])
    def test_a_file_that_is_none(self, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "notes.txt").write_text("words")
        assert cli.main(["--scheme-file", str(tmp_path / name), "check", *self.lab()]) == 2
        error = capsys.readouterr().err
        assert name in error
        assert error.count("\n") == 1

    def test_one_that_was_imported_already_says_so(self, capsys: pytest.CaptureFixture[str]) -> None:
        with registered(FLY):
            assert cli.main(["--scheme-file", str(FILES / "fly.py"), "check", *self.lab()]) == 2
        assert "'fly' is taken by a scheme" in capsys.readouterr().err

    def test_a_name_that_no_file_has_registered(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["generate", *self.lab(), "--prompt", "12", "--scheme", "fly"]) == 2
        error = capsys.readouterr().err
        assert "but is 'fly'" in error
        assert "--scheme-file" in error


# A whole loop


def test_a_whole_loop_of_ones_own() -> None:
    @dataclass(frozen=True, kw_only=True)
    class LoopConfig(SchemeConfig):
        passes: int = within(1, 1, 3)
        own_words: str = field(default="x")

    def loop(request: Any) -> Any:
        base = SemSpecConfig("lossless").scheme_config
        assert request.scheme.passes == 2
        return SCHEMES["lossless"].decode(replace(request, scheme=base))

    register_scheme("loop", LoopConfig, decode=loop)
    target = tiny()
    both = [
        target.generate(**prompts((5,)), assistant_model=draft_of(target, "near"), generation_config=config)
        for config in (SemSpecConfig("loop", passes=2, max_new_tokens=9), SemSpecConfig("lossless", max_new_tokens=9))
    ]
    assert torch.equal(*both)
    with pytest.raises(ValueError, match="`revise_with` must be"):
        SemSpecConfig("parse", revise_with="loop")
