"""The MoE block in plain torch: the specification of the faster paths.

T tokens, K experts per token, M = T · K pairs sorted by expert, E experts, D hidden, I expert width.
"""

import torch

from loraplex.kernels.elementwise import silu_mul


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
        y = silu_mul(x_TD[tokens] @ w13_EFD[expert].T) @ w2_EDI[expert].T
        out_TD.index_add_(0, tokens, y.float() * weights_TK[tokens, choices, None])
    return out_TD.to(x_TD.dtype)


def grouped_gemm_reference(x_MD: torch.Tensor, w_END: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """y[m] = w[e] x[m] for the rows m of expert e: ends[e − 1] ≤ m < ends[e]. Returns [M, N]."""
    y_MN = x_MD.new_empty(x_MD.shape[0], w_END.shape[1])
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            torch.mm(x_MD[start:end], w_END[expert].T, out=y_MN[start:end])
        start = end
    return y_MN
