"""Which pair is asked for, on what prompts and where: checked before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.fields import integer
from ..tools.loading import device_by_name, dtype_by_name
from .sizes import DRAFT_1_5M, TARGET_98M, Size
from .subject import Subject, controlled_subject, load_subject, read_prompts

NEEDS = ("scipy", "matplotlib", "rich")


@dataclass(frozen=True, kw_only=True)
class PairRequest:
    """A pair by name, loaded, or to be made in code.

    Args:
        model (`str` or `PreTrainedModel`, *optional*): the target: a Hub id, a folder, or a loaded model (with
            `tokenizer`).
        draft (`str` or `PreTrainedModel`, *optional*): the draft: the same, or made from the target
            (`bf16`, `nf4`, `layers:N`, ...; see [`loading.load_named_draft`]).
        controlled (`float`, *optional*): in place of both: make a pair that agrees on this share of tokens; see
            [`controlled_pair`], also for `vocab` and `logit_scale`.
        target_size, draft_size (`Size`): shapes of that pair.
        vocab (`int`, *optional*): its vocabulary.
        logit_scale (`float`): its best logit, in nats; less is more entropy.
        prompts (`Sequence[str]` or `Path`, *optional*): texts, or a file of them; eight of our own by default.
        dtype (`str`): of both models, as torch calls it; `auto` is as stored, float32 for a pair made in code.
        device (`str`, *optional*): where both live; cuda where there is one, else cpu.
        seed (`int`): of all draws, and of the pair made in code.
        chat (`bool`): put prompts as a user's turn where the tokenizer has a chat template.
        tokenizer, draft_tokenizer (`PreTrainedTokenizerBase`, *optional*): of models that are passed loaded.

    Raises:
        ValueError: none is asked for, or two are, or a bad value.
        ImportError: what the bench computes and draws with is not there.
    """

    model: str | PreTrainedModel | None = None
    draft: str | PreTrainedModel | None = None
    controlled: float | None = None
    target_size: Size = TARGET_98M
    draft_size: Size = DRAFT_1_5M
    vocab: int | None = None
    logit_scale: float = 12.0
    prompts: Sequence[str] | Path | None = None
    dtype: str = "auto"
    device: str | None = None
    seed: int = 0
    chat: bool = True
    tokenizer: PreTrainedTokenizerBase | None = None
    draft_tokenizer: PreTrainedTokenizerBase | None = None
    texts: list[str] | None = field(init=False)

    def __post_init__(self) -> None:
        if self.controlled is None and (self.model is None or self.draft is None):
            missing = "--model" if self.model is None else "--draft"
            raise ValueError(
                f"{missing} is missing: pass --model and --draft, or --controlled AGREEMENT to make a pair"
            )
        if self.controlled is not None:
            if self.model is not None or self.draft is not None:
                raise ValueError("--controlled makes both models: leave out --model and --draft, or leave it out")
            if not 0 <= self.controlled <= 1:
                raise ValueError(f"--controlled {self.controlled}: must be in [0, 1]")
            if self.prompts is not None:
                raise ValueError("--prompts: a controlled pair has ids and no words; its prompts are made with it")
        if self.vocab is not None:
            integer("vocab", self.vocab, 4)
        integer("seed", self.seed, 0)
        if not 0 < self.logit_scale < math.inf:
            raise ValueError(f"--logit-scale {self.logit_scale}: must be a number > 0")
        dtype_by_name(self.dtype)
        device_by_name(self.device)
        texts = read_prompts(self.prompts) if isinstance(self.prompts, Path) else self.prompts
        object.__setattr__(self, "texts", None if texts is None else list(texts))
        check_installed()

    def describe(self) -> dict[str, Any]:
        """What it is, JSON-safe: two requests that are described alike give the same models and prompts."""
        common = {"dtype": self.dtype, "device": device_by_name(self.device), "seed": self.seed}
        if self.controlled is None:
            names = {"model": _named(self.model), "draft": _named(self.draft)}
            return {**names, **common, "prompts": self.texts, "chat": self.chat}
        sizes = {"target_size": vars(self.target_size), "draft_size": vars(self.draft_size)}
        return {
            "controlled": self.controlled,
            **sizes,
            "vocab": self.vocab,
            "logit_scale": self.logit_scale,
            **common,
        }

    def load(self, prompts: int = 8) -> Subject:
        """The pair; one made in code gets so many prompts."""
        device = device_by_name(self.device)
        if self.controlled is not None:
            dtype = dtype_by_name(self.dtype)
            return controlled_subject(
                self.controlled,
                target_size=self.target_size,
                draft_size=self.draft_size,
                vocab=self.vocab,
                seed=self.seed,
                logit_scale=self.logit_scale,
                dtype=dtype if isinstance(dtype, torch.dtype) else torch.float32,
                device=device,
                prompts=prompts,
            )
        assert self.model is not None and self.draft is not None
        return load_subject(
            self.model,
            self.draft,
            self.texts,
            tokenizer=self.tokenizer,
            draft_tokenizer=self.draft_tokenizer,
            dtype=self.dtype,
            device=device,
            chat=self.chat,
        )


def check_installed() -> None:
    """See that what the bench computes and draws with is there.

    Raises:
        ImportError: something is not.
    """
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise ImportError(f'The bench needs {", ".join(missing)}: pip install "hf-semspec[bench]"')


def _named(model: str | PreTrainedModel | None) -> str:
    return model.config._name_or_path or type(model).__name__ if isinstance(model, PreTrainedModel) else str(model)
