"""One GEMM per expert over rows sorted by expert: chooses the implementation."""

from typing import Any

import torch

# Public under one name or the other, depending on the torch version.
_torch_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
_ALIGNMENT = 16
"""Bytes; torch's grouped GEMM wants every row to start on a multiple."""


def grouped_gemm(x_MD: torch.Tensor, w_END: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """y[m] = w[e] x[m] for the rows m of expert e: ends[e − 1] ≤ m < ends[e]. Returns [M, N].

    ends: int32 [E], cumulative; rows from the last on are undefined. bf16 on CUDA runs without reading it back.
    """
    assert x_MD.shape[1] == w_END.shape[2], (x_MD.shape, w_END.shape)
    aligned = all(n * x_MD.element_size() % _ALIGNMENT == 0 for n in w_END.shape[1:])
    if x_MD.is_cuda and x_MD.dtype == torch.bfloat16 and aligned:
        return _torch_grouped_mm(x_MD, w_END.transpose(1, 2), offs=ends_E)
    return grouped_gemm_reference(x_MD, w_END, ends_E)


def grouped_gemm_reference(x_MD: torch.Tensor, w_END: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """The same by a loop over the experts; reads `ends` back. Rows from the last end on are not written."""
    y_MN = x_MD.new_empty(x_MD.shape[0], w_END.shape[1])
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            torch.mm(x_MD[start:end], w_END[expert].T, out=y_MN[start:end])
        start = end
    return y_MN
