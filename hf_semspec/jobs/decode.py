"""One batch of a job through `generate`; what is wrong with one line costs that line alone."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

import torch

from ..configuration import SemSpecConfig
from ..drafts.choose import asks_for_model
from ..engine.model import context_of
from ..evaluation.batch import Batch as Prompts
from ..evaluation.batch import ends_and_pad
from ..evaluation.decoding import Pair
from ..tools.loading import encode
from .lines import Batch, Line
from .store import Record


def decode(pair: Pair, config: SemSpecConfig, batch: Batch, seed: int) -> list[Record]:
    """The records of `batch`: `line`, and either `text`, `new_tokens` and `stats` (counts of tokens, see `RowStats`),
    or `error`. The draws depend on the seed and the batch's number alone."""
    records: dict[int, Record] = {}
    rows: dict[int, torch.Tensor] = {}
    for line in batch.lines:
        try:
            rows[line.number] = _ids(pair, config, line)
        except Exception as error:  # a chat template may raise anything
            records[line.number] = _failed(line.number, error)
    try:
        records |= _together(pair, config, rows, f"{seed}/{batch.number}")
    except Exception:
        # Whoever is at fault is found by decoding one at a time; memory for all at once may have been what lacked.
        for number, ids in rows.items():
            try:
                records |= _together(pair, config, {number: ids}, f"{seed}/{batch.number}/{number}")
            except Exception as error:
                records[number] = _failed(number, error)
    return [records[line.number] for line in batch.lines]


def check(pair: Pair, config: SemSpecConfig) -> None:
    """Decode a token or two, so that what the scheme refuses of any prompt is raised instead of noted line by line."""
    few = SemSpecConfig.from_dict({**config.to_dict(), "max_new_tokens": min(config.max_new_tokens, 2)})
    few.return_dict_in_generate = True
    ids = encode(pair.tokenizer, "1", chat=pair.chat)[0]
    _together(pair, few, {0: ids}, "check")


def _ids(pair: Pair, config: SemSpecConfig, line: Line) -> torch.Tensor:
    """The ids (length,) of what `line` asks."""
    if line.error is not None:
        raise ValueError(line.error)
    tokenizer = pair.tokenizer
    if isinstance(line.asked, str):
        ids = encode(tokenizer, line.asked, chat=pair.chat)[0]
    elif not tokenizer.chat_template:
        raise ValueError("`messages` need a tokenizer with a chat template; pass `prompt`")
    else:
        text = tokenizer.apply_chat_template(line.asked, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]
    context = context_of(pair.model) or math.inf
    if not 0 < len(ids) <= context - config.max_new_tokens:
        raise ValueError(
            f"{len(ids)} tokens and max_new_tokens={config.max_new_tokens} must fit into the target's context of "
            f"{context} tokens"
        )
    return ids


def _together(pair: Pair, config: SemSpecConfig, rows: dict[int, torch.Tensor], seed: str) -> dict[int, Record]:
    if not rows:
        return {}
    eos, pad = ends_and_pad(pair.model, pair.tokenizer)
    prompts = Prompts.of(list(rows.values()), eos, pad, pair.model.device)
    given: dict[str, Any] = {"tokenizer": pair.tokenizer}
    if asks_for_model(config):
        given["assistant_model"] = pair.draft
        if pair.draft_tokenizer is not None:
            given["assistant_tokenizer"] = pair.draft_tokenizer
    torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big"))
    output = pair.model.generate(prompts.ids, attention_mask=prompts.mask, generation_config=config, **given)
    records = {}
    for number, ids, stats in zip(rows, prompts.answers(output.sequences), output.stats.rows, strict=True):
        text = pair.tokenizer.decode(ids, skip_special_tokens=True)
        records[number] = {"line": number, "text": text, "new_tokens": len(ids), "stats": dataclasses.asdict(stats)}
    return records


def _failed(number: int, error: Exception) -> Record:
    return {"line": number, "error": f"{type(error).__name__}: {error}"}
