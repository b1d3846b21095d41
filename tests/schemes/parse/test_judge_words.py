"""In which words `parse` asks the target, and which tokens it takes for an answer."""

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from hf_semspec import SemSpecConfig
from hf_semspec.engine.call import CallState
from hf_semspec.engine.model import CachedModel
from hf_semspec.engine.text import find_tokenizer
from hf_semspec.schemes.parse.judge import Judge, label_ids, suffix_ids
from tests.helpers import JUDGE, WEAK_DRAFTS, assisted, refuses
from tests.models import draft_of, prompts, tiny, tokenizer

pytestmark = WEAK_DRAFTS


def words_of(*names: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of all printable characters with merges up to each of `names` ("Ġ" is a space)."""
    space = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokens = [space.pre_tokenize_str(chr(code))[0][0] for code in (0x0A, *range(0x20, 0x7F))]
    merges: list[tuple[str, str]] = []
    for name in names:
        for end in range(2, len(name) + 1):
            if name[:end] not in tokens:
                tokens.append(name[:end])
                merges.append((name[: end - 1], name[end - 1]))
    core = Tokenizer(tokenizer_models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer, core.decoder = space, decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def named(words: Any, *labels: tuple[str, str]) -> tuple[list[list[str]], ...]:
    return tuple([words.convert_ids_to_tokens(ids) for ids in label_ids(words, pair)] for pair in labels)


def test_a_spelling_counts_only_if_both_labels_have_it_as_one_token() -> None:
    """As with SmolLM2: lower case with a leading space is all that both have."""
    words = words_of("Ġcorrect", "Ġincorrect", "Correct", "ĠCorrect", "correct")
    assert named(words, ("Correct", "Incorrect")) == ([["Ġcorrect"], ["Ġincorrect"]],)


def test_every_spelling_that_both_have_counts() -> None:
    words = words_of("ĠYes", "ĠNo", "Ġyes", "Ġno", "Yes", "No", "yes")
    correct, incorrect = label_ids(words, ("Yes", "No"))
    assert set(words.convert_ids_to_tokens(correct)) == {"Yes", "ĠYes", "Ġyes"}
    assert set(words.convert_ids_to_tokens(incorrect)) == {"No", "ĠNo", "Ġno"}


def test_the_first_tokens_count_where_no_spelling_is_one_token() -> None:
    assert named(words_of("Cor"), ("Correct", "Incorrect")) == ([["Cor"], ["I"]],)


@pytest.mark.parametrize("labels", [("Right", "Rightless"), ("Good", "Great"), ("a", "A")])
def test_labels_that_begin_alike_are_refused_with_a_way_out(labels: tuple[str, str]) -> None:
    words = words_of()
    if labels == ("a", "A"):
        assert named(words, labels) == ([["a"], ["A"]],), "as they are given they differ"
        return
    with pytest.raises(ValueError, match=r'(?s)labels=.*\("Yes", "No"\)'):
        label_ids(words, labels)


def test_unknown_words_are_no_labels() -> None:
    core = Tokenizer(tokenizer_models.WordLevel({"<unk>": 0, "Yes": 1, "No": 2, "Correct": 3}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    assert label_ids(words, ("Yes", "No")) == ([1], [2])
    for labels in (("Right", "Wrong"), ("Correct", "Incorrect")):
        with pytest.raises(ValueError, match="cannot tell"):
            label_ids(words, labels)


def test_labels_that_cannot_be_told_apart_are_refused_before_any_forward() -> None:
    target = tiny("llama")
    config = SemSpecConfig("parse", **{**JUDGE, "labels": ("Good", "Great")}, max_new_tokens=4)
    call = {"tokenizer": tokenizer(), "generation_config": config}
    refuses(target, draft_of(target, "near"), prompts((4,)), r"labels=\('Good', 'Great'\)", **call)


CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SWITCH = CHAT + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
ALWAYS = CHAT + "<think>\n"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (None, "\n\nWell?\n"),
        (CHAT, "<end>\n<user>Well?<end>\n<assistant>"),
        (SWITCH, "<end>\n<user>Well?<end>\n<assistant><think>\n\n</think>\n\n"),
        (ALWAYS, "<end>\n<user>Well?<end>\n<assistant><think>\n\n</think>\n\n"),
    ],
)
def test_the_question_closes_the_answers_turn_and_opens_the_judges(template: str | None, end: str) -> None:
    words = words_of()
    words.chat_template = template
    ids = suffix_ids(words, "Well?")
    assert words.decode(ids) == end
    assert ids == words(end, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m['content'] | lower }}{% endfor %}",
    ],
)
def test_a_template_that_does_not_show_the_answer_is_refused(template: str) -> None:
    words = tokenizer()
    words.chat_template = template
    target = tiny("llama")
    config = SemSpecConfig("parse", **JUDGE, max_new_tokens=4)
    call = {"tokenizer": words, "generation_config": config}
    refuses(target, draft_of(target, "near"), prompts((4,)), "chat template leaves out", **call)


def test_without_a_tokenizer_the_error_names_the_argument(tmp_path: Any) -> None:
    target = tiny("llama")
    config = SemSpecConfig("parse", **JUDGE, max_new_tokens=4)
    refuses(target, draft_of(target, "near"), prompts((4,)), r"pass tokenizer=", generation_config=config)
    target.config._name_or_path = str(tmp_path)
    refuses(target, draft_of(target, "near"), prompts((4,)), r"pass tokenizer=", generation_config=config)


def test_the_tokenizer_in_the_models_folder_is_found(tmp_path: Any) -> None:
    target = tiny("llama")
    tokenizer().save_pretrained(tmp_path)
    target.config._name_or_path = str(tmp_path)
    assert find_tokenizer(target, None).get_vocab() == tokenizer().get_vocab()
    own = tokenizer(chat=True)
    assert find_tokenizer(target, own) is own
    config = SemSpecConfig("parse", **JUDGE, accept_threshold=0.0, max_new_tokens=9)
    draft = draft_of(target, "near")
    output = target.generate(**prompts((4,)), assistant_model=draft, generation_config=config)
    assert output.equal(assisted(target, draft, prompts((4,)), "parse", accept_threshold=0.0, max_new_tokens=9))


def test_a_sentence_ends_before_a_word_whose_space_is_part_of_its_token() -> None:
    """Tokenizers in the manner of SentencePiece drop the space of a text's first token, and of that one only."""
    names = ["<unk>", "a", "\u2581a", "\u2581so", "."]
    core = Tokenizer(tokenizer_models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    words = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    assert words.decode([3]) == "so"
    call = CallState.__new__(CallState)
    target = tiny("llama")
    call.request = SimpleNamespace(model=target, tokenizer=words, processors=[])
    judge = Judge(call, CachedModel(target, 1, 9), SemSpecConfig("parse", labels=("a", "so")).scheme_config)
    assert judge.pieces([3, 4, 3, 2, 4]) == [" so", ".", " so", " a", "."]
