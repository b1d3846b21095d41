"""The seeded calls that tests/test_digests.py digests, and the models, tokenizers and inputs that they take."""

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerFast, StoppingCriteria

from hf_semspec import SemanticConfig, load_draft, train_semantic_probe

VOCAB, PAD, WIDTH = 97, 0, 8
PADS = {1: [0], 3: [3, 5, 0]}  # on the left of the prompts of a batch


@dataclass(frozen=True)
class Case:
    """A call of the scheme that its name begins with.

    Args:
        fields: of the config.
        rows: of the batch.
        target, draft: names of the models, see `model` and `draft_of`.
        given: what else there is: names in `GIVEN`, "stream" for a streamer, "turn" for a second call with the cache,
            which with "suffix" is given the new ids only.
    """

    fields: dict[str, Any]
    rows: int = 3
    target: str = "llama"
    draft: str | None = "near"
    given: tuple[str, ...] = ()


@functools.cache
def model(name: str) -> PreTrainedModel:
    """A float64 model of the architecture `name`."""
    own = {"vocab_size": VOCAB, "pad_token_id": PAD, "eos_token_id": None, "bos_token_id": None}
    own["tie_word_embeddings"] = False
    llama = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama |= {"num_key_value_heads": 2}
    gemma = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}
    gemma |= {"layer_types": ["sliding_attention", "full_attention"]}
    bart = {f"{side}_{part}": 2 for side in ("encoder", "decoder") for part in ("layers", "attention_heads")}
    bart |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "forced_eos_token_id": None}
    kind, more = {
        "llama": (transformers.LlamaConfig, llama),
        "eager": (transformers.LlamaConfig, llama),
        "deep": (transformers.LlamaConfig, llama | {"num_hidden_layers": 8}),
        "gemma3": (transformers.Gemma3TextConfig, llama | gemma),
        "gpt2": (transformers.GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
        "t5": (transformers.T5Config, {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}),
        "bart": (transformers.BartConfig, {"d_model": 32, **bart}),
    }[name]
    own |= {"decoder_start_token_id": 2} if name in ("t5", "bart") else {}
    return drawn(kind(**own, **more), "sdpa" if name == "llama" else "eager")


def drawn(config: Any, attention: str, near: dict[str, torch.Tensor] | None = None) -> PreTrainedModel:
    """A model whose matrices are random, whatever transformers draws; or those of `near`, as many rows, disturbed."""
    coded = config.is_encoder_decoder
    kind = transformers.AutoModelForSeq2SeqLM if coded else transformers.AutoModelForCausalLM
    made = kind.from_config(config, attn_implementation=attention).double().eval()
    head = made.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # T5's is tied whatever its config says
    generator = torch.Generator().manual_seed(5 if near else 1)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() > 1:
                scale = 2.0 if coded and ("embed" in name or "shared" in name) else 0.3
                scale *= 0.3 if any(f"layers.{index}." in name for index in range(2, 8)) else 1
                fresh = scale * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
                weight.copy_(near[name][: len(weight)] + 0.1 * fresh if near else fresh)
    return made


@functools.cache
def draft_of(target: str, kind: str) -> PreTrainedModel:
    """A draft for the target: `near` it, and of a `small` or `foreign` vocabulary; or the target's first `layer`s."""
    one = model(target)
    if kind == "layer":
        return load_draft(one, layers=max(one.config.num_hidden_layers // 4, 1))
    config, weights = one.config.to_dict(), dict(one.state_dict())
    config["vocab_size"] = {"small": 80, "foreign": 90}.get(kind, VOCAB)
    if kind == "foreign":
        ids = [tokens().convert_tokens_to_ids(tokens(kind).convert_ids_to_tokens(index)) for index in range(90)]
        weights |= {name: value[ids] for name, value in weights.items() if len(value) == VOCAB}
    return drawn(type(one.config)(**config), one.config._attn_implementation, weights)


CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@functools.cache
def tokens(kind: str = "own") -> PreTrainedTokenizerFast:
    """<pad>, <eos> and the printable ASCII characters, a token each; `foreign`: some of them, by other ids; `chat`:
    with a chat template."""
    space = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names = [space.pre_tokenize_str(chr(code))[0][0] for code in range(0x20, 0x7F)]
    names = ["<pad>", "<eos>", *(names[3:91] if kind == "foreign" else names)]
    core = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer, core.decoder = space, decoders.ByteLevel()
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    made = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **special)
    made.chat_template = CHAT if kind == "chat" else None
    return made


@functools.cache
def prompts(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCAB, (rows, WIDTH), generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(WIDTH) >= torch.tensor(PADS[rows])[:, None]).long()
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


@functools.cache
def probe() -> "tempfile.TemporaryDirectory[str]":
    """The folder of a probe trained for the pair of Llamas; it lives as long as the process."""
    folder = tempfile.TemporaryDirectory()
    texts = [{name: value[:, start:] for name, value in prompts(1).items()} for start in (0, 3)]
    options = {"num_continuations": 3, "max_prefixes": 3, "max_new_tokens": 12, "epochs": 8, "hidden": (8,)}
    options |= {"config": SemanticConfig(**SEGMENTS, scorer="none"), "tokenizer": tokens(), "progress": False}
    options |= {"generation_config": transformers.GenerationConfig(**SAMPLED)}
    train_semantic_probe(model("llama"), draft_of("llama", "near"), texts, **options).save_pretrained(folder.name)
    return folder


class Parity(LogitsProcessor):
    """Prefers ids of another parity than the last one, the more the longer the text."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        same = (torch.arange(scores.shape[1]) + input_ids[:, -1:]) % 2 == 0
        return torch.where(same, scores - 0.1 * input_ids.shape[1], scores)


class Sevens(StoppingCriteria):
    """Ends a row where its last two ids add up to a multiple of seven."""

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids[:, -2:].sum(dim=1) % 7 == 0


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "words": lambda: {"tokenizer": tokens()},
    "chat": lambda: {"tokenizer": tokens("chat")},
    "foreign": lambda: {"tokenizer": tokens(), "assistant_tokenizer": tokens("foreign")},
    "parity": lambda: {"logits_processor": [Parity()]},
    "sevens": lambda: {"stopping_criteria": [Sevens()]},
}
COSTS = {"target": [[1, 1, 1.0], [1, 17, 1.5], [3, 1, 1.2], [3, 17, 2.5]], "draft": [[1, 0.1], [3, 0.15]]}
AUTO = {"num_draft_tokens": "auto", "cost_profile": COSTS}
TOKEN = {"verification": "token"}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95}
SCORES = {"output_scores": True, "output_logits": True}
RULES = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[7], [11, 12]], "min_new_tokens": 6}
EOS = {"eos_token_id": list(range(20, 28))}
THREE = {"num_chains": 3, "num_draft_tokens": 3}
EASD = {"num_draft_tokens": 4, "target_entropy_threshold": 0.9, "draft_entropy_threshold": 0.9}
EASD |= {"overlap_threshold": 0.5, "top_n": 5}
EASD_INSIDE = {"revise_with": {"scheme": "easd", **EASD}}
TOKEN_INSIDE = {"revise_with": {"scheme": "lossless", **TOKEN}}
CHANCE = {"trigger": "random", "trigger_rate": 0.3}
JUDGE = {"segment_tokens": 4, "judge_prompt": "ok?", "full_judge_prompt": "all ok?", "labels": ("Y", "N")}
JUDGE |= {"accept_threshold": 0.9, "prefix_threshold": 0.3}
SEGMENTS = {"max_segment_tokens": 4, "segment_stop": None, "think_end": None}
LIKELY = {**SEGMENTS, "scorer": "likelihood", "accept_ratio": 0.8}
COIN = {"scorer": "random", "accept_rate": 0.6}
TEXT = {"segment_stop": "a", "think_end": "q", "max_finish_tokens": 4}
WHOLE = {**SEGMENTS, "scorer": "sequence"}
SMC = {"num_particles": 4, "num_draft_tokens": 3}
TRACE = {"trace": True}

CASES = {
    "lossless greedy one": Case(SCORES, 1),
    "lossless greedy": Case({}),
    "lossless sampled one": Case({**SAMPLED, **TOKEN, **TRACE}, 1),
    "lossless sampled": Case({**SAMPLED, **TOKEN, **SCORES}),
    "lossless chains greedy": Case({**THREE, **TRACE}),
    "lossless chains sampled": Case({**THREE, **SAMPLED, **SCORES}),
    "lossless rules greedy": Case({**RULES, **EOS, **SCORES}),
    "lossless rules sampled": Case({**RULES, **EOS, **SAMPLED, **TOKEN}, given=("parity",)),
    "lossless parity chains": Case({**THREE, **SAMPLED, **SCORES}, given=("parity",)),
    "lossless eos": Case({**EOS, **TRACE, **SCORES}),
    "lossless criterion": Case({**SAMPLED, **TOKEN, **TRACE}, given=("sevens",)),
    "lossless criterion and eos": Case({**EOS, **SAMPLED, **TOKEN, **SCORES}, given=("sevens",)),
    "lossless max length": Case({"max_new_tokens": None, "max_length": 19}),
    "lossless stop strings": Case({"stop_strings": ["a", "7"], **EOS}, given=("words",)),
    "lossless ngram greedy": Case({"draft": "ngram", "max_new_tokens": 40}, draft=None),
    "lossless ngram sampled": Case({"draft": "ngram", **SAMPLED, **TOKEN, "max_new_tokens": 40}, draft=None),
    "lossless ngram and model": Case({"draft": "ngram+model", **SAMPLED, **TOKEN, **TRACE, "max_new_tokens": 40}),
    "lossless auto greedy": Case({**AUTO, **TRACE, "max_new_tokens": 40}),
    "lossless auto sampled": Case({**AUTO, **SAMPLED, **TOKEN}, target="deep", draft="layer"),
    "lossless compiled": Case({"compile_draft": True, **SAMPLED, **TOKEN}),
    "lossless compiled chains": Case({"compile_draft": True, **THREE, **EOS}),
    "lossless foreign greedy": Case({**EOS, **TRACE}, draft="foreign", given=("foreign",)),
    "lossless foreign chains": Case({**THREE, **SAMPLED}, draft="foreign", given=("foreign",)),
    "lossless t5 greedy": Case({**SCORES, **TRACE}, target="t5"),
    "lossless t5 chains": Case({**THREE, **SAMPLED, **EOS}, target="t5"),
    "lossless bart sampled": Case({**SAMPLED, **TOKEN, **SCORES}, target="bart"),
    "lossless small vocabulary": Case({**SAMPLED, **TOKEN, **TRACE}, draft="small"),
    "lossless layer": Case(SCORES, draft="layer"),
    "lossless three each": Case({**SAMPLED, **TOKEN, **SCORES, "num_return_sequences": 3}),
    "lossless two turns": Case({**SAMPLED, **TOKEN, **SCORES}, 1, given=("turn",)),
    "lossless turn without text": Case({**SAMPLED, **TOKEN, **RULES, **SCORES}, 1, given=("turn", "suffix")),
    "lossless stream": Case({**SAMPLED, **TOKEN}, 1, given=("stream",)),
    "lossless windows": Case({**SAMPLED, **TOKEN, **SCORES}, target="gemma3"),
    "lossless gpt2": Case({**EOS, **SCORES}, target="gpt2"),
    "lossless eager": Case({**THREE, **SAMPLED}, target="eager"),
    "lossless block one": Case({**SAMPLED, **TRACE}, 1),
    "lossless block": Case({**SAMPLED, **SCORES}),
    "lossless block rules": Case({**RULES, **EOS, **SAMPLED}, given=("parity",)),
    "lossless block ngram and model": Case({"draft": "ngram+model", **SAMPLED, **TRACE, "max_new_tokens": 40}),
    "lossless block small vocabulary": Case({**SAMPLED, **TRACE}, draft="small"),
    "easd greedy": Case({**EASD, **TRACE}),
    "easd sampled": Case({**EASD, **SAMPLED, **SCORES}),
    "easd penalty 1": Case({**EASD, **SAMPLED, "penalty": 1.0}),
    "easd chains": Case({**EASD, **THREE, **SAMPLED, "penalty": 0.5, **TRACE}),
    "easd random greedy": Case({**EASD, **CHANCE, **EOS, **SCORES}),
    "easd random sampled": Case({**EASD, **CHANCE, **SAMPLED, **TRACE, "num_return_sequences": 2}),
    "easd auto": Case({**EASD, **AUTO, **SAMPLED, **TRACE}),
    "easd compiled": Case({**EASD, "compile_draft": True}),
    "easd foreign": Case({**EASD, **SAMPLED}, draft="foreign", given=("foreign",)),
    "easd t5": Case({**EASD, **SAMPLED, **TRACE}, target="t5"),
    "easd two turns": Case({**EASD, **RULES, **SCORES}, 1, given=("turn", "stream")),
    "parse greedy": Case({**JUDGE, **TRACE, **SCORES}),
    "parse sampled": Case({**JUDGE, **SAMPLED, **TOKEN_INSIDE, **TRACE}),
    "parse longest": Case({**JUDGE, **SAMPLED, "boundary": "longest"}),
    "parse cascade": Case({**JUDGE, "boundary": "cascade", "accept_threshold": 0.5}),
    "parse random": Case({**JUDGE, **SAMPLED, **TOKEN_INSIDE, "boundary": "random", **TRACE}),
    "parse two passes": Case({**JUDGE, "single_pass": False, **SCORES, **TRACE}),
    "parse easd": Case({**JUDGE, **EASD_INSIDE, **SAMPLED, **TRACE}),
    "parse lossless": Case({**JUDGE, "revise_with": {"scheme": "lossless", **THREE}, **SAMPLED, **SCORES}),
    "parse alone": Case({**JUDGE, "revise_with": None, **EOS}),
    "parse redrafts": Case({**JUDGE, "max_redrafts": 2, **EOS, **SAMPLED, **SCORES, **TRACE}),
    "parse ngram": Case({**JUDGE, "draft_ngram": True, "max_redrafts": 1, **TRACE}),
    "parse packed": Case({**JUDGE, "max_packed_tokens": 40, "max_redrafts": 1}),
    "parse chat": Case({**JUDGE, "max_packed_tokens": 60, **TRACE}, given=("chat",)),
    "parse foreign": Case({**JUDGE, **SAMPLED, **TOKEN_INSIDE}, draft="foreign", given=("foreign",)),
    "parse compiled": Case({**JUDGE, "compile_draft": True, "max_redrafts": 1}),
    "parse rules": Case({**JUDGE, **RULES, **SCORES}, given=("parity", "sevens")),
    "parse two turns": Case({**JUDGE, **SCORES}, 1, given=("turn", "stream")),
    "parse block": Case({**JUDGE, **SAMPLED, **TRACE}),
    "semantic likelihood": Case({**LIKELY, **TRACE}),
    "semantic likelihood sampled": Case({**LIKELY, **SAMPLED, **SCORES}),
    "semantic sequence": Case({**WHOLE, **SAMPLED, **TRACE}),
    "semantic random": Case({**SEGMENTS, **COIN, "bonus": False, **SAMPLED, **SCORES, **TRACE}),
    "semantic top k": Case({**SEGMENTS, "scorer": "none", "top_k_accept": 3, **EOS, **TRACE}),
    "semantic draft first": Case({**LIKELY, "first_segment": "draft", "salvage": False, **SCORES}),
    "semantic lossless": Case({**LIKELY, "revise_with": "lossless", **SCORES}),
    "semantic easd": Case({**WHOLE, **EASD_INSIDE, **SAMPLED, **TRACE}),
    "semantic exact": Case({**WHOLE, "residual": "exact", **SAMPLED, **SCORES}),
    "semantic exact bare": Case({**LIKELY, "residual": "exact", "bonus": False, **SAMPLED, **TRACE}),
    "semantic chunks": Case({**WHOLE, "revise_chunk": 1, **SAMPLED}),
    "semantic text": Case({**LIKELY, **TEXT, **SAMPLED, **TRACE}),
    "semantic probe": Case({**SEGMENTS, "scorer": "probe", **SAMPLED}),
    "semantic rules": Case({**LIKELY, **RULES, **SAMPLED, **SCORES}, given=("parity", "sevens")),
    "semantic two turns": Case(LIKELY, 1, given=("turn", "stream")),
    "smc one particle": Case({**SMC, "num_particles": 1}, 1),
    "smc": Case({**SMC, **SCORES, **TRACE}),
    "smc eight": Case({**SMC, "num_particles": 8, **EOS}),
    "smc power": Case({**SMC, "power": 2.0, **TRACE}),
    "smc best": Case({**SMC, "select": "best", "num_return_sequences": 2}),
    "smc multinomial": Case({**SMC, "resampling": "multinomial", "ess_threshold": 1.0, **SCORES}),
    "smc stratified": Case({**SMC, "resampling": "stratified", "ess_threshold": 0.9, **TRACE}),
    "smc residual": Case({**SMC, "resampling": "residual", "ess_threshold": 0.9}),
    "smc two each": Case({**SMC, "num_return_sequences": 2, **EOS, **SCORES, **TRACE}),
    "smc criterion": Case({**SMC, "temperature": 0.8, "top_k": 40}, given=("sevens",)),
    "smc rules": Case({**SMC, **RULES, **EOS}, given=("parity",)),
    "smc rules two each": Case({**SMC, **RULES, "num_return_sequences": 2, **SCORES}, given=("parity", "sevens")),
    "smc draft temperature": Case({**SMC, "draft_temperature": 1.5, "top_p": 0.95}),
    "smc compiled": Case({**SMC, "compile_draft": True}),
    "smc two turns": Case({**SMC, **SCORES}, 1, given=("turn", "stream")),
}
