"""`pipeline("text-generation", assistant_model=...)`: where the config may stand, what of a pipeline still works."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig, PreTrainedModel, pipeline

from hf_semspec import SemSpecConfig, load_draft, record_stats
from tests.helpers import Recorder, check_identities
from tests.models import draft_of, tiny, tokenizer

# Pipelines set max_new_tokens beside a stored max_length, or options beside a config, which transformers deprecates.
pytestmark = [pytest.mark.seam, pytest.mark.deprecated, pytest.mark.filterwarnings("ignore:fewer than 10%")]
VERSION = Version(transformers.__version__)
CHAT = [{"role": "user", "content": "Hello"}]
NEW = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target with two EOS ids, and a draft with one of them."""
    target = tiny("llama", 0, eos=[2, 7])
    draft = draft_of(target, "near")
    draft.config.eos_token_id = draft.generation_config.eos_token_id = 2
    return target, draft


def config(**fields: Any) -> SemSpecConfig:
    return SemSpecConfig("lossless", num_draft_tokens=3, **fields)


@pytest.fixture
def pair(models: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The models, with generation configs that a test may change."""
    for model in models:
        monkeypatch.setattr(model, "generation_config", GenerationConfig.from_model_config(model.config))
    return models


def text_pipeline(target: Any, draft: Any = None, **arguments: Any) -> Any:
    """A text pipeline with the tiny tokenizer; plain without a draft."""
    extra = {} if draft is None else {"assistant_model": draft}
    return pipeline("text-generation", model=target, tokenizer=tokenizer(chat=True), **extra, **arguments)


def build(place: str, pair: Any, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    """A pipeline whose scheme stands at `place`, and what a call of it has to pass."""
    target, draft = pair
    if place == "construction":
        if Version("5") > VERSION:
            pytest.skip("4.57 takes no generation_config at construction")
        return text_pipeline(target, draft, generation_config=config(**NEW)), {}
    if place == "call":
        return text_pipeline(target, draft), {"generation_config": config(**NEW)}
    target.generation_config = config(eos_token_id=[2, 7], pad_token_id=0, max_new_tokens=12)
    # Where the model's own config leaves it open a text pipeline samples, on 4.57 for 256 tokens whatever it says.
    if place == "model":
        return text_pipeline(target, draft), NEW
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(tmp_path / name)
        tokenizer(chat=True).save_pretrained(tmp_path / name)
    target.generation_config.semspec = None
    pipe = pipeline(
        "text-generation", model=str(tmp_path / "target"), assistant_model=str(tmp_path / "draft"), dtype=torch.float64
    )
    return pipe, NEW


@pytest.mark.parametrize("place", ["construction", "call", "model", "folder"])
@pytest.mark.parametrize("asked", ["Hello", CHAT, ["Hello", "Hi there", "How"], [CHAT, CHAT]], ids=range(4))
def test_the_scheme_runs_wherever_its_config_stands(place: str, asked: Any, pair: Any, tmp_path: Path) -> None:
    pipe, arguments = build(place, pair, tmp_path)
    with record_stats() as stats:
        written = pipe(asked, **arguments)
    calls = len(asked) if isinstance(asked[0], str | list) and not isinstance(asked, str) else 1
    assert [entry.scheme for entry in stats] == ["lossless"] * calls
    for entry in stats:
        assert entry.draft_forwards > 0
        check_identities(entry)
    pair[0].generation_config = GenerationConfig(eos_token_id=[2, 7], pad_token_id=0)
    assert written == text_pipeline(pair[0])(asked, **NEW)


def test_a_chat_is_continued_with_a_turn(pair: Any) -> None:
    (answer,) = text_pipeline(*pair)(CHAT, generation_config=config(**NEW))
    assert [turn["role"] for turn in answer["generated_text"]] == ["user", "assistant"]
    assert answer["generated_text"][-1]["content"]


def test_prompts_are_decoded_as_one_batch_where_asked(pair: Any) -> None:
    """Each text of the batch is the one that its prompt gives alone."""
    asked = ["Hello", "Hi there", "How"]
    pipe = text_pipeline(*pair)
    with record_stats() as stats:
        written = pipe(asked, batch_size=3, generation_config=config(**NEW))
    assert [len(entry.rows) for entry in stats] == [3]
    alone = [pipe(text, generation_config=config(**NEW)) for text in asked]
    assert written == alone


def test_tokens_are_streamed_as_they_are_committed(pair: Any) -> None:
    streamer = Recorder()
    pipe = text_pipeline(*pair)
    (written,) = pipe("Hello", generation_config=config(**NEW), streamer=streamer, return_tensors=True)
    assert streamer.ids() == list(written["generated_token_ids"])
    assert streamer.ends == 1
    assert len(streamer.puts) > 2


def test_statistics_of_a_block_are_those_of_its_calls(pair: Any) -> None:
    pipe = text_pipeline(*pair)
    with record_stats() as outer:
        pipe("Hello", generation_config=config(**NEW))
        with record_stats() as inner:
            pipe("Hi", generation_config=config(**NEW))
    assert (len(outer), len(inner)) == (2, 1)
    assert outer[1] is inner[0]


def test_an_output_with_statistics_does_not_break_a_pipeline(pair: Any) -> None:
    asked = config(**NEW, return_dict_in_generate=True, output_scores=True)
    with record_stats() as stats:
        (written,) = text_pipeline(*pair)("Hello", generation_config=asked)
    assert written["generated_text"].startswith("Hello")
    assert len(stats) == 1


def test_options_of_the_scheme_at_the_call(pair: Any) -> None:
    with pytest.raises(ValueError, match="num_draft_tokens"):
        text_pipeline(*pair)("Hello", generation_config=config(**NEW), num_draft_tokens=0)


def test_without_a_draft_the_error_names_both_ways_out(pair: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)assistant_model.*semspec=None"):
        text_pipeline(pair[0])("Hello", generation_config=config(**NEW))


@pytest.mark.quantized
def test_a_quantized_draft_by_name_beside_a_list_of_eos_ids(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    target = tiny("llama", 0, hidden=64, eos=[2, 7], dtype=torch.float32)
    target.save_pretrained(tmp_path / "full")
    load_draft(str(tmp_path / "full"), quantization="nf4").save_pretrained(tmp_path / "nf4")
    tokenizer().save_pretrained(tmp_path / "nf4")
    pipe = text_pipeline(target, str(tmp_path / "nf4"))
    assert pipe.assistant_model.is_quantized
    with record_stats() as stats:
        written = pipe(CHAT, generation_config=config(**NEW))
    assert stats[0].accepted > 0
    assert written == text_pipeline(target)(CHAT, **NEW)
