"""Two small networks that guess, from a segment's mean hidden state, how likely target and draft are to say what it
means."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.utils import cached_file

from ...common.fields import SAMPLING_SETTINGS, shown
from ...common.json_files import read_object
from ...common.warn_once import warn_once
from ...engine.cache import text_config

FORMAT = 1
WEIGHTS, DESCRIPTION = "probe.safetensors", "probe.json"
ROLES = ("target", "draft")
DROPOUT = 0.3
# What the description must have for the weights to be read and used rightly.
_NEEDED = ("format", "widths", "hidden", "segment_stop", "sampling")


class ProbeNetwork(nn.Module):
    """An MLP with one output in (0, 1), on features that it standardises first.

    Args:
        width (`int`): size of a feature, the model's hidden size.
        hidden: sizes of its hidden layers.
    """

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, width: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))
        layers: list[nn.Module] = []
        for size in hidden:
            layers += [nn.Linear(width, size), nn.ReLU(), nn.Dropout(DROPOUT)]
            width = size
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))

    def standardise(self, features: torch.Tensor) -> None:
        """Take mean and spread of `features` (rows, width) for those of all."""
        self.mean.copy_(features.mean(dim=0))
        self.scale.copy_(features.std(dim=0).clamp(min=1e-6))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(rows,) values in (0, 1) for `features` (rows, width)."""
        values: torch.Tensor = self.layers((features.to(self.mean) - self.mean) / self.scale)
        return values.squeeze(-1).sigmoid()


