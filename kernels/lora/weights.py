"""Device-side adapter weights of one layer: where each resident adapter's A and B lie in the arena.

All adapters of a rank live in one flat tensor, the arena, each in exactly its own bytes. A layer sees them through
tables that are indexed by table row (one resident adapter) and part (q, k, v; gate, up; gate, up, down of experts). The
tables are views of static buffers: a CUDA graph reads them through stable pointers, and a load or an eviction rewrites
one row. C parts, R rank, E experts.
"""

from dataclasses import dataclass

import numpy as np
import torch

A_OFFSET, B_OFFSET, A_STRIDE, B_STRIDE = range(4)
"""Columns of `LoRAWeights.places`."""


@dataclass(frozen=True)
class LowRank:
    """One adapter's delta at one part, as views of the arena: y += scale · (x Aᵀ) B. Folding scale into B would lose
    bits in bf16."""

    a_ERD: torch.Tensor
    """[E, r, in]; a dense part has E = 1. Experts that share one matrix see it through a stride of 0."""
    b_ERN: torch.Tensor
    """[E, r, out]: B transposed, so that a row is contiguous along the output whatever the rank."""
    scale: float


@dataclass(frozen=True)
class LoRAWeights:
    """All resident adapters at one `Linear`, `LMHead`, `Embedding` or `Experts`."""

    arena: torch.Tensor
    """[capacity], the model's dtype."""
    places: torch.Tensor
    """int64 [rows, C, 4]: a_offset, b_offset, a_expert_stride, b_expert_stride, in elements of the arena. A lies at
    a_offset + e · a_expert_stride as [r, in], B at b_offset + e · b_expert_stride as [r, out], both row-major. A stride
    of 0 means shared by all experts; dense parts have both 0. All are multiples of 16, for 16-byte reads."""
    ranks: torch.Tensor
    """int32 [rows, C]; 0: the adapter does not touch this part, nothing else of its row may be read."""
    scales: torch.Tensor
    """fp32 [rows, C]."""
    host_places: np.ndarray
    """The three tables once more on the host, kept equal by whoever rewrites a row: for the torch reference, which
    needs shapes without reading the device."""
    host_ranks: np.ndarray
    host_scales: np.ndarray
    in_features: tuple[int, ...]
    """[C] on this rank; the part of the vocabulary, padded, for an `Embedding`."""
    slices: tuple[int, ...]
    """[C] output widths on this rank."""
    num_experts: int = 1
    """1 for dense layers."""

    def part(self, row: int, part: int) -> LowRank | None:
        """Views of one adapter's A and B at one part; None where it does not touch it."""
        rank = int(self.host_ranks[row, part])
        if rank == 0:
            return None
        a, b, a_stride, b_stride = (int(v) for v in self.host_places[row, part])
        d_in, d_out, num = self.in_features[part], self.slices[part], self.num_experts
        return LowRank(
            a_ERD=self.arena.as_strided((num, rank, d_in), (a_stride, d_in, 1), a),
            b_ERN=self.arena.as_strided((num, rank, d_out), (b_stride, d_out, 1), b),
            scale=float(self.host_scales[row, part]),
        )

    def touches(self, row: int) -> bool:
        """Whether the adapter of this row touches any part."""
        return bool(self.host_ranks[row].any())
