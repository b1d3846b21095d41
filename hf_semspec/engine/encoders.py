"""Encoder-decoders and prompts with images: which pairs of models can be drafted with, and what each of them reads
beside text."""

from collections.abc import Mapping
from typing import Any

import torch

from ..common.wrappers import forward_parameters
from .cache import text_config
from .hooks import compute_device
from .model import keeps_no_tensors
from .request import Request
from .sources import Encoded, Images, Positions, Source

PLAINLY = "decode plainly with generate(..., semspec=None) and without assistant_model"

# Where the decoders of these families take their positions from, which decides how unequal rows share a batch.
POSITIONS: dict[str, Positions] = {
    "t5": "relative",
    "mt5": "relative",
    "umt5": "relative",
    "whisper": "given",
    "bart": "counted",
    "mbart": "counted",
    "marian": "counted",
    "pegasus": "counted",
}
# Families that put what they see of an image in the place of tokens of the prompt, and change nothing else.
IMAGE_MODELS = ("llava",)
_IMAGES = ("pixel_values", "image_sizes", "vision_feature_layer", "vision_feature_select_strategy")
_CACHES = ("cache", "past_key_values")
RAW_IMAGES = "semspec_images"


def decodes_encoded(model: Any) -> bool:
    """Whether `model` decodes what an encoder has read: an encoder-decoder, or the decoder of one, which takes
    `encoder_outputs`."""
    return bool(model.config.is_encoder_decoder) or _takes_states(model)


def check_encoders(model: Any, draft: Any, scheme: Any) -> None:
    """Refuse pairs of which one has an encoder and the other cannot read what it reads.

    Args:
        draft: `None` for a scheme that drafts without a model.

    Raises:
        ValueError: names the model and the way out.
    """
    target_name, draft_name = type(model).__name__, type(draft).__name__
    with_model = hasattr(draft, "config")
    if not model.config.is_encoder_decoder:
        if with_model and decodes_encoded(draft):
            raise ValueError(
                f"the draft model {draft_name} reads what an encoder has read, and the target {target_name} has no "
                "encoder: pass another draft"
            )
        return
    if not scheme.reads_encoders:
        raise ValueError(
            f"{scheme.name} does not support encoder-decoders, and the target model {target_name} is one: use "
            f"lossless or easd, or {PLAINLY}"
        )
    if with_model and not decodes_encoded(draft):
        raise ValueError(
            f"the draft model {draft_name} has no encoder, and the target {target_name} is an encoder-decoder: pass a "
            "smaller model of its kind as the draft"
        )
    for role, one, way_out in (("target", model, PLAINLY), ("draft", draft, "pass another draft"))[: 1 + with_model]:
        if one.config.model_type not in POSITIONS:
            raise ValueError(
                f"the {role} model {type(one).__name__} is an encoder-decoder of type {one.config.model_type!r}, "
                f"which semspec does not support yet ({', '.join(POSITIONS)} are): {way_out}"
            )
    if with_model:
        _check_same_inputs(model, draft)


def _check_same_inputs(model: Any, draft: Any) -> None:
    target_name, draft_name = type(model).__name__, type(draft).__name__
    if not draft.config.is_encoder_decoder:
        names = ("d_model", "width of the encoder's states")
        if _takes_states(model):
            return
    elif model.main_input_name != draft.main_input_name:
        raise ValueError(
            f"the target {target_name} reads {model.main_input_name} and the draft {draft_name} "
            f"{draft.main_input_name}: pass a draft that takes the same inputs"
        )
    else:
        names = ("num_mel_bins", "number of mel bins")
    ours, theirs = (getattr(one.config, names[0], None) for one in (model, draft))
    if ours != theirs:
        raise ValueError(
            f"the {names[1]} ({names[0]}) of the target {target_name} is {ours} and of the draft {draft_name} "
            f"{theirs}: pass a draft that takes the same inputs"
        )


