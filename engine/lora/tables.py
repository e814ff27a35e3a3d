"""Tables that tell the kernels where each resident adapter lies: static buffers, one row per adapter.

Every layer's `LoRAWeights` are views of them, so a CUDA graph reads a row through pointers that never change.
"""

from collections.abc import Mapping

import numpy as np
import torch

from loraplex.engine.layers.embedding import Embedding
from loraplex.engine.layers.experts import Experts
from loraplex.engine.models.sites import Adapted, Site
from loraplex.kernels.lora.weights import LoRAWeights


class _Table:
    """The same values on the host and on the device."""

    def __init__(self, host: np.ndarray, device: torch.device) -> None:
        self.host = host
        self.device = torch.from_numpy(host).to(device, copy=True)

    def write(self, row: int, values: np.ndarray) -> None:
        self.host[row] = values
        words = torch.from_numpy(values)
        if self.device.is_cuda:
            words = words.pin_memory()  # the copy waits for the steps under way, the host does not
        self.device[row].copy_(words, non_blocking=True)


class AdapterTables:
    """One rank's: S sites of the model, in the order of `sites`; parts of one layer stand side by side."""

    def __init__(self, sites: Mapping[str, Site], rows: int, arena: torch.Tensor) -> None:
        shape = rows, len(sites)
        self.rows = rows
        self._arena = arena
        self._places = _Table(np.zeros((*shape, 4), dtype=np.int64), arena.device)
        self._ranks = _Table(np.zeros(shape, dtype=np.int32), arena.device)
        self._scales = _Table(np.zeros(shape, dtype=np.float32), arena.device)
        self.layers: dict[Adapted, LoRAWeights] = {}
        columns: dict[Adapted, list[int]] = {}
        for i, site in enumerate(sites.values()):
            columns.setdefault(site.module, []).append(i)
        for module, own in columns.items():
            assert own == list(range(own[0], own[-1] + 1)), own
            self.layers[module] = self._weights(module, slice(own[0], own[-1] + 1))

    def write(self, row: int, places: np.ndarray, ranks: np.ndarray, scales: np.ndarray) -> None:
        """Rewrites a row: [S, 4], [S], [S]; one copy per table, in order with the steps before and after."""
        self._places.write(row, places)
        self._scales.write(row, scales)
        self._ranks.write(row, ranks)

    def clear(self, row: int) -> None:
        """Rank 0 everywhere: nothing else of the row is read then."""
        self._ranks.write(row, np.zeros_like(self._ranks.host[row]))

    def _weights(self, module: Adapted, columns: slice) -> LoRAWeights:
        in_features, slices = _widths(module)
        return LoRAWeights(
            arena=self._arena,
            places=self._places.device[:, columns],
            ranks=self._ranks.device[:, columns],
            scales=self._scales.device[:, columns],
            host_places=self._places.host[:, columns],
            host_ranks=self._ranks.host[:, columns],
            host_scales=self._scales.host[:, columns],
            in_features=in_features,
            slices=slices,
            num_experts=module.num_experts if isinstance(module, Experts) else 1,
        )


def _widths(module: Adapted) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Input and output width of each part on this rank."""
    if isinstance(module, Experts):
        hidden, local = module.hidden, module.local
        return (hidden, hidden, local), (local, local, hidden)
    if isinstance(module, Embedding):
        return (module.num_rows,), (module.hidden,)
    width = module.in_range.stop - module.in_range.start
    return (width,) * len(module.slices), module.slices
