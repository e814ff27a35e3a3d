"""One GEMM per expert over rows sorted by expert: chooses the implementation."""

from typing import Any

import torch

from loraplex.kernels.moe.reference import grouped_gemm_reference

# Public under one name or the other, depending on the torch version.
_torch_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
_ALIGNMENT = 16
"""Bytes; torch's grouped GEMM wants every row to start on a multiple."""


def grouped_gemm(x_MD: torch.Tensor, w_END: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """y[m] = w[e] x[m] for the rows m of expert e: ends[e − 1] ≤ m < ends[e]. Returns [M, N].

    ends: int32 [E], cumulative, the last is M. bf16 on CUDA runs without reading it back.
    """
    assert x_MD.shape[1] == w_END.shape[2], (x_MD.shape, w_END.shape)
    aligned = all(n * x_MD.element_size() % _ALIGNMENT == 0 for n in w_END.shape[1:])
    if x_MD.is_cuda and x_MD.dtype == torch.bfloat16 and aligned:
        return _torch_grouped_mm(x_MD, w_END.transpose(1, 2), offs=ends_E)
    return grouped_gemm_reference(x_MD, w_END, ends_E)
