"""Between host and device, without one waiting for the other."""

import numpy as np
import torch

WORDS_ALIGNED = 4


def aligned(words: int) -> int:
    """Where the next tensor may begin in a buffer of 32-bit words of which so many are taken: on 16 bytes. Triton
    compiles a kernel anew for pointers that are not, so that offsets must not depend on a step's size."""
    return -(-words // WORDS_ALIGNED) * WORDS_ALIGNED


def fetch(tensor: torch.Tensor) -> torch.Tensor:
    """A host tensor whose values are there once an event recorded after this call has passed (at once on CPU)."""
    return tensor.to("cpu", non_blocking=True)


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on `device`, without waiting for it: from pinned memory, on CUDA."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def resolve_device(name: str, rank: int) -> torch.device:
    """--device on this rank: auto is CUDA when there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and rank >= torch.cuda.device_count():
        raise ValueError(f"--device cuda: rank {rank} needs GPU {rank}, this machine has {torch.cuda.device_count()}")
    return torch.device("cuda", rank) if name == "cuda" else torch.device("cpu")
