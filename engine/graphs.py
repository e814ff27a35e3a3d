"""Steps over static buffers, so that a CUDA graph can replay them: sizes, buffers, capture.

A step runs in the smallest bucket that holds it; what is left of the bucket is padding, which stores no KV and meets
neither expert nor adapter. A bucket is for decode steps (T rows of one token), or for any step of up to T tokens.
Buckets without adapters hold no LoRA kernel at all; those with adapters are made for a largest rank.

On a CPU the same buffers are filled and the model is called on them, which tests all but the replay itself.
"""

import gc
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from loraplex.engine.batch import StepPlan
from loraplex.engine.config import Config
from loraplex.engine.inputs import PageTable, StaticInputs, StepInputs, StepShape
from loraplex.engine.lora.backend import LoRABackend
from loraplex.engine.lora.planning import StaticBatch
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.moe.tiles import rank_capacity

log = logging.getLogger(__name__)

PATIENCE = 16
"""Steps of a rank capacity that run eagerly before the buckets they lack are captured, each when it is met: a capture
takes about as long as a few such steps, and an adapter that is used once is not worth one."""

Forward = Callable[[StepInputs, LoRABatchInfo | None, int | None], torch.Tensor]
"""Inputs, adapters, rank capacity → hidden states [T, D]."""


def decode_sizes(most: int) -> list[int]:
    """Batch sizes up to `most`, which is one of them; close together where they are small, and a padding row is a
    larger part of the step."""
    sizes = [*range(1, 8), *range(8, 16, 2), *range(16, 32, 4), *range(32, 64, 8), *range(64, 256, 16)]
    sizes += range(256, most, 32)
    return [size for size in sizes if size < most] + [most]


