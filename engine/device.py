"""Host arrays to the device: one packed int32 copy instead of one copy each."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on `device`, without waiting for it: from pinned memory, on CUDA."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def to_device(arrays: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
    """int32 tensors on `device` for one-dimensional int arrays or lists: views of a single (pinned, on CUDA) copy."""
    parts = [np.asarray(a, dtype=np.int32) for a in arrays]
    packed = torch.from_numpy(np.concatenate(parts))
    if device.type == "cuda":
        packed = packed.pin_memory()
    on_device = packed.to(device, non_blocking=True)
    return list(torch.split(on_device, [len(p) for p in parts]))


def resolve_device(name: str, rank: int) -> torch.device:
    """--device on this rank: auto is CUDA when there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and rank >= torch.cuda.device_count():
        raise ValueError(f"--device cuda: rank {rank} needs GPU {rank}, this machine has {torch.cuda.device_count()}")
    return torch.device("cuda", rank) if name == "cuda" else torch.device("cpu")
