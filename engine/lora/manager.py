"""Adapters of all ranks as the step loop sees them: install what was read, publish the name, free what nobody uses."""

import msgspec

from loraplex.engine import ranks
from loraplex.engine.config import LoRAConfig
from loraplex.engine.lora.adapter import HostAdapter
from loraplex.engine.lora.loader import Loaded
from loraplex.engine.lora.pool import AdapterPool
from loraplex.engine.lora.registry import AdapterRegistry, AdapterVersion
from loraplex.engine.messages import AdapterInfo, ErrorInfo, LoadAdapter, Reply, UnloadAdapter


class AdapterManager:
    """Rank 0. A name answers requests only after every rank holds the adapter."""

    def __init__(self, config: LoRAConfig, pool: AdapterPool, followers: ranks.Followers) -> None:
        self.registry = AdapterRegistry()
        self.bytes = 0
        """Bytes of all installed adapters on this rank's device."""
        self._config = config
        self._pool = pool
        self._followers = followers
        self._bytes_of_row: dict[int, int] = {}

    def finish_load(self, loaded: Loaded) -> Reply:
        """Installs a read adapter on every rank and publishes it; the reply holds its AdapterInfo or the error."""
        request = loaded.request
        if loaded.adapter is None:
            return Reply(op=request.op, error=loaded.error)
        current = self.registry.get(request.name)
        if current is not None and current.info.digest == loaded.adapter.digest:
            return _report(request, current.info)
        error = self._refusal(request, current)
        if error is not None:
            return Reply(op=request.op, error=error)
        self.sweep()
        row = self.registry.new_row()
        error = self._install(row, request.path, loaded.adapter)
        if error is not None:
            self._remove(row)
            self.registry.drop_row(row)
            return Reply(op=request.op, error=error)
        info = _info(request, loaded.adapter, self.registry.new_version(), self._bytes_of_row[row])
        self.registry.publish(AdapterVersion(info, row))
        return _report(request, info)

    def unload(self, message: UnloadAdapter) -> Reply:
        """Takes the name away at once; requests in flight finish on the version they hold."""
        if self.registry.get(message.name) is None:
            return Reply(op=message.op, error=_unknown(message.name))
        self.registry.unpublish(message.name)
        self.sweep()
        return Reply(op=message.op, result={})

    def sweep(self) -> None:
        """Clears the rows of versions that became unused."""
        for version in self.registry.take_freed():
            self._remove(version.row)

    def _refusal(self, request: LoadAdapter, current: AdapterVersion | None) -> ErrorInfo | None:
        if current is not None and not request.replace:
            return ErrorInfo(
                status=409,
                message=f"An adapter named `{request.name}` with other content is loaded; unload it, or load in place.",
                code="adapter_exists",
                param="lora_name",
            )
        limit = self._config.max_loaded_loras
        if current is None and limit is not None and len(self.registry) >= limit:
            return ErrorInfo(
                status=507,
                message=f"{limit} adapters are loaded, as many as --max-loaded-loras allows; unload one first.",
                code="too_many_adapters",
                param="lora_name",
            )
        return None

    def _install(self, row: int, path: str, adapter: HostAdapter) -> ErrorInfo | None:
        try:
            self._bytes_of_row[row] = self._pool.install(row, adapter)
        except (MemoryError, RuntimeError):  # torch's out-of-memory error is a RuntimeError
            return ErrorInfo(status=507, message="The adapter does not fit into device memory.", code="no_memory")
        self.bytes += self._bytes_of_row[row]
        return self._followers.install(ranks.Install(row, path, adapter.digest))

    def _remove(self, row: int) -> None:
        self.bytes -= self._bytes_of_row.pop(row, 0)
        self._pool.remove(row)
        self._followers.send(ranks.Remove(row))


def _info(request: LoadAdapter, adapter: HostAdapter, version: int, device_bytes: int) -> AdapterInfo:
    return AdapterInfo(
        name=request.name,
        path=request.path,
        digest=adapter.digest,
        version=version,
        rank_min=adapter.rank_min,
        rank_max=adapter.rank_max,
        layout=adapter.layout,
        bytes=device_bytes,
        num_tensors=adapter.num_tensors,
        ignored_tensors=list(adapter.ignored),
        modules=adapter.modules,
        notes=list(adapter.notes),
    )


def _report(request: LoadAdapter, info: AdapterInfo) -> Reply:
    return Reply(op=request.op, result=msgspec.to_builtins(info))


def _unknown(name: str) -> ErrorInfo:
    return ErrorInfo(
        status=404, message=f"No adapter named `{name}` is loaded.", param="lora_name", code="adapter_not_found"
    )
