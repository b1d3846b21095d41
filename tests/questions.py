"""The first questions of GSM8K, as a chat model is asked them."""

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

DATA = Path(__file__).parent / "data" / "gsm8k_sample.jsonl"


def questions(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    lines = [json.loads(line)["question"] for line in DATA.read_text().splitlines()]
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": line}], tokenize=False, add_generation_prompt=True)
        for line in lines
    ]