def token_sizes(most: int) -> list[int]:
    """Token counts up to `most`, which is one of them; above 512 at most an eighth of a bucket is padding."""
    sizes = [16, 32, 64, 96, 128, 192, 256, 384]
    octave = 512
    while octave < most:
        sizes += range(octave, 2 * octave, octave // 8)
        octave *= 2
    return [size for size in sizes if size < most] + [most]


def reason_against(config: Config, dtype: torch.dtype) -> str | None:
    """Why a server on CUDA cannot capture its steps: some of its kernels read the device or loop on the host."""
    if dtype not in (torch.bfloat16, torch.float16):
        return "--dtype float32 runs through torch's operations"
    if config.model.attention_backend == "torch":
        return "--attention-backend torch loops over rows on the host"
    if config.lora.enable_lora and config.lora.lora_backend == "torch":
        return "--lora-backend torch loops over adapters on the host"
    if config.lora.enable_lora and not config.lora.lora_use_virtual_experts:
        return "--no-lora-use-virtual-experts loops over adapters on the host"
    return None


@dataclass(frozen=True)
class Bucket:
    shape: StepShape
    capacity: int
    """Largest rank of adapters in it; 0: no adapters."""


@dataclass(frozen=True)
class _Step:
    """A bucket with its buffers, and its graph where graphs are captured."""

    inputs: StepInputs
    lora: StaticBatch | None
    graph: "torch.cuda.CUDAGraph | None"


class StepGraphs:
    """The buckets of one rank. All ranks are given the same plans, and so capture the same at the same step."""

    def __init__(
        self,
        forward: Forward,
        pages: PageTable,
        backend: LoRABackend,
        hidden_TD: torch.Tensor,
        *,
        decode: list[int],
        tokens: list[int],
        alone: bool = True,
    ) -> None:
        """hidden_TD: where the hidden states of every step go; as long as the largest bucket, on the device of the
        buffers. decode, tokens: sizes, ascending. alone: no other rank takes part in forwards."""
        self._forward = forward
        self._pages = pages
        self._backend = backend
        self._hidden_TD = hidden_TD
        self._decode = decode
        self._tokens = tokens
        self._max_rows = len(pages.pages)
        self._alone = alone
        self._missed: Counter[int] = Counter()
        """By capacity."""
        self._refused: set[Bucket] = set()
        self._steps: dict[Bucket, _Step] = {}
        self._buffers = StaticInputs(len(hidden_TD), self._max_rows, pages.pages.shape[1], hidden_TD.device)
        self._cuda = hidden_TD.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._cuda else None
        self._stream = torch.cuda.Stream(hidden_TD.device) if self._cuda else None

    def buckets(self, capacity: int) -> list[Bucket]:
        """All buckets of one capacity, largest first, so that the memory of the first serves the others."""
        shapes = [StepShape(n, min(n, self._max_rows), False) for n in reversed(self._tokens)]
        shapes += [StepShape(n, n, True) for n in reversed(self._decode)]
        return [Bucket(shape, capacity) for shape in shapes]

    def bucket_of(self, plan: StepPlan, rank: int) -> Bucket | None:
        """Where this step belongs; None: it is larger than all. rank: largest one of its adapters, 0 without. A bucket
        that is ready and made for a larger rank goes before one that is not."""
        tokens = len(plan.ids)
        is_decode = plan.is_decode and tokens <= self._decode[-1]
        sizes = self._decode if is_decode else self._tokens
        if tokens > sizes[-1]:
            return None
        size = sizes[bisect_left(sizes, tokens)]
        shape = StepShape(size, size if is_decode else min(size, self._max_rows), is_decode)
        fitting = Bucket(shape, rank_capacity(rank) if rank else 0)
        larger = (b for b in self._steps if b.shape == shape and fitting.capacity and b.capacity > fitting.capacity)
        if fitting in self._steps:
            return fitting
        return min(larger, key=lambda b: b.capacity, default=fitting)

    def run(self, plan: StepPlan, ranks: Mapping[int, int]) -> tuple[StepInputs, torch.Tensor] | None:
        """Runs a step in its bucket: its inputs and hidden states, both valid until the next call. None: it has to
        run eagerly. ranks: table row → largest rank."""
        rank = max((ranks[row] for row in plan.slot_rows), default=0)
        bucket = self.bucket_of(plan, rank)
        if bucket is None:
            return None
        if bucket not in self._steps:
            self._missed[bucket.capacity] += 1
            if self._missed[bucket.capacity] < PATIENCE:
                return None
            if not self._capture_late(bucket):
                return None
        step = self._steps[bucket]
        inputs = self._buffers.fill(plan, self._pages, bucket.shape)
        lora = step.lora.fill(plan.slots, plan.num_new, plan.slot_rows, ranks) if step.lora is not None else None
        if step.graph is not None:
            step.graph.replay()
        else:
            self._run(inputs, lora, bucket.capacity)
        return inputs, self._hidden_TD[: bucket.shape.tokens]

    def capture(self, bucket: Bucket) -> None:
        """Makes a bucket ready. Its buffers are padding meanwhile: no KV is written, no adapter read."""
        shape = bucket.shape
        lora = None
        if bucket.capacity:
            lora = self._backend.static(shape.tokens, shape.rows, self._hidden_TD.device, bucket.capacity)
        inputs = self._buffers.views(shape, self._pages)
        graph = None
        if self._cuda:
            self._buffers.clear(shape)
            graph = self._record(inputs, lora, bucket.capacity)
        self._steps[bucket] = _Step(inputs, lora, graph)

    def _capture_late(self, bucket: Bucket) -> bool:
        """Captures beside a full KV pool. False, and it is not tried again: there was no room. With other ranks it
        raises: they may be waiting in the middle of a forward."""
        if bucket in self._refused:
            return False
        try:
            self.capture(bucket)
        except RuntimeError:
            if not self._alone:
                raise
            log.exception("steps of %s run without a CUDA graph", bucket)
            self._refused.add(bucket)
            return False
        return True

    def clear(self) -> None:
        """Forgets all graphs, whose memory then is free."""
        self._steps.clear()
        self._missed.clear()
        if self._cuda:
            torch.cuda.synchronize(self._hidden_TD.device)
            self._pool = torch.cuda.graph_pool_handle()

    def _record(self, inputs: StepInputs, lora: StaticBatch | None, capacity: int) -> torch.cuda.CUDAGraph:
        info = lora.info if lora is not None else None
        self._run(inputs, info, capacity)  # compiles what is not compiled yet
        torch.cuda.synchronize(self._hidden_TD.device)
        graph = torch.cuda.CUDAGraph()
        with _no_garbage_collection(), torch.cuda.stream(self._stream):
            # Other threads go on meanwhile: an adapter being read pins its memory, which a global capture forbids.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._run(inputs, info, capacity)
            finally:
                graph.capture_end()
        graph.replay()  # the first launch brings the graph to the device
        return graph

    def _run(self, inputs: StepInputs, lora: LoRABatchInfo | None, capacity: int) -> None:
        hidden_TD = self._forward(inputs, lora, capacity or None)
        self._hidden_TD[: len(hidden_TD)].copy_(hidden_TD)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A graph or an event that is collected during a capture breaks it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
