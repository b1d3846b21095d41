"""A character-level tokenizer with a chat template, in the Hub's format."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, END, ANSWER, UNKNOWN = "<|pad|>", "<|end|>", "<|answer|>", "<|unk|>"
CHARACTERS = "0123456789+-*=#\n?YN "

# Between an assistant's turn and the next, when the user says `?`, stands `<|end|>?<|answer|>`: three tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|answer|>' + message['content'] + '<|end|>' }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|answer|>' }}{% endif %}"
)
JUDGE_PROMPT, LABELS = "?", ("Y", "N")
SENTINEL = "0"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The lab's tokenizer: one token a character, four special tokens, `<|end|>` is EOS and `<|pad|>` the padding."""
    vocabulary = {token: index for index, token in enumerate((PAD, END, ANSWER, UNKNOWN, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[ANSWER],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Saves a tokenizer under the names that every supported transformers reads.

    Args:
        tokenizer: The lab's tokenizer.
        folder: Where to.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    # transformers 5 writes a class and a list that 4.57 does not know.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.pop("backend", None)
    config["additional_special_tokens"] = config.pop("extra_special_tokens", None) or [ANSWER]
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def prompt_text(tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    """A question as the chat template asks it."""
    messages = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def judging_suffix(tokenizer: PreTrainedTokenizerFast) -> str:
    """What the chat template puts between an assistant's text and the verdict on it."""
    roles = (("user", "1="), ("assistant", SENTINEL), ("user", JUDGE_PROMPT))
    messages = [{"role": role, "content": content} for role, content in roles]
    rendered = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return rendered.rpartition(SENTINEL)[2]