def raw_images(scheme: Any, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The images among `generate`'s arguments, for a scheme that has a use for them."""
    if not scheme.reads_encoders:
        return {}
    return {name: model_kwargs[name] for name in _IMAGES if model_kwargs.get(name) is not None}


class Sources:
    """What the models of a call read beside text.

    Args:
        request: the call; `text` is what is left of its model inputs.

    Raises:
        ValueError: inputs that the draft cannot read, or a cache that cannot go with them.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.text = dict(request.model_kwargs)
        self.hidden: torch.Tensor | None = None
        self.mask: torch.Tensor | None = None
        self.images: dict[str, Any] = {}
        self.draft_images: dict[str, Any] = {}
        self.repeats = 1
        if not request.scheme.reads_encoders:
            return
        if request.model.config.is_encoder_decoder:
            self._take_states()
        else:
            self._take_images()

    @property
    def beside_text(self) -> bool:
        """Whether they read anything but text."""
        return self.hidden is not None or bool(self.images)

    def of_target(self) -> Source | None:
        """For the model that decides; `None` for text alone."""
        if self.images:
            return Images(len(self.request.input_ids), self.images)
        if self.hidden is None:
            return None
        returned = bool(self.request.generation_config.return_dict_in_generate)
        return self._encoded(self.request.model, self.hidden, returned)

    def of_rows(self, rows: list[int]) -> Source | None:
        """For the same model with `rows` alone, whose prompts a cache holds."""
        return None if self.hidden is None else self._encoded(self.request.model, self.hidden).part(rows)

    def of_draft(self) -> Source | None:
        """For the draft model, whose own encoder runs here, once; `None` for text alone."""
        if self.images:
            return Images(len(self.request.input_ids) // self.repeats, self.draft_images)
        if self.hidden is None:
            return None
        model, draft = self.request.model, self.request.draft
        shared = draft is model or not draft.config.is_encoder_decoder or draft.get_encoder() is model.get_encoder()
        return self._encoded(draft, self.hidden if shared else self._encode(draft))

    def _take_states(self) -> None:
        kwargs = self.text
        self.hidden = kwargs.pop("encoder_outputs")[0]
        mask = kwargs.pop("attention_mask", None)
        self.mask = None if mask is None or bool((mask != 0).all()) else mask
        own = kwargs.pop("decoder_attention_mask", None)
        if own is not None:
            kwargs["attention_mask"] = own
        for cache in [kwargs.pop(name) for name in _CACHES if kwargs.get(name) is not None]:
            if cache.get_seq_length() or getattr(cache, "_is_user_defined", False):
                raise ValueError(
                    f"a cache of the caller's own ({type(cache).__name__}) is not supported by semspec for "
                    "encoder-decoders: leave it out"
                )
        if own is not None and not bool((own != 0).all()):
            for one in filter(None, (self.request.model, self.request.draft)):
                if POSITIONS[one.config.model_type] == "counted":
                    raise ValueError(
                        f"decoder_attention_mask hides tokens, and {type(one).__name__} counts them in its positions: "
                        "pass prompts of equal length for the decoder, without padding"
                    )

    def _take_images(self) -> None:
        kwargs, request = self.text, self.request
        raw = kwargs.pop(RAW_IMAGES, {})
        if request.model.config.model_type not in IMAGE_MODELS:
            return  # left to be refused by name
        encoded = kwargs.get("mm_encoder_outputs") or {}
        if any(value is not None for value in encoded.values()):
            self.images = {"mm_encoder_outputs": kwargs.pop("mm_encoder_outputs")}
            self.repeats = request.generation_config.num_return_sequences or 1
            self.draft_images = raw
        else:
            self.images = {name: kwargs.pop(name) for name in _IMAGES if kwargs.get(name) is not None}
            self.draft_images = dict(self.images)
        if "pixel_values" not in self.images and "mm_encoder_outputs" not in self.images:
            self.images = {}
            return
        if request.draft is not None:
            _check_image_draft(request.model, request.draft)
        if request.draft is not None and not self.draft_images:
            raise ValueError(
                "mm_encoder_outputs was passed without the images, which the draft has to encode for itself: pass "
                "pixel_values instead"
            )
        if any(kwargs[name].get_seq_length() for name in _CACHES if kwargs.get(name) is not None):
            raise ValueError("images beside a filled cache are not supported by semspec: pass the whole prompt alone")

    def _encoded(self, model: Any, hidden: torch.Tensor, keeps_first: bool = False) -> Encoded:
        device, batch, nested = compute_device(model), len(self.request.input_ids), model.config.is_encoder_decoder
        positions = POSITIONS[model.config.model_type]
        if not nested and not _passes_positions(model):
            positions = "counted"
        hidden = hidden.to(device, model.dtype)
        if len(hidden) != batch:
            hidden = hidden.repeat_interleave(batch // len(hidden), dim=0)
        return Encoded(hidden, None if self.mask is None else self.mask.to(device), positions, nested, keeps_first)

    def _encode(self, draft: Any) -> torch.Tensor:
        """The draft's encoder over the caller's inputs, (prompts, source length, width)."""
        inputs, device = self.request.inputs_tensor, compute_device(draft)
        name = draft.main_input_name
        if inputs is None or bool((inputs == -100).all()):
            raise ValueError(
                f"encoder_outputs was passed without {name}, which the draft's own encoder has to read: pass {name} "
                "instead"
            )
        arguments = {name: inputs.to(device)}
        if inputs.is_floating_point():
            arguments[name] = arguments[name].to(draft.dtype)
        else:
            config = text_config(draft)
            arguments[name] = torch.where(inputs < config.vocab_size, inputs, config.pad_token_id or 0).to(device)
        if self.mask is not None:
            repeats = len(self.mask) // len(inputs)
            arguments["attention_mask"] = self.mask[::repeats].to(device)
        with torch.inference_mode() if keeps_no_tensors(draft) else torch.no_grad():
            hidden: torch.Tensor = draft.get_encoder()(**arguments, return_dict=True)[0]
        return hidden


def _check_image_draft(model: Any, draft: Any) -> None:
    """Refuse drafts that cannot read the target's images, or put them in the place of other tokens."""
    kind = draft.config.model_type
    if kind != model.config.model_type:
        raise ValueError(
            f"the prompt has images (pixel_values), which the draft model {type(draft).__name__} cannot read: pass a "
            f"draft of the target's kind ({model.config.model_type}), or {PLAINLY}"
        )
    for name in ("image_token_id", "image_token_index", "vision_feature_select_strategy"):
        ours, theirs = (getattr(one.config, name, None) for one in (model, draft))
        if ours != theirs:
            raise ValueError(f"{name} of the target is {ours!r} and of the draft {theirs!r}: pass another draft")
    for name in ("image_size", "patch_size", "num_channels"):
        ours, theirs = (getattr(one.config.vision_config, name, None) for one in (model, draft))
        if ours != theirs:
            raise ValueError(
                f"{name} of the target's images is {ours} and of the draft's {theirs}: pass a draft with the same "
                "image processor"
            )


def _takes_states(model: Any) -> bool:
    parameters = forward_parameters(model)
    return "encoder_outputs" in parameters and "decoder_input_ids" not in parameters


def _passes_positions(model: Any) -> bool:
    parameters = forward_parameters(model)
    return "position_ids" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
