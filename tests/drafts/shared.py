"""What the tests of drafts that are looked up share."""

from typing import Any

from transformers import PreTrainedModel

from hf_semspec import SemSpecConfig
from tests.models import draft_of

SOURCES = ("ngram", "ngram+model")


def looked_up(
    target: PreTrainedModel, inputs: Any, source: str = "ngram", draft: Any = None, *, call: Any = None, **fields: Any
) -> Any:
    models = {"assistant_model": draft or draft_of(target, "near")} if source == "ngram+model" else {}
    config = SemSpecConfig("lossless", draft=source, return_dict_in_generate=True, **fields)
    return target.generate(**inputs, **models, **(call or {}), generation_config=config)
