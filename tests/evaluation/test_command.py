"""The command hf-semspec eval, by one process and by several."""

import json
import os
import subprocess
import sys

import pytest

import hf_semspec
from hf_semspec import cli
from hf_semspec.evaluation.contenders import parse_contenders
from hf_semspec.evaluation.journal import Journal
from tests.evaluation.shared import evaluate_module_of
from tests.models import draft_of, tiny, tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    model = tiny(eos=1)
    for name, one in (("target", model), ("draft", draft_of(model, "near"))):
        one.save_pretrained(root / name)
        tokenizer(chat=True).save_pretrained(root / name)
    lines = [json.dumps({"prompt": f"say {'x' * i}", "answer": "J"}) for i in range(8)]
    (root / "task.jsonl").write_text("\n".join(lines))
    return root


def arguments(folders, *extra):
    required = ["--model", folders / "target", "--draft", folders / "draft", "--path", folders / "task.jsonl"]
    common = ["--task", "jsonl", "--extract", "[A-Z]", "--max-new-tokens", "8", "--device", "cpu", *extra]
    return ["eval", *map(str, [*required, *common])]


class TestCommand:
    def test_prints_the_table_and_writes_the_files(self, folders, tmp_path, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "160")  # test workers set 80, where names are cut
        extra = ["--schemes", "target,draft,lossless", "mine=easd:penalty=1", "--batch-size", "3", "--out", tmp_path]
        assert cli.main(arguments(folders, *extra)) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in ("target", "draft", "lossless", "mine", "McNemar"))
        for name in (
            "results.json",
            "results.md",
            "records.jsonl",
            "quality_speed.png",
            "quality_speed.pdf",
            "run.json",
        ):
            assert (tmp_path / name).stat().st_size > 0
        result = json.loads((tmp_path / "results.json").read_text())
        meta = result["meta"]
        assert meta["command"].startswith("hf-semspec eval --model")
        assert {"commit", "versions", "machine", "date"} <= meta.keys()
        assert meta["run"]["seeds"] == [0]
        assert [row["name"] for row in result["contenders"]] == ["target", "draft", "lossless", "mine"]
        assert result["contenders"][3]["options"]["penalty"] == 1.0
        assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 4 * 3

    def test_grids_become_heat_maps(self, folders, tmp_path, capsys):
        grid = ["--grid", "smc:num_particles=1|2,num_draft_tokens=2|3", "--limit", "2", "--out", tmp_path]
        assert cli.main(arguments(folders, *grid)) == 0
        for suffix in ("png", "pdf"):
            assert (tmp_path / f"grid_smc.{suffix}").stat().st_size > 0
        result = json.loads((tmp_path / "results.json").read_text())
        assert result["contenders"][0]["name"] == "target"
        assert [cell["values"] for cell in result["grids"][0]["cells"]] == [
            ["1", "2"],
            ["1", "3"],
            ["2", "2"],
            ["2", "3"],
        ]
        assert all(cell["accuracy"] is not None and cell["speed_ratio"] > 0 for cell in result["grids"][0]["cells"])

    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            (["--schemes", "lossles"], "did you mean `lossless`"),
            (["--schemes", "easd:penalti=1"], "did you mean `penalty`"),
            (["--path", "/nowhere.jsonl"], "/nowhere.jsonl"),
            (["--temperature", "0"], "temperature 0.0: must be > 0"),
            (["--temperature", "nan"], "temperature nan: must be > 0"),
            (["--batch-size", "0"], "batch_size"),
            (["--limit", "0"], "limit"),
            (["--max-new-tokens", "0"], "max_new_tokens"),
            (["--seeds", "1", "1"], "none twice"),
            (["--seeds", "a"], "--seeds a"),
            (["--task", "gsm9k"], "--task gsm9k"),
            (["--task", "gsm8k"], "--extract is for"),
            (["--template", "hello"], "--template"),
            (["--extract", "("], "--extract"),
            (["--dtype", "float17"], "--dtype float17"),
            (["--device", "banana"], "--device banana"),
            (["--grid", "smc:num_particles=4"], "--grid"),
        ],
    )
    def test_mistakes_are_one_line_before_a_model_is_loaded(
        self, folders, tmp_path, capsys, monkeypatch, extra, message
    ):
        monkeypatch.setattr(evaluate_module_of(), "load_pair", lambda *a: pytest.fail("loaded"))
        assert cli.main([*arguments(folders, "--out", tmp_path / "out"), *extra]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.startswith("hf-semspec: ") and "Traceback" not in err
        assert not (tmp_path / "out").exists()

    def test_a_contender_that_needs_a_draft_says_so(self, folders, tmp_path, capsys):
        given = arguments(folders, "--out", tmp_path / "out", "--schemes", "lossless")
        at = given.index("--draft")
        assert cli.main([*given[:at], *given[at + 2 :]]) == 2
        assert "contender 'lossless' needs a draft" in capsys.readouterr().err

    def test_without_a_draft_the_target_votes(self, folders, tmp_path, capsys):
        given = arguments(folders, "--out", tmp_path, "--schemes", "majority:n=2", "--limit", "2")
        at = given.index("--draft")
        assert cli.main([*given[:at], *given[at + 2 :]]) == 0

    def test_a_copy_of_the_target_drafts(self, folders, tmp_path, capsys):
        given = arguments(folders, "--out", tmp_path, "--schemes", "lossless", "--limit", "1", "--dtype", "float32")
        assert cli.main([*given, "--draft", "bf16"]) == 0

    def test_a_missing_package_names_the_extra(self, folders, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(evaluate_module_of(), "find_spec", lambda name: None if name == "scipy" else 1)
        assert cli.main(arguments(folders, "--out", tmp_path)) == 2
        assert 'needs scipy: pip install "hf-semspec[eval]"' in capsys.readouterr().err

    def test_no_model_there(self, folders, tmp_path, capsys):
        assert cli.main([*arguments(folders, "--out", tmp_path), "--model", "/nowhere"]) == 2
        assert "/nowhere" in capsys.readouterr().err


def test_two_processes_find_what_one_finds(folders, tmp_path):
    """Started by accelerate's launcher; on CPUs they meet over gloo."""
    extra = ["--schemes", "target,draft,lossless", "--batch-size", "3"]
    assert cli.main(arguments(folders, *extra, "--out", tmp_path / "one")) == 0
    launch = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
    command = [sys.executable, *launch.split(), "--dynamo_backend", "no", "--main_process_port", "0"]
    root = os.path.dirname(os.path.dirname(os.path.abspath(hf_semspec.__file__)))
    done = subprocess.run(
        [*command, "-m", "hf_semspec.cli", *arguments(folders, *extra, "--out", tmp_path / "two")],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written to") == 1
    sizes = [len(Journal(tmp_path / "two", i)._part().read_text().splitlines()) for i in (0, 1)]
    assert sizes == [1 + 2 * 3, 1 + 1 * 3]  # a line for the start; two batches of three, and one
    found = []
    for name in ("one", "two"):
        records = [json.loads(line) for line in (tmp_path / name / "records.jsonl").read_text().splitlines()]
        assert len(records) == 9
        found.append(
            [[r[key] for key in ("seed", "batch", "contender", "prompts", "texts", "correct")] for r in records]
        )
    assert found[0] == found[1]
    results = [json.loads((tmp_path / name / "results.json").read_text())["contenders"] for name in ("one", "two")]
    for one, two in zip(*results, strict=True):
        assert (one["name"], one["accuracy"], one["new_tokens"]) == (two["name"], two["accuracy"], two["new_tokens"])


def test_the_parser_lists_every_kind(capsys):
    with pytest.raises(SystemExit):
        cli.main(["eval", "--help"])
    out = capsys.readouterr().out
    assert all(one.kind in out for one in parse_contenders("draft,lossless,easd,smc,assisted,best_of,majority"))
