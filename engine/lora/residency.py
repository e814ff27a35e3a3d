"""Which adapters are in the arena now. Rank 0 decides, between steps; the followers do as told."""

from collections.abc import Iterable, Set
from typing import Literal

from loraplex.engine import ranks
from loraplex.engine.lora.pool import AdapterPool
from loraplex.engine.lora.registry import AdapterVersion

EvictionPolicy = Literal["lru", "fifo"]


class Residency:
    """A loaded adapter may be resident or only a host copy; one that a step uses is resident."""

    def __init__(self, pool: AdapterPool, followers: ranks.Followers, rows: int, policy: EvictionPolicy) -> None:
        self._pool = pool
        self._followers = followers
        self._policy = policy
        self._rows = rows
        self._free_rows = list(range(rows - 1, -1, -1))
        self._resident: dict[AdapterVersion, None] = {}
        """In the order in which they may go: least recently used, or least recently placed, first."""

    @property
    def resident(self) -> list[AdapterVersion]:
        """Next to be evicted first."""
        return list(self._resident)

    def ensure(self, version: AdapterVersion, keep: Set[AdapterVersion]) -> bool:
        """Makes an adapter resident, evicting others but pinned ones and those of `keep`, and of these first the ones
        no request holds. False, and nothing has changed, when that is not enough."""
        if version.row >= 0:
            return True
        stay = [v for v in self._resident if v in keep or v.stays]
        if len(stay) == self._rows:
            return False
        victims = sorted((v for v in self._resident if v not in stay), key=lambda v: v.refs > 0)
        count = self._pool.fits(version.info.version, [v.info.version for v in victims])
        if count is None:
            if sum(self._pool.numel(v.info.version) for v in (*stay, version)) > self._pool.arena.capacity:
                return False
            self._place_anew(stay)
        else:
            for victim in victims[: count if self._free_rows else max(count, 1)]:
                self.evict(victim)
        self._place(version)
        return True

    def touch(self, used: Iterable[AdapterVersion]) -> None:
        """These adapters are in the step that runs now."""
        if self._policy == "lru":
            for version in used:
                self._resident[version] = self._resident.pop(version)

    def evict(self, version: AdapterVersion) -> None:
        """Takes an adapter out of the arena on every rank. Harmless when it is not there."""
        if version.row < 0:
            return
        self._followers.send(ranks.Evict(version.info.version))
        self._pool.evict(version.info.version)
        self._free_rows.append(version.row)
        del self._resident[version]
        version.row = -1

    def _place_anew(self, stay: Iterable[AdapterVersion]) -> None:
        """Empties the arena and fills it from its beginning, from the host copies: what is free is then one block.
        Rare: chunks are small beside an adapter, so room of the right sum is seldom in the wrong pieces."""
        for version in self.resident:
            self.evict(version)
        for version in stay:
            self._place(version)

    def _place(self, version: AdapterVersion) -> None:
        row = self._free_rows.pop()
        self._followers.send(ranks.Place(version.info.version, row))
        self._pool.place(version.info.version, row)
        version.row = row
        self._resident[version] = None
