"""Streams are those of plain decoding."""

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, TextIteratorStreamer, TextStreamer

from tests.helpers import CACHE, EXACT, WEAK_DRAFTS, Recorder, assisted, first_occurrence, plain, plain_rows, states
from tests.models import DRAFTS, draft_of, prompts, tiny, tokenizer

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("name", DRAFTS)
def test_ui48_the_streamer_is_called_as_by_plain_decoding(kind: str, name: str) -> None:
    target = tiny("llama", 1)
    inputs = prompts((5,), seed=2)
    text = plain(target, inputs, max_new_tokens=20)[0, 5:].tolist()
    eos = next(token for i, token in enumerate(text) if i > 6 and first_occurrence(text, i))
    for fields in ({}, {"eos_token_id": eos}):
        streams = []
        for run in (plain, assisted):
            models = (target,) if run is plain else (target, draft_of(target, name))
            args = () if run is plain else (kind,)
            streamer = Recorder()
            output = run(*models, inputs, *args, call={"streamer": streamer}, max_new_tokens=20, **fields)
            assert streamer.ids() == output[0].tolist()
            assert streamer.ends == 1
            streams.append(streamer.puts)
        assert [value.shape for value in streams[0]] == [value.shape for value in streams[1]]
        assert all(torch.equal(*pair) for pair in zip(*streams, strict=True))


def test_ui48_text_streamers_write_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny("llama", 1)
    inputs = prompts((5,), seed=2)
    written = []
    for run in (plain, assisted):
        models = (target,) if run is plain else (target, draft_of(target, "near"))
        output = run(
            *models, inputs, call={"streamer": TextStreamer(tokenizer(), skip_prompt=True)}, max_new_tokens=20
        )
        written.append(capsys.readouterr().out)
    assert written[0] == written[1]
    assert written[1].rstrip("\n") == tokenizer().decode(output[0, 5:])


def test_ui48_a_batch_with_a_streamer_is_stocks_error() -> None:
    target = tiny("llama", 1)
    inputs = prompts((5, 3), seed=2)
    with pytest.raises(ValueError, match="batch size 1"):
        plain(target, inputs, call={"streamer": TextStreamer(tokenizer())}, max_new_tokens=4)
    with pytest.raises(ValueError, match="batch size 1"):
        assisted(
            target, draft_of(target, "near"), inputs, call={"streamer": TextStreamer(tokenizer())}, max_new_tokens=4
        )


class FailsAt(LogitsProcessor):
    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= self.width:
            raise RuntimeError("the processor failed")
        return scores


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("width", [5, 11])
def test_ui48_the_streamer_is_closed_on_error(kind: str, width: int) -> None:
    """A reader in another thread must not wait for ever, and gets kept tokens only."""
    target = tiny("llama", 1)
    inputs = prompts((5,), seed=2)
    expected = plain(target, inputs, max_new_tokens=20)[0].tolist()
    streamer = Recorder()
    call = {"streamer": streamer, "logits_processor": LogitsProcessorList([FailsAt(width)])}
    with pytest.raises(RuntimeError, match="the processor failed"):
        assisted(target, draft_of(target, "near"), inputs, kind, call=call, max_new_tokens=20)
    assert streamer.ends == 1
    assert streamer.ids() == expected[: len(streamer.ids())]
    reader = TextIteratorStreamer(tokenizer(), skip_prompt=True, timeout=5)
    with pytest.raises(RuntimeError, match="the processor failed"):
        assisted(target, draft_of(target, "near"), inputs, kind, call={**call, "streamer": reader}, max_new_tokens=20)
    assert isinstance("".join(reader), str)


@pytest.mark.parametrize("kind", EXACT)
def test_a_batch_streams_the_columns_that_plain_decoding_streams(kind: str) -> None:
    target = tiny("llama", 4, attention="sdpa")
    inputs = prompts((3, 7), seed=4)
    rows = plain_rows(target, inputs, max_new_tokens=18)
    eos = [int(rows[0, 3]), int(rows[1, 11])]
    for fields in ({}, {"eos_token_id": eos}):
        streams = []
        for run in (plain, assisted):
            models = (target,) if run is plain else (target, draft_of(target, "near"))
            args = () if run is plain else (kind,)
            streamer = Recorder()
            run(*models, inputs, *args, call={"streamer": streamer}, max_new_tokens=18, **fields)
            assert streamer.ends == 1
            streams.append([value.tolist() for value in streamer.puts])
        assert streams[0] == streams[1]


class Breaks:
    """A streamer that fails at its `at`-th put, or at the end (-1)."""

    def __init__(self, at: int) -> None:
        self.at, self.puts, self.ends = at, 0, 0

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == self.at:
            raise BrokenPipeError("the reader has gone")

    def end(self) -> None:
        self.ends += 1
        if self.at == -1:
            raise BrokenPipeError("the reader has gone")


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("at", [-1, 1, 2, 16])
def test_a_streamer_that_fails_leaves_the_callers_cache_and_ends_once(kind: str, at: int) -> None:
    target = tiny("llama", 1)
    inputs, cache = prompts((5,), seed=2), DynamicCache()
    plain(target, inputs, max_new_tokens=1, call={CACHE: cache})
    given = {**prompts((9,), seed=3), CACHE: cache}
    given["input_ids"][:, :5] = inputs["input_ids"]
    before = [tuple(part.clone() for part in pair) for pair in states(cache)]
    streamer = Breaks(at)
    with pytest.raises(BrokenPipeError):
        assisted(target, draft_of(target, "near"), given, kind, call={"streamer": streamer}, max_new_tokens=15)
    assert streamer.ends == (at > 1 or at == -1)
    for now, then in zip(states(cache), before, strict=True):
        assert all(torch.equal(*pair) for pair in zip(now, then, strict=True))


def test_an_error_is_told_though_the_streamer_fails_at_its_end() -> None:
    target = tiny("llama", 1)
    call = {"streamer": Breaks(-1), "logits_processor": LogitsProcessorList([FailsAt(9)])}
    with pytest.raises(RuntimeError, match="the processor failed"):
        assisted(target, draft_of(target, "near"), prompts((5,), seed=2), call=call, max_new_tokens=20)
    assert call["streamer"].ends == 1
