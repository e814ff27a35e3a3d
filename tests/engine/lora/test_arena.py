"""The arena's allocator by seeded simulation, and what fragmentation does to it."""

import itertools
import random

import pytest

from loraplex.engine.lora.arena import ALIGN, Arena, align


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_allocations_and_releases_loses_nothing(seed: int) -> None:
    rng = random.Random(seed)
    arena = Arena(200 * ALIGN)
    held: list[tuple[list[int], list[int]]] = []
    refused = 0
    for _ in range(1500):
        if held and rng.random() < 0.48:
            offsets, _ = held.pop(rng.randrange(len(held)))
            arena.release(offsets)
        else:
            sizes = [ALIGN * rng.choice([1, 2, 3, 7, 20]) for _ in range(rng.randrange(1, 6))]
            before = arena.copy()
            offsets = arena.allocate(sizes)
            if offsets is None:
                refused += 1
                assert arena.free == before.free
                assert arena.largest_free == before.largest_free
            else:
                held.append((offsets, sizes))
        arena.check()
        blocks = sorted((o, s) for offsets, sizes in held for o, s in zip(offsets, sizes, strict=True))
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(blocks)), "overlap"
        assert arena.used == sum(size for _, size in blocks)
        assert arena.used + arena.free == arena.capacity
        assert arena.largest_free <= arena.free
    assert refused > 0
    for offsets, _ in held:
        arena.release(offsets)
    assert arena.largest_free == arena.capacity


def test_first_fit_takes_the_lowest_hole_that_is_large_enough() -> None:
    arena = Arena(10 * ALIGN)
    a, b, c, d = arena.allocate([ALIGN, 2 * ALIGN, ALIGN, 2 * ALIGN])
    assert (a, b, c, d) == (0, ALIGN, 3 * ALIGN, 4 * ALIGN)
    arena.release([a, c])
    assert arena.allocate([2 * ALIGN]) == [6 * ALIGN]
    assert arena.allocate([ALIGN]) == [a]


def test_fragmentation_is_seen_and_chunks_fit_into_holes() -> None:
    """Every other block free: half the arena, in pieces. What is one block does not fit, what comes in chunks does."""
    arena = Arena(16 * ALIGN)
    blocks = arena.allocate([ALIGN] * 16)
    arena.release(blocks[::2])
    assert (arena.free, arena.largest_free) == (8 * ALIGN, ALIGN)
    assert arena.allocate([2 * ALIGN]) is None
    assert arena.allocate([ALIGN] * 8) == blocks[::2]
    assert (arena.free, arena.largest_free) == (0, 0)
    assert arena.allocate([ALIGN]) is None


def test_what_fits_by_its_sum_fits_an_empty_arena() -> None:
    arena = Arena(6 * ALIGN)
    assert arena.allocate([ALIGN, 3 * ALIGN, 2 * ALIGN]) is not None
    assert arena.free == 0


def test_alignment() -> None:
    assert [align(n) for n in (1, 64, 65)] == [64, 64, 128]
    with pytest.raises(AssertionError):
        Arena(2 * ALIGN).allocate([ALIGN + 1])
    assert Arena(0).allocate([ALIGN]) is None
