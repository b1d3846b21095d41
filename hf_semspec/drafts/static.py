"""A draft whose one-token forwards run from tensors that stay in place, so that CUDA can replay them as one graph.

Every kernel of a small model's forward takes longer to launch than to run. A captured graph launches them all at once,
but it reads and writes the addresses it was captured with: ids and columns are copied into fixed tensors, the cache is
written and shown whole, and the mask alone decides what is seen.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..engine.hooks import is_hooked
from ..engine.mapped_model import MappedModel
from ..engine.mixers import has_recurrent_layers
from ..engine.model import Fed, Wanted, has_adapting_rope, takes_masks
from ..engine.ranks import share
from ..engine.sources import Source

# Columns to begin with: each time the cache doubles, its buffers move and the forward is captured anew.
CAPACITY = 256
WARM_UPS = 2
CAPTURING = ("cuda",)

Run = Callable[[], torch.Tensor]


class StaticDraft(MappedModel):
    """A [`MappedModel`] whose forwards over one token a row run from fixed buffers; on CUDA they are captured once and
    replayed, elsewhere they run as they are. All arguments as there.

    What is captured is used for as long as the rows and the cache's buffers stay: until rows leave, or the text has
    outgrown the buffers. It goes with the call.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cache.expect(self.cache.planned.longest, CAPACITY)
        self._step: _Step | None = None

    def _feed(
        self, source: Source, ids: torch.Tensor, ends: Sequence[int], keep: int, with_hidden: Wanted = False
    ) -> Fed:
        if ids.shape[1] > 1 or not self.cache.is_filled or with_hidden:
            return super()._feed(source, ids, ends, keep, with_hidden)
        began = time.perf_counter()
        self.cache.plan(0, max(ends))
        columns = torch.tensor(ends, device=self.device).unsqueeze(1) - 1
        buffers = self._buffers()
        if self._step is None or self._step.buffers is not buffers or buffers.shape[2] < self.cache.planned.capacity:
            self._step = None  # its memory first
            self._step = _Step(self, ids.to(self.device), columns)
        else:
            self._step.ids.copy_(ids)
            self._step.columns.copy_(columns)
        logits = self._step(self)
        self._count(1, ids.numel(), time.perf_counter() - began)
        return Fed(share(logits), None)

    def _buffers(self) -> torch.Tensor:
        """The keys of the first layer that has any: all layers' buffers are replaced together."""
        return next(layer.keys for layer in self.cache.layers if layer.is_initialized)

    def _forward_at(self, ids: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """The forward over `ids` (rows, 1) at `columns` (rows, 1), against all columns of the cache."""
        self.cache.plan(0, self.cache.planned.capacity, columns)
        mask = self.masks(columns, self.cache.planned.capacity)
        return self._call(self.source, ids, mask, columns.clamp(max=self.last_position), 1).logits


class _Step:
    """One forward over one token a row of `draft`, from tensors of its own and the cache's buffers of now."""

    def __init__(self, draft: StaticDraft, ids: torch.Tensor, columns: torch.Tensor) -> None:
        self.ids, self.columns = ids.clone(), columns.clone()
        self.replay: Callable[[], None] | None = None
        if draft.device.type in CAPTURING:
            try:
                self.replay, self.output = capture(lambda: draft._forward_at(self.ids, self.columns), draft.device)
            except RuntimeError as error:
                raise ValueError(
                    f"compile_draft=True: a forward of {type(draft.model).__name__} could not be captured as a CUDA "
                    f"graph ({error}): leave compile_draft out"
                ) from error
        else:
            draft._forward_at(self.ids, self.columns)  # the buffers grow here if they have to
        self.buffers = draft._buffers()

    def __call__(self, draft: StaticDraft) -> torch.Tensor:
        if self.replay is None:
            return draft._forward_at(self.ids, self.columns)
        self.replay()
        return self.output.clone()


def capture(run: Run, device: torch.device) -> tuple[Callable[[], None], torch.Tensor]:
    """What runs `run` again on the same addresses, and the tensor in which that leaves its result."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may generate meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = run()
    return graph.replay, output


def check_static(draft: Any) -> None:
    """Refuse drafts whose forward does more than run kernels on fixed tensors.

    Raises:
        ValueError: names the reason and the way out.
    """
    reason = _reason_against(draft)
    if reason is not None:
        raise ValueError(
            f"compile_draft=True runs the draft from fixed buffers, but the draft model {type(draft).__name__} "
            f"{reason}: leave compile_draft out, or pass another draft"
        )


def _reason_against(draft: Any) -> str | None:
    if not isinstance(draft, PreTrainedModel):
        return "is wrapped (pass the model itself)"
    if has_recurrent_layers(draft):
        return "has layers with a recurrent state, which is put back between forwards"
    if is_hooked(draft):
        return "has hooks (offloading, several devices, forward hooks), which a replay would leave out"
    if (getattr(draft, "_tp_size", None) or 1) > 1:
        return "is tensor-parallel"
    if draft.training:
        return "is in train mode (call .eval() on it)"
    if draft.config.is_encoder_decoder:
        return "is an encoder-decoder"
    if not takes_masks(draft):
        return 'takes no 4-D mask (load it with attn_implementation="sdpa" or "eager")'
    if has_adapting_rope(draft):
        return "has rotary frequencies that change with the text's length"
    return None
