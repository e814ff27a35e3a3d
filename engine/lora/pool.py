"""The adapters of one rank: packed host copies, and those that are resident in the arena, each in exactly its own
bytes. Rank 0 decides who is resident; every rank then does the same and, shards being equal, at the same offsets.
"""

from collections.abc import Iterable, Mapping

import torch

from loraplex.engine.layers.embedding import Embedding
from loraplex.engine.layers.experts import Experts
from loraplex.engine.layers.linear import LoRAOp
from loraplex.engine.lora.adapter import HostAdapter
from loraplex.engine.lora.arena import ALIGN, Arena
from loraplex.engine.lora.errors import AdapterError
from loraplex.engine.lora.packed import PackedAdapter, lay_out, pack
from loraplex.engine.lora.tables import AdapterTables
from loraplex.engine.models.sites import Site, lora_sites
from loraplex.kernels.lora.experts import ExpertLoRAOp


class AdapterPool:
    """Adapters are keyed by their version number. Without `allocate` (LoRA disabled) the layers stay plain."""

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        *,
        dense_op: LoRAOp,
        expert_op: ExpertLoRAOp,
    ) -> None:
        self.sites: Mapping[str, Site] = lora_sites(model)
        self.arena = Arena(0)
        self.ranks: dict[int, int] = {}
        """Largest rank of the adapter in each table row in use."""
        self._device = device
        self._dtype = dtype
        self._dense_op = dense_op
        self._expert_op = expert_op
        self._memory: torch.Tensor | None = None
        self._tables: AdapterTables | None = None
        self._stored: dict[int, PackedAdapter] = {}
        self._resident: dict[int, tuple[int, list[int]]] = {}
        """Key → row, offsets of its chunks."""

    def allocate(self, nbytes: int, rows: int) -> None:
        """Takes the arena, at most `nbytes`, and the tables, and hangs them into the layers. Once, at start-up."""
        self.arena = Arena(nbytes // self._dtype.itemsize // ALIGN * ALIGN)
        self._memory = torch.empty(self.arena.capacity, dtype=self._dtype, device=self._device)
        self._tables = AdapterTables(self.sites, rows, self._memory)
        for module, weights in self._tables.layers.items():
            module.lora = weights
            if isinstance(module, Experts):
                module.lora_op = self._expert_op
            elif not isinstance(module, Embedding):
                module.lora_op = self._dense_op

    @property
    def used_bytes(self) -> int:
        """Of the arena."""
        return self.arena.used * self._dtype.itemsize

    @property
    def capacity_bytes(self) -> int:
        return self.arena.capacity * self._dtype.itemsize

    @property
    def host_bytes(self) -> int:
        return sum(packed.nbytes for packed in self._stored.values())

    # ---- host tier

    def pack(self, adapter: HostAdapter) -> PackedAdapter:
        """This rank's part in arena layout; may run beside the step loop. Raises AdapterError when no arena of this
        size can hold it, before it takes memory, and when a value overflows in the model's dtype."""
        layout, matrices = lay_out(adapter, self.sites)
        if self._memory is not None and layout.numel > self.arena.capacity:
            raise AdapterError(
                f"the adapter takes {layout.numel * self._dtype.itemsize} bytes of device memory, more than all of "
                f"--lora-memory ({self.capacity_bytes})",
                status=507,
            )
        packed = pack(layout, matrices, self._dtype, self._device)
        if self._dtype == torch.float16 and not packed.buffer.tensor.isfinite().all():
            packed.buffer.close()
            raise AdapterError("the adapter has values beyond the range of float16; serve it with --dtype bfloat16")
        return packed

    def store(self, key: int, packed: PackedAdapter) -> None:
        self._stored[key] = packed

    def drop(self, key: int) -> None:
        """Frees an adapter's bytes in the arena and on the host. Harmless when there are none."""
        self.evict(key)
        packed = self._stored.pop(key, None)
        if packed is not None:
            packed.buffer.close()

    # ---- arena

    def numel(self, key: int) -> int:
        """Elements of the arena that a stored adapter takes."""
        return self._stored[key].layout.numel

    def fits(self, key: int, victims: Iterable[int] = ()) -> int | None:
        """How many of `victims`, resident ones in this order, must go so that `key` finds room; None: all are not
        enough."""
        sizes = self._stored[key].layout.sizes
        trial = self.arena.copy()
        count = 0
        for victim in (None, *victims):
            if victim is not None:
                trial.release(self._resident[victim][1])
                count += 1
            if trial.free >= sum(sizes) and trial.copy().allocate(sizes) is not None:
                return count
        return None

    def place(self, key: int, row: int) -> None:
        """Copies an adapter into the arena and fills its table row: seen by the next step, not by one under way."""
        assert self._memory is not None
        assert self._tables is not None
        packed = self._stored[key]
        offsets = self.arena.allocate(packed.layout.sizes)
        assert offsets is not None, (key, packed.layout.numel, self.arena.free, self.arena.largest_free)
        for offset, chunk in zip(offsets, packed.chunks, strict=True):
            self._memory[offset : offset + len(chunk)].copy_(chunk, non_blocking=True)
        self._tables.write(row, packed.layout.places_at(offsets), packed.layout.ranks, packed.layout.scales)
        self.ranks[row] = packed.layout.rank_max
        self._resident[key] = row, offsets

    def evict(self, key: int) -> None:
        """Frees an adapter's arena bytes and table row; its host copy stays. Harmless when it is not resident."""
        if key not in self._resident:
            return
        assert self._tables is not None
        row, offsets = self._resident.pop(key)
        self.arena.release(offsets)
        self._tables.clear(row)
        del self.ranks[row]
