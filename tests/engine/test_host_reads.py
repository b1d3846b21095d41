"""One device-to-host read a round: anything more would stall an accelerator (counted here on the CPU)."""

from typing import Any

import pytest

from hf_semspec import SemSpecConfig
from tests.helpers import EXACT, WEAK_DRAFTS, assisted
from tests.host_reads import HostReads
from tests.models import draft_of, prompts, tiny, tokenizer

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]


def count(kind: str, name: str, limit: int, lengths: tuple[int, ...], **fields: Any) -> tuple[int, int, list[str]]:
    target = tiny("gemma3", 0)
    draft = draft_of(target, name)
    inputs = prompts(lengths)
    with pytest.MonkeyPatch.context() as patch, HostReads(patch, target, draft) as reads:
        # Without a cache to return, every forward is a round: the padding of one is fed at the end.
        fields = {"max_new_tokens": limit, "return_dict_in_generate": True, "use_cache": False, **fields}
        output = assisted(target, draft, inputs, kind, **fields)
    # A token that the draft of parse or semantic writes alone is a round of its own.
    alone = {"parse": limit, "semantic": output.stats.draft_forwards}.get(kind, 0)
    return reads.count, output.stats.target_forwards + alone, reads.where


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8},
        {"num_draft_tokens": "auto", "output_scores": True},
        {"repetition_penalty": 1.2},
    ],
)
@pytest.mark.parametrize("lengths", [(5,), (3, 9, 6)])
@pytest.mark.parametrize("kind", EXACT)
def test_one_host_read_a_round(kind: str, lengths: tuple[int, ...], fields: dict[str, Any]) -> None:
    """Reads of the call itself (checks of its arguments) are the same in a short and in a long one."""
    if kind == "smc" and "num_draft_tokens" in fields:
        fields = {**fields, "num_draft_tokens": 2}
    short, few, _ = count(kind, "near", 12, lengths, **fields)
    long, many, where = count(kind, "near", 48, lengths, **fields)
    assert many > few
    # What is returned of a prompt's particles is chosen by one read more where the prompt leaves.
    leaving = len(lengths) - 1 if kind == "smc" else 0
    assert long - short <= many - few + leaving, where


@pytest.mark.parametrize("kind", ["ngram", "ngram+model", "foreign"])
def test_one_host_read_a_round_with_other_drafts(kind: str) -> None:
    """What is looked up, and what a draft of another tokenizer reads, is known from the ids that were committed."""
    reads, forwards = [], []
    for limit in (12, 40):
        target = tiny("llama", 0)
        call: dict[str, Any] = {} if kind == "ngram" else {"assistant_model": draft_of(target, "near")}
        if kind == "foreign":
            call |= {"tokenizer": tokenizer(), "assistant_tokenizer": tokenizer(permute=3)}
        config = SemSpecConfig(
            "lossless",
            draft="model" if kind == "foreign" else kind,
            max_new_tokens=limit,
            return_dict_in_generate=True,
        )
        models = [model for model in (target, call.get("assistant_model")) if model is not None]
        with pytest.MonkeyPatch.context() as patch, HostReads(patch, *models) as counted:
            output = target.generate(**prompts((3, 9, 6)), **call, generation_config=config)
        reads.append(counted.count)
        forwards.append(output.stats.target_forwards)
    assert reads[1] - reads[0] <= forwards[1] - forwards[0], counted.where