class SemanticProbe:
    """The two probes of a pair of models, as [`train_semantic_probe`] returns them and `probe=` names them.

    Args:
        networks: by role, `"target"` and `"draft"`.
        description (`dict`): JSON-safe: sizes, pooling, segment stop, sampling settings, how the labels were made,
            names of the models, and `metrics` on held-out prompts.
    """

    def __init__(self, networks: dict[str, ProbeNetwork], description: dict[str, Any]) -> None:
        self.networks = {role: network.eval() for role, network in networks.items()}
        self.description = description

    @property
    def report(self) -> dict[str, Any]:
        """Metrics on held-out prompts."""
        return dict(self.description.get("metrics", {}))

    def target(self, features: torch.Tensor) -> torch.Tensor:
        """P̂ (rows,) of the target's mean hidden states (rows, width)."""
        return self._estimate("target", features)

    def draft(self, features: torch.Tensor) -> torch.Tensor:
        """Q̂ (rows,) of the draft's mean hidden states (rows, width)."""
        return self._estimate("draft", features)

    def _estimate(self, role: str, features: torch.Tensor) -> torch.Tensor:
        network = self.networks[role].to(features.device)
        with torch.no_grad():
            values: torch.Tensor = network(features)
        return values

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `probe.safetensors` and `probe.json` to `folder`, which can be uploaded to the Hub as it is."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"{role}.{name}": value.detach().float().cpu().clone().contiguous()
            for role, network in self.networks.items()
            for name, value in network.state_dict().items()
        }
        save_file(tensors, folder / WEIGHTS)
        (folder / DESCRIPTION).write_text(json.dumps(self.description, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, name: str) -> "SemanticProbe":
        """Read the probes from a folder or a Hub id. No code is run: the files are JSON and plain tensors.

        Raises:
            ValueError: there are no probes, or what is there is none.
        """
        try:
            description = read_object(_file(name, DESCRIPTION))
            tensors = load_file(_file(name, WEIGHTS))
        except (OSError, ValueError, SafetensorError) as error:
            reason = next(iter(str(error).splitlines()), "")  # the Hub's go on for paragraphs
            raise ValueError(
                f"probe={name!r} could not be read ({reason}): it must be a folder or a Hub id with {WEIGHTS} and "
                f"{DESCRIPTION}, as train_semantic_probe's result saves them"
            ) from error
        _check_description(name, description)
        networks = {}
        for role in ROLES:
            width, hidden = description["widths"][role], description["hidden"]
            own = {key.removeprefix(f"{role}."): value for key, value in tensors.items() if key.startswith(f"{role}.")}
            # Before anything of these sizes is made.
            if {key: tuple(value.shape) for key, value in own.items()} != _shapes(width, hidden):
                raise ValueError(f"probe={name!r}: {WEIGHTS} does not hold the {role}'s network of {DESCRIPTION}")
            network = ProbeNetwork(width, hidden)
            network.load_state_dict(own)
            networks[role] = network
        return cls(networks, description)

    def check(self, name: str, model: Any, draft: Any, config: Any, segment_stop: str | None) -> None:
        """Refuse a probe that was made for models of other sizes; warn once of other sampling settings or segments.

        Args:
            name: what the probe was loaded from.
            config: the resolved generation config.

        Raises:
            ValueError: the sizes differ.
        """
        for role, one in (("target", model), ("draft", draft)):
            width, own = self.description["widths"][role], text_config(one).hidden_size
            if width != own:
                trained = self.description.get("models", {}).get(role) or "another model"
                raise ValueError(
                    f"probe={name!r} was trained on hidden states of size {width} ({trained}), but the {role} model "
                    f"{type(one).__name__} has {own}: train a probe for this pair with train_semantic_probe"
                )
        sampling = self.description["sampling"]
        names = SAMPLING_SETTINGS if config.do_sample else ()  # probes for greedy decoding come from samples, too
        changed = [key for key in names if key in sampling and not _same(sampling[key], getattr(config, key, None))]
        if self.description["segment_stop"] != segment_stop:
            changed.append("segment_stop")
        if changed:
            place = Path(name).name if Path(name).is_absolute() else name
            warn_once(
                f"the probes of {place} were trained for other settings ({', '.join(changed)} differ): train them for "
                "these, or expect worse decisions"
            )

    def plot(self, path: str | Path) -> None:
        """Draw the reliability curves on held-out prompts to `path` (needs matplotlib, `hf-semspec[bench]`)."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 5), layout="constrained")
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=1, zorder=0)
        for kind, curve in self.report.get("reliability", {}).items():
            r2 = self.report.get("r2", {}).get(kind)
            label = kind if r2 is None else f"{kind}, R² {r2:.2f}"
            segments = sum(point["segments"] for point in curve)
            axes.scatter(
                [point["predicted"] for point in curve],
                [point["label"] for point in curve],
                [8 + 300 * (point["segments"] / segments) ** 0.5 for point in curve],
                alpha=0.6,
                label=label,
            )
        axes.set(xlabel="the probe's estimate", ylabel="mean label", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
        axes.set_title("held-out prompts, ten bins; the side of a mark grows with its segments", fontsize=9)
        axes.legend(fontsize=8, markerscale=0.4)
        figure.savefig(path, dpi=130)


def _check_description(name: str, description: dict[str, Any]) -> None:
    """Refuse a description that lacks what the weights need, or has it of another kind."""
    missing = [key for key in _NEEDED if key not in description]
    if missing or description["format"] != FORMAT:
        raise ValueError(
            f"probe={name!r}: its {DESCRIPTION} "
            + (f"lacks {', '.join(missing)}" if missing else f"has format {description['format']!r}, not {FORMAT}")
            + ": train the probe again with train_semantic_probe"
        )
    widths, hidden, stop = (description[key] for key in ("widths", "hidden", "segment_stop"))
    right = {
        "widths": isinstance(widths, dict) and all(_is_size(widths.get(role)) for role in ROLES),
        "hidden": isinstance(hidden, list) and all(_is_size(size) for size in hidden),
        "segment_stop": stop is None or isinstance(stop, str),
        "sampling": isinstance(description["sampling"], dict),
        "models": isinstance(description.get("models", {}), dict),
        "metrics": isinstance(description.get("metrics", {}), dict),
    }
    for key, fits in right.items():
        if not fits:
            raise ValueError(
                f"probe={name!r}: its {DESCRIPTION} has {key}={shown(description[key])}, which is not what "
                "train_semantic_probe writes: train the probe again"
            )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _shapes(width: int, hidden: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Shapes of a [`ProbeNetwork`]'s state, by name."""
    shapes: dict[str, tuple[int, ...]] = {"mean": (width,), "scale": (width,)}
    for i, size in enumerate([*hidden, 1]):
        shapes[f"layers.{3 * i}.weight"], shapes[f"layers.{3 * i}.bias"] = (size, width), (size,)
        width = size
    return shapes


def _same(one: Any, other: Any) -> bool:
    numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
    return math.isclose(one, other) if numbers else one == other


def _file(name: str, file: str) -> str:
    """The local path of a file of a folder or of a Hub repository."""
    if Path(name).is_dir():
        return str(Path(name) / file)
    if Path(name).is_absolute() or name.startswith(("./", "../", "~")):
        raise OSError("there is no such folder")
    found = cached_file(name, file)
    if found is None:
        raise OSError(f"there is no {file}")
    return str(found)
