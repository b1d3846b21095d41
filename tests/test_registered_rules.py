"""What a registered rule has for nothing: statistics, traces, ends, caches, streams, other drafts, revision."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, TextStreamer

from hf_semspec import LosslessConfig, SemSpecConfig, load_draft, record_stats
from tests.helpers import CACHE, WEAK_DRAFTS, cache_of, check_identities, first_occurrence, new_tokens
from tests.models import draft_of, prompts, row_of, tiny, tokenizer
from tests.own_schemes import loaded, registered

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]

FLY = loaded("fly")


@pytest.fixture
def fly() -> Iterator[None]:
    with registered(FLY):
        yield


LOOSE = {"window": 1, "threshold": 0, "num_draft_tokens": 6, "max_new_tokens": 20}


def decode(inputs: dict[str, torch.Tensor], call: dict[str, Any] | None = None, **fields: Any) -> Any:
    target = tiny(eos=fields.pop("eos", None))
    config = SemSpecConfig("fly", **{**LOOSE, "return_dict_in_generate": True, **fields})
    torch.manual_seed(0)
    draft = draft_of(target, "near")
    return target.generate(**inputs, **(call or {}), assistant_model=draft, generation_config=config)


@pytest.mark.usefixtures("fly")
@pytest.mark.parametrize("sampled", [False, True])
class TestCalls:
    def test_statistics_scores_and_trace_agree(self, sampled: bool) -> None:
        inputs = prompts((6, 3))
        with record_stats() as calls:
            output = decode(inputs, output_scores=True, output_logits=True, trace=True, do_sample=sampled)
        assert len(output.scores) == len(output.logits) == 20
        assert calls[0].accepted > 0
        check_identities(output.stats, [20, 20])
        assert output.trace.to_dict()["settings"]["scheme"] == "fly"
        plain = decode(inputs, do_sample=sampled)
        assert torch.equal(plain.sequences, output.sequences)

    def test_an_eos_in_a_block_ends_the_text_there(self, sampled: bool) -> None:
        inputs = prompts((5,))
        tokens = new_tokens(decode(inputs, do_sample=sampled), inputs)[0].tolist()
        at = next(i for i in range(6, 20) if first_occurrence(tokens, i))
        ended = new_tokens(decode(inputs, do_sample=sampled, eos_token_id=tokens[at], pad_token_id=0), inputs)[0]
        assert ended.tolist() == tokens[: at + 1]

    def test_a_cache_goes_on(self, sampled: bool) -> None:
        inputs, cache = prompts((5,)), DynamicCache()
        output = decode(inputs, {CACHE: cache}, do_sample=sampled)
        ids = torch.cat([output.sequences, torch.tensor([[7, 8]])], dim=1)
        more = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        kept = decode(more, {CACHE: cache_of(output)}, do_sample=sampled)
        assert torch.equal(kept.sequences, decode(more, do_sample=sampled).sequences)

    def test_streams(self, sampled: bool, capsys: pytest.CaptureFixture[str]) -> None:
        words = tokenizer()
        output = decode(prompts((5,)), {"streamer": TextStreamer(words, skip_prompt=True)}, do_sample=sampled)
        assert words.decode(output.sequences[0, 5:]) in capsys.readouterr().out

    def test_ngrams_draft(self, sampled: bool) -> None:
        output = decode(prompts((9, 4)), draft="ngram+model", do_sample=sampled)
        check_identities(output.stats, [20, 20])

    @pytest.mark.parametrize("scheme", ["parse", "semantic"])
    def test_it_revises_for_others(self, sampled: bool, scheme: str) -> None:
        target = tiny()
        given: dict[str, Any] = {"do_sample": sampled, "max_new_tokens": 20}
        if scheme == "parse":
            given |= {"segment_tokens": 4, "judge_prompt": "ok?", "full_judge_prompt": "all ok?", "labels": ("Y", "N")}
            given |= {"accept_threshold": 2.0, "prefix_threshold": 2.0}
        else:
            given |= {"scorer": "none", "top_k_accept": 0, "segment_stop": None, "think_end": None}
        own = FLY.FlyConfig(window=1, threshold=0, num_draft_tokens=6)

        def text(reviser: Any) -> torch.Tensor:
            torch.manual_seed(0)
            config = SemSpecConfig(scheme, revise_with=reviser, **given)
            call = {"tokenizer": tokenizer(), "assistant_model": draft_of(target, "near")}
            ids: torch.Tensor = target.generate(**prompts((6, 3)), **call, generation_config=config)
            return ids

        assert text("fly").shape == text(own).shape
        strict = FLY.FlyConfig(threshold=1.5, num_draft_tokens=6)
        assert torch.equal(text(strict), text(LosslessConfig(num_draft_tokens=6, verification="token")))
        assert not torch.equal(text(own), text(strict))


@pytest.mark.usefixtures("fly")
def test_each_row_of_a_batch_gets_what_it_gets_alone() -> None:
    inputs = prompts((6, 3))
    batch = new_tokens(decode(inputs), inputs)
    for row in range(2):
        alone = row_of(inputs, row)
        assert torch.equal(new_tokens(decode(alone), alone)[0], batch[row])


@pytest.mark.usefixtures("fly")
def test_a_stored_reviser_is_found_again(tmp_path: Path) -> None:
    SemSpecConfig("parse", revise_with="fly").save_pretrained(tmp_path)
    assert SemSpecConfig.from_pretrained(tmp_path).revise_with == FLY.FlyConfig()


@pytest.mark.usefixtures("fly")
@pytest.mark.quantized
def test_a_quantized_draft() -> None:
    target = tiny(hidden=64, dtype=torch.float32)
    draft = load_draft(target, quantization="torchao-int8")
    inputs = prompts((6, 3))
    output = target.generate(**inputs, assistant_model=draft, generation_config=SemSpecConfig("fly", **LOOSE))
    assert new_tokens(output, inputs).shape == (2, 20)
