"""Exactly sized host memory that copies to the device without staging.

torch's pinned allocator rounds a block up to a power of two and keeps it when it is freed. Adapters are large and come
and go, so each gets pages of its own, registered with CUDA, that go back to the system.
"""

import mmap
from contextlib import suppress

import torch

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device."""


class HostBuffer:
    """A flat host tensor. Raises MemoryError when there is no room, or none that can be pinned."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        try:
            memory = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{numel * dtype.itemsize} bytes of host memory: {error.strerror}") from error
        self.tensor = torch.frombuffer(memory, dtype=dtype)
        self._device = device if device.type == "cuda" else None
        if self._device is not None:
            with torch.cuda.device(self._device):
                code = torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self.tensor.nbytes, _PORTABLE)
            if int(code) != 0:
                _forget_error(self._device)
                self._device = None
                raise MemoryError(f"{self.tensor.nbytes} bytes cannot be pinned: CUDA error {int(code)}")

    def close(self) -> None:
        """Gives the memory back. Waits for copies from it that are still on their way. Harmless twice."""
        device, self._device = self._device, None
        if device is not None:
            torch.cuda.synchronize(device)
            with torch.cuda.device(device):
                torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
        self.tensor = torch.empty(0, dtype=self.tensor.dtype)

    def __del__(self) -> None:
        # Pages that go while CUDA holds them registered make a later registration at their address fail (error 712).
        if getattr(self, "_device", None) is not None:
            self.close()


def _forget_error(device: torch.device) -> None:
    """CUDA keeps a failed call's code until the next kernel launch is checked, which raises it: let it raise here."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)
