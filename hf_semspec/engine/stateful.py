"""Whether the caller's logits processors can be asked about drafts: those that keep a state are refused by name."""

import copy
import pickle
import types
from collections.abc import Iterable
from typing import Any

import torch

from .replay import Replayed, restarts

PLAIN = "decode plainly with generate(..., semspec=None) and without assistant_model"

# Those of transformers that keep a state between calls, run a model, or mix the rows of a batch.
_STATEFUL_NAMES = (
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor",
)
# How often one is asked whose attributes change: a budget of so many calls is found.
_PATIENCE = 256
# The order in which prefixes are asked about; no rhythm that a state could keep.
_ORDER = (0, 2, 1, 1, 0)


def check_processors(
    processors: Iterable[Any], ids: torch.Tensor, vocabulary: int, eos: Iterable[int] = ()
) -> list[Any]:
    """The processors as functions of `(input_ids, scores)`, whoever drafts: those with a state that can be started
    anew are [`replay.Replayed`] for each row, others are refused.

    Those of transformers are known by class. Any other passes if it has a true attribute `stateless`; else a copy of
    it is asked about the prompts and one and two ids more, in turns, and must repeat its answers.

    Args:
        ids: (batch, width) the caller's prompts.
        vocabulary (`int`): how many ids the target scores.
        eos: ids that end a row; nothing is asked behind them.

    Raises:
        ValueError: a processor keeps a state, or cannot be copied and declares nothing.
    """
    functions = []
    for processor in processors:
        kind = type(processor)
        fresh = restarts(processor)
        if fresh is not None:
            functions.append(Replayed(fresh, ids.shape[1], eos))
            continue
        if kind.__module__.startswith("transformers."):
            known = any(base.__name__ in _STATEFUL_NAMES for base in kind.__mro__)
            if known:
                raise _refusal(processor, "keeps a state between tokens, or mixes the rows of a batch")
        elif getattr(processor, "stateless", False) is not True:
            _probe(processor, ids, vocabulary, set(eos))
        functions.append(processor)
    return functions


def _probe(processor: Any, ids: torch.Tensor, vocabulary: int, eos: set[int]) -> None:
    try:
        copied = _copied(processor)
    except Exception as error:
        raise _refusal(processor, f"cannot be copied ({error}), so nothing shows whether it keeps a state") from error
    if copied is processor and not isinstance(processor, types.FunctionType):
        raise _refusal(processor, "is copied as itself, so nothing shows whether it keeps a state")
    scores = torch.sin(torch.arange(vocabulary, device=ids.device) * 7.0).repeat(len(ids), 1)
    devices = [ids.device] if ids.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        before = _fingerprint(copied)
        prefixes, answers = [ids], [copied(ids.clone(), scores.clone()).clone()]
        while len(prefixes) < 3:
            best, tokens = answers[-1].max(dim=-1)
            if not bool((best > -torch.inf).all()) or eos & set(tokens.tolist()):
                break  # no such text will be shown
            longer = torch.cat([prefixes[-1], tokens.to(ids)[:, None]], dim=1)
            try:
                answers.append(copied(longer.clone(), scores.clone()).clone())
            except Exception:  # plain decoding would meet it as well
                break
            prefixes.append(longer)
        moved = before is None or before != _fingerprint(copied)
        for time in range(_PATIENCE if moved else len(_ORDER)):
            place = min(_ORDER[time % len(_ORDER)], len(prefixes) - 1)
            try:
                again = copied(prefixes[place].clone(), scores.clone())
                same = torch.equal(again.nan_to_num(), answers[place].nan_to_num())
            except Exception:
                same = False
            if not same:
                raise _refusal(processor, "keeps a state: asked about one text twice, it gives two answers")


def _copied(processor: Any) -> Any:
    """A deep copy; of a function with what it closes over."""
    if not isinstance(processor, types.FunctionType) or processor.__closure__ is None:
        return copy.deepcopy(processor)
    cells = tuple(types.CellType(copy.deepcopy(cell.cell_contents)) for cell in processor.__closure__)
    twin = types.FunctionType(
        processor.__code__, processor.__globals__, processor.__name__, processor.__defaults__, cells
    )
    twin.__kwdefaults__ = processor.__kwdefaults__
    return twin


def _fingerprint(processor: Any) -> bytes | None:
    """What a processor holds, to see whether calls change it; `None` if that cannot be told."""
    cells = getattr(processor, "__closure__", None)
    held = [cell.cell_contents for cell in cells or ()] if isinstance(processor, types.FunctionType) else processor
    try:
        return pickle.dumps(getattr(held, "__dict__", held))
    except Exception:
        return None


def _refusal(processor: Any, reason: str) -> ValueError:
    name = getattr(processor, "__name__", type(processor).__name__)
    return ValueError(
        f"logits_processor {name} {reason}. Drafts that are dropped must leave no trace: make it a function of "
        "(input_ids, scores), or give it a method fresh() that returns a new one; if it is such a function already, "
        "give it the attribute stateless = True; or " + PLAIN
    )
