"""Trains the probes of `semantic` for a pair of models, on prompts of the user's task."""

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from ..common.fields import bad_value, integer
from ..configuration import SemanticConfig
from ..engine.cache import text_config
from ..engine.text import find_tokenizer
from ..schemes.semantic.probe import FORMAT, SemanticProbe
from .continuations import Continuer
from .easd import progress_over, prompt_inputs
from .meanings import Equivalence, meanings, shares
from .probe_fitting import Samples, fit, joined, measure

ROWS = 160  # continuations written at once


def train_semantic_probe(
    model: Any,
    draft: Any,
    prompts: Iterable[Any],
    *,
    equivalence: Equivalence = "exact",
    num_continuations: int = 20,
    max_prefixes: int = 8,
    labels: str = "cross",
    hidden: Sequence[int] = (64, 32),
    seed: int = 0,
    config: SemanticConfig | None = None,
    generation_config: GenerationConfig | None = None,
    tokenizer: Any = None,
    max_new_tokens: int = 512,
    epochs: int = 20,
    held_out: float = 0.2,
    folder: str | Path | None = None,
    progress: bool = True,
) -> SemanticProbe:
    """Train the two probes of `semantic` (SemanticSpec, arXiv 2602.03708) for a pair of models.

    The target writes a text for each prompt. Where a segment of it begins, both models continue `num_continuations`
    times; what means the same is put together, and a probe learns, from the mean hidden state of a continuation, which
    share of the model's continuations mean the same.

    Args:
        model, draft: the pair to train for.
        prompts: strings or lists of chat messages, or dicts of `input_ids` and `attention_mask`, one prompt each.
        equivalence: which continuations mean the same: `"exact"` those of the same text up to white space, `"hidden"`
            those of close hidden states (ours), or a function of two texts, such as an entailment model both ways.
        num_continuations (`int`): M, a prefix and model.
        max_prefixes (`int`): the most prefixes a prompt, drawn from the places where a segment begins.
        labels: `"cross"`: the target's probe also learns what the target thinks of the draft's continuations, labelled
            by the target's share (ours, and better); `"own"`: each probe sees its own model's text only, as in the
            release.
        hidden: sizes of the probes' hidden layers.
        seed (`int`): decides prefixes, continuations, the split and the fit.
        config (`SemanticConfig`, *optional*): says where segments end; its defaults otherwise.
        generation_config (`GenerationConfig`, *optional*): the sampling settings to train for; temperature 1 and
            nothing cut off otherwise. For greedy use, train at the temperature that sampling would have.
        tokenizer (*optional*): the target's; by default the one in the folder that `model` came from.
        max_new_tokens (`int`): of the texts that prefixes are cut from.
        epochs (`int`): passes over the data.
        held_out (`float` in (0, 1)): share of the prompts that the metrics are measured on.
        folder (*optional*): where the continuations are kept, prompt by prompt: the same call goes on where it was
            interrupted.
        progress (`bool`): show a progress bar (with rich, if it is installed).

    Returns:
        `SemanticProbe` with `.save_pretrained(folder)`, `.report` (metrics on held-out prompts) and `.plot(path)`.

    Raises:
        ValueError: a bad value, fewer than two prompts, a greedy generation config, or a folder of other settings.
    """
    inputs = _checked(prompts, equivalence, num_continuations, max_prefixes, labels, held_out)
    tokenizer = find_tokenizer(model, tokenizer, "train_semantic_probe tells segments by their text")
    base = config if config is not None else SemanticConfig()
    sampling = _sampling(generation_config)
    eos = _eos(model, generation_config)
    pad = next((i for i in (getattr(tokenizer, "pad_token_id", None), *eos) if i is not None), 0)
    described = {
        "format": FORMAT,
        "widths": {"target": text_config(model).hidden_size, "draft": text_config(draft).hidden_size},
        "hidden": [int(size) for size in hidden],
        "pooling": "mean of the last hidden states, after the final norm, that predict the segment's tokens",
        "segment_stop": base.segment_stop,
        "max_segment_tokens": base.max_segment_tokens,
        "sampling": {"do_sample": True, **sampling},
        "num_continuations": num_continuations,
        "max_prefixes": max_prefixes,
        "labels": labels,
        "equivalence": equivalence if isinstance(equivalence, str) else getattr(equivalence, "__name__", "callable"),
        "models": {"target": _name(model), "draft": _name(draft)},
        "prompts": len(inputs),
        "seed": seed,
    }
    fixed = {name: value for name, value in described.items() if name not in ("hidden", "labels", "prompts")}
    kept = _Kept(folder, {**fixed, "max_new_tokens": max_new_tokens})
    continuer = Continuer(model, draft, tokenizer, base, sampling, eos, int(pad))
    samples = []
    for index, prompt in enumerate(progress_over(inputs, "continuing prefixes", progress)):
        batch = prompt_inputs(prompt, tokenizer, model)
        found = kept.load(index, batch["input_ids"])
        if found is None:
            with torch.random.fork_rng():
                torch.manual_seed(seed * 1_000_003 + index)
                text = _write(model, batch, sampling, eos, int(pad), max_new_tokens)
                prefixes = _prefixes(continuer, batch["input_ids"][0].tolist(), text, max_prefixes, seed + index)
                found = _samples(continuer, prefixes, num_continuations, equivalence)
            kept.save(index, batch["input_ids"], found)
        samples.append(found)
    order = list(range(len(samples)))
    random.Random(seed).shuffle(order)
    tested = max(1, round(held_out * len(order)))
    train, test = joined([samples[i] for i in order[tested:]]), joined([samples[i] for i in order[:tested]])
    networks = fit(train, labels, hidden, epochs, seed)
    metrics = {"held_out_prompts": tested, **measure(networks, test, base.accept_ratio)}
    return SemanticProbe(networks, {**described, "epochs": epochs, "metrics": metrics})


