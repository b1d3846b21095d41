"""What is measured: a pair of models, their tokenizers, and the prompts that they decode."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..evaluation.batch import Batch, encode_all, ends_and_pad
from ..evaluation.evaluate import load_pair
from ..tools.models import PROBLEMS
from .pairs import ControlledPair, controlled_pair
from .sizes import Size

PROMPTS = (
    *PROBLEMS,
    "Explain to a child why the sky is blue, in three sentences.",
    "Write a short letter to a landlord about a leaking roof.",
    "List the steps of changing a bicycle tyre.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take? Show your reasoning.",
    "Name five uses of vinegar in a kitchen, with a reason for each.",
)
JUDGED_WORDS = ("Correct", "Incorrect")


@dataclass(frozen=True)
class Subject:
    """A pair of models and the prompts that they decode.

    Args:
        model (`PreTrainedModel`): the target.
        draft (`PreTrainedModel`): the draft.
        prompts (`list[torch.LongTensor]`): ids `(length,)` each, on the target's device.
        tokenizer, draft_tokenizer (`PreTrainedTokenizerBase`, *optional*): where they have them.
        eos (`list[int]`): ids that end a text.
        pad (`int`): the id that fills a row.
        about (`dict`): what this is, JSON-safe: names or sizes, dtype, device.
        pair (`ControlledPair`, *optional*): the pair that was made in code.
    """

    model: PreTrainedModel
    draft: PreTrainedModel
    prompts: list[torch.Tensor]
    tokenizer: PreTrainedTokenizerBase | None = None
    draft_tokenizer: PreTrainedTokenizerBase | None = None
    eos: list[int] = field(default_factory=list)
    pad: int = 0
    about: dict[str, Any] = field(default_factory=dict)
    pair: ControlledPair | None = None

    @property
    def cuda(self) -> bool:
        """Whether the target runs on an accelerator of that kind."""
        return bool(self.model.device.type == "cuda")

    def batch(self, size: int, index: int) -> Batch:
        """The `index`-th batch of `size` prompts, padded on the left; after the last prompt comes the first."""
        count = len(self.prompts)
        rows = [self.prompts[(index * size + i) % count] for i in range(size)]
        return self.padded(rows)

    def batches(self, size: int) -> int:
        """How many batches of `size` differ."""
        return max(1, len(self.prompts) // size)

    def padded(self, rows: Sequence[torch.Tensor]) -> Batch:
        """The prompts `rows` as one batch."""
        return Batch.of(rows, self.eos, self.pad, self.model.device)


def load_subject(
    model: str | PreTrainedModel,
    draft: str | PreTrainedModel,
    prompts: Sequence[str] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    chat: bool = True,
) -> Subject:
    """Two models by name, folder or as they are, with the prompts as ids; arguments as of [`bench`]."""
    names = {"model": _name(model), "draft": _name(draft)}
    pair = load_pair(model, draft, tokenizer, draft_tokenizer, dtype, device, chat)
    assert pair.draft is not None
    ids = [row.to(pair.model.device) for row in encode_all(pair.tokenizer, list(prompts or PROMPTS), chat=chat)]
    eos, pad = ends_and_pad(pair.model, pair.tokenizer)
    about = {**names, **_sizes(pair.model, pair.draft), "prompts": len(ids)}
    return Subject(pair.model, pair.draft, ids, pair.tokenizer, pair.draft_tokenizer, eos, pad, about)


def controlled_subject(
    agreement: float,
    *,
    target_size: Size,
    draft_size: Size,
    vocab: int | None = None,
    seed: int = 0,
    logit_scale: float = 12.0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    prompts: int = 8,
    prompt_length: int = 16,
) -> Subject:
    """A pair made in code, with `prompts` stretches of its cycle of `prompt_length` tokens as prompts.

    See [`controlled_pair`] for the other arguments. Its tokenizer has a word for each id; two of them are the words
    that parse's judge answers with.
    """
    pair = controlled_pair(
        agreement,
        target_size=target_size,
        draft_size=draft_size,
        vocab=vocab,
        seed=seed,
        logit_scale=logit_scale,
        dtype=dtype,
        device=device,
    )
    rows = list(pair.prompts(prompts, prompt_length, seed=seed).to(device))
    about = {"controlled": agreement, "seed": seed, "logit_scale": logit_scale, "vocab": len(pair.cycle)}
    about |= {"prompts": prompts, "prompt_length": prompt_length, **_sizes(pair.model, pair.draft)}
    words = word_tokenizer(len(pair.cycle))
    return Subject(pair.model, pair.draft, rows, words, words, [], 0, about, pair)


def word_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A tokenizer with a word for each id of a controlled pair: `t0`, `t1`, ..., `Correct`, `Incorrect`."""
    names = [*(f"t{i}" for i in range(vocab - len(JUDGED_WORDS))), *JUDGED_WORDS]
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="t0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="t0", pad_token="t0")


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: its lines that are not empty, or of a `.jsonl` file the entries `prompt`.

    Raises:
        ValueError: there is no such file, no prompt in it, or a line of JSON without one.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {path}: {error}") from None
    if path.suffix == ".jsonl":
        try:
            lines = [json.loads(line)["prompt"] for line in lines]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f'--prompts {path}: every line must be JSON with an entry "prompt"') from None
    if not lines or not all(isinstance(line, str) and line.strip() for line in lines):
        raise ValueError(f"--prompts {path}: holds no prompt, or an empty one")
    return lines


def _sizes(model: PreTrainedModel, draft: PreTrainedModel) -> dict[str, Any]:
    return {
        "parameters": [sum(p.numel() for p in each.parameters()) for each in (model, draft)],
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
    }


def _name(model: str | PreTrainedModel) -> str:
    return str(model) if isinstance(model, str | Path) else model.config._name_or_path or type(model).__name__
