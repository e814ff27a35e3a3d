"""Device-side adapter weights of one layer, indexed by resident-adapter table row."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class LowRank:
    """One adapter's delta at one dense site: y += scale · B (A x). Folding scale into B would lose bits in bf16."""

    a_RD: torch.Tensor
    """[r, in]."""
    b_NR: torch.Tensor
    """[out, r]."""
    scale: float


@dataclass(frozen=True)
class ExpertLowRank:
    """The same for one projection of a layer's routed experts. An expert dimension of 1 is shared by all experts."""

    a_ERD: torch.Tensor
    """[E or 1, r, in]."""
    b_ENR: torch.Tensor
    """[E or 1, out, r]."""
    scale: float


@dataclass
class LoRAWeights:
    """All resident adapters at one `Linear`: `rows[table row][part]`, None where an adapter does not touch it."""

    slices: tuple[int, ...]
    """Output width of each part on this rank, in order (q, k, v / gate, up / one)."""
    rows: list[tuple[LowRank | None, ...] | None] = field(default_factory=list)


@dataclass(frozen=True)
class ExpertDeltas:
    """One adapter at one `Experts` layer. Gate and up have their own A."""

    gate: ExpertLowRank | None
    up: ExpertLowRank | None
    down: ExpertLowRank | None


@dataclass
class ExpertLoRAWeights:
    """All resident adapters at one `Experts` layer."""

    rows: list[ExpertDeltas | None] = field(default_factory=list)
