"""Trains the lab's target or draft on a CPU: `python -m examples.arithmetic_lab.train target --out DIR`."""

import argparse
import json
import os
import random
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Tokenizer

from .evaluate import judge_rates, right_answers, write_solutions
from .packing import IGNORE, Packed, Packer, Row
from .plot import plot_metrics
from .task import Problem, corrupt, sample_problem, solution
from .tokenizer import build_tokenizer, save_tokenizer

SHAPES = {
    "target": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8, "num_attention_heads": 4},
    "draft": {"hidden_size": 80, "intermediate_size": 240, "num_hidden_layers": 2, "num_attention_heads": 4},
}
# Training ends when accuracy on the validation problems lies in the band (and, for the target, it judges well).
BANDS = {"target": (0.88, 0.95), "draft": (0.56, 0.72)}
GOOD_JUDGE = 0.92
# The hidden states from which the judge's parts are trained: what comes next is to be known after half of the eight layers,
# whether a character is what was to come after six, and the verdict gathers the answers in the last two.
EARLY, MARKS = -5, -3


@dataclass
class Settings:
    """What a run is made of; kept in its checkpoint and metrics."""

    role: str
    out: str
    draft: str | None = None  # folder of a trained draft, whose own solutions the target is to judge
    steps: int = 8000
    minutes: float = 60.0
    tokens: int = 4000  # columns a batch
    lr: float = 2e-3
    warmup: int = 100
    decay: int = 2000  # the last steps, over which the rate falls to a twentieth
    curriculum: int = 800  # steps until the chains have their full lengths
    mix_from: int = 2000  # the step from which half of a batch is the draft's own writing
    pool: int = 512  # solutions of the draft written at once, and drawn from for fifty steps
    label_weight: float = 1.0  # of the verdicts' mean loss; the characters' mean is over ten times as many
    slip_weight: float = 1.0  # of a throw-away head that marks wrong characters, two layers below the top
    evaluate_every: int = 200
    validation: int = 256
    seed: int = 0
    resume: bool = True
    threads: int = 2
    until_band: bool = True
    shape: dict[str, int] = field(default_factory=dict)


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


def learning_rate(settings: Settings, step: int) -> float:
    """Linear warm-up, constant, linear decay."""
    rate = min(1.0, (step + 1) / max(1, settings.warmup))
    left = (settings.steps - step) / max(1, settings.decay)
    return settings.lr * min(rate, max(0.05, min(1.0, left)))


