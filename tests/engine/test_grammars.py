"""The processors of outlines and xgrammar, where installed: plain decoding's text, with drafts of any kind."""

from typing import Any

import pytest
import torch

from tests.helpers import WEAK_DRAFTS, exact, plain
from tests.models import draft_of, tiny, tokenizer

pytestmark = [pytest.mark.seam, WEAK_DRAFTS]

REGEX = r"[a-f]{3,9}-[0-9]{2,4}"
SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 4}, "ok": {"type": "boolean"}},'
    ' "required": ["name", "ok"], "additionalProperties": false}'
)
TEXTS = ("Say: abc-123 abc-12", "x", 'One more: {"a": 1')
TOKENS = 40


def processor(library: str, kind: str) -> Any:
    words = tokenizer()
    if library == "xgrammar.contrib.hf":
        xgrammar = pytest.importorskip("xgrammar")
        hf = pytest.importorskip(library)
        info = xgrammar.TokenizerInfo.from_huggingface(words, vocab_size=len(words), stop_token_ids=[1])
        compiler = xgrammar.GrammarCompiler(info)
        if kind == "regex":
            return hf.LogitsProcessor(compiler.compile_regex(REGEX))
        return hf.LogitsProcessor(compiler.compile_json_schema(SCHEMA, any_whitespace=False))
    outlines = pytest.importorskip("outlines")
    pytest.importorskip(library)
    model = outlines.from_transformers(tiny("llama", 1, eos=1), words)
    if kind == "regex":
        return outlines.backends.get_regex_logits_processor(library, model, REGEX)
    return outlines.backends.get_json_schema_logits_processor(library, model, SCHEMA)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["regex", "json"])
@pytest.mark.parametrize("library", ["outlines_core", "llguidance", "xgrammar", "xgrammar.contrib.hf"])
def test_structured_output_is_plain_decodings(library: str, kind: str, batch: int) -> None:
    target = tiny("llama", 1, eos=1, attention="sdpa")
    words = tokenizer()(list(TEXTS[:batch]), return_tensors="pt", padding=True, padding_side="left")
    inputs = {name: words[name] for name in ("input_ids", "attention_mask")}
    fields = {"max_new_tokens": TOKENS, "num_draft_tokens": 4}
    expected = plain(target, inputs, max_new_tokens=TOKENS, call={"logits_processor": [processor(library, kind)]})
    for scheme in ("lossless", "easd"):
        for source in ("ngram", "model", "ngram+model"):
            call: dict[str, Any] = {} if source == "ngram" else {"assistant_model": draft_of(target, "near", seed=1)}
            config = exact(scheme, draft=source, **fields)
            masks = [processor(library, kind)]
            output = target.generate(**inputs, **call, logits_processor=masks, generation_config=config)
            assert torch.equal(output, expected), (scheme, source)
