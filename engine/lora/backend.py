"""Families of dense-LoRA kernels behind one protocol: `plan` once a step on the host, `add_` once a layer."""

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol

import torch

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

        slot_rows: table row behind each slot. ranks: table row → largest rank. At least one request has an adapter.
        """
        ...

    def add_(self, y_TN: torch.Tensor, x_TD: torch.Tensor, w: LoRAWeights, batch: LoRABatchInfo) -> None:
        """y[t] += scale · B (A x[t]) for every token t with an adapter that touches this site; other rows stay as
        they are, bit for bit."""
        ...


BACKENDS = {"torch": "loraplex.engine.lora.plain:Plain"}
"""Value of --lora-backend → class. The names the flag knows but that are missing here are refused by name."""


def make_backend(name: str) -> LoRABackend:
    module, cls = BACKENDS[name].split(":")
    backend: LoRABackend = getattr(import_module(module), cls)()
    return backend
