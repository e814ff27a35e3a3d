"""Whether a launcher runs its Triton kernel or its torch reference."""

import os

import torch


def use_triton(tensor: torch.Tensor) -> bool:
    """True on CUDA, and on CPU where TRITON_INTERPRET=1 asks for the interpreter."""
    return tensor.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
