"""Jobs over files of prompts: every line answered once, in order, over kills, broken lines and processes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_semspec import SemSpecConfig
from hf_semspec.cli import command as cli
from hf_semspec.jobs import decode as decoding
from hf_semspec.jobs import generate_lines
from hf_semspec.jobs.lines import WINDOW, Line, batches, read_file

LAB = Path(__file__).parents[2] / "examples" / "arithmetic_lab"
QUESTIONS = [json.loads(line)["prompt"] for line in (LAB / "heldout.jsonl").read_text().splitlines()[:24]]
CONFIG = SemSpecConfig("lossless", max_new_tokens=16, do_sample=True)


@pytest.fixture(scope="module")
def pair():
    models = [AutoModelForCausalLM.from_pretrained(LAB / name).eval() for name in ("target", "draft")]
    return {"model": models[0], "draft": models[1], "tokenizer": AutoTokenizer.from_pretrained(LAB / "target")}


def write(path, entries):
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def command(source, out, *extra):
    arguments = ["generate", "--model", str(LAB / "target"), "--draft", str(LAB / "draft"), "--device", "cpu"]
    arguments += ["--input", str(source), "--output", str(out), "--batch-size", "4", "--max-new-tokens", "16"]
    return [*arguments, "--set", "do_sample=true", *extra]


class TestLines:
    def test_batches_are_of_like_length_and_hold_every_line_once(self):
        lines = [Line(i, "x" * (i * 7 % 50 + 1)) for i in range(3 * WINDOW + 2)]
        made = list(batches(lines, 2))
        assert [batch.number for batch in made] == list(range(len(made)))
        assert sorted(line.number for batch in made for line in batch.lines) == list(range(len(lines)))
        first = [line.length for batch in made[:WINDOW] for line in batch.lines]
        assert first == sorted(first, reverse=True)

    def test_the_input_is_read_a_window_at_a_time(self):
        taken = []
        lines = (taken.append(i) or Line(i, "x") for i in range(10 * WINDOW))
        next(batches(lines, 2))
        assert len(taken) == 2 * WINDOW

    def test_what_cannot_be_asked_carries_its_error(self, tmp_path):
        chat = [{"role": "user", "content": "1+1="}]
        entries = [
            {"prompt": "a"},
            {"messages": chat},
            "{",
            "",
            {"prompt": 3},
            {"prompt": "a", "messages": chat},
            "\xff",
        ]
        found = list(read_file(write(tmp_path / "in", entries)))
        assert [line.asked for line in found[:2]] == ["a", chat]
        assert [line.error is None for line in found] == [True, True, *[False] * 5]


def test_a_bad_line_costs_itself_and_answers_are_those_of_generate(pair, tmp_path):
    greedy = SemSpecConfig("lossless", max_new_tokens=16, do_sample=False)
    chat = [{"role": "user", "content": QUESTIONS[1]}]
    entries = [QUESTIONS[0], {"messages": chat}, "", {"prompt": "1" * 600}, {"prompt": QUESTIONS[2]}]
    records = read(generate_lines(source=entries, output=tmp_path / "out", config=greedy, **pair, batch_size=5))
    assert [record["line"] for record in records] == list(range(5))
    assert ["error" in record for record in records] == [False, False, True, True, False]
    assert "must fit into the target's context" in records[3]["error"]
    for record, question in zip([records[i] for i in (0, 1, 4)], QUESTIONS, strict=False):
        ids = (
            pair["tokenizer"]
            .apply_chat_template(
                [{"role": "user", "content": question}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
            .input_ids
        )
        plain = pair["model"].generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
        assert record["text"] == pair["tokenizer"].decode(plain, skip_special_tokens=True)
        assert record["stats"]["emitted"] == record["new_tokens"] <= 16


def test_a_line_on_which_generate_fails_costs_itself(pair, tmp_path, monkeypatch):
    real = type(pair["model"]).generate

    def fails(self, ids, **options):
        if (ids == pair["tokenizer"].convert_tokens_to_ids(" ")).any():
            raise torch.OutOfMemoryError("no room")
        return real(self, ids, **options)

    monkeypatch.setattr(type(pair["model"]), "generate", fails)
    out = generate_lines(source=[*QUESTIONS[:3], "1 ="], output=tmp_path / "out", config=CONFIG, **pair)
    assert [record.get("error") for record in read(out)] == [None, None, None, "OutOfMemoryError: no room"]


def test_an_interrupted_job_goes_on_to_the_same_output(pair, tmp_path, monkeypatch):
    arguments = {"source": QUESTIONS, "config": CONFIG, "batch_size": 4, **pair}
    whole = generate_lines(output=tmp_path / "whole", **arguments).read_bytes()
    decoded = []

    def interrupted(given, config, batch, seed):
        if len(decoded) == 3:
            raise KeyboardInterrupt
        decoded.append(batch.number)
        return decoding.decode(given, config, batch, seed)

    monkeypatch.setattr("hf_semspec.jobs.run.decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate_lines(output=tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()
    part = tmp_path / "out.parts" / "parts" / "0.jsonl"
    part.write_bytes(part.read_bytes()[:-9])  # the third batch's line is torn
    decoded.clear()
    monkeypatch.setattr("hf_semspec.jobs.run.decode", lambda *a: decoded.append(a[2].number) or decoding.decode(*a))
    assert generate_lines(output=tmp_path / "out", **arguments).read_bytes() == whole
    assert decoded == [2, 3, 4, 5]
    generate_lines(output=tmp_path / "out", **arguments)
    assert len(decoded) == 4  # nothing was left to do


@pytest.mark.parametrize(
    "change", [{"source": QUESTIONS[1:9]}, {"source": QUESTIONS[:4]}, {"seed": 1}, {"batch_size": 2}]
)
def test_another_job_is_refused(pair, tmp_path, change):
    arguments = {"source": QUESTIONS[:8], "config": CONFIG, "batch_size": 4, "output": tmp_path / "out", **pair}
    before = generate_lines(**arguments).read_bytes()
    with pytest.raises(ValueError, match=r"another run|input differs"):
        generate_lines(**{**arguments, **change})
    assert (tmp_path / "out").read_bytes() == before


def test_what_the_scheme_refuses_of_all_lines_is_raised(pair, tmp_path, capsys):
    with pytest.raises(ValueError, match="max_new_tokens must be set"):
        generate_lines(source=["1+1="], output=tmp_path / "out", config=SemSpecConfig("lossless"), **pair)
    config = SemSpecConfig("parse", max_new_tokens=8, do_sample=False)
    with pytest.raises(ValueError, match="labels"):
        generate_lines(source=["1+1="], output=tmp_path / "out", config=config, **pair)
    write(tmp_path / "taken", [])
    with pytest.raises(ValueError, match="exists: take another"):
        generate_lines(source=["1+1="], output=tmp_path / "taken", config=CONFIG, **pair)
    assert cli.main([*command("missing.jsonl", tmp_path / "o")]) == 2
    assert "there is no such file" in capsys.readouterr().err


def killed_at_random(source, out, times, seed):
    """Run the command, killed `times` times after a batch or more came on disk; then let it end."""
    draw = random.Random(seed)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "hf_semspec.cli", *command(source, out)]
    part = Path(f"{out}.parts") / "parts" / "0.jsonl"
    for _ in range(times):
        before = part.stat().st_size if part.exists() else 0
        with subprocess.Popen(line, env=environment, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and (part.stat().st_size if part.exists() else 0) <= before:
                time.sleep(0.01)
            time.sleep(draw.random() / 10)
            process.send_signal(signal.SIGKILL)
    return subprocess.run(line, env=environment, check=False).returncode


def test_kill_loses_nothing(tmp_path, pair):
    source = write(tmp_path / "in", [{"prompt": question} for question in QUESTIONS * 2])
    assert killed_at_random(source, tmp_path / "out", 1, 0) == 0
    records = read(tmp_path / "out")
    assert [record["line"] for record in records] == list(range(len(QUESTIONS) * 2))
    assert all("text" in record for record in records)


@pytest.mark.grid
def test_ten_thousand_lines_over_three_kills(tmp_path):
    source = write(tmp_path / "in", [{"prompt": QUESTIONS[i % 24]} for i in range(10_000)])
    assert killed_at_random(source, tmp_path / "out", 3, 1) == 0
    records = read(tmp_path / "out")
    assert [record["line"] for record in records] == list(range(10_000))
    assert all("text" in record for record in records)


def test_processes_share_the_lines(tmp_path, pair):
    """Two processes of a launcher give what one does."""
    source = write(tmp_path / "in", [{"prompt": question} for question in QUESTIONS])
    alone = generate_lines(source=source, output=tmp_path / "alone", config=CONFIG, batch_size=4, **pair)
    launch = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
    launch += " --dynamo_backend no --main_process_port 0 -m hf_semspec.cli"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, *launch.split(), *command(source, tmp_path / "out")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "out.parts" / "parts").glob("*.jsonl"))) == 2
    assert [record["text"] for record in read(tmp_path / "out")] == [record["text"] for record in read(alone)]
