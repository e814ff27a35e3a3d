"""From a step's requests to its `LoRABatchInfo`: what every dense backend's `plan` and `static` share.

The description is made on the host and goes to the device in one copy of packed words, into fresh tensors or into the
fixed buffers of a CUDA graph.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from loraplex.engine.words import Field, Ints, WordLayout
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.weights import LoRAWeights


@dataclass(frozen=True)
class BackendOptions:
    max_slots: int
    """--max-loras-per-batch: distinct adapters in one step."""
    max_rank: int
    """--max-lora-rank."""
    chunk_size: int | None
    """--max-lora-chunk-size; None: by token count."""


@dataclass(frozen=True)
class Segments:
    """A dense backend's order of the step's tokens and how it is cut."""

    permutation: Ints
    """[T]."""
    indptr: Ints
    """[num_segments + 1], over `permutation`; tokens after the last bound are in no segment."""
    slots: Ints
    """[num_segments], −1 = base."""


class PlannedBackend(ABC):
    """A dense backend: `cut` and `add_` are its own, the rest is here."""

    def __init__(self, options: BackendOptions) -> None:
        self.options = options

    @abstractmethod
    def cut(self, slots: Sequence[int], num_tokens: Sequence[int], bucket: int) -> Segments:
        """Segments of a step. bucket: tokens of the buffers it will run in, padding included."""

    @abstractmethod
    def max_segments(self, max_tokens: int, max_requests: int) -> int:
        """Bound on the segments `cut` makes of any such step with bucket = max_tokens."""

    @abstractmethod
    def add_(self, y_TN: torch.Tensor, x_TD: torch.Tensor, w: LoRAWeights, batch: LoRABatchInfo) -> None: ...

    def plan(
        self,
        slots: list[int],
        num_tokens: list[int],
        slot_rows: list[int],
        ranks: Mapping[int, int],
        device: torch.device,
    ) -> LoRABatchInfo:
        segments = self.cut(slots, num_tokens, sum(num_tokens))
        fields = _fields(slots, num_tokens, slot_rows, segments)
        sizes = {name: len(values) for name, values in fields.items()}
        # Kernels are compiled for a number of slots: one that changed with the step would compile them again and again.
        sizes["slot_row"] = self.options.max_slots
        layout = _layout(sizes)
        packed = _pack(fields, layout, device).to(device, non_blocking=True)
        return LoRABatchInfo(
            **layout.views(packed),
            max_rank_in_batch=max(ranks.get(row, 0) for row in slot_rows),
            segments_host=_segments_host(segments, slot_rows),
        )

    def static(
        self, max_tokens: int, max_requests: int, device: torch.device, max_rank: int | None = None
    ) -> "StaticBatch":
        return StaticBatch(self, max_tokens, max_requests, max_rank or self.options.max_rank, device)


class StaticBatch:
    """Fixed device buffers that a CUDA graph is captured over: `info` at capture, `fill` before each replay.

    max_rank: largest rank of any adapter that `fill` will see; sizes the scratch and chooses the kernels' variant.
    """

    def __init__(
        self, backend: PlannedBackend, max_tokens: int, max_requests: int, max_rank: int, device: torch.device
    ) -> None:
        self.backend = backend
        self.max_tokens = max_tokens
        segments = backend.max_segments(max_tokens, max_requests)
        sizes = {
            "permutation": max_tokens,
            "token_slot": max_tokens,
            "token_row": max_tokens,
            "req_seg_indptr": max_requests + 1,
            "req_weight_indices": max_requests,
            "slot_row": backend.options.max_slots,
            "seg_indptr": segments + 1,
            "weight_indices": segments,
            "segment_row": segments,
            "num_segments": 1,
        }
        nothing = np.zeros(0, dtype=np.int64)
        empty = _fields([], [], [], Segments(nothing, np.zeros(1, dtype=np.int64), nothing))
        self.layout = _layout(sizes)
        self.packed = _pack(empty, self.layout, device).to(device)
        self.info = LoRABatchInfo(**self.layout.views(self.packed), max_rank_in_batch=max_rank, segments_host=())
        """Before the first `fill` a batch of padding only."""

    def fill(
        self, slots: list[int], num_tokens: list[int], slot_rows: list[int], ranks: Mapping[int, int]
    ) -> LoRABatchInfo:
        """Describes a step in the buffers, on the current stream; arguments as for `plan`. Tokens from
        sum(num_tokens) to `max_tokens` are padding. Returns `info` with the step's `segments_host`."""
        assert sum(num_tokens) <= self.max_tokens, (sum(num_tokens), self.max_tokens)
        assert all(ranks[row] <= self.info.max_rank_in_batch for row in slot_rows), (ranks, slot_rows)
        segments = self.backend.cut(slots, num_tokens, self.max_tokens)
        packed = _pack(_fields(slots, num_tokens, slot_rows, segments), self.layout, self.packed.device)
        self.packed.copy_(packed, non_blocking=True)
        return replace(self.info, segments_host=_segments_host(segments, slot_rows))


def _fields(
    slots: Sequence[int], num_tokens: Sequence[int], slot_rows: Sequence[int], segments: Segments
) -> dict[str, Ints]:
    """Arrays of `LoRABatchInfo` by field name, in packing order."""

    def rows_of(slots: Sequence[int]) -> Ints:
        return np.asarray([slot_rows[s] if s >= 0 else -1 for s in slots], dtype=np.int64)

    return {
        "permutation": segments.permutation,
        "token_slot": np.repeat(np.asarray(slots, dtype=np.int64), num_tokens),
        "token_row": np.repeat(rows_of(slots), num_tokens),
        "req_seg_indptr": np.concatenate([[0], np.cumsum(num_tokens, dtype=np.int64)]),
        "req_weight_indices": np.asarray(slots, dtype=np.int64),
        "slot_row": np.asarray(slot_rows, dtype=np.int64),
        "seg_indptr": segments.indptr,
        "weight_indices": segments.slots,
        "segment_row": rows_of(segments.slots.tolist()),
        "num_segments": np.asarray([len(segments.slots)]),
    }


def _segments_host(segments: Segments, slot_rows: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    bounds, slots = segments.indptr.tolist(), segments.slots.tolist()
    return tuple((slot_rows[s], bounds[i], bounds[i + 1]) for i, s in enumerate(slots) if s >= 0)


def _layout(sizes: Mapping[str, int]) -> WordLayout:
    """Tails are neutral: bounds repeat the last one, slots and rows are −1."""
    return WordLayout(
        {
            name: Field(size, wide=True)
            if name == "permutation"
            else Field(size, tail=None if name.endswith("indptr") else -1)
            for name, size in sizes.items()
        }
    )


def _pack(fields: Mapping[str, Ints], layout: WordLayout, device: torch.device) -> torch.Tensor:
    """One int32 host tensor (pinned for CUDA)."""
    packed = torch.empty(layout.num_words, dtype=torch.int32, pin_memory=device.type == "cuda")
    layout.fill(packed, fields)
    return packed
