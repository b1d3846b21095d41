"""Which families with recurrent layers decode: `python -m examples.benchmarks.recurrent [--page FILE]`.

Every family of the installed transformers whose code keeps recurrent states is listed. Those with a tiny config in
`recurrent_models` are decoded as target and draft, greedily in float64, against plain decoding of each row alone.
"""

import argparse
import copy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

from hf_semspec import SemSpecConfig
from hf_semspec.bench.command import quiet
from hf_semspec.engine.mixers import chunk_errors, mixers_of
from hf_semspec.engine.model import CachedModel

from .marks import write_between
from .recurrent_models import FAMILIES, REFUSED, recurrent

TOKENS, LENGTHS, DRAFTED = 300, ((5,), (3, 8, 6)), 4
HEADS = ("family", "same text", "accepted", "forwards / rounds", "chunk error, float32", "bfloat16")


def main(argv: Sequence[str] | None = None) -> int:
    """Decode with every family, print the table, and put it into a page if one is named."""
    parser = argparse.ArgumentParser(prog="python -m examples.benchmarks.recurrent", description=__doc__)
    parser.add_argument("--page", type=Path, metavar="FILE", help="a page with the marks to write between")
    arguments = parser.parse_args(argv)
    with quiet():
        rows = [row for family in sorted({*FAMILIES, *REFUSED, *installed()}) for row in [_row(family)]]
    lines = [f"| {' | '.join(HEADS)} |", "|---|" + "---:|" * (len(HEADS) - 1)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    text = "\n".join([_origin(), "", *lines])
    print(text)
    if arguments.page is not None:
        write_between(text, arguments.page, "recurrent")
    return 0


def installed() -> list[str]:
    """The families of the installed transformers whose code hands recurrent states to a cache."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    files = (Path(spec.origin).parent / "models").glob("*/modeling_*.py")
    calls = ("update_conv_state(", "update_recurrent_state(")
    names = {path.stem.removeprefix("modeling_") for path in files if any(call in path.read_text() for call in calls)}
    own = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
    return [own.get(name, name) for name in names]


def _row(family: str) -> tuple[str, ...]:
    if family in REFUSED:
        try:
            mixers_of(recurrent(family), CachedModel)
        except ValueError as error:
            reason = str(error).split(": ")[1].split(". As")[0]
            return (f"`{family}`", f"refused: {reason}", "", "", "", "")
    if family not in FAMILIES:
        return (f"`{family}`", "not tried: no tiny config here", "", "", "", "")
    target = recurrent(family)
    draft, same, accepted, forwards = _near(target), [], [], []
    for lengths in LENGTHS:
        ids, mask = _prompts(lengths)
        config = SemSpecConfig("lossless", num_draft_tokens=DRAFTED, max_new_tokens=TOKENS, use_cache=False)
        output = target.generate(
            ids, attention_mask=mask, assistant_model=draft, generation_config=config, return_dict_in_generate=True
        )
        for row, length in enumerate(lengths):
            plain = GenerationConfig(max_new_tokens=TOKENS)
            alone = target.generate(ids[row : row + 1, -length:], generation_config=plain)
            same.append(torch.equal(alone[0, length:], output.sequences[row, max(lengths) :]))
        accepted.append(output.stats.acceptance_rate)
        rounds = max(row.emitted - row.accepted for row in output.stats.rows)
        forwards.append(f"{output.stats.target_forwards} / {rounds}")
    errors = []
    for dtype in (torch.float32, torch.bfloat16):
        model = recurrent(family, dtype=dtype)
        mixers_of(model, CachedModel)
        errors.append(f"{float(chunk_errors(model, CachedModel)[1].median()):.0e}")
    shares = " and ".join(f"{share:.0%}" for share in accepted)
    return (f"`{family}`", f"{sum(same)} of {len(same)} rows", shares, " and ".join(forwards), *errors)


def _near(target: PreTrainedModel) -> PreTrainedModel:
    """A draft that agrees with `target` on part of the text."""
    draft, generator = copy.deepcopy(target), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() > 1:
                weight.add_(0.02 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return draft


def _prompts(lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(2, 97, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(3))
    first = max(lengths) - torch.tensor(lengths).unsqueeze(1)
    return ids, (torch.arange(max(lengths)) >= first).long()


def _origin() -> str:
    return (
        f"`python -m examples.benchmarks.recurrent`; Python {sys.version.split()[0]}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}. Greedy, float64, {TOKENS} tokens, γ = {DRAFTED}, one prompt and "
        "three of unequal length; the draft is the target with noise on its weights. The chunk error is the middle "
        "difference between logits of blocks and of single steps, in standard deviations of the logits."
    )


if __name__ == "__main__":
    sys.exit(main())
