"""Quantized drafts of every kind, made by the real libraries, as drafts of tiny models under all schemes."""

import json
import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_semspec import load_draft
from hf_semspec.drafts import quantizations, weights
from hf_semspec.drafts.quantizations import MAKERS
from hf_semspec.drafts.weights import own_bytes, weight_bytes
from tests.helpers import EXACT, WEAK_DRAFTS, assisted, check_identities, new_tokens, plain_rows
from tests.models import prompts, tiny, tokenizer

pytestmark = WEAK_DRAFTS

IDS = torch.arange(2, 12)[None]
LENGTH = 6
PROMPTS = prompts((3, 8))
SCHEMES = tuple(kind for kind in EXACT if kind != "chains")
# What a weight of 64 columns takes, in bits: its own, and a scale (and zero) for each block, group or row.
BITS = {
    "nf4": 4 + 32 / 64,
    "fp4": 4 + 32 / 64,
    "int8": 8 + 32 / 64,
    "torchao-int8": 8 + 32 / 64 + 8 / 64,
    "torchao-int4": 8 + 32 / 32 + 8 / 32,
    "hqq": 4 + 64 / 64,
}


@pytest.fixture(autouse=True)
def quiet_int8() -> Iterator[None]:
    """bitsandbytes logs one line a layer and forward about its cast to float16."""
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(level)


def fresh_target() -> PreTrainedModel:
    # 64 columns: the smallest block that bitsandbytes and HQQ quantize.
    return tiny(hidden=64, dtype=torch.float32)


def save(model: PreTrainedModel, folder: Path, quantization_config: dict[str, Any] | None = None) -> Path:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    if quantization_config is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization_config}))
    return folder


