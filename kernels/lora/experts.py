"""LoRA of the routed experts in torch: two implementations that share no code, each a check of the other.

M (token, choice) pairs sorted by expert, T tokens, K experts per token, E experts, R rank. One call adds one
projection's delta (gate, up or down):

    y[position[t, k]] += (scale · x[position[t, k]] A[e]ᵀ) B[e],   e = ids[t, k], for tokens t with an adapter

y: [M, N], written in place, may be a column slice of a wider tensor. x: [M, D]. Matrices that all experts share have an
expert stride of 0. Products accumulate in fp32; the scaled x Aᵀ is rounded to x's dtype between them.
"""

from collections.abc import Iterator
from typing import Literal, Protocol

import torch

from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.weights import LoRAWeights, LowRank

Projection = Literal["gate", "up", "down"]
PARTS: tuple[Projection, ...] = ("gate", "up", "down")
"""Parts of an experts layer, in the order of its tables."""
GATHER_BYTES = 256 << 20
"""Bound on the copies of A and B that the virtual-expert reference makes at once."""


class ExpertLoRAOp(Protocol):
    def __call__(
        self,
        y_MN: torch.Tensor,
        x_MD: torch.Tensor,
        position_TK: torch.Tensor,
        ids_TK: torch.Tensor,
        w: LoRAWeights,
        projection: Projection,
        batch: LoRABatchInfo,
    ) -> None: ...


def virtual_experts_add_(
    y_MN: torch.Tensor,
    x_MD: torch.Tensor,
    position_TK: torch.Tensor,
    ids_TK: torch.Tensor,
    w: LoRAWeights,
    projection: Projection,
    batch: LoRABatchInfo,
) -> None:
    """Every pair picks its own A and B by expert id: batched matrix-vector products, no reading back."""
    for delta, tokens in _segments(w, projection, batch):
        pairs, experts = position_TK[tokens].flatten(), ids_TK[tokens].flatten()
        rank, width = delta.a_ERD.shape[1], delta.a_ERD.shape[2] + delta.b_ERN.shape[2]
        step = max(1, GATHER_BYTES // (4 * rank * width))
        for start in range(0, pairs.shape[0], step):
            chunk, chosen = pairs[start : start + step], experts[start : start + step]
            z = _per_pair(delta.a_ERD.mT, chosen, x_MD[chunk].float()) * delta.scale
            added = _per_pair(delta.b_ERN, chosen, z.to(x_MD.dtype).float())
            y_MN[chunk] = (y_MN[chunk].float() + added).to(y_MN.dtype)


def per_adapter_add_(
    y_MN: torch.Tensor,
    x_MD: torch.Tensor,
    position_TK: torch.Tensor,
    ids_TK: torch.Tensor,
    w: LoRAWeights,
    projection: Projection,
    batch: LoRABatchInfo,
) -> None:
    """Adapter by adapter, expert by expert. Slow and plain."""
    for row, start, end in batch.segments_host:
        delta = w.part(row, PARTS.index(projection))
        if delta is None:
            continue
        tokens = batch.permutation[start:end]
        for expert in torch.unique(ids_TK[tokens]).tolist():
            a_RD, b_RN = delta.a_ERD[expert].float(), delta.b_ERN[expert].float()
            pairs = position_TK[tokens][ids_TK[tokens] == expert]
            z = (x_MD[pairs].float() @ a_RD.T * delta.scale).to(x_MD.dtype)
            y_MN[pairs] = (y_MN[pairs].float() + z.float() @ b_RN).to(y_MN.dtype)


def expert_lora_op(use_virtual_experts: bool) -> ExpertLoRAOp:
    """The implementation that `--lora-use-virtual-experts` names."""
    return virtual_experts_add_ if use_virtual_experts else per_adapter_add_


def _segments(w: LoRAWeights, projection: Projection, batch: LoRABatchInfo) -> Iterator[tuple[LowRank, torch.Tensor]]:
    for row, start, end in batch.segments_host:
        delta = w.part(row, PARTS.index(projection))
        if delta is not None:
            yield delta, batch.permutation[start:end]


def _per_pair(w_EDO: torch.Tensor, experts_P: torch.Tensor, x_PD: torch.Tensor) -> torch.Tensor:
    """x[p] w[experts[p]] → [P, O] fp32; a w that all experts share needs no gather."""
    if w_EDO.stride(0) == 0:
        return x_PD @ w_EDO[0].float()
    return torch.bmm(x_PD[:, None], w_EDO[experts_P].float())[:, 0]
