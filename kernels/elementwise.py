"""Row-wise functions between the GEMMs. Each computes in fp32 and rounds once, to the input's dtype."""

import torch
import torch.nn.functional as F


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """weight · x / sqrt(mean(x²) + eps) over the last dimension; x is rounded before the weight, as transformers do."""
    x32 = x_TD.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return weight_D * normed.to(x_TD.dtype)


def rotary(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Rotates the pair (x[i], x[i + D/2]) of each head by its angle. cos and sin: [T, D] fp32, both halves equal."""
    x32 = x_THD.float()
    low, high = x32.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return (x32 * cos_TD[:, None] + turned * sin_TD[:, None]).to(x_THD.dtype)


def silu_mul(g_MF: torch.Tensor) -> torch.Tensor:
    """[M, 2I] with the gate first → silu(gate) · up, [M, I]."""
    gate, up = g_MF.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(g_MF.dtype)
