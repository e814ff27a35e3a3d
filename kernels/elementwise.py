"""Row-wise functions between the GEMMs. Each computes in fp32 and rounds once, to the input's dtype, where not said
otherwise; each is one launch."""

import torch
import torch.nn.functional as F

from loraplex.kernels.devices import dependent_launch, use_triton
from loraplex.kernels.tuning import power_of_two

COLUMNS = 1024
"""Columns of a program of `silu_mul`."""


def rms_norm_reference(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    x32 = x_TD.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return weight_D * normed.to(x_TD.dtype)


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """weight · x / sqrt(mean(x²) + eps) over the last dimension; x is rounded before the weight, as transformers do."""
    if not use_triton(x_TD):
        return rms_norm_reference(x_TD, weight_D, eps)
    return _rms_norm(x_TD.contiguous(), None, None, weight_D, eps)


def add_rms_norm_reference(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    summed_TD = x_TD + residual_TD
    return rms_norm_reference(summed_TD, weight_D, eps), summed_TD


def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual). The sum is rounded to the dtype before it is normed."""
    assert x_TD.shape == residual_TD.shape, (x_TD.shape, residual_TD.shape)
    if not use_triton(x_TD):
        return add_rms_norm_reference(x_TD, residual_TD, weight_D, eps)
    summed_TD = torch.empty_like(residual_TD, memory_format=torch.contiguous_format)
    return _rms_norm(x_TD.contiguous(), residual_TD.contiguous(), summed_TD, weight_D, eps), summed_TD


def silu_mul_reference(g_MF: torch.Tensor) -> torch.Tensor:
    gate, up = g_MF.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(g_MF.dtype)


def silu_mul(g_MF: torch.Tensor) -> torch.Tensor:
    """[M, 2I] with the gate first → silu(gate) · up, [M, I]."""
    if not use_triton(g_MF):
        return silu_mul_reference(g_MF)
    from loraplex.kernels import _triton_elementwise as kernels

    assert g_MF.dim() == 2, g_MF.shape
    assert g_MF.stride(1) == 1, "rows must be contiguous"
    rows, width = g_MF.shape[0], g_MF.shape[1] // 2
    out_MI = g_MF.new_empty(rows, width)
    if rows == 0:
        return out_MI
    pdl = dependent_launch(g_MF.device)
    grid = (rows, -(-width // COLUMNS))
    kernels.silu_mul[grid](g_MF, out_MI, ROW=g_MF.stride(0), WIDTH=width, BLOCK=COLUMNS, num_warps=4, **pdl)
    return out_MI


def _rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, summed: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """All contiguous; the sum goes to `summed` when there is a residual."""
    from loraplex.kernels import _triton_elementwise as kernels

    out, width = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // width
    if rows == 0:
        return out
    block = power_of_two(width)
    kernels.rms_norm[(rows,)](
        x,
        residual,
        weight,
        out,
        summed,
        EPS=eps,
        WIDTH=width,
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
        **dependent_launch(x.device),
    )
    return out
