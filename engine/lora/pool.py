"""Resident adapters of one rank: exact-rank tensors on the device, hung into each layer's table by row.

An adapter takes the bytes of its own ranks, whatever other adapters or flags say. A row is filled completely before any
layer sees it and emptied when its version is freed.
"""

from collections.abc import Mapping

import torch

from loraplex.engine.layers.embedding import LMHead
from loraplex.engine.layers.experts import Experts
from loraplex.engine.layers.linear import Linear, LoRAOp
from loraplex.engine.lora.adapter import HostAdapter
from loraplex.engine.models.sites import Site, lora_sites, shard_delta
from loraplex.engine.parallel import Parallel
from loraplex.kernels.lora.experts import ExpertLoRAOp
from loraplex.kernels.lora.weights import ExpertDeltas, ExpertLoRAWeights, ExpertLowRank, LoRAWeights, LowRank

HostKey = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Address, shape and strides of a host tensor."""


class AdapterPool:
    """Installs and removes adapters in the layers of one rank's model."""

    def __init__(
        self,
        model: torch.nn.Module,
        parallel: Parallel,
        device: torch.device,
        dtype: torch.dtype,
        *,
        dense_op: LoRAOp,
        expert_op: ExpertLoRAOp,
        enabled: bool,
    ) -> None:
        self.sites: Mapping[str, Site] = lora_sites(model)
        self.ranks: dict[int, int] = {}
        """Largest rank of the adapter in each table row in use."""
        self._parallel = parallel
        self._device = device
        self._dtype = dtype
        self._modules = list(dict.fromkeys(site.module for site in self.sites.values())) if enabled else []
        for module in self._modules:
            if isinstance(module, Experts):
                module.lora, module.lora_op = ExpertLoRAWeights(), expert_op
            else:
                module.lora, module.lora_op = LoRAWeights(slices=module.slices), dense_op

    def install(self, row: int, adapter: HostAdapter) -> int:
        """Copies an adapter to the device into table row `row`; returns its bytes there. Nothing is visible unless
        all of it fits (`torch.OutOfMemoryError` otherwise)."""
        dense: dict[Linear | LMHead, dict[str, LowRank]] = {}
        experts: dict[Experts, dict[str, ExpertLowRank]] = {}
        moved: dict[HostKey, torch.Tensor] = {}
        for path, delta in adapter.sites.items():
            site = self.sites[path]
            a, b = shard_delta(site, delta.a, delta.b)
            a, b = self._to_device(a, moved), self._to_device(b, moved)
            if isinstance(site.module, Experts):
                experts.setdefault(site.module, {})[site.part] = ExpertLowRank(a, b, delta.scale)
            else:
                dense.setdefault(site.module, {})[site.part] = LowRank(a, b, delta.scale)
        for module in self._modules:
            assert module.lora is not None
            rows: list = module.lora.rows
            rows.extend([None] * (row + 1 - len(rows)))
            if isinstance(module, Experts):
                rows[row] = _expert_deltas(experts[module]) if module in experts else None
            else:
                parts = dense.get(module)
                rows[row] = tuple(parts.get(name) for name in module.parts) if parts else None
        self.ranks[row] = adapter.rank_max
        return sum(t.numel() * t.element_size() for t in moved.values())

    def remove(self, row: int) -> None:
        """Empties a table row in every layer; its tensors are freed."""
        self.ranks.pop(row, None)
        for module in self._modules:
            assert module.lora is not None
            rows: list = module.lora.rows
            if row < len(rows):
                rows[row] = None

    def _to_device(self, t: torch.Tensor, moved: "dict[HostKey, torch.Tensor]") -> torch.Tensor:
        """One copy per distinct host tensor: gate and up of a fused adapter share their A."""
        key = (t.data_ptr(), tuple(t.shape), t.stride())
        if key not in moved:
            moved[key] = t.to(self._device, self._dtype, copy=True).contiguous()
        return moved[key]


def _expert_deltas(named: dict[str, ExpertLowRank]) -> ExpertDeltas:
    return ExpertDeltas(named.get("gate_proj"), named.get("up_proj"), named.get("down_proj"))