def _checked(
    prompts: Iterable[Any], equivalence: Any, continuations: Any, prefixes: Any, labels: Any, held_out: Any
) -> list[Any]:
    """The prompts as a list, once all else is what it must be."""
    if not callable(equivalence) and equivalence not in ("exact", "hidden"):
        raise bad_value("equivalence", equivalence, '"exact", "hidden" or a function of two texts')
    if labels not in ("cross", "own"):
        raise bad_value("labels", labels, '"cross" or "own"')
    integer("num_continuations", continuations, 2)
    integer("max_prefixes", prefixes, 1)
    if not 0 < held_out < 1:
        raise bad_value("held_out", held_out, "a number in (0, 1)")
    inputs = list(prompts)
    if len(inputs) < 2:
        raise ValueError(f"prompts has {len(inputs)} entries: pass at least two, some are held out for the metrics")
    return inputs


def _sampling(config: GenerationConfig | None) -> dict[str, Any]:
    """`temperature`, `top_k` and `top_p` as `generate` would resolve them."""
    if config is None:
        return {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    if not config.do_sample:
        raise ValueError(
            "generation_config decodes greedily, but a probe is trained on samples: set do_sample=True and the "
            "temperature that sampling would have"
        )
    defaults = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
    given = {name: getattr(config, name, None) for name in defaults}
    return {name: default if given[name] is None else given[name] for name, default in defaults.items()}


def _eos(model: Any, config: GenerationConfig | None) -> list[int]:
    own = getattr(config, "eos_token_id", None)
    value = model.generation_config.eos_token_id if own is None else own
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _name(model: Any) -> str:
    return str(getattr(model.config, "_name_or_path", "") or type(model).__name__)


def _write(
    model: Any, batch: dict[str, torch.Tensor], sampling: dict[str, Any], eos: list[int], pad: int, most: int
) -> list[int]:
    """A text of the target's, as ids."""
    config = GenerationConfig(
        do_sample=True, **sampling, max_new_tokens=most, eos_token_id=eos or None, pad_token_id=pad
    )
    output = model.generate(**batch, generation_config=config, semspec=None)
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    ids: list[int] = sequences[0, batch["input_ids"].shape[1] :].tolist()
    return ids


def _prefixes(continuer: Continuer, prompt: list[int], text: list[int], most: int, seed: int) -> list[list[int]]:
    cuts = continuer.cuts(text)
    if len(cuts) > most:
        cuts = sorted(random.Random(seed).sample(cuts, most))
    return [prompt + text[:cut] for cut in cuts]


def _samples(continuer: Continuer, prefixes: list[list[int]], number: int, equivalence: Equivalence) -> Samples:
    parts, step = [], max(ROWS // number, 1)
    for first in range(0, len(prefixes), step):
        for found in continuer(prefixes[first : first + step], number):
            texts = [*found.target_texts, *found.draft_texts]
            said = meanings(texts, torch.cat([found.target, found.crossed]), equivalence)
            target, draft = said[:number], said[number:]
            wanted = (shares(target, target), shares(draft, draft), shares(draft, target))
            parts.append(Samples(found.target, found.draft, found.crossed, *(torch.tensor(one) for one in wanted)))
    return joined(parts)


class _Kept:
    """Samples of each prompt in a folder, for a call that is interrupted."""

    def __init__(self, folder: str | Path | None, settings: dict[str, Any]) -> None:
        self.folder = None if folder is None else Path(folder)
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        file, text = self.folder / "settings.json", json.dumps(settings, indent=1, sort_keys=True)
        if file.exists() and file.read_text(encoding="utf-8") != text:
            raise ValueError(
                f"folder={str(folder)!r} holds continuations of other settings: name another, or empty it"
            )
        file.write_text(text, encoding="utf-8")

    def load(self, index: int, ids: torch.Tensor) -> Samples | None:
        if self.folder is None or not self._file(self.folder, index, ids).exists():
            return None
        return Samples(**load_file(self._file(self.folder, index, ids)))

    def save(self, index: int, ids: torch.Tensor, samples: Samples) -> None:
        if self.folder is not None:
            unfinished = self.folder / "unfinished"
            save_file({name: value.contiguous() for name, value in vars(samples).items()}, unfinished)
            unfinished.replace(self._file(self.folder, index, ids))

    @staticmethod
    def _file(folder: Path, index: int, ids: torch.Tensor) -> Path:
        text = hashlib.sha256(json.dumps(ids.tolist()).encode()).hexdigest()[:8]
        return folder / f"{index:05d}-{text}.safetensors"
