"""Ranks: who owns which slice, and the collectives. Layers ask `Parallel`; nothing else does rank arithmetic."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Parallel:
    """This process' place among the tensor-parallel ranks. Size 1 needs no process group; neither do the slices."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, (self.rank, self.size)

    def local_units(self, units: int) -> int:
        """How many of `units` indivisible things (heads) this rank holds; at least one: few are replicated."""
        return max(1, units // self.size)

    def local_slice(self, total: int, units: int | None = None) -> slice:
        """This rank's part of a dimension of `total` elements made of `units` equal blocks (default: elements).

        Fewer units than ranks: neighbouring ranks hold the same one (key/value heads). Raises ValueError when the
        ranks cannot share evenly.
        """
        units = total if units is None else units
        if units % self.size and self.size % units:
            raise ValueError(f"--tp-size {self.size} cannot split {units} units ({total} elements) evenly")
        width = total // units * self.local_units(units)
        start = total // units * (self.rank * units // self.size)
        return slice(start, start + width)

    def padded(self, total: int) -> int:
        """`total` rounded up to a multiple of the ranks."""
        return -(-total // self.size) * self.size

    def padded_slice(self, total: int) -> slice:
        """This rank's part of `total` when the dimension is padded: may be shorter than the others', even empty."""
        width = self.padded(total) // self.size
        start = min(self.rank * width, total)
        return slice(start, min(start + width, total))

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        """Sums `x` over the ranks in place and returns it."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        """[…, n] on each rank → [..., size · n], in rank order."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def broadcast_(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrites `x` with rank `src`'s and returns it."""
        if self.size > 1:
            dist.broadcast(x, src)
        return x

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def init_parallel(rank: int, size: int, rendezvous: str, device: torch.device) -> Parallel:
    """Joins the ranks: gloo on CPU, NCCL on CUDA. `rendezvous` is a path of a file that does not exist yet, or a URL.

    Size 1 joins nothing and ignores `rendezvous`.
    """
    if size > 1:
        url = rendezvous if "://" in rendezvous else f"file://{rendezvous}"
        cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            init_method=url,
            rank=rank,
            world_size=size,
            device_id=device if cuda else None,
        )
    return Parallel(rank, size)
