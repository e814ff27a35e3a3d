"""PagePool: states of a page, prefix matches, eviction order, and the invariant under random use."""

import random

import pytest

from loraplex.engine.kv_cache import PagePool
from loraplex.engine.prefix import extend_chain, namespace_root


def chain(tokens: list[int], size: int = 4, root: bytes = b"r") -> list[bytes]:
    names: list[bytes] = []
    extend_chain(names, root, tokens, size)
    return names


def test_released_named_pages_are_found_again_and_unnamed_ones_are_free() -> None:
    pool = PagePool(4, prefix_cache=True)
    pages = pool.allocate(3)
    names = chain(list(range(8)))
    pool.name(pages[0], names[0])
    pool.name(pages[1], names[1])
    pool.release(pages)
    assert (pool.counts().free, pool.counts().cached, pool.counts().held) == (2, 2, 0)
    assert pool.match(names) == pages[:2]
    assert pool.counts().held == 2
    pool.check()


def test_match_stops_at_the_first_gap() -> None:
    pool = PagePool(4, prefix_cache=True)
    pages = pool.allocate(3)
    names = chain(list(range(12)))
    pool.name(pages[0], names[0])
    pool.name(pages[2], names[2])
    assert pool.match(names) == pages[:1]


def test_eviction_takes_the_deepest_page_of_the_oldest_prefix_first() -> None:
    pool = PagePool(3, prefix_cache=True)
    pages = pool.allocate(3)
    names = chain(list(range(12)))
    for page, name in zip(pages, names):
        pool.name(page, name)
    pool.release(pages)
    pool.allocate(1)
    assert pool.match(names) == pages[:2], "the prefix outlives its continuation"


def test_without_prefix_cache_nothing_stays() -> None:
    pool = PagePool(2, prefix_cache=False)
    pages = pool.allocate(2)
    pool.name(pages[0], b"x")
    pool.release(pages)
    assert pool.counts().free == 2
    assert pool.match([b"x"]) == []


def test_names_depend_on_adapter_salt_and_every_earlier_token() -> None:
    roots = {namespace_root(d, s) for d, s in [(None, ""), ("a", ""), (None, "a"), ("", "a"), ("a", "b"), ("ab", "")]}
    assert len(roots) == 6
    one, two = chain([1, 2, 3, 4, 5, 6, 7, 8]), chain([9, 2, 3, 4, 5, 6, 7, 8])
    assert one[1] != two[1]
    assert chain([1, 2, 3, 4, 5, 6, 7, 8], root=b"other")[1] != one[1]


def test_double_release_is_caught() -> None:
    pool = PagePool(1, prefix_cache=True)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)


@pytest.mark.parametrize("seed", range(5))
def test_invariant_holds_under_random_use(seed: int) -> None:
    rng = random.Random(seed)
    pool = PagePool(16, prefix_cache=True)
    held: list[list[int]] = []
    for _ in range(500):
        names = chain([rng.randrange(3) for _ in range(rng.randrange(1, 20))])
        if held and rng.random() < 0.5:
            pool.release(held.pop(rng.randrange(len(held))))
        else:
            pages = pool.match(names)
            more = min(pool.available, len(names) - len(pages))
            pages += pool.allocate(more)
            for page, name in zip(pages, names):
                pool.name(page, name)
            held.append(pages)
        pool.check()
    for pages in held:
        pool.release(pages)
    pool.flush()
    assert pool.counts().free == 16
