"""Resident adapters of one rank: exact-rank tensors on the device, hung into each layer's table by row.

An adapter takes the bytes of its own ranks, whatever other adapters or flags say. A row is filled completely before any
layer sees it and emptied when its version is freed.
"""

from collections.abc import Callable, Mapping

import torch

from loraplex.engine.layers.experts import Experts
from loraplex.engine.layers.linear import Linear
from loraplex.engine.lora.reader import HostAdapter, SiteDelta
from loraplex.engine.models.sites import Site, lora_sites, shard_delta
from loraplex.engine.parallel import Parallel
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.weights import ExpertDeltas, ExpertLoRAWeights, ExpertLowRank, LoRAWeights, LowRank

DenseOp = Callable[[torch.Tensor, torch.Tensor, LoRAWeights, LoRABatchInfo], None]


class AdapterPool:
    """Installs and removes adapters in the layers of one rank's model."""

    def __init__(
        self,
        model: torch.nn.Module,
        parallel: Parallel,
        device: torch.device,
        dtype: torch.dtype,
        *,
        dense_op: DenseOp,
        virtual_experts: bool,
        enabled: bool,
    ) -> None:
        self.sites: Mapping[str, Site] = lora_sites(model)
        self.ranks: dict[int, int] = {}
        """Largest rank of the adapter in each table row in use."""
        self._parallel = parallel
        self._device = device
        self._dtype = dtype
        if enabled:
            for site in self.sites.values():
                _open_table(site, dense_op, virtual_experts)

    def install(self, row: int, adapter: HostAdapter) -> int:
        """Copies an adapter to the device into table row `row`; returns its bytes there. Nothing is visible unless
        all of it fits (`torch.OutOfMemoryError` otherwise)."""
        dense: dict[Linear, dict[str, LowRank]] = {}
        experts: dict[Experts, dict[str, ExpertLowRank]] = {}
        moved: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], torch.Tensor] = {}
        for path, delta in adapter.sites.items():
            site = self.sites[path]
            a, b = shard_delta(site, delta.a, delta.b, self._parallel)
            a, b = self._to_device(a, moved), self._to_device(b, moved)
            if isinstance(site.module, Experts):
                experts.setdefault(site.module, {})[site.part] = ExpertLowRank(a, b, delta.scale)
            else:
                dense.setdefault(site.module, {})[site.part] = LowRank(a, b, delta.scale)
        for linear, parts in dense.items():
            assert linear.lora is not None, "adapters are not enabled"
            _set_row(linear.lora.rows, row, tuple(parts.get(name) for name in linear.parts))
        for layer, named in experts.items():
            assert layer.lora is not None, "adapters are not enabled"
            deltas = ExpertDeltas(named.get("gate_proj"), named.get("up_proj"), named.get("down_proj"))
            _set_row(layer.lora.rows, row, deltas)
        self.ranks[row] = max(_rank(delta) for delta in adapter.sites.values())
        return sum(t.numel() * t.element_size() for t in moved.values())

    def remove(self, row: int) -> None:
        """Empties a table row in every layer; its tensors are freed."""
        self.ranks.pop(row, None)
        for site in self.sites.values():
            table = site.module.lora
            if table is not None and row < len(table.rows):
                table.rows[row] = None

    def _to_device(
        self, t: torch.Tensor, moved: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], torch.Tensor]
    ) -> torch.Tensor:
        """One copy per distinct host tensor: gate and up of a fused adapter share their A."""
        key = (t.untyped_storage().data_ptr(), t.storage_offset(), tuple(t.shape), t.stride())
        if key not in moved:
            moved[key] = t.to(self._device, self._dtype, copy=True).contiguous()
        return moved[key]


def _open_table(site: Site, dense_op: DenseOp, virtual_experts: bool) -> None:
    module = site.module
    if isinstance(module, Experts):
        module.lora = module.lora or ExpertLoRAWeights()
        module.virtual_experts = virtual_experts
    elif module.lora is None:
        module.lora = LoRAWeights(slices=module.local_slices)
        module.lora_op = dense_op


def _set_row(rows: list, row: int, value: object) -> None:
    rows.extend([None] * (row + 1 - len(rows)))
    rows[row] = value


def _rank(delta: SiteDelta) -> int:
    return delta.a.shape[-2]
