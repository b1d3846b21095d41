"""Trains the lab's target or draft on a CPU: `python -m examples.arithmetic_lab.train target --out DIR`."""

import argparse
import json
import random
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Tokenizer

from .evaluate import judge_rates, right_answers
from .packing import IGNORE, Packed, Packer, Row
from .plot import plot_metrics
from .rows import Rows, drafted_rows, right_row
from .settings import SHAPES, Settings
from .task import corrupt, sample_problem
from .tokenizer import build_tokenizer, save_tokenizer

# Training ends when accuracy on the validation problems lies in the band (and, for the target, it judges well).
BANDS = {"target": (0.88, 0.95), "draft": (0.56, 0.72)}
GOOD_JUDGE = 0.92
# The hidden states from which the judge's parts are trained: what comes next is to be known after four of the eight
# layers, whether a character is what was to come after six; the verdict gathers the answers in the last two.
EARLY, MARKS = -5, -3
LOSSES = ("writing_loss", "early_loss", "judging_loss", "slip_loss")


def build_model(settings: Settings, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A model of random weights in float32."""
    torch.manual_seed(settings.seed)
    shape = settings.shape or SHAPES[settings.role]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    return LlamaForCausalLM(config)


def build_optimizers(settings: Settings, model: Any, head: torch.nn.Linear) -> list[torch.optim.Optimizer]:
    """AdamW for all weights or, with `settings.muon`, for what Muon is not for: it takes the layers' matrices.

    Muon's update has about the same size in every direction (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).
    """
    muon = [weight for weight in model.model.layers.parameters() if weight.dim() > 1] if settings.muon else []
    taken = {id(weight) for weight in muon}
    left = [weight for weight in model.parameters() if id(weight) not in taken]
    matrices = [weight for weight in left if weight.dim() > 1]
    vectors = [weight for weight in left if weight.dim() <= 1] + list(head.parameters())
    decay = {"lr": settings.lr, "weight_decay": 0.05}
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, betas=(0.9, 0.98), **decay)]
    if muon:
        # Updates as large as AdamW's, so that one learning rate serves both.
        optimizers.append(torch.optim.Muon(muon, adjust_lr_fn="match_rms_adamw", **decay))
    return optimizers


def learning_rate(settings: Settings, step: int) -> float:
    """Linear warm-up, constant, linear decay."""
    rate = min(1.0, (step + 1) / max(1, settings.warmup))
    left = (settings.steps - step) / max(1, settings.decay)
    return settings.lr * min(rate, max(0.05, min(1.0, left)))


def halved(losses: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """The mean over the kinds of the mean loss of each, so that a rare kind weighs as much as a common one."""
    return torch.stack([losses[kinds == kind].mean() for kind in kinds.unique()]).mean()


def losses(model: Any, head: torch.nn.Linear, batch: Packed) -> tuple[torch.Tensor, ...]:
    """Mean losses of the characters, of the characters told half-way up, of the verdicts, of the marks on wrong ones.

    A verdict asks whether any character before it was wrong. The head asks it of each character by itself, where the
    model has two layers left to gather the answers: a hundred signals a solution beside the verdicts' eight.

    Args:
        model: What is trained.
        head: From the hidden state two layers below the top to a logit; it is not part of the saved model.
        batch: What it is trained on.
    """
    judged = bool((batch.labels != IGNORE).any())
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.mask, "position_ids": batch.position_ids}
    output = model(**inputs, use_cache=False, output_hidden_states=judged)
    writing = cross_entropy(output.logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)
    if not judged:
        return writing, *torch.zeros(3)
    early = model.lm_head(model.model.norm(output.hidden_states[EARLY]))
    early_writing = cross_entropy(early.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)
    where, marked = batch.labels != IGNORE, batch.slips != IGNORE
    verdicts = cross_entropy(output.logits[where], batch.labels[where], reduction="none")
    marks = head(output.hidden_states[MARKS][marked]).squeeze(-1)
    slips = binary_cross_entropy_with_logits(marks, batch.slips[marked].float(), reduction="none")
    return writing, early_writing, halved(verdicts, batch.labels[where]), halved(slips, batch.slips[marked])


class Trainer:
    """One run: its model, optimizer and metrics, saved together and taken up again together.

    Args:
        settings: The run's.
    """

    def __init__(self, settings: Settings):
        self.settings, self.out = settings, Path(settings.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.tokenizer = build_tokenizer()
        self.model = build_model(settings, self.tokenizer)
        self.head = torch.nn.Linear(self.model.config.hidden_size, 1)
        self.packer, self.rows = Packer(self.tokenizer), Rows(settings, self.tokenizer)
        self.optimizers = build_optimizers(settings, self.model, self.head)
        self.step, self.seconds, self.history = 0, 0.0, []
        rng = random.Random(f"{settings.seed}-validation")
        self.validation = [sample_problem(rng, split="validation") for _ in range(settings.validation)]
        self.synthetic = [Row(p, *corrupt(rng, p)) if i % 2 else right_row(p) for i, p in enumerate(self.validation)]
        self.drafted: list[Row] = []
        if settings.resume and self.checkpoint.exists():
            self.load()

    @property
    def checkpoint(self) -> Path:
        """The file a run is resumed from."""
        return self.out / "checkpoint.pt"

    def load(self) -> None:
        """Takes up a run where its checkpoint left it."""
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.head.load_state_dict(state["head"])
        for optimizer, held in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(held)
        self.step, self.seconds, self.history = state["step"], state["seconds"], state["history"]

    def save_checkpoint(self) -> None:
        """Writes the checkpoint whole or not at all."""
        names = ("step", "seconds", "history")
        state = {name: getattr(self, name) for name in names}
        for name in ("model", "head"):
            state[name] = getattr(self, name).state_dict()
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)
        settings = {**asdict(self.settings), "shape": self.settings.shape or SHAPES[self.settings.role]}
        versions = {"torch": torch.__version__, "transformers": __import__("transformers").__version__}
        metrics = {"settings": settings, "versions": versions, "history": self.history}
        (self.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
        plot_metrics(metrics, self.out / "training.png")

    def train_step(self) -> list[float]:
        """One step of the optimizer; its losses."""
        batch = self.packer(self.rows(self.step))
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate(self.settings, self.step)
        found = losses(self.model, self.head, batch)
        writing, early, judging, slips = found
        weighted = self.settings.label_weight * judging + self.settings.slip_weight * slips
        (writing + early + weighted).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return [loss.item() for loss in found]

    def evaluate(self) -> dict[str, Any]:
        """Accuracy on the validation problems, and of the verdicts on made-up and on drafted solutions."""
        self.model.eval()
        result: dict[str, Any] = right_answers(self.model, self.packer, self.validation)
        if self.settings.role == "target":
            result["judge"] = {"synthetic": judge_rates(self.model, self.packer, self.synthetic)}
            if self.rows.mixed(max(self.step, self.settings.mix_from)):
                if not self.drafted:
                    self.drafted = drafted_rows(self.rows.draft, self.tokenizer, self.validation, 0.8, 0.5)
                result["judge"]["draft"] = judge_rates(self.model, self.packer, self.drafted)
        self.model.train()
        return result

    def done(self, result: dict[str, Any]) -> bool:
        """Whether a model is what it was trained for."""
        low, high = BANDS[self.settings.role]
        judges = result.get("judge", {})
        if not self.settings.until_band or not low <= result["accuracy"] <= high:
            return False
        if self.settings.role == "draft":
            return True
        kinds = ("whole", "unfinished")
        return "draft" in judges and all(
            rates[kind]["balanced"] >= GOOD_JUDGE for rates in judges.values() for kind in kinds
        )

    def run(self) -> dict[str, Any]:
        """Trains until the model is what it is for, or the steps or the minutes are spent; saves the model."""
        torch.set_num_threads(self.settings.threads)
        self.model.train()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        result: dict[str, Any] = self.history[-1] if self.history else {}
        sums, count, began = [0.0] * len(LOSSES), 0, time.monotonic() - self.seconds
        with Progress(*columns, refresh_per_second=1) as progress:
            task = progress.add_task(self.settings.role, total=self.settings.steps, completed=self.step)
            finished = bool(result) and self.done(result)
            while not finished and self.step < self.settings.steps and self.seconds < 60 * self.settings.minutes:
                sums = [total + loss for total, loss in zip(sums, self.train_step(), strict=True)]
                count, self.seconds = count + 1, time.monotonic() - began
                progress.update(task, completed=self.step)
                if self.step % self.settings.evaluate_every == 0 or self.step == self.settings.steps:
                    means = {name: total / count for name, total in zip(LOSSES, sums, strict=True)}
                    result = {"step": self.step, "minutes": self.seconds / 60, **means, **self.evaluate()}
                    self.history.append(result)
                    self.save_checkpoint()
                    progress.console.print(one_line(result))
                    sums, count = [0.0] * len(LOSSES), 0
                    finished = self.done(result)
        self.save_model()
        return result

    def save_model(self) -> None:
        """The model in bfloat16 with its tokenizer and generation config, as `from_pretrained` takes them."""
        model = build_model(self.settings, self.tokenizer)
        model.load_state_dict(self.model.state_dict())
        model.generation_config = GenerationConfig(
            eos_token_id=self.tokenizer.eos_token_id, pad_token_id=self.tokenizer.pad_token_id, max_new_tokens=104
        )
        save_tokenizer(self.tokenizer, self.out)
        model.to(torch.bfloat16).save_pretrained(self.out)


def one_line(result: dict[str, Any]) -> str:
    """A result for the log."""
    losses = " / ".join(f"{result[name]:.3f}" for name in LOSSES)
    text = f"step {result['step']} {result['minutes']:.1f} min  losses {losses}"
    text += f"  right {result['accuracy']:.3f} steps {result['step_accuracy']:.4f}"
    for source, rates in result.get("judge", {}).items():
        parts = (f"{kind} fa {r['false_accept']:.3f} fr {r['false_reject']:.3f}" for kind, r in rates.items())
        text += f"\n    judge {source}: " + ", ".join(parts)
    return text


def main(argv: list[str] | None = None) -> None:
    """The command line: an option for each of `Settings`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=sorted(SHAPES))
    for item in fields(Settings):
        if item.name in ("role", "shape"):
            continue
        name = "--" + item.name.replace("_", "-")
        if isinstance(item.default, bool):
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=item.default)
        elif item.name == "out":
            parser.add_argument(name, required=True)
        else:
            kind = str if item.default is None else type(item.default)
            parser.add_argument(name, type=kind, default=item.default)
    Trainer(Settings(**vars(parser.parse_args(argv)))).run()


if __name__ == "__main__":
    main()