def gguf_file(model: PreTrainedModel, folder: Path) -> str:
    """`model`, a Llama, as a GGUF file in 8 bits; the query and key rows stand in GGUF's order."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    parts |= {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"} | {"self_attn.o_proj": "attn_output"}
    parts |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{ours}": f"blk.{layer}.{theirs}" for ours, theirs in parts.items()}
    eight_bits = gguf.GGMLQuantizationType.Q8_0
    for name, tensor in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads is not None:
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        place = names[name.removesuffix(".weight")] + ".weight"
        if tensor.dim() == 1:
            writer.add_tensor(place, tensor.numpy())
        else:
            writer.add_tensor(place, gguf.quants.quantize(tensor.numpy(), eight_bits), raw_dtype=eight_bits)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return "tiny.gguf"


def compressed_tensors(model: PreTrainedModel, folder: Path) -> Path:
    """`model` as a checkpoint of compressed-tensors with 8-bit weights, a scale a row."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from safetensors.torch import save_file

    weights = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
    settings = QuantizationConfig(
        config_groups={"all": QuantizationScheme(targets=["Linear"], weights=weights)},
        ignore=["lm_head"],
        format="pack-quantized",
        quantization_status="compressed",
    )
    packed = fresh_target()
    apply_quantization_config(packed, settings)
    for module in packed.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = module.weight.data.abs().amax(1, keepdim=True) / 127
    ModelCompressor(quantization_config=settings).compress_model(packed)
    stored = {**json.loads(settings.model_dump_json()), "quant_method": "compressed-tensors"}
    save(model, folder, stored)
    state = {name: tensor.contiguous() for name, tensor in packed.state_dict().items()}
    assert any(name.endswith("weight_packed") for name in state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make(kind: str, folder: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target and its draft of one kind."""
    target = fresh_target()
    if kind in MAKERS:
        pytest.importorskip(MAKERS[kind][0])
        return target, load_draft(target, quantization=kind)
    if kind == "gguf":
        return target, load_draft(folder, gguf_file=gguf_file(target, folder))
    return target, load_draft(compressed_tensors(target, folder))


Pair = tuple[PreTrainedModel, PreTrainedModel, torch.Tensor]
MADE: dict[str, Pair] = {}


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    """The pair of one kind and what its target writes alone, made once."""
    kind = request.param
    if kind not in MADE:
        target, draft = make(kind, tmp_path)
        MADE[kind] = target, draft, plain_rows(target, PROMPTS, max_new_tokens=LENGTH)
    return MADE[kind]


@pytest.mark.quantized
@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("pair", [*MAKERS, "gguf", "compressed-tensors"], indirect=True)
def test_ui27_every_kind_drafts_under_every_scheme_and_is_never_moved_or_cast(
    pair: Pair, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, expected = pair

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("the draft was moved or cast")

    for name in ("to", "half", "float", "double", "bfloat16", "cpu", "cuda", "train", "requires_grad_"):
        monkeypatch.setattr(draft, name, forbidden)
    output = assisted(target, draft, PROMPTS, kind, max_new_tokens=LENGTH, return_dict_in_generate=True)
    assert torch.equal(new_tokens(output, PROMPTS), expected)
    check_identities(output.stats, [LENGTH, LENGTH])
    if kind == "lossless":
        assert output.stats.accepted > 0


@pytest.mark.quantized
@pytest.mark.parametrize("quantization", MAKERS)
def test_the_copy_is_its_own_and_the_target_untouched(quantization: str) -> None:
    pytest.importorskip(MAKERS[quantization][0])
    target = fresh_target()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    classes = [type(module) for module in target.modules()]
    config, logits = target.config.to_dict(), target(IDS).logits
    draft = load_draft(target, quantization=quantization)
    assert not weights._storages(draft).keys() & weights._storages(target).keys()
    assert own_bytes(draft, target) < own_bytes(target, draft)
    assert nn.functional.cosine_similarity(draft(IDS).logits.float(), logits, dim=-1).median() > 0.8
    assert not torch.equal(draft(IDS).logits, logits)
    # The draft's head and embeddings keep the target's dtype.
    assert draft.get_output_embeddings().weight.dtype == draft.get_input_embeddings().weight.dtype == torch.float32
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())
    assert [type(module) for module in target.modules()] == classes
    assert torch.equal(target(IDS).logits, logits)
    assert target.config.to_dict() == config
    assert getattr(target, "hf_quantizer", None) is None


@pytest.mark.quantized
@pytest.mark.parametrize("quantization", MAKERS)
def test_bytes_of_the_weights_are_the_packed_ones(quantization: str) -> None:
    pytest.importorskip(MAKERS[quantization][0])
    target = fresh_target()
    draft = load_draft(target, quantization=quantization)
    elements = sum(part.in_features * part.out_features for part in target.model.modules() if _is_linear(part))
    dense = weight_bytes(target) - 4 * elements
    # The feed-forward's last layer has 128 columns, so its rows' scales count half.
    bits = (weight_bytes(draft) - dense) * 8 / elements
    assert 0.97 * BITS[quantization] <= bits <= BITS[quantization]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


@pytest.mark.quantized
@pytest.mark.parametrize("quantization", ["fp4", "torchao-int8", "torchao-int4", "hqq"])
def test_a_folder_is_quantized_as_the_loaded_model_is(quantization: str, tmp_path: Path) -> None:
    pytest.importorskip(MAKERS[quantization][0])
    target = fresh_target()
    folder = save(target, tmp_path / "plain")
    draft = load_draft(folder, quantization=quantization, dtype=torch.float32)
    assert torch.allclose(draft(IDS).logits, load_draft(target, quantization=quantization)(IDS).logits, atol=1e-4)
    assert draft.dtype == torch.float32
    half = load_draft(folder, quantization=quantization, dtype=torch.bfloat16)
    assert half.dtype == half(IDS).logits.dtype == torch.bfloat16
    as_stored = load_draft(folder, quantization=quantization)
    assert as_stored.dtype == as_stored(IDS).logits.dtype == torch.float32
    if quantization != "hqq":
        draft.save_pretrained(tmp_path / "packed")
        again = load_draft(tmp_path / "packed")
        assert torch.allclose(again(IDS).logits, draft(IDS).logits, atol=1e-4)


@pytest.mark.quantized
def test_compressed_tensors_are_unpacked_by_the_first_forward(tmp_path: Path) -> None:
    target = fresh_target()
    draft = load_draft(compressed_tensors(target, tmp_path))
    stored = weight_bytes(draft)
    assert stored < 0.5 * weight_bytes(target)
    assert nn.functional.cosine_similarity(draft(IDS).logits, target(IDS).logits, dim=-1).median() > 0.99
    assert weight_bytes(draft) > weight_bytes(target)


@pytest.mark.quantized
def test_a_gguf_file_is_unpacked_and_can_be_quantized_once_loaded(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    target = fresh_target()
    draft = load_draft(tmp_path, gguf_file=gguf_file(target, tmp_path))
    logits = target(IDS).logits
    assert nn.functional.cosine_similarity(draft(IDS).logits, logits, dim=-1).median() > 0.99
    assert weight_bytes(draft) == weight_bytes(target)
    with pytest.raises(ValueError, match="load it without `quantization`"):
        load_draft(tmp_path, gguf_file="tiny.gguf", quantization="nf4")
    assert weight_bytes(load_draft(draft, quantization="nf4")) < weight_bytes(draft)


@pytest.mark.quantized
def test_ui22_a_quantized_draft_with_broken_scales_is_named() -> None:
    pytest.importorskip("torchao")
    target = fresh_target()
    draft = load_draft(target, quantization="torchao-int8")
    draft.model.layers[1].mlp.down_proj.weight.scale.fill_(torch.nan)
    for kind in ("lossless", "easd"):
        with pytest.raises(ValueError, match=r"(?i)the draft model.*nan"):
            assisted(target, draft, prompts((4, 6)), kind, max_new_tokens=8)


@pytest.mark.parametrize(("quantization", "package"), [(name, maker[0]) for name, maker in MAKERS.items()])
def test_a_missing_package_is_named_with_the_line_for_pip(
    quantization: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizations, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"needs {package}: pip install .*(hf-semspec\[quant\]|{package})"):
        load_draft(fresh_target(), quantization=quantization)


@pytest.mark.parametrize(
    ("stored", "packages"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, ("optimum", "gptqmodel")),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, ("gptqmodel",)),
        ({"quant_method": "quanto", "weights": "int8"}, ("optimum-quanto",)),
    ],
    ids=["gptq", "awq", "quanto"],
)
def test_a_quantized_checkpoint_without_its_package_is_named(
    stored: dict[str, Any], packages: tuple[str, ...], tmp_path: Path
) -> None:
    """These packages are not installed here: what they would load has not been tested."""
    if any(find_spec(name.split("-")[0]) for name in packages):
        pytest.skip("a package is installed")
    folder = save(fresh_target(), tmp_path, stored)
    with pytest.raises(ImportError, match=rf"stored in {stored['quant_method']} .*pip install {' '.join(packages)}$"):
        load_draft(folder)


@pytest.mark.parametrize(
    ("method", "package"), [("compressed-tensors", "compressed-tensors"), ("torchao", "torchao"), ("gguf", "gguf")]
)
def test_a_reader_that_is_installed_here_is_named_where_it_is_not(
    method: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(fresh_target(), tmp_path, {"quant_method": method})
    monkeypatch.setattr(quantizations, "find_spec", lambda name: None)

    def fails(*_: Any, **__: Any) -> None:
        raise ImportError("as transformers says it")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fails)
    options = {"gguf_file": "a.gguf"} if method == "gguf" else {}
    with pytest.raises(ImportError, match=r"pip install .*" + ("demo" if method == "gguf" else package)):
        load_draft(folder, **options)


def test_other_errors_of_loading_stay_as_they_are(tmp_path: Path) -> None:
    save(fresh_target(), tmp_path)
    with pytest.raises(OSError, match="absent"):
        load_draft(tmp_path / "absent")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "nonsense"}))
    with pytest.raises(ValueError, match="nonsense"):
        load_draft(tmp_path)


@pytest.mark.quantized
@pytest.mark.parametrize("quantization", MAKERS)
def test_float64_is_refused_before_anything_is_loaded(quantization: str) -> None:
    pytest.importorskip(MAKERS[quantization][0])
    with pytest.raises(ValueError, match=r"float64: pass `dtype`"):
        load_draft(tiny(hidden=64), quantization=quantization)


@pytest.mark.quantized
def test_four_bits_of_torchao_on_cuda_need_bfloat16() -> None:
    pytest.importorskip("torchao")
    with pytest.raises(ValueError, match=r"dtype=torch\.bfloat16"):
        load_draft("absent", quantization="torchao-int4", device="cuda")
    for device in (0, "cuda", torch.device("cuda:1")):
        with pytest.raises(ValueError, match=r"dtype=torch\.bfloat16"):
            quantizations.quantization_config("torchao-int4", torch.float16, device)
        settings = quantizations.quantization_config("torchao-int4", torch.bfloat16, device)
        assert settings.quant_type.group_size == quantizations.INT4_GROUP
