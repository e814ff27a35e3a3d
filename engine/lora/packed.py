"""An adapter in host memory as it will lie in the arena: one rank's slices, model dtype, packed to its own ranks.

A load into the arena is then one plain copy per chunk, and an eviction loses nothing. A chunk holds all of one decoder
layer (or one site outside the layers): small enough to find a place between others, large enough to copy at full speed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from loraplex.engine.lora.adapter import HostAdapter
from loraplex.engine.lora.arena import align
from loraplex.engine.lora.host_memory import HostBuffer
from loraplex.engine.models.sites import Site, shard_delta
from loraplex.kernels.lora.weights import A_OFFSET, A_STRIDE, B_OFFSET, B_STRIDE

MatrixKey = tuple[int, bool, int, tuple[int, ...], tuple[int, ...]]
"""Chunk; is it A; address, shape and strides of a host tensor: parts of a fused layer that share an A share its key."""


@dataclass(frozen=True)
class Layout:
    """Where an adapter's matrices lie: C chunks, S sites of the model in the order of the tables."""

    sizes: list[int]
    """[C] elements."""
    chunk_of: np.ndarray
    """int64 [S]: chunk that holds the site's matrices; 0 where the adapter does not touch it."""
    places: np.ndarray
    """int64 [S, 4]: a row of the tables, offsets counted from the start of the site's chunk."""
    ranks: np.ndarray
    """int32 [S]; 0 where the adapter does not touch the site."""
    scales: np.ndarray
    """fp32 [S]."""

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    @property
    def rank_max(self) -> int:
        return int(self.ranks.max())

    def places_at(self, offsets: Sequence[int]) -> np.ndarray:
        """The table row when chunk i lies at offsets[i] of the arena."""
        places = self.places.copy()
        start = np.asarray(offsets, dtype=np.int64)[self.chunk_of]
        places[:, A_OFFSET] += start
        places[:, B_OFFSET] += start
        return places


@dataclass(frozen=True)
class PackedAdapter:
    layout: Layout
    buffer: HostBuffer
    """The chunks one after the other."""

    @property
    def nbytes(self) -> int:
        """In the arena and on the host."""
        return self.buffer.tensor.nbytes

    @property
    def chunks(self) -> Sequence[torch.Tensor]:
        return torch.split(self.buffer.tensor, self.layout.sizes)


@dataclass(frozen=True)
class Matrix:
    """A or B of one site, all experts, and where it goes."""

    chunk: int
    offset: int
    stride: int
    """Between experts; 0 when there is one matrix."""
    values_ERX: torch.Tensor
    """A [E, r, in] or B transposed [E, r, out]; E = 1 when dense or shared."""

    def write(self, chunk: torch.Tensor) -> None:
        shape = self.values_ERX.shape
        strides = (self.stride, shape[2], 1)
        chunk.as_strided(shape, strides, chunk.storage_offset() + self.offset).copy_(self.values_ERX)


def lay_out(adapter: HostAdapter, sites: Mapping[str, Site]) -> tuple[Layout, list[Matrix]]:
    """Plans this rank's part of `adapter`. `sites`: all of the model, in the order of the tables."""
    sizes: list[int] = []
    layout = Layout(
        sizes=sizes,
        chunk_of=np.zeros(len(sites), dtype=np.int64),
        places=np.zeros((len(sites), 4), dtype=np.int64),
        ranks=np.zeros(len(sites), dtype=np.int32),
        scales=np.zeros(len(sites), dtype=np.float32),
    )
    chunks: dict[str, int] = {}
    matrices: dict[MatrixKey, Matrix] = {}

    def place(chunk: int, values: torch.Tensor, *, is_a: bool) -> tuple[int, int]:
        key = (chunk, is_a, values.data_ptr(), tuple(values.shape), values.stride())
        if key not in matrices:
            m = values if is_a else values.mT
            m_ERX = m if m.dim() == 3 else m[None]
            num, rank, width = m_ERX.shape
            step = align(rank * width)
            matrices[key] = Matrix(chunk, sizes[chunk], step if num > 1 else 0, m_ERX)
            sizes[chunk] += num * step
        return matrices[key].offset, matrices[key].stride

    for i, (path, site) in enumerate(sites.items()):
        delta = adapter.sites.get(path)
        if delta is None:
            continue
        chunk = chunks.setdefault(_layer_of(path), len(chunks))
        sizes.extend([0] * (len(chunks) - len(sizes)))
        a, b = shard_delta(site, delta.a, delta.b)
        layout.chunk_of[i], layout.ranks[i], layout.scales[i] = chunk, delta.rank, delta.scale
        layout.places[i, [A_OFFSET, A_STRIDE]] = place(chunk, a, is_a=True)
        layout.places[i, [B_OFFSET, B_STRIDE]] = place(chunk, b, is_a=False)
    return layout, list(matrices.values())


def pack(layout: Layout, matrices: Sequence[Matrix], dtype: torch.dtype, device: torch.device) -> PackedAdapter:
    """Copies what `lay_out` planned into host memory that is ready for `device`; may run beside the step loop.

    Raises MemoryError when the host has no room.
    """
    packed = PackedAdapter(layout, HostBuffer(layout.numel, dtype, device))
    chunks = packed.chunks
    for matrix in matrices:
        matrix.write(chunks[matrix.chunk])
    return packed


def _layer_of(path: str) -> str:
    """`model.layers.3.mlp.gate` → `model.layers.3`; a path without a number stays."""
    parts = path.split(".")
    layer = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return path if layer is None else ".".join(parts[: layer + 1])
