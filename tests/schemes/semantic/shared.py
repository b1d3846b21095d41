"""What the tests of `semantic` share."""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteria

from hf_semspec import SemSpecConfig
from hf_semspec.schemes.semantic.probe import FORMAT, ProbeNetwork, SemanticProbe
from tests.models import VOCAB, draft_of, prompts, tiny, tokenizer

CHARACTERS = [tokenizer().decode([token]) for token in range(VOCAB)]
NO_TEXT = {"segment_stop": None, "think_end": None}
ALWAYS = {"scorer": "random", "accept_rate": 1.0}
NEVER = {"accept_floor": math.inf}


def call(target: PreTrainedModel, draft: PreTrainedModel, inputs: Any, **fields: Any) -> Any:
    config = SemSpecConfig("semantic", **{"do_sample": False, "return_dict_in_generate": True, **fields})
    return target.generate(**inputs, assistant_model=draft, generation_config=config, tokenizer=tokenizer())


def a_probe(folder: Path, widths: tuple[int, int] = (32, 32), **description: Any) -> str:
    """A probe whose weights are random, so that about half of all segments pass."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        networks = {role: ProbeNetwork(width, [8]) for role, width in zip(("target", "draft"), widths, strict=True)}
        for network in networks.values():
            network.layers[-1].weight.data *= 10  # far from 1/2
    described = {
        "format": FORMAT,
        "widths": dict(zip(("target", "draft"), widths, strict=True)),
        "hidden": [8],
        "segment_stop": None,
        "sampling": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
        **description,
    }
    SemanticProbe(networks, described).save_pretrained(folder)
    return str(folder)


def passed(model: PreTrainedModel, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and last hidden states of a whole text."""
    with torch.no_grad():
        output = model(torch.tensor([ids]), output_hidden_states=True)
    return output.logits[0].float().log_softmax(dim=-1), output.hidden_states[-1][0]


SHORT = {**NO_TEXT, "max_segment_tokens": 4, "revise_chunk": 2}


def three(shape: str = "llama", noise: float = 0.2) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    target = tiny(shape, 1, attention="sdpa")
    return target, draft_of(target, "near", noise=noise), prompts((4, 9, 6), seed=1)


class Twice(StoppingCriteria):
    """Ends a row that holds `token`, and counts how often it is asked at each width."""

    def __init__(self, token: int) -> None:
        self.token, self.widths = token, list[int]()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.widths.append(input_ids.shape[1])
        return (input_ids[:, 9:] == self.token).any(dim=1)
