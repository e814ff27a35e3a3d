"""The routed experts of one layer with all adapters of the step: the one call of the model.

T tokens, K experts per token, P = T · K pairs, E experts here, D hidden, I expert width. Three paths by the number of
pairs, each a chain of launches on one stream whose next kernel starts while the one before it ends:

- up to `ROW_FORM_PAIRS`: order, shrink, GEMM, expand + activation, shrink, expand, GEMM, combine; one program per pair
- up to `SEPARATE_PAIRS`: the same over chunks of 16 pairs with the same expert and adapter
- beyond: order, shrink, GEMM with expand and activation, shrink, GEMM with expand, combine

Base rows are computed by the same products with the same tiles whether or not adapters are in the batch, gate and up
stay in fp32 until the activation, and nothing of an adapter is read for them: bit for bit what a server without
adapters answers.
"""

import torch

from loraplex.kernels.devices import runs_triton
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.experts import ExpertLoRAOp, virtual_experts_add_
from loraplex.kernels.lora.experts_ops import (
    AdapterStep,
    expand_activate,
    expand_down,
    shrink_down,
    shrink_gate_up,
)
from loraplex.kernels.lora.weights import LoRAWeights
from loraplex.kernels.moe import tiles
from loraplex.kernels.moe.expert_gemm import FusedDelta, combine_pairs, down, gate_up
from loraplex.kernels.moe.pairs import order_pairs
from loraplex.kernels.moe.reference import moe_lora_reference
from loraplex.kernels.tuning import TileConfig


def moe_lora_forward(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    w13_EFD: torch.Tensor,
    w2_EDI: torch.Tensor,
    lora: LoRAWeights | None = None,
    batch: LoRABatchInfo | None = None,
    *,
    lora_op: ExpertLoRAOp = virtual_experts_add_,
    rank_capacity: int | None = None,
) -> torch.Tensor:
    """out[t] = Σ_k weights[t, k] · down[e] h, h = silu(gate[e] x) · up[e] x, e = ids[t, k].

    gate, up and down each with the delta of the token's adapter.

    x: [T, D]. ids: int [T, K], −1 = an expert that is not here. weights: fp32 [T, K]. w13: [E, 2I, D], gate rows first.
    w2: [E, D, I]. lora and batch: both or neither; tokens with slot −1 are base or padding. Returns [T, D].

    lora_op: `--no-lora-use-virtual-experts` names another than the default, which is then run as it is.
    rank_capacity: the largest rank that a token of this call may have, for scratch; a CUDA graph whose replays see
    other adapters must be given its bound. Default: the largest resident one.
    """
    assert (lora is None) == (batch is None), "adapters and their batch description go together"
    assert w13_EFD.shape[1] == 2 * w2_EDI.shape[2], (w13_EFD.shape, w2_EDI.shape)
    if not runs_triton(x_TD) or (lora is not None and lora_op is not virtual_experts_add_):
        return moe_lora_reference(x_TD, ids_TK, weights_TK, w13_EFD, w2_EDI, lora, batch, lora_op=lora_op)
    if ids_TK.numel() == 0:
        return torch.empty_like(x_TD)
    x_TD, ids_TK, weights_TK = x_TD.contiguous(), ids_TK.contiguous(), weights_TK.contiguous()
    if lora is None or batch is None:
        return _base(x_TD, ids_TK, weights_TK, w13_EFD, w2_EDI)
    capacity = _capacity(lora, rank_capacity)
    if ids_TK.numel() <= tiles.SEPARATE_PAIRS:
        return _separate(x_TD, ids_TK, weights_TK, w13_EFD, w2_EDI, lora, batch, capacity)
    return _fused(x_TD, ids_TK, weights_TK, w13_EFD, w2_EDI, lora, batch, capacity)


def _base(
    x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, w13_EFD: torch.Tensor, w2_EDI: torch.Tensor
) -> torch.Tensor:
    top_k, (first, second) = ids_TK.shape[1], _tiles(ids_TK, w13_EFD)
    order = order_pairs(ids_TK, None, num_experts=w13_EFD.shape[0])
    h_PI = gate_up(x_TD, w13_EFD, order, first, top_k=top_k)
    y_PD = down(h_PI, w2_EDI, order, second, top_k=top_k)
    return combine_pairs(y_PD, None, ids_TK, weights_TK, None, None)


def _separate(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    w13_EFD: torch.Tensor,
    w2_EDI: torch.Tensor,
    lora: LoRAWeights,
    batch: LoRABatchInfo,
    capacity: int,
) -> torch.Tensor:
    """Shrink and expand read memory while the GEMM beside them does: `overlaps`."""
    top_k, (first, second) = ids_TK.shape[1], _tiles(ids_TK, w13_EFD)
    rows = None if ids_TK.numel() <= tiles.ROW_FORM_PAIRS else tiles.DECODE_CHUNK_ROWS
    step = _step(ids_TK, w13_EFD.shape[0], lora, batch, capacity, rows)
    t = shrink_gate_up(x_TD, step)
    g_PF = gate_up(x_TD, w13_EFD, step.order, first, top_k=top_k, activate=False, overlaps=True)
    h_PI = expand_activate(g_PF, t, step, x_TD.dtype)
    delta_PD = expand_down(shrink_down(h_PI, step), x_TD.shape[1], step)
    y_PD = down(h_PI, w2_EDI, step.order, second, top_k=top_k, overlaps=True)
    return combine_pairs(y_PD, delta_PD, ids_TK, weights_TK, lora, batch)


def _fused(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    w13_EFD: torch.Tensor,
    w2_EDI: torch.Tensor,
    lora: LoRAWeights,
    batch: LoRABatchInfo,
    capacity: int,
) -> torch.Tensor:
    top_k, (first, second) = ids_TK.shape[1], _tiles(ids_TK, w13_EFD)
    step = _step(ids_TK, w13_EFD.shape[0], lora, batch, capacity, tiles.PREFILL_CHUNK_ROWS)
    delta = FusedDelta(shrink_gate_up(x_TD, step), capacity, lora, batch)
    h_PI = gate_up(x_TD, w13_EFD, step.order, first, top_k=top_k, fused=delta, overlaps=True)
    delta = FusedDelta(shrink_down(h_PI, step), capacity, lora, batch)
    y_PD = down(h_PI, w2_EDI, step.order, second, top_k=top_k, fused=delta, overlaps=True)
    return combine_pairs(y_PD, None, ids_TK, weights_TK, None, None)


def _step(
    ids_TK: torch.Tensor, num_experts: int, lora: LoRAWeights, batch: LoRABatchInfo, capacity: int, rows: int | None
) -> AdapterStep:
    slots = batch.slot_row.shape[0]
    order = order_pairs(ids_TK, batch.token_slot, num_experts=num_experts, num_slots=slots, chunk_rows=rows)
    return AdapterStep(lora, batch, ids_TK, order, capacity)


def _tiles(ids_TK: torch.Tensor, w13_EFD: torch.Tensor) -> tuple[TileConfig, TileConfig]:
    pairs, (experts, twice_inner, hidden) = ids_TK.numel(), w13_EFD.shape
    shape = (w13_EFD.device, pairs, experts, twice_inner // 2, hidden)
    return tiles.gate_up_tile(*shape), tiles.down_tile(*shape)


def _capacity(lora: LoRAWeights, asked: int | None) -> int:
    rank = int(lora.host_ranks.max(initial=1)) if asked is None else asked
    return tiles.rank_capacity(rank)
