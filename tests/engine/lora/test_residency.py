"""Who leaves the arena for whom."""

from types import SimpleNamespace
from typing import Any

import pytest

from loraplex.engine import ranks
from loraplex.engine.lora.arena import ALIGN, Arena
from loraplex.engine.lora.registry import AdapterVersion
from loraplex.engine.lora.residency import EvictionPolicy, Residency


class Pool:
    """The pool's allocator without tensors: adapter n has `sizes[n]` chunks of one unit."""

    def __init__(self, capacity: int) -> None:
        self.arena = Arena(capacity * ALIGN)
        self.sizes: dict[int, list[int]] = {}
        self.offsets: dict[int, list[int]] = {}
        self.rows: dict[int, int] = {}

    def numel(self, key: int) -> int:
        return sum(self.sizes[key])

    def fits(self, key: int, victims: Any = ()) -> int | None:
        trial = self.arena.copy()
        for count, victim in enumerate((None, *victims)):
            if victim is not None:
                trial.release(self.offsets[victim])
            if trial.copy().allocate(self.sizes[key]) is not None:
                return count
        return None

    def place(self, key: int, row: int) -> None:
        assert row not in self.rows.values()
        offsets = self.arena.allocate(self.sizes[key])
        assert offsets is not None
        self.offsets[key], self.rows[key] = offsets, row

    def evict(self, key: int) -> None:
        self.arena.release(self.offsets.pop(key))
        del self.rows[key]


class Bench:
    def __init__(self, capacity: int, sizes: list[int], policy: EvictionPolicy = "lru", rows: int = 16) -> None:
        self.pool = Pool(capacity)
        self.pool.sizes = {i: [ALIGN] * size for i, size in enumerate(sizes)}
        self.residency = Residency(self.pool, ranks.Followers([]), rows, policy)  # type: ignore[arg-type]
        self.versions = [AdapterVersion(SimpleNamespace(version=i, pinned=False)) for i in range(len(sizes))]  # type: ignore[arg-type]

    def ensure(self, i: int, *keep: int) -> bool:
        done = self.residency.ensure(self.versions[i], {self.versions[k] for k in keep})
        self.pool.arena.check()
        for version in self.versions:
            assert version.row == self.pool.rows.get(version.info.version, -1)
            assert (version in self.residency.resident) == (version.row >= 0)
        return done

    def use(self, *used: int) -> None:
        self.residency.touch([self.versions[i] for i in used])

    @property
    def resident(self) -> list[int]:
        return [v.info.version for v in self.residency.resident]


@pytest.mark.parametrize(("policy", "left"), [("lru", [0, 2, 3]), ("fifo", [1, 2, 3])])
def test_policies(policy: EvictionPolicy, left: list[int]) -> None:
    bench = Bench(3, [1, 1, 1, 1], policy)
    for i in (0, 1, 2):
        assert bench.ensure(i)
    bench.use(0, 2)
    assert bench.ensure(3)
    assert sorted(bench.resident) == left


def test_order_of_eviction_is_order_of_last_use() -> None:
    bench = Bench(4, [1] * 8)
    for i in (0, 1, 2, 3):
        bench.ensure(i)
    bench.use(2)
    bench.use(0, 3)
    gone = []
    for i in (4, 5, 6, 7):
        before = bench.resident
        assert bench.ensure(i)
        gone += [j for j in before if j not in bench.resident]
    assert gone == [1, 2, 0, 3]


def test_only_as_many_leave_as_must_and_kept_ones_stay() -> None:
    bench = Bench(6, [1, 2, 3, 4])
    for i in (0, 1, 2):
        bench.ensure(i)
    assert bench.ensure(3, 0)
    assert bench.resident == [0, 3]
    assert not bench.ensure(2, 3), "1 free, 1 of adapter 0: not enough for 3"
    assert bench.resident == [0, 3], "and then nobody left for nothing"
    assert bench.ensure(2)


def test_adapters_that_requests_hold_go_last() -> None:
    bench = Bench(3, [1, 1, 1, 1])
    for i in (0, 1, 2):
        bench.ensure(i)
    bench.versions[0].refs = 1
    assert bench.ensure(3)
    assert bench.resident == [0, 2, 3]


def test_rows_are_room_too() -> None:
    bench = Bench(10, [1, 1, 1], rows=2)
    assert bench.ensure(0)
    assert bench.ensure(1)
    assert not bench.ensure(2, 0, 1)
    assert bench.ensure(2)
    assert bench.resident == [1, 2]


def test_holes_of_an_evicted_adapter_are_used_by_chunks() -> None:
    bench = Bench(6, [2, 2, 2, 4])
    for i in (0, 1, 2):
        bench.ensure(i)
    bench.use(1)
    assert bench.ensure(3, 1)
    assert bench.pool.offsets[3] == [0, ALIGN, 4 * ALIGN, 5 * ALIGN]


def test_pinned_adapters_stay_until_they_retire() -> None:
    bench = Bench(3, [1, 1, 1, 1, 1])
    for i in (0, 1, 2):
        bench.ensure(i)
    bench.versions[0].info.pinned = True  # type: ignore[misc]
    assert bench.ensure(3)
    assert bench.ensure(4)
    assert bench.resident == [0, 3, 4]
    bench.versions[0].retired = True
    assert bench.ensure(1)
    assert bench.resident == [3, 4, 1]


def test_room_in_the_wrong_pieces_is_put_together() -> None:
    """Free: a piece of 1 on each side of adapter 1, which must stay. The other comes as one piece of 2."""
    bench = Bench(4, [1, 2, 1, 2])
    bench.pool.sizes[3] = [2 * ALIGN]
    for i in (0, 1, 2):
        bench.ensure(i)
    assert (bench.pool.offsets[1], bench.pool.arena.largest_free) == ([ALIGN, 2 * ALIGN], 0)
    assert not bench.ensure(3, 0, 1)
    assert bench.ensure(3, 1)
    assert bench.resident == [1, 3]
    assert bench.pool.offsets == {1: [0, ALIGN], 3: [2 * ALIGN]}
