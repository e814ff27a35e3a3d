"""Which experts a token goes to, the order the GEMMs take the pairs in, and the way back.

T tokens, K experts per token, E experts, M = T · K (token, choice) pairs.
"""

from dataclasses import dataclass

import torch

from loraplex.kernels.devices import dependent_launch, use_triton
from loraplex.kernels.tuning import power_of_two


def route_reference(
    logits_TE: torch.Tensor, top_k: int, *, norm: bool, kv_slots_T: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_TE = logits_TE.float()
    ids_TK = torch.sort(logits_TE, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights_TK = torch.softmax(logits_TE, dim=-1).gather(-1, ids_TK)
    if norm:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    if kv_slots_T is not None:
        padding_T1 = kv_slots_T[:, None] < 0
        weights_TK, ids_TK = weights_TK.masked_fill(padding_T1, 0), ids_TK.masked_fill(padding_T1, -1)
    return weights_TK, ids_TK


def route(
    logits_TE: torch.Tensor, top_k: int, *, norm: bool, kv_slots_T: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts in fp32, then the K largest, in descending order; `norm` rescales those to sum 1.

    Equal logits: the lower expert first. Returns weights fp32 [T, K] and expert ids int64 [T, K], which are K different
    experts whatever the logits hold; a NaN makes its token's weights NaN.

    kv_slots: int64 [T], where each token's keys go; negative: the token is padding of a graph's bucket. It gets ids −1
    and weights 0, so that no expert is read for it.
    """
    tokens, num_experts = logits_TE.shape
    assert top_k <= num_experts, (top_k, num_experts)
    if not use_triton(logits_TE) or tokens == 0:
        return route_reference(logits_TE, top_k, norm=norm, kv_slots_T=kv_slots_T)
    from loraplex.kernels.moe import _triton_routing as kernels

    assert logits_TE.stride(1) == 1, "rows must be contiguous"
    assert kv_slots_T is None or kv_slots_T.is_contiguous(), kv_slots_T.stride()
    weights_TK = torch.empty(tokens, top_k, dtype=torch.float32, device=logits_TE.device)
    ids_TK = torch.empty(tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    kernels.route[(tokens,)](
        logits_TE,
        kv_slots_T,
        weights_TK,
        ids_TK,
        ROW=logits_TE.stride(0),
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        NORM=norm,
        BLOCK_E=power_of_two(num_experts),
        BLOCK_K=power_of_two(top_k),
        num_warps=1,
        **dependent_launch(logits_TE.device),
    )
    return weights_TK, ids_TK


@dataclass(frozen=True)
class ExpertOrder:
    """The pairs sorted by expert. Example: ids [[1, 0], [1, 2]] → token [0, 0, 1, 1], ends [1, 3, 4],
    position [[1, 0], [2, 3]]."""

    token_M: torch.Tensor
    """int64 [M]: token of each sorted pair."""
    position_TK: torch.Tensor
    """int64 [T, K]: place of each pair in the sorted order."""
    ends_E: torch.Tensor
    """int32 [E]: end of each expert's rows, cumulative; pairs from the last on have no expert here."""


def sort_by_expert(ids_TK: torch.Tensor, num_experts: int) -> ExpertOrder:
    """Stable, and without reading the device back. Pairs of foreign experts (id −1) come last."""
    flat_M = torch.where(ids_TK < 0, num_experts, ids_TK).flatten()
    sorted_M, order_M = torch.sort(flat_M, stable=True)
    experts_E = torch.arange(num_experts, device=flat_M.device, dtype=flat_M.dtype)
    ends_E = torch.searchsorted(sorted_M, experts_E, right=True, out_int32=True)
    position_M = torch.empty_like(order_M)
    position_M[order_M] = torch.arange(order_M.shape[0], device=flat_M.device)
    return ExpertOrder(order_M // ids_TK.shape[1], position_M.view_as(ids_TK), ends_E)


def combine(
    y_MD: torch.Tensor, position_TK: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """out[t] = Σ_k weights[t, k] · y[position[t, k]] over the k with an expert here (id ≥ 0), summed in fp32 in the
    order of k. Returns [T, D] in y's dtype."""
    y_TKD = torch.where(ids_TK[..., None] < 0, 0, y_MD[position_TK].float() * weights_TK[..., None])
    return y_TKD.sum(dim=1).to(y_MD.dtype)
