"""Who owns which part of the adapter arena: a first-fit allocator over element offsets. It touches no tensor."""

from bisect import bisect_left
from collections.abc import Sequence

ALIGN = 64
"""Elements. Offsets and sizes are multiples of it, so that every matrix starts on a 128-byte line in 16-bit types."""


def align(size: int) -> int:
    """`size` rounded up to a multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN


class Arena:
    """Blocks of a flat tensor of `capacity` elements. Free neighbours are always one block, so an empty arena is whole
    again whatever happened before."""

    def __init__(self, capacity: int) -> None:
        assert capacity >= 0, capacity
        assert capacity % ALIGN == 0, capacity
        self.capacity = capacity
        self._free = [(0, capacity)] if capacity else []
        """(offset, size), ascending."""
        self._used: dict[int, int] = {}

    @property
    def free(self) -> int:
        return sum(size for _, size in self._free)

    @property
    def largest_free(self) -> int:
        """The largest block that could be had now; `free` minus this is lost to fragmentation for that request."""
        return max((size for _, size in self._free), default=0)

    @property
    def used(self) -> int:
        return self.capacity - self.free

    def copy(self) -> "Arena":
        """For trying out."""
        other = Arena(0)
        other.capacity, other._free, other._used = self.capacity, self._free.copy(), self._used.copy()
        return other

    def allocate(self, sizes: Sequence[int]) -> list[int] | None:
        """Offsets of one block per size, each the first that fits; None, and nothing taken, unless all fit."""
        offsets: list[int] = []
        for size in sizes:
            offset = self._take(size)
            if offset is None:
                self.release(offsets)
                return None
            offsets.append(offset)
        return offsets

    def release(self, offsets: Sequence[int]) -> None:
        for offset in offsets:
            self._give_back(offset, self._used.pop(offset))

    def check(self) -> None:
        """Raises AssertionError when blocks overlap, are lost, or free neighbours lie apart."""
        blocks = sorted([*((o, s, False) for o, s in self._used.items()), *((o, s, True) for o, s in self._free)])
        end, was_free = 0, False
        for offset, size, is_free in blocks:
            assert offset == end, f"block at {offset}, the one before ends at {end}"
            assert size > 0, blocks
            assert offset % ALIGN == size % ALIGN == 0, (offset, size)
            assert not (is_free and was_free), f"free neighbours at {offset}"
            end, was_free = offset + size, is_free
        assert end == self.capacity, (end, self.capacity)

    def _take(self, size: int) -> int | None:
        assert size > 0, size
        assert size % ALIGN == 0, size
        for i, (offset, room) in enumerate(self._free):
            if room >= size:
                self._free[i : i + 1] = [(offset + size, room - size)] if room > size else []
                self._used[offset] = size
                return offset
        return None

    def _give_back(self, offset: int, size: int) -> None:
        i = bisect_left(self._free, (offset, 0))
        if i < len(self._free) and self._free[i][0] == offset + size:
            size += self._free.pop(i)[1]
        if i > 0 and sum(self._free[i - 1]) == offset:
            before, room = self._free.pop(i - 1)
            offset, size, i = before, room + size, i - 1
        self._free.insert(i, (offset, size))
