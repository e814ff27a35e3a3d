"""A Triton driver for an H200 that is not there: enough to key and to compile kernels, not to run them."""

import torch
from triton.backends.compiler import GPUTarget


class Hopper:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def is_active(self) -> bool:
        return True
