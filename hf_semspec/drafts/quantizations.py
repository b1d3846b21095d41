"""The quantizations that `load_draft` makes, and the packages that these and quantized checkpoints need."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel, TorchAoConfig

# What each quantization is called here: the package that does it and what pip is told.
MAKERS = {
    "nf4": ("bitsandbytes", '"hf-semspec[quant]"'),
    "fp4": ("bitsandbytes", '"hf-semspec[quant]"'),
    "int8": ("bitsandbytes", '"hf-semspec[quant]"'),
    "torchao-int8": ("torchao", "torchao"),
    "torchao-int4": ("torchao", "torchao"),
    "hqq": ("hqq", "hqq"),
}
# By `quant_method` of a stored config: what pip calls the packages that loading such a checkpoint takes.
READERS = {
    "awq": ("gptqmodel",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",),
    "gptq": ("optimum", "gptqmodel"),
    "quanto": ("optimum-quanto",),
    "torchao": ("torchao",),
}
_MODULES = {"compressed-tensors": "compressed_tensors", "optimum-quanto": "optimum.quanto"}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INT4_GROUP, HQQ_GROUP = 32, 64


def check_quantization(name: str, kwargs: Mapping[str, Any]) -> None:
    """Check that `name` is a quantization that can be made here, and the only one asked for.

    Raises:
        ValueError: an unknown name, or two quantizations; the message says what to pass.
        ImportError: its package is missing; the message names the line for pip.
    """
    if name not in MAKERS:
        raise ValueError(f"quantization={name!r}: must be None or one of {', '.join(MAKERS)}.")
    if "quantization_config" in kwargs:
        raise ValueError("Pass either `quantization` or `quantization_config`, not both.")
    if "gguf_file" in kwargs:
        raise ValueError(
            "transformers unpacks a GGUF file while it loads it: load it without `quantization`, then pass the loaded "
            "model with it."
        )
    package, install = MAKERS[name]
    if find_spec(package) is None:
        raise ImportError(f'quantization="{name}" needs {package}: pip install {install}')


def default_dtype(name: str) -> torch.dtype:
    """What the layers of a model loaded by name compute in where nothing is said: bitsandbytes casts what comes in;
    under the others the rest of the model, whose dtype is its checkpoint's, must agree."""
    return torch.bfloat16 if MAKERS[name][0] == "bitsandbytes" else torch.float32


def quantization_config(name: str, dtype: torch.dtype, device: Any) -> Any:
    """What `from_pretrained` is told; `None` for a quantization that is made after loading ([`quantize`]).

    Args:
        name (`str`): a key of `MAKERS`.
        dtype (`torch.dtype`): the one quantized layers compute in.
        device: where the model will live; `None` is the CPU.

    Raises:
        ValueError: `dtype` cannot be quantized.
    """
    if dtype not in _DTYPES:
        raise ValueError(
            f'quantization="{name}" of a model in {dtype}: pass `dtype`, one of {", ".join(map(str, _DTYPES))}.'
        )
    if name == "hqq":
        return None
    if name == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    if name in ("nf4", "fp4"):
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=name, bnb_4bit_compute_dtype=dtype)
    return TorchAoConfig(_int8_weights() if name == "torchao-int8" else _int4_weights(dtype, device))


def _int8_weights() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    # The inductor's settings are the process's own.
    return Int8WeightOnlyConfig(set_inductor_config=False)


def _int4_weights(dtype: torch.dtype, device: Any) -> Any:
    from torchao import quantization

    kind = "cpu" if device is None else "cuda" if isinstance(device, int) else torch.device(device).type
    if kind != "cuda":
        # torchao packs two weights into a byte on CUDA only; elsewhere each of these 4-bit weights takes a byte.
        per_group = quantization.PerGroup(INT4_GROUP)
        return quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=per_group)  # type: ignore[attr-defined]
    if dtype != torch.bfloat16:
        raise ValueError('quantization="torchao-int4" computes in bfloat16 on CUDA: pass `dtype=torch.bfloat16`.')
    return quantization.Int4WeightOnlyConfig(
        group_size=INT4_GROUP, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
    )


def quantize(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replace the linear layers of `model`, but for its head, by HQQ's 4-bit ones, in place.

    transformers 5 has no loader for HQQ. Layers whose rows are no multiple of 64 stay as they are.
    """
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    head = model.get_output_embeddings()
    settings = BaseQuantizeConfig(nbits=4, group_size=HQQ_GROUP, axis=1)
    for name, linear in list(model.named_modules()):
        if type(linear) is torch.nn.Linear and linear is not head and linear.in_features % HQQ_GROUP == 0:
            place = str(linear.weight.device)
            model.set_submodule(name, HQQLinear(linear, settings, compute_dtype=dtype, device=place).eval())


def missing_reader(source: str | os.PathLike[str], kwargs: Mapping[str, Any]) -> str | None:
    """A sentence that names the packages which loading the checkpoint `source` takes and which are missing; `None`
    where nothing is."""
    if "gguf_file" in kwargs:
        return None if find_spec("gguf") else f'{kwargs["gguf_file"]} needs gguf: pip install "hf-semspec[demo]"'
    stored = PretrainedConfig.get_config_dict(source, **kwargs)[0].get("quantization_config")
    method = stored.get("quant_method") if isinstance(stored, dict) else None
    packages = [name for name in READERS.get(str(method), ()) if not _installed(_MODULES.get(name, name))]
    if not packages:
        return None
    return f"{source} is stored in {method} and needs {' and '.join(packages)}: pip install {' '.join(packages)}"


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent of a dotted name is missing
        return False
