"""EAGLE-3 checkpoints of SafeAILab, SpecForge / AngelSlim and speculators, made into one form."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from ...common.wrappers import inner_model
from ...engine.hooks import call_for_states, decoder_layers
from .module import EagleConfig, EagleHead

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# The layer's parts in the three formats -> here.
_RENAMED = {"layers.0.": "midlayer.", "model.": "", "enorm.": "midlayer.input_layernorm."}
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def head_entries(source: str | os.PathLike[str], options: dict[str, Any]) -> dict[str, Any] | None:
    """The `config.json` of `source` if it is that of an EAGLE-3 head; runs and loads nothing."""
    path = _file(source, "config.json", options)
    if path is None:
        return None
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(entries, dict):
        return None
    names = [entries.get("speculators_model_type"), *(entries.get("architectures") or [])]
    named = any("eagle3" in str(name).lower() for name in names)
    return entries if named or entries.get("draft_vocab_size") is not None else None


def load_head(
    source: str | os.PathLike[str],
    entries: dict[str, Any],
    target: Any,
    device: Any = None,
    dtype: torch.dtype | None = None,
    options: dict[str, Any] | None = None,
) -> EagleHead:
    """Load a head for `target`.

    Args:
        source: a Hub id or a folder.
        entries: its config.
        target: the model that it was trained for, loaded.
        device, dtype: the target's by default.

    Raises:
        ValueError: a file that cannot be read, weights that do not fit the config, or a config that does not fit the
            target; raised before any forward.
    """
    model = inner_model(target)
    if decoder_layers(model) is None:
        raise ValueError(f"{type(model).__name__} shows no list of decoder layers, from which a head could read.")
    state = _named(_read(source, options or {}))
    config, open_points = _config(source, entries, state, model)
    head = EagleHead(config, model.get_input_embeddings())
    _fill(source, head, state)
    ids = head.ids()
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(set(ids.tolist())) < len(ids)):
        raise ValueError(
            f"The head {source} maps its vocabulary (d2t) to ids that the target does not have, or twice to one: it "
            "was made for another target."
        )
    head.to(device=device or model.lm_head.weight.device if hasattr(model, "lm_head") else device or model.device)
    head.to(dtype=dtype or model.dtype)
    head.eval().requires_grad_(False)
    chosen = _settle(head, model, open_points)
    head.conventions = {"layer_ids": list(config.layer_ids), **{name: getattr(config, name) for name in _FLAGS}}
    head.conventions["probed"] = chosen
    return head


def _file(source: Any, name: str, options: dict[str, Any]) -> str | None:
    known = {key: options[key] for key in ("revision", "cache_dir", "token", "local_files_only") if key in options}
    try:
        found: str | None = cached_file(
            str(source), name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_connection_errors=False, **known,
        )  # fmt: skip
    except OSError:
        return None
    return found


def _read(source: Any, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    path = next(filter(None, (_file(source, name, options) for name in WEIGHTS)), None)
    if path is None:
        raise ValueError(f"The head {source} has no weights: one of {', '.join(WEIGHTS)} is read.")
    try:
        if path.endswith(".safetensors"):
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"The head's weights {path} cannot be read ({error}): the file is damaged.") from error
    return dict(state)


def _named(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state` under SafeAILab's names."""
    renamed = {}
    for name, value in state.items():
        for old, new in _RENAMED.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
        renamed[name] = value
    return renamed


