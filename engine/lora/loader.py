"""Adapter folders → packed host copies, off the step loop: one thread reads, parses, validates and packs."""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from loraplex.engine.config import LoRAConfig
from loraplex.engine.lora.adapter import HostAdapter
from loraplex.engine.lora.dummy import DUMMY_PREFIX, dummy_adapter, parse_dummy_spec
from loraplex.engine.lora.errors import AdapterError
from loraplex.engine.lora.packed import PackedAdapter
from loraplex.engine.lora.pool import AdapterPool
from loraplex.engine.lora.reader import read_adapter
from loraplex.engine.messages import AdapterInfo, ErrorInfo, LoadAdapter
from loraplex.engine.models.sites import Site

log = logging.getLogger(__name__)
T = TypeVar("T")

NO_HOST_MEMORY = ErrorInfo(
    status=507, message="The host has no memory left for the adapter.", code="no_memory", type="server_error"
)


@dataclass(frozen=True)
class Prepared:
    """A packed adapter and what is told about it, its version still open."""

    info: AdapterInfo
    packed: PackedAdapter


@dataclass(frozen=True)
class Loaded:
    """What reading one adapter came to; put into the engine's inbox."""

    request: LoadAdapter
    result: Prepared | ErrorInfo


def guarded(name: str, action: Callable[[], T]) -> T | ErrorInfo:
    """What `action` gives, with whatever a hostile file, a failing disk or short memory provokes as an error of that
    load, never of the engine."""
    try:
        return action()
    except AdapterError as error:
        return ErrorInfo(status=error.status, message=str(error), param="lora_path")
    except MemoryError:
        return NO_HOST_MEMORY
    except Exception:
        log.exception("reading adapter %r failed", name)
        message = "The adapter could not be read; the server's log has the details."
        return ErrorInfo(status=422, message=message, param="lora_path")


def read(path: str, sites: Mapping[str, Site], config: LoRAConfig, dtype: torch.dtype) -> HostAdapter:
    """The adapter at `path`, or the random one that a `dummy:` path describes. Raises AdapterError."""
    if path.startswith(DUMMY_PREFIX):
        rank, seed = parse_dummy_spec(path)
        if rank > config.max_lora_rank:
            raise AdapterError(f"{path} has rank {rank}, above the limit of {config.max_lora_rank} (--max-lora-rank)")
        return dummy_adapter(sites, rank, seed, dtype=dtype)
    return read_adapter(path, sites, max_rank=config.max_lora_rank, strict=config.lora_strict_loading)


def prepare(request: LoadAdapter, pool: AdapterPool, config: LoRAConfig, dtype: torch.dtype) -> Prepared:
    """Reads and packs. Raises AdapterError and MemoryError."""
    adapter = read(request.path, pool.sites, config, dtype)
    packed = pool.pack(adapter)
    info = AdapterInfo(
        name=request.name,
        path=request.path,
        digest=adapter.digest,
        version=0,
        rank_min=adapter.rank_min,
        rank_max=adapter.rank_max,
        layout=adapter.layout,
        bytes=packed.nbytes,
        pinned=request.pinned,
        num_tensors=adapter.num_tensors,
        ignored_tensors=list(adapter.ignored),
        modules=adapter.modules,
        notes=list(adapter.notes),
    )
    return Prepared(info, packed)


class AdapterLoader:
    """Reads adapters one after the other, in the order they were asked for."""

    def __init__(
        self,
        pool: AdapterPool,
        config: LoRAConfig,
        dtype: torch.dtype,
        done: Callable[[Loaded], None],
        delay_s: float = 0.0,
    ) -> None:
        self._pool = pool
        self._config = config
        self._dtype = dtype
        self._done = done
        self._delay_s = delay_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter-loader")

    def submit(self, request: LoadAdapter) -> None:
        self._thread.submit(self._load, request)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self, request: LoadAdapter) -> None:
        time.sleep(self._delay_s)
        result = guarded(request.name, lambda: prepare(request, self._pool, self._config, self._dtype))
        self._done(Loaded(request, result))