class Rows:
    """Draws the rows of a step: a function of the seed and the step alone, so that a resumed run sees the same.

    Args:
        settings: The run's.
        tokenizer: The lab's tokenizer.
    """

    REFRESH = 50

    def __init__(self, settings: Settings, tokenizer: Tokenizer):
        self.settings, self.tokenizer = settings, tokenizer
        self.judged = settings.role == "target"
        self.draft: Any = None
        self.pool: dict[int, list[Row]] = {}
        self.pool_index = -1

    def __call__(self, step: int) -> list[Row]:
        rng = random.Random(f"{self.settings.seed}-{step}")
        grown = min(1.0, step / max(1, self.settings.curriculum))
        count = rng.randint(1 + round(3 * grown), 2 + round(8 * grown))
        length = 12 * count + 8 + (3 * count + 3 if self.judged else 0)
        number = max(2, self.settings.tokens // length)
        rows = self.drafted(rng, step, count, number // 2) if self.mixed(step) else []
        return rows + [synthetic_row(rng, count, self.judged) for _ in range(number - len(rows))]

    def mixed(self, step: int) -> bool:
        """Whether a step has rows of the draft's own."""
        folder = self.settings.draft
        if folder is None or step < self.settings.mix_from:
            return False
        if self.draft is None and (Path(folder) / "model.safetensors").exists():
            self.draft = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return self.draft is not None

    def drafted(self, rng: random.Random, step: int, count: int, number: int) -> list[Row]:
        """Rows the draft wrote, of one chain length, from a pool that is written anew every few steps."""
        index = step // self.REFRESH
        if index != self.pool_index:
            self.pool_index, self.pool = index, {}
            source = random.Random(f"{self.settings.seed}-pool-{index}")
            problems = [sample_problem(source) for _ in range(self.settings.pool)]
            for row in drafted_rows(self.draft, self.tokenizer, problems, source.uniform(0.7, 1.0), source.random()):
                self.pool.setdefault(len(row.problem.steps), []).append(row)
        rows = self.pool.get(count, [])
        return rng.sample(rows, min(number, len(rows)))


def synthetic_row(rng: random.Random, count: int, judged: bool) -> Row:
    """A right solution or, for a model that is to judge, more often than not a corrupted one.

    Half of the corrupted have a fault on every other line: one fault in a hundred characters is too few to learn from.
    """
    problem = sample_problem(rng, count, count)
    if judged and rng.random() < 0.6:
        return Row(problem, *corrupt(rng, problem, rng.choice((0.0, 0.5))))
    text = solution(problem)
    return Row(problem, text, [True] * len(text), judged=judged)


def drafted_rows(
    draft: Any, tokenizer: Tokenizer, problems: list[Problem], temperature: float, seed: float
) -> list[Row]:
    """What a model writes, to be judged; its characters are imitated up to the first wrong one."""
    texts = write_solutions(draft, tokenizer, problems, temperature=temperature, seed=int(seed * 2**31))
    rows = []
    for problem, (text, finished) in zip(problems, texts, strict=True):
        right = len(os.path.commonprefix([text, solution(problem)]))
        expected = [index < right for index in range(len(text))]
        rows.append(Row(problem, text, expected, right + 1, finished=finished and text == solution(problem)))
    return rows


def halved(losses: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """The mean over the kinds of the mean loss of each, so that a rare kind weighs as much as a common one."""
    return torch.stack([losses[kinds == kind].mean() for kind in kinds.unique()]).mean()


def losses(model: Any, head: torch.nn.Linear, batch: Packed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean losses of the characters, of the verdicts, and of the marks on wrong characters.

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
        return writing, writing.new_zeros(()), writing.new_zeros(())
    early = model.lm_head(model.model.norm(output.hidden_states[EARLY]))
    writing = writing + cross_entropy(early.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)
    where, marked = batch.labels != IGNORE, batch.slips != IGNORE
    verdicts = cross_entropy(output.logits[where], batch.labels[where], reduction="none")
    marks = head(output.hidden_states[MARKS][marked]).squeeze(-1)
    slips = binary_cross_entropy_with_logits(marks, batch.slips[marked].float(), reduction="none")
    return writing, halved(verdicts, batch.labels[where]), halved(slips, batch.slips[marked])


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
        matrices = [weight for weight in self.model.parameters() if weight.dim() > 1]
        vectors = [weight for weight in self.model.parameters() if weight.dim() <= 1]
        vectors += self.head.parameters()
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.98))
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
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.history = state["step"], state["seconds"], state["history"]

    def save_checkpoint(self) -> None:
        """Writes the checkpoint whole or not at all."""
        names = ("step", "seconds", "history")
        state = {name: getattr(self, name) for name in names}
        for name in ("model", "head", "optimizer"):
            state[name] = getattr(self, name).state_dict()
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)
        settings = {**asdict(self.settings), "shape": self.settings.shape or SHAPES[self.settings.role]}
        versions = {"torch": torch.__version__, "transformers": __import__("transformers").__version__}
        metrics = {"settings": settings, "versions": versions, "history": self.history}
        (self.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
        plot_metrics(metrics, self.out / "training.png")

    def train_step(self) -> tuple[float, float, float]:
        """One step of the optimizer; the three losses."""
        batch = self.packer(self.rows(self.step))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.settings, self.step)
        writing, judging, slips = losses(self.model, self.head, batch)
        (writing + self.settings.label_weight * judging + self.settings.slip_weight * slips).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return writing.item(), judging.item(), slips.item()

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
        result: dict[str, Any] = {}
        sums, count, began = [0.0] * 3, 0, time.monotonic() - self.seconds
        with Progress(*columns, refresh_per_second=1) as progress:
            task = progress.add_task(self.settings.role, total=self.settings.steps, completed=self.step)
            while self.step < self.settings.steps and self.seconds < 60 * self.settings.minutes:
                sums = [total + loss for total, loss in zip(sums, self.train_step(), strict=True)]
                count, self.seconds = count + 1, time.monotonic() - began
                progress.update(task, completed=self.step)
                if self.step % self.settings.evaluate_every == 0 or self.step == self.settings.steps:
                    names = ("writing_loss", "judging_loss", "slip_loss")
                    means = {name: total / count for name, total in zip(names, sums, strict=True)}
                    result = {"step": self.step, "minutes": self.seconds / 60, **means, **self.evaluate()}
                    self.history.append(result)
                    self.save_checkpoint()
                    progress.console.print(one_line(result))
                    sums, count = [0.0] * 3, 0
                    if self.done(result):
                        break
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


def right_row(problem: Problem) -> Row:
    """The right solution as a row to be judged."""
    text = solution(problem)
    return Row(problem, text, [True] * len(text))


def one_line(result: dict[str, Any]) -> str:
    """A result for the log."""
    text = f"step {result['step']} {result['minutes']:.1f} min  loss {result['writing_loss']:.3f}"
    text += f" / {result['judging_loss']:.3f} / {result['slip_loss']:.3f}  right {result['accuracy']:.3f} steps {result['step_accuracy']:.4f}"
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
