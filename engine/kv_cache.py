"""Paged KV pool with a prefix cache. Every page is in exactly one state: free, cached (named, unused) or held.

Invariant: free + cached + held = total, checked by `check()` in every test and when the engine is idle.
"""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True)
class PoolCounts:
    total: int
    free: int
    cached: int
    held: int


class PagePool:
    """Hands out page numbers; knows names and reference counts, never tensors.

    A named page whose last user leaves stays cached and may be taken again by name; the least recently left is evicted
    when free pages run out. Pages are left in reverse order, so a prefix outlives its continuations.
    """

    def __init__(self, num_pages: int, *, prefix_cache: bool) -> None:
        self.num_pages = num_pages
        self._prefix_cache = prefix_cache
        self._free = list(range(num_pages - 1, -1, -1))
        self._refs = [0] * num_pages
        self._name_of: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that `allocate` can give now: free ones and, by eviction, cached ones."""
        return len(self._free) + len(self._cached)

    def allocate(self, n: int) -> list[int]:
        """n pages with one reference each. The caller has checked `available`."""
        assert n <= self.available, f"{n = } pages asked, {self.available = }"
        pages = []
        for _ in range(n):
            if not self._free:
                self._evict_one()
            page = self._free.pop()
            assert (self._refs[page], self._name_of[page]) == (0, None), (page, self._refs[page])
            self._refs[page] = 1
            pages.append(page)
        return pages

    def match(self, names: list[bytes]) -> list[int]:
        """The longest run of leading `names` present; takes a reference on each page."""
        pages: list[int] = []
        for name in names:
            page = self._page_of.get(name)
            if page is None:
                break
            if self._refs[page] == 0:
                del self._cached[page]
            self._refs[page] += 1
            pages.append(page)
        return pages

    def name(self, page: int, name: bytes) -> None:
        """Makes a full, computed page findable. A second page with the same content stays unnamed."""
        if self._prefix_cache and name not in self._page_of and self._name_of[page] is None:
            self._page_of[name] = page
            self._name_of[page] = name

    def release(self, pages: list[int]) -> None:
        """Drops one reference on each page."""
        for page in reversed(pages):
            assert self._refs[page] > 0, f"page {page} released twice"
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if self._name_of[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None

    def flush(self) -> None:
        """Forgets all cached pages that nobody holds."""
        while self._cached:
            self._evict_one()

    def counts(self) -> PoolCounts:
        held = self.num_pages - len(self._free) - len(self._cached)
        return PoolCounts(self.num_pages, len(self._free), len(self._cached), held)

    def check(self) -> None:
        """Raises AssertionError when a page is lost, owned twice or misnamed."""
        assert sum(refs > 0 for refs in self._refs) == self.counts().held, self.counts()
        unused = [*self._free, *self._cached]
        assert len(set(unused)) == len(unused), "a page is free or cached twice"
        assert not any(self._refs[page] for page in unused), "a page is held and free"
        assert all(self._name_of[p] is not None for p in self._cached)
        assert all(self._name_of[page] == name for name, page in self._page_of.items())

    def _evict_one(self) -> None:
        page, _ = self._cached.popitem(last=False)
        name = self._name_of[page]
        assert name is not None, page
        del self._page_of[name]
        self._name_of[page] = None
        self._free.append(page)
