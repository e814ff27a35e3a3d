"""Which tensors the Triton kernels take, and what their device can do."""

import os
from functools import lru_cache

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run on the CPU through Triton's interpreter: fp32 and fp16 only, its bf16 products are wrong."""


def use_triton(tensor: torch.Tensor) -> bool:
    """For kernels of every float type: True on CUDA, and on CPU where TRITON_INTERPRET=1 asks for the interpreter."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def runs_triton(x: torch.Tensor) -> bool:
    """For kernels of 16-bit types on CUDA: whether a launcher given x uses its kernel and not its reference."""
    return INTERPRETED or (x.is_cuda and x.dtype in (torch.bfloat16, torch.float16))


def has_dependent_launch(x: torch.Tensor) -> bool:
    """Programmatic dependent launch: a kernel may start while its predecessor still runs, and waits where it must."""
    return not INTERPRETED and x.is_cuda and _capability(x.device) >= (9, 0)


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel with a `PDL` parameter that may start before its predecessor ends."""
    able = device.type == "cuda" and _capability(device) >= (9, 0)
    return {"PDL": able, "launch_pdl": True} if able else {"PDL": False}


def has_tensor_descriptors(x: torch.Tensor) -> bool:
    """TMA loads."""
    return not INTERPRETED and x.is_cuda and _capability(x.device) >= (9, 0)


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
