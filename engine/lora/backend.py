"""Families of dense-LoRA kernels behind one protocol: `plan` once a step on the host, `add_` once a layer."""

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol

import torch

from loraplex.engine.config import LoRAConfig
from loraplex.engine.lora.planning import BackendOptions, StaticBatch
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.weights import LoRAWeights


class LoRABackend(Protocol):
    def plan(
        self,
        slots: list[int],
        num_tokens: list[int],
        slot_rows: list[int],
        ranks: Mapping[int, int],
        device: torch.device,
    ) -> LoRABatchInfo:
        """Device description of a run of requests: per request its slot (−1 = base) and how many tokens it has.

        slot_rows: table row behind each slot. ranks: table row → largest rank; a row without an adapter is missing
        and does nothing. At least one request has a slot.
        """
        ...

    def static(
        self, max_tokens: int, max_requests: int, device: torch.device, max_rank: int | None = None
    ) -> StaticBatch:
        """Buffers of fixed addresses for CUDA graphs of at most so many tokens and requests. max_rank: largest rank
        that its steps will have (default: --max-lora-rank)."""
        ...

    def add_(self, y_TN: torch.Tensor, x_TD: torch.Tensor, w: LoRAWeights, batch: LoRABatchInfo) -> None:
        """y[t] += scale · B (A x[t]) for every token t with an adapter that touches this site; other rows stay as
        they are, bit for bit."""
        ...


BACKENDS = {
    "csgmv": "loraplex.engine.lora.csgmv:ChunkedSGMV",
    "triton": "loraplex.engine.lora.segmented:Segmented",
    "torch": "loraplex.engine.lora.plain:Plain",
}
"""Value of --lora-backend → class."""


def make_backend(config: LoRAConfig, device: torch.device) -> LoRABackend:
    """The backend of --lora-backend; auto is csgmv on CUDA and torch on CPU."""
    name = config.lora_backend
    if name == "auto":
        name = "csgmv" if device.type == "cuda" else "torch"
    module, cls = BACKENDS[name].split(":")
    options = BackendOptions(config.max_loras_per_batch, config.max_lora_rank, config.max_lora_chunk_size)
    backend: LoRABackend = getattr(import_module(module), cls)(options)
    return backend
