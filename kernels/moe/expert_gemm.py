"""The experts' GEMMs over a `PairOrder`, and the weighted sum over a token's choices.

T tokens, K experts per token, P = T · K pairs, E experts here, D hidden, I expert width.
"""

from dataclasses import dataclass

import torch

from loraplex.kernels.devices import has_dependent_launch, has_tensor_descriptors
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.weights import LoRAWeights
from loraplex.kernels.moe.pairs import PairOrder
from loraplex.kernels.moe.tiles import has_tail, rank_window
from loraplex.kernels.tuning import TileConfig, power_of_two


@dataclass(frozen=True)
class FusedDelta:
    """Adapters for the GEMM to add in its epilogue: out += t B before the activation."""

    t: torch.Tensor
    """[P, parts · capacity] in the sorted order: the scaled x Aᵀ, model dtype."""
    capacity: int
    weights: LoRAWeights
    batch: LoRABatchInfo


def gate_up(
    x_TD: torch.Tensor,
    w13_EFD: torch.Tensor,
    order: PairOrder,
    tile: TileConfig,
    *,
    top_k: int,
    activate: bool = True,
    fused: FusedDelta | None = None,
    overlaps: bool = False,
) -> torch.Tensor:
    """silu(gate) · up of the sorted pairs, [P, I], or with activate=False gate and up in fp32, [P, 2I]: rounding them
    before the activation would make a base row depend on whether an adapter is in the batch.

    overlaps: the kernel before makes nothing that the products read, and has itself waited for what does; with
    dependent launch the products run beside it.
    """
    num_pairs, inner = order.order_P.shape[0], w13_EFD.shape[1] // 2
    dtype = x_TD.dtype if activate else torch.float32
    out = torch.empty(num_pairs, inner if activate else 2 * inner, dtype=dtype, device=x_TD.device)
    _launch(x_TD, w13_EFD, out, order, tile, inner, top_k, True, activate, fused, overlaps)
    return out


def down(
    h_PI: torch.Tensor,
    w2_EDI: torch.Tensor,
    order: PairOrder,
    tile: TileConfig,
    *,
    top_k: int,
    fused: FusedDelta | None = None,
    overlaps: bool = False,
) -> torch.Tensor:
    """w2[e] h of every pair: [P, D] in the order of the pairs; rows of foreign experts are not written."""
    out = torch.empty(h_PI.shape[0], w2_EDI.shape[1], dtype=h_PI.dtype, device=h_PI.device)
    _launch(h_PI, w2_EDI, out, order, tile, w2_EDI.shape[1], top_k, False, False, fused, overlaps)
    return out


def combine_pairs(
    y_PD: torch.Tensor,
    delta_PD: torch.Tensor | None,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    lora: LoRAWeights | None,
    batch: LoRABatchInfo | None,
) -> torch.Tensor:
    """out[t] = Σ_k weights[t, k] · (y + delta)[t, k], [T, D]; delta counts where the adapter touches down."""
    from loraplex.kernels.moe import _triton_gemm as kernels

    (tokens, top_k), hidden = ids_TK.shape, y_PD.shape[1]
    out = y_PD.new_empty(tokens, hidden)
    dependent = has_dependent_launch(y_PD)
    has_delta = delta_PD is not None and lora is not None and batch is not None
    block = 512
    kernels.combine[(tokens, -(-hidden // block))](
        y_PD,
        delta_PD,
        ids_TK,
        weights_TK,
        out,
        batch.token_row if has_delta and batch is not None else None,
        lora.ranks if has_delta and lora is not None else None,
        D=hidden,
        TOP_K=top_k,
        RANKS_STRIDE=lora.ranks.stride(0) if has_delta and lora is not None else 0,
        HAS_DELTA=has_delta,
        BLOCK_N=block,
        WAIT=dependent,
        **({"launch_pdl": True} if dependent else {}),
    )
    return out


def _launch(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    order: PairOrder,
    tile: TileConfig,
    width: int,
    top_k: int,
    gated: bool,
    activate: bool,
    fused: FusedDelta | None,
    overlaps: bool,
) -> None:
    from loraplex.kernels.moe import _triton_gemm as kernels

    num_pairs, experts, depth = order.order_P.shape[0], w.shape[0], w.shape[2]
    assert x.shape[1] == depth, (x.shape, w.shape)
    assert x.is_contiguous(), x.stride()
    assert w.is_contiguous(), w.stride()
    # Padded to what each expert may own, or one block per place, whichever is less.
    by_expert = num_pairs // tile.block_m + experts
    blocks = min(num_pairs, by_expert)
    dependent = has_dependent_launch(x)
    lora, batch = (fused.weights, fused.batch) if fused else (None, None)
    kernels.expert_gemm[(blocks * -(-width // tile.block_n),)](
        x,
        w,
        _descriptor(w, tile),
        out,
        order.order_P,
        order.starts,
        blocks,
        batch.token_slot if batch else None,
        fused.t if fused else None,
        lora.arena if lora else None,
        lora.places if lora else None,
        lora.ranks if lora else None,
        batch.slot_row if batch else None,
        N=width,
        K=depth,
        TOP_K=top_k,
        NUM_EXPERTS=experts,
        EXPERTS_POW2=power_of_two(experts),
        GATED=gated,
        ACT=activate,
        rank_cap=fused.capacity if fused else 0,
        PLACES_STRIDE=lora.places.stride(0) if lora else 0,
        RANKS_STRIDE=lora.ranks.stride(0) if lora else 0,
        SLOTS_POW2=power_of_two(batch.slot_row.shape[0]) if batch else 1,
        WINDOW=rank_window(fused.capacity, num_pairs) if fused else 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        STAGES=tile.num_stages,
        GROUP=8,
        BY_PLACE=num_pairs < by_expert,
        TAIL=has_tail(tile),
        TMA=has_tensor_descriptors(w) and depth % 8 == 0,
        WAIT=(2 if overlaps else 1) if dependent else 0,
        num_warps=tile.num_warps,
        **({"launch_pdl": True} if dependent else {}),
    )


def _descriptor(w: torch.Tensor, tile: TileConfig) -> object:
    """TMA wants rows that start on 16 bytes."""
    if not has_tensor_descriptors(w) or w.shape[2] % 8:
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(w.view(-1, w.shape[2]), [tile.block_n, tile.block_k])
