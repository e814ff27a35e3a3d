"""The MoE block in plain torch: the specification of the faster paths.

T tokens, K experts per token, M = T · K pairs sorted by expert, E experts, D hidden, I expert width.
"""

import torch

from loraplex.kernels.elementwise import silu_mul_reference
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.experts import ExpertLoRAOp, virtual_experts_add_
from loraplex.kernels.lora.weights import LoRAWeights
from loraplex.kernels.moe.grouped_gemm import grouped_gemm
from loraplex.kernels.moe.routing import combine, sort_by_expert


def moe_reference(
    x_TD: torch.Tensor,
    w13_EFD: torch.Tensor,
    w2_EDI: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    """out[t] = Σ_k weights[t, k] · w2[e] (silu(gate) · up), (gate, up) = w13[e] x[t], e = ids[t, k]. No LoRA."""
    out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for expert in range(w13_EFD.shape[0]):
        tokens, choices = (ids_TK == expert).nonzero(as_tuple=True)
        y = silu_mul_reference(x_TD[tokens] @ w13_EFD[expert].T) @ w2_EDI[expert].T
        out_TD.index_add_(0, tokens, y.float() * weights_TK[tokens, choices, None])
    return out_TD.to(x_TD.dtype)


def moe_lora_reference(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    w13_EFD: torch.Tensor,
    w2_EDI: torch.Tensor,
    lora: LoRAWeights | None,
    batch: LoRABatchInfo | None,
    *,
    lora_op: ExpertLoRAOp = virtual_experts_add_,
) -> torch.Tensor:
    """The MoE block with the adapters of the step, see `forward.py`: the deltas of gate and up before the activation,
    down's before the router weight, which is applied once. Pairs of foreign experts (id −1) count for nothing."""
    order = sort_by_expert(ids_TK, w13_EFD.shape[0])
    x_MD = x_TD[order.token_M]
    g_MF = grouped_gemm(x_MD, w13_EFD, order.ends_E)
    if lora is not None and batch is not None:
        gate_MI, up_MI = g_MF.chunk(2, dim=1)
        lora_op(gate_MI, x_MD, order.position_TK, ids_TK, lora, "gate", batch)
        lora_op(up_MI, x_MD, order.position_TK, ids_TK, lora, "up", batch)
    h_MI = silu_mul_reference(g_MF)
    y_MD = grouped_gemm(h_MI, w2_EDI, order.ends_E)
    if lora is not None and batch is not None:
        lora_op(y_MD, h_MI, order.position_TK, ids_TK, lora, "down", batch)
    return combine(y_MD, order.position_TK, ids_TK, weights_TK)
