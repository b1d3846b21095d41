"""What a number depends on: command, commit, versions, machine."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("hf-semspec", "torch", "transformers", "accelerate", "bitsandbytes", "torchao", "hqq")


def describe(command: str) -> dict[str, Any]:
    """Command, commit (with "+" where files differ from it), versions, machine and how busy it is, JSON-safe."""
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "processor": _processor(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "load_average": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
            "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def commit() -> str | None:
    """The commit that the package's files are at, `None` where they are not tracked (an installed copy)."""
    folder = Path(__file__).parents[1]
    try:
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        head = _git(folder, "rev-parse", "--short=12", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
