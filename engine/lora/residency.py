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
        self._free_rows = list(range(rows - 1, -1, -1))
        self._resident: dict[AdapterVersion, None] = {}
        """In the order in which they may go: least recently used, or least recently placed, first."""

    @property
    def resident(self) -> list[AdapterVersion]:
        """Next to be evicted first."""
        return list(self._resident)

    def ensure(self, version: AdapterVersion, keep: Set[AdapterVersion]) -> bool:
        """Makes an adapter resident, evicting others but those of `keep`, and of these first the ones no request
        holds. False, and nothing has changed, when that is not enough."""
        if version.row >= 0:
            return True
        victims = sorted((v for v in self._resident if v not in keep), key=lambda v: v.refs > 0)
        count = self._pool.fits(version.info.version, [v.info.version for v in victims])
        if count is not None and not self._free_rows:
            count = max(count, 1)
        if count is None or count > len(victims):
            return False
        for victim in victims[:count]:
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

    def _place(self, version: AdapterVersion) -> None:
        row = self._free_rows.pop()
        self._followers.send(ranks.Place(version.info.version, row))
        self._pool.place(version.info.version, row)
        version.row = row
        self._resident[version] = None
