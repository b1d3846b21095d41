"""A job from its arguments to its output."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.fields import integer
from ..configuration import SemSpecConfig
from ..drafts.choose import asks_for_model
from ..evaluation.batch import ends_and_pad
from ..evaluation.evaluate import load_pair, processes
from ..tools.loading import device_by_name
from ..tools.progress import progress_bar
from .decode import check, decode
from .lines import batches, read_file, read_rows
from .store import Store


def generate_lines(
    model: str | PreTrainedModel,
    draft: str | PreTrainedModel | None,
    source: str | Path | Iterable[Any],
    output: str | Path,
    config: SemSpecConfig,
    *,
    batch_size: int = 8,
    seed: int = 0,
    dtype: str = "auto",
    device: str | None = None,
    chat: bool = True,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokenizer: PreTrainedTokenizerBase | None = None,
    progress: bool = False,
) -> Path:
    """Decode every line of `source`, and write a line of JSON for each, in order.

    Finished batches are kept beside `output` at once: the same call goes on where it was interrupted, to the same
    output. Under `accelerate launch` the batches are dealt out to the processes. Lines are read as they are needed,
    and never all held.

    Args:
        model (`str` or `PreTrainedModel`): the target: a Hub id, a folder, or a loaded model (with `tokenizer`).
        draft (`str` or `PreTrainedModel`, *optional*): the draft: the same, or made from the target (`nf4`,
            `layers:N`, ...); `None` where `config` asks for none.
        source (`str`, `Path` or `Iterable`): a file with a line of JSON for each prompt, or an iterable (a
            `datasets.Dataset`, say) of the same: `{"prompt": text}`, `{"messages": [...]}`, or the text or the list
            itself.
        output (`str` or `Path`): the file to write. Each line has `line`, the number of the prompt from 0, and `text`,
            `new_tokens` and `stats` (see [`RowStats`]), or `error`.
        config ([`SemSpecConfig`]): how to decode, with `max_new_tokens`.
        batch_size (`int`): prompts decoded together, of like length.
        seed (`int`): of all draws.
        dtype (`str`): of models that are named; `auto` is as stored.
        device (`str`, *optional*): where both live; cuda if there is one, else cpu.
        chat (`bool`): put a prompt as a user's turn where the tokenizer has a chat template.
        tokenizer, draft_tokenizer (`PreTrainedTokenizerBase`, *optional*): of models that are passed loaded.
        progress (`bool`): show a bar on standard error.

    Returns:
        `Path`: the output.

    Raises:
        ValueError: bad arguments, another job's output, an input that has changed since, or what the scheme refuses of
            any prompt. What is wrong with one line is noted in that line's `error`.
    """
    integer("batch_size", batch_size, 1)
    config = _own_config(config)
    if asks_for_model(config) and draft is None:
        raise ValueError("the scheme needs a draft: pass one")
    from_file = isinstance(source, (str, Path))
    if from_file and not Path(str(source)).is_file():
        raise ValueError(f"input {source}: there is no such file")
    total = _count(source)
    state = processes(device)
    device = f"cuda:{state.local_process_index}" if device is None and state.device.type == "cuda" else device
    device = device_by_name(device)
    store = Store(Path(output), state.process_index)
    definition = _define(config, model, draft, batch_size, seed, dtype, chat)
    store.check(definition)
    state.wait_for_everyone()
    store.open(definition)
    lines = read_file(Path(str(source))) if from_file else read_rows(source)  # type: ignore[arg-type]
    pair, number = None, 0  # batches so far
    with progress_bar(progress and state.is_main_process, total) as advance:
        for batch in batches(lines, batch_size):
            number += 1
            if store.has(batch) or batch.number % state.num_processes != state.process_index:
                advance("", len(batch.lines), 0)
                continue
            if pair is None:
                advance("loading", 0, 0)
                pair = load_pair(model, draft, tokenizer, draft_tokenizer, dtype, device, chat)
                config.pad_token_id = ends_and_pad(pair.model, pair.tokenizer)[1]
                check(pair, config)
            records = decode(pair, config, batch, seed)
            store.add(batch, records)
            advance("", len(records), sum(record.get("new_tokens", 0) for record in records))
    state.wait_for_everyone()
    if state.is_main_process:
        store.merge(number)
    state.wait_for_everyone()
    return store.output


def _own_config(config: SemSpecConfig) -> SemSpecConfig:
    own: SemSpecConfig = SemSpecConfig.from_dict(config.to_dict())
    if own.max_new_tokens is None:
        raise ValueError("max_new_tokens must be set: it says how long a prompt may be")
    if (own.num_return_sequences or 1) > 1:
        raise ValueError("num_return_sequences must be 1: a line gets one answer")
    own.return_dict_in_generate = True
    return own


def _count(source: Any) -> int | None:
    """Lines in all, where that can be known beforehand."""
    if isinstance(source, (str, Path)):
        with open(source, "rb") as file:
            return sum(1 for _ in file)
    return len(source) if hasattr(source, "__len__") else None


def _define(config: SemSpecConfig, model: Any, draft: Any, batch_size: int, seed: int, dtype: str, chat: bool) -> Any:
    """What two starts must have in common to be one job."""

    def name(given: Any) -> Any:
        return str(given) if given is None or isinstance(given, (str, Path)) else given.config._name_or_path

    return {
        "model": name(model),
        "draft": name(draft),
        "config": config.to_diff_dict(),
        "batch_size": batch_size,
        "seed": seed,
        "dtype": dtype,
        "chat_template": chat,
    }
