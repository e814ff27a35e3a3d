"""Adapters of all ranks as the step loop sees them: store what was read, publish the name, free what nobody uses."""

from collections.abc import Iterable

import msgspec

from loraplex.engine import ranks
from loraplex.engine.config import LoRAConfig
from loraplex.engine.lora.loader import Loaded
from loraplex.engine.lora.pool import AdapterPool
from loraplex.engine.lora.registry import AdapterRegistry, AdapterVersion
from loraplex.engine.lora.residency import Residency
from loraplex.engine.messages import AdapterInfo, ErrorInfo, LoadAdapter, Reply, UnloadAdapter


class AdapterManager:
    """Rank 0. A name answers requests only after every rank holds the adapter."""

    def __init__(self, config: LoRAConfig, pool: AdapterPool, followers: ranks.Followers) -> None:
        self.registry = AdapterRegistry()
        self.residency = Residency(pool, followers, config.table_rows, config.lora_eviction_policy)
        self._config = config
        self._pool = pool
        self._followers = followers

    @property
    def bytes(self) -> int:
        """Bytes of all resident adapters on this rank's device."""
        return self._pool.used_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of all packed copies of this rank."""
        return self._pool.host_bytes

    def finish_load(self, loaded: Loaded) -> Reply:
        """Stores a read adapter on every rank, publishes it and makes it resident if that is possible now; the reply
        holds its AdapterInfo or the error."""
        assert self._config.enable_lora
        request = loaded.request
        if isinstance(loaded.result, ErrorInfo):
            return Reply(op=request.op, error=loaded.result)
        info, packed = loaded.result.info, loaded.result.packed
        current = self.registry.get(request.name)
        if current is not None and current.info.digest == info.digest:
            packed.buffer.close()
            return self._pin(request, current)
        self.sweep()
        error = self._refusal(request, current, packed.nbytes)
        if error is not None:
            packed.buffer.close()
            return Reply(op=request.op, error=error)
        info = msgspec.structs.replace(info, version=self.registry.new_version())
        self._pool.store(info.version, packed)
        error = self._followers.store(ranks.Store(info.version, request.path, info.digest))
        if error is not None:
            self._drop(info.version)
            return Reply(op=request.op, error=error)
        version = AdapterVersion(info)
        self.registry.publish(version)
        self.sweep()
        self.residency.ensure(version, keep=self.registry.held())
        return _report(request, info)

    def _pin(self, request: LoadAdapter, current: AdapterVersion) -> Reply:
        """The content is loaded already: only whether it is pinned can change."""
        if request.pinned != current.info.pinned:
            others = [v for v in self.registry.versions() if v is not current]
            error = self._pinned_refusal(request, current.info.bytes, others, leaving=None)
            if error is not None:
                return Reply(op=request.op, error=error)
            current.info = msgspec.structs.replace(current.info, pinned=request.pinned)
        return _report(request, current.info)

    def unload(self, message: UnloadAdapter) -> Reply:
        """Takes the name away at once; requests in flight finish on the version they hold."""
        if self.registry.get(message.name) is None:
            return Reply(op=message.op, error=_unknown(message.name))
        self.registry.unpublish(message.name)
        self.sweep()
        return Reply(op=message.op, result={})

    def sweep(self) -> None:
        """Frees versions that became unused, on device and host."""
        for version in self.registry.take_freed():
            self.residency.evict(version)
            self._drop(version.info.version)

    def _refusal(self, request: LoadAdapter, current: AdapterVersion | None, nbytes: int) -> ErrorInfo | None:
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
        bound = self._config.host_memory_bytes
        replaced = current.info.bytes if current is not None and current.refs == 0 else 0
        if bound is not None and self.host_bytes - replaced + nbytes > bound:
            return ErrorInfo(
                status=507,
                message=f"The loaded adapters take {self.host_bytes} bytes and this one {nbytes}, together more than "
                f"the {bound} of --lora-host-memory; unload one first.",
                code="no_memory",
                param="lora_name",
            )
        others = [v for v in self.registry.versions() if v is not current]
        return self._pinned_refusal(request, nbytes, others, leaving=current)

    def _pinned_refusal(
        self, request: LoadAdapter, nbytes: int, others: Iterable[AdapterVersion], leaving: AdapterVersion | None
    ) -> ErrorInfo | None:
        """Beside the pinned adapters there must be room for each other one, or its requests would wait for ever: also
        for those whose name is gone, or goes now (`leaving`), while requests hold them."""
        pinned: list[int] = []
        evictable: list[int] = []
        for version in others:
            (pinned if version.stays else evictable).append(version.info.bytes)
        (pinned if request.pinned else evictable).append(nbytes)
        if leaving is not None and leaving.refs > 0:
            evictable.append(leaving.info.bytes)
        most = self._pool.capacity_bytes
        rows = len(pinned) + min(1, len(evictable))
        if sum(pinned) + max(evictable, default=0) <= most and rows <= self._config.table_rows:
            return None
        return ErrorInfo(
            status=507,
            message=f"{len(pinned)} pinned adapters take {sum(pinned)} bytes and the largest other one "
            f"{max(evictable, default=0)}, together more than the {most} of --lora-memory (or more than the "
            f"{self._config.table_rows} adapters that --max-loaded-loras allows); pin fewer.",
            code="no_memory",
            param="pinned",
        )

    def _drop(self, version: int) -> None:
        self._followers.send(ranks.Drop(version))
        self._pool.drop(version)


def _report(request: LoadAdapter, info: AdapterInfo) -> Reply:
    return Reply(op=request.op, result=msgspec.to_builtins(info))


def _unknown(name: str) -> ErrorInfo:
    return ErrorInfo(
        status=404, message=f"No adapter named `{name}` is loaded.", param="lora_name", code="adapter_not_found"
    )
