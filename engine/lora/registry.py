"""Which adapters exist, by name and version, and who is using them. Rank 0 only; tensors are the pool's business."""

from dataclasses import dataclass

from loraplex.engine.messages import AdapterInfo


@dataclass(eq=False)
class AdapterVersion:
    """One loaded content under one name. In-flight requests keep the version they began with."""

    info: AdapterInfo
    row: int = -1
    """Row in the tables of every layer while it is resident in the arena, else −1; `Residency` sets it."""
    refs: int = 0
    """Requests (not choices) holding a lease."""
    retired: bool = False
    """Replaced or unloaded: answers no new request, goes when the last lease is released."""
    last_step: int = 0
    """Step that served it last; adapters that compete for slots take turns by it."""

    @property
    def stays(self) -> bool:
        """Pinned: not evicted for others."""
        return self.info.pinned and not self.retired


class AdapterRegistry:
    """Names → versions, with leases. A version is freed exactly once, when it is retired and unused."""

    def __init__(self) -> None:
        self._by_name: dict[str, AdapterVersion] = {}
        self._versions: set[AdapterVersion] = set()
        self._freed: list[AdapterVersion] = []
        self._next_version = 1

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str) -> AdapterVersion | None:
        return self._by_name.get(name)

    def versions(self) -> list[AdapterVersion]:
        """All that exist, with a name or only held by requests."""
        return list(self._versions)

    def infos(self) -> list[AdapterInfo]:
        return [v.info for v in self._by_name.values()]

    def new_version(self) -> int:
        self._next_version += 1
        return self._next_version - 1

    def publish(self, version: AdapterVersion) -> None:
        """Makes the version answer to its name from now on; the one it replaces retires."""
        old = self._by_name.get(version.info.name)
        self._by_name[version.info.name] = version
        self._versions.add(version)
        if old is not None:
            self._retire(old)

    def unpublish(self, name: str) -> None:
        """Takes the name away; its version goes with its last lease."""
        self._retire(self._by_name.pop(name))

    def acquire(self, version: AdapterVersion) -> None:
        assert not version.retired, f"lease on retired {version.info.name}@{version.info.version}"
        version.refs += 1

    def release(self, version: AdapterVersion) -> None:
        assert version.refs > 0, f"{version.info.name}@{version.info.version} released twice"
        version.refs -= 1
        self._free_if_unused(version)

    def take_freed(self) -> list[AdapterVersion]:
        """Versions that became unused since the last call; the caller frees their bytes on every rank."""
        freed, self._freed = self._freed, []
        return freed

    def held(self) -> set[AdapterVersion]:
        """Versions that a request holds."""
        return {version for version in self._versions if version.refs > 0}

    def refs(self) -> dict[str, int]:
        return {f"{v.info.name}@{v.info.version}": v.refs for v in self._versions}

    def _retire(self, version: AdapterVersion) -> None:
        version.retired = True
        self._free_if_unused(version)

    def _free_if_unused(self, version: AdapterVersion) -> None:
        if version.retired and version.refs == 0:
            self._versions.remove(version)
            self._freed.append(version)