def _config(source: Any, entries: dict[str, Any], state: Any, model: PreTrainedModel) -> tuple[EagleConfig, list[str]]:
    """The head's config, and what the file leaves open."""
    text = model.config.get_text_config()
    nested = dict(entries.get("transformer_layer_config") or {})
    eagle = dict(entries.get("eagle_config") or {})
    shapes = {**{k: v for k, v in entries.items() if not isinstance(v, dict) or k.startswith("rope")}, **nested}
    for name in ("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "layer_types"):
        shapes.pop(name, None)
    said = {**entries, **eagle}
    open_points = [] if said.get("norm_before_residual") is not None else ["norm_before_residual"]
    layer_ids = said.get("eagle_aux_hidden_state_layer_ids")
    count = int(text.num_hidden_layers)
    if not layer_ids:
        layer_ids = [min(2, count), count // 2, max(count - 3, 0)]
    elif "speculators_model_type" not in entries:
        open_points.append("layer_ids")
    layer_ids = [int(index) for index in layer_ids]
    if min(layer_ids) < 0 or max(layer_ids) > count:
        raise ValueError(
            f"The head {source} reads the target's hidden states {layer_ids}, and the target has {count} layers: it "
            "was made for another target."
        )
    for name, own in (("vocab_size", text.vocab_size), ("target_hidden_size", text.hidden_size)):
        value = entries.get(name) or shapes.get(name)
        if value is not None and int(value) != int(own):
            raise ValueError(
                f"The head {source} was made for a target with {name} {value}, and this one's is {own}: pass the "
                "target that it was trained for."
            )
    embeds = "embed_tokens.weight" in state
    if not embeds and int(shapes.get("hidden_size", text.hidden_size)) != int(text.hidden_size):
        raise ValueError(
            f"The head {source} is of size {shapes['hidden_size']} and has no embeddings of its own, and the target's "
            f"are of size {text.hidden_size}: pass the target that it was trained for."
        )
    head_size = state["lm_head.weight"].shape[0] if "lm_head.weight" in state else text.vocab_size
    own = {name: bool(said.get(name) or False) for name in _FLAGS}
    shapes |= {
        **own,
        "vocab_size": int(text.vocab_size),
        "target_hidden_size": int(text.hidden_size),
        "draft_vocab_size": int(said.get("draft_vocab_size") or head_size),
        "layer_ids": layer_ids,
        "own_embeddings": embeds,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    shapes.setdefault("hidden_size", int(text.hidden_size))
    for name in ("eagle_aux_hidden_state_layer_ids", "speculators_model_type", "speculators_version", "auto_map"):
        shapes.pop(name, None)
    return EagleConfig(**shapes), open_points


def _fill(source: Any, head: EagleHead, state: dict[str, torch.Tensor]) -> None:
    """Load `state` into `head`: every weight once, in its shape."""
    wanted = head.state_dict()
    if "d2t" not in state and head.config.draft_vocab_size == head.config.vocab_size:
        state = {**state, "d2t": torch.zeros(head.config.vocab_size, dtype=torch.long)}
    given = {name: value for name, value in state.items() if name not in ("t2d", "verifier_lm_head.weight")}
    given = {name: value for name, value in given.items() if not name.startswith(("verifier_", "rotary"))}
    missing, surplus = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    if missing or surplus:
        parts = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(surplus)}"] * bool(surplus)
        raise ValueError(f"The head {source} {' and '.join(parts)}: it is no EAGLE-3 head in a known format.")
    for name, value in wanted.items():
        if given[name].shape != value.shape:
            raise ValueError(
                f"The head {source} has {name} of shape {tuple(given[name].shape)}, and its config and the target ask "
                f"for {tuple(value.shape)}: the file is of another head or another target."
            )
    head.to(dtype=given["fc.weight"].dtype)
    head.load_state_dict(given)


def _settle(head: EagleHead, model: PreTrainedModel, open_points: list[str]) -> dict[str, float]:
    """Try what the file leaves open on two texts of the target's own, and keep what agrees with it most often.

    Returns:
        The share of the target's own tokens that the head names first, by what was tried; empty if nothing was open.
    """
    config, count = head.config, int(model.config.get_text_config().num_hidden_layers)
    named = list(config.layer_ids)
    shifts = (0, 1) if "layer_ids" in open_points and max(named) < count else (0,)
    residuals = (False, True) if "norm_before_residual" in open_points else (config.norm_before_residual,)
    if len(shifts) * len(residuals) == 1:
        return {}
    shares: dict[str, float] = {}
    best = -1.0
    texts = _own_texts(model)
    for shift, residual in itertools.product(shifts, residuals):
        ids = [index + shift for index in named]
        before, head.midlayer.before_residual = head.midlayer.before_residual, residual
        share = _agreement(head, model, texts, ids)
        head.midlayer.before_residual = before
        shares[f"layer_ids={ids}, norm_before_residual={residual}"] = share
        if share > best:
            best, config.layer_ids, config.norm_before_residual = share, ids, residual
    head.midlayer.before_residual = config.norm_before_residual
    return shares


@torch.no_grad()
def _own_texts(model: PreTrainedModel, width: int = 24) -> list[torch.Tensor]:
    """Two greedy texts of the target, (1, width) each."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    texts = []
    for start in (vocabulary // 3, vocabulary // 7):
        ids = torch.tensor([[start, start // 2]], device=model.get_input_embeddings().weight.device)
        while ids.shape[1] < width:
            ids = torch.cat((ids, model(input_ids=ids).logits[:, -1:].argmax(-1).to(ids.device)), dim=1)
        texts.append(ids)
    return texts


@torch.no_grad()
def _agreement(head: EagleHead, model: nn.Module, texts: list[torch.Tensor], layer_ids: list[int]) -> float:
    """The share of the target's next tokens that `head` names first, over true features."""
    found = []
    for ids in texts:
        output, states = call_for_states(model, {"input_ids": ids, "use_cache": False}, layer_ids)
        logits = head(ids[:, 1:].to(head.device), head.features(states[:, :-1])).logits
        guesses = head.ids()[logits.argmax(-1)]
        found.append((guesses == output.logits[:, 1:].argmax(-1).to(guesses.device)).float().mean().item())
    return float(sum(found) / len(found))
