"""`check` and what both commands refuse, with a reason, before anything is loaded."""

import itertools
import json
import re

import pytest

from hf_semspec import LosslessConfig, cli
from hf_semspec.bench import bench, check, request
from hf_semspec.bench.command import main
from hf_semspec.bench.subject import read_prompts
from tests.bench.shared import PAIR


class TestCheck:
    @pytest.fixture(scope="class")
    def advice(self):
        return check(**PAIR, new_tokens=16, repeats=1, blocks=8, widths=(1, 4), batches=(1, 2))

    def test_agreement_is_near_what_was_asked(self, advice):
        for mode in ("greedy", "sampling"):
            assert advice.agreement[mode].greedy == pytest.approx(0.7, abs=0.06)
            assert advice.agreement[mode].positions == 8 * 32
        assert advice.vocabulary == {"kind": "same", "sizes": [200, 200], "note": "200 ids"}

    def test_all_of_it_is_json(self, advice):
        stored = json.loads(json.dumps(advice.to_dict(), allow_nan=False))
        assert stored["chi2"].keys() == {"1", "2", "4", "8", "16"}
        assert {(role, rows, width) for role, rows, width, _ in stored["costs"]} == advice.seconds.keys()
        assert advice.seconds.keys() == {(r, b, w) for r in ("target", "draft") for b in (1, 2) for w in (1, 4)}
        assert {entry["batch"] for entry in stored["forecasts"]} == {1, 2}

    def test_auto_is_forecast_beside_every_fixed_length(self, advice):
        assert [(entry["mode"], entry["batch"]) for entry in advice.lengths] == list(
            itertools.product(("greedy", "sampling"), (1, 2))
        )
        for entry in advice.lengths:
            assert list(entry["speed_up"]) == ["1", "2", "3", "4", "6", "8", "12", "16", "auto"]
            fixed = [value for name, value in entry["speed_up"].items() if name != "auto"]
            assert entry["speed_up"]["auto"] > 0.85 * max(1.0, *fixed)
        assert "γ=auto" in [column.header for column in advice.tables()[-1].columns]

    def test_the_command_prints_tables_and_writes_json(self, capsys, tmp_path, monkeypatch):
        monkeypatch.setenv("COLUMNS", "150")
        sizes = ["--target-size", "1x64x64x2", "--draft-size", "1x64x64x2", "--vocab", "64"]
        options = ["--controlled", "0.5", *sizes, "--new-tokens", "4", "--repeats", "1", "--blocks", "2"]
        costs = tmp_path / "costs.json"
        assert cli.main(["check", *options, "--out", str(tmp_path), "--save", str(costs)]) == 0
        out = capsys.readouterr().out
        assert "64 ids" in out
        assert "one forward, milliseconds" in out
        stored = json.loads((tmp_path / "check.json").read_text())
        assert stored["meta"]["command"].startswith("hf-semspec check --controlled 0.5")
        profile = json.loads(costs.read_text())
        assert LosslessConfig(num_draft_tokens="auto", cost_profile=profile).cost_profile == profile
        assert profile["pair"]["device"] == ["cpu", "cpu"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "--model is missing: pass --model and --draft, or --controlled"),
            (["--model", "m"], "--draft is missing"),
            (["--draft", "d"], "--model is missing"),
            (["--model", "m", "--draft", "d", "--controlled", "0.5"], "--controlled makes both models"),
            (["--controlled", "1.5"], r"--controlled 1.5: must be in \[0, 1\]"),
            (["--controlled", "0.5", "--prompts", "x"], "a controlled pair has ids"),
            (["--controlled", "0.5", "--target-size", "huge"], "--target-size huge: must be one of 98M"),
            (["--controlled", "0.5", "--draft-size", "1x10x10x3"], "--draft-size 1x10x10x3: the hidden size"),
            (["--controlled", "0.5", "--draft-size", "1x16x16x4/3"], "heads of keys and values"),
            (["--controlled", "0.5", "--vocab", "2"], "`vocab` must be an int >= 4"),
            (["--controlled", "0.5", "--logit-scale", "0"], "--logit-scale 0.0"),
            (["--controlled", "0.5", "--batch", "one"], "--batch one: must be whole numbers"),
            (["--controlled", "0.5", "--batch", "0"], "`batch` must be an int in"),
            (["--controlled", "0.5", "--batch", ","], "`batch` must name at least one"),
            (["--controlled", "0.5", "--new-tokens", "1"], "`new_tokens` must be an int >= 2"),
            (["--controlled", "0.5", "--repeats", "0"], "`repeats`"),
            (["--controlled", "0.5", "--alone", "0"], "`alone`"),
            (["--controlled", "0.5", "--schemes", "losless"], "did you mean `lossless`"),
            (["--controlled", "0.5", "--schemes", "lossless:num_draft_tokens=99"], "num_draft_tokens"),
            (["--controlled", "0.5", "--schemes", "majority"], "majority is not a way to decode faster"),
            (["--controlled", "0.5", "--schemes", "plain=lossless"], "'plain': the name is that of a rival"),
            (["--controlled", "0.5", "--dtype", "float3"], "--dtype float3"),
            (["--controlled", "0.5", "--device", "warp"], "--device warp"),
            (["--model", "m", "--draft", "d", "--prompts", "nowhere.txt"], "--prompts nowhere.txt"),
        ],
    )
    def test_before_anything_is_loaded(self, arguments, message, capsys, monkeypatch):
        monkeypatch.setattr(request.PairRequest, "load", lambda *args, **kwargs: pytest.fail("loaded"))
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert re.search(message, error)

    @pytest.mark.parametrize("option", ["new_tokens", "repeats", "blocks"])
    def test_of_the_advisor(self, option, monkeypatch):
        monkeypatch.setattr(request.PairRequest, "load", lambda *args, **kwargs: pytest.fail("loaded"))
        with pytest.raises(ValueError, match=option):
            check(controlled=0.5, **{option: 0})

    def test_without_what_it_draws_with_the_error_names_the_extra(self, monkeypatch):
        monkeypatch.setattr(request, "find_spec", lambda name: None if name == "scipy" else object())
        with pytest.raises(ImportError, match=r'scipy: pip install "hf-semspec\[bench\]"'):
            bench(controlled=0.5)

    def test_prompts_of_a_file(self, tmp_path):
        lines, entries = tmp_path / "a.txt", tmp_path / "b.jsonl"
        lines.write_text("one\n\n two\n")
        entries.write_text('{"prompt": "x\\ny"}\n')
        assert read_prompts(lines) == ["one", " two"]
        assert read_prompts(entries) == ["x\ny"]
        for content in ("", '{"question": "x"}', "not json"):
            entries.write_text(content)
            with pytest.raises(ValueError, match=r"b\.jsonl"):
                read_prompts(entries)
