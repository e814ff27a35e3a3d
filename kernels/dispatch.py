"""Whether a launcher runs its Triton kernel or its torch reference, and how it launches it."""

import os
from functools import cache

import torch


def use_triton(tensor: torch.Tensor) -> bool:
    """True on CUDA, and on CPU where TRITON_INTERPRET=1 asks for the interpreter."""
    return tensor.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


@cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that may start before its predecessor ends (Hopper and later), see `PDL` there."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"PDL": able, "launch_pdl": True} if able else {"PDL": False}
