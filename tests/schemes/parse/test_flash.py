from typing import Any

import pytest
import torch

from hf_semspec import SemSpecConfig
from tests.helpers import Forwards
from tests.models import draft_of, prompts, tiny, tokenizer
from tests.schemes.parse import flash

ASKED = {"segment_tokens": 5, "labels": ("Y", "N"), "judge_prompt": "fine?", "full_judge_prompt": "right?"}


def call(target: Any, draft: Any, lengths: tuple[int, ...] = (9,), **fields: Any) -> Any:
    config = SemSpecConfig(
        "parse", **{**ASKED, "max_new_tokens": 30, "return_dict_in_generate": True, "do_sample": False, **fields}
    )
    return target.generate(
        **prompts(lengths), assistant_model=draft, tokenizer=tokenizer(chat=True), generation_config=config
    )


@pytest.mark.parametrize("shape", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("fields", [{}, {"max_packed_tokens": 12}, {"single_pass": False, "max_redrafts": 1}], ids=str)
def test_ui40_under_flash_attention_the_copies_are_a_batch_and_the_verdicts_the_same(
    shape: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"prefix_threshold": 0.2, "output_scores": True, **fields}
    target = tiny(shape, eos=5, attention="sdpa")
    draft = draft_of(target, "near", noise=0.15)
    packed = call(target, draft, **fields)
    flash.use(target, monkeypatch)
    expanded = call(target, draft, **fields)
    assert packed.stats.judging == "packed"
    assert expanded.stats.judging == "expanded"
    torch.testing.assert_close(expanded.verdicts, packed.verdicts, equal_nan=True)
    assert expanded.sequences.tolist() == packed.sequences.tolist()
    torch.testing.assert_close(expanded.scores, packed.scores)


def test_under_flash_attention_a_batch_is_refused_before_any_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny()
    draft = draft_of(target, "near")
    flash.use(draft, monkeypatch)
    with Forwards(target, draft) as spy, pytest.raises(ValueError, match="one prompt at a time"):
        call(target, draft, (3, 5))
    assert spy.calls == 0
