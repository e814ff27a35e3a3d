"""Adapter folders → host tensors, off the step loop: one thread reads, parses and validates; the loop installs."""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from loraplex.engine.config import LoRAConfig
from loraplex.engine.lora.adapter import HostAdapter
from loraplex.engine.lora.dummy import DUMMY_PREFIX, dummy_adapter, parse_dummy_spec
from loraplex.engine.lora.errors import AdapterError
from loraplex.engine.lora.reader import read_adapter
from loraplex.engine.messages import ErrorInfo, LoadAdapter
from loraplex.engine.models.sites import Site

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """What reading one adapter came to; put into the engine's inbox."""

    request: LoadAdapter
    adapter: HostAdapter | None
    error: ErrorInfo | None = None


def read_safely(
    name: str, path: str, sites: Mapping[str, Site], config: LoRAConfig, dtype: torch.dtype
) -> HostAdapter | ErrorInfo:
    """`read`, with whatever a hostile file or a failing disk provokes as an error of that load, never of the engine."""
    try:
        return read(path, sites, config, dtype)
    except AdapterError as error:
        return ErrorInfo(status=error.status, message=str(error), param="lora_path")
    except Exception:
        log.exception("reading adapter %r failed", name)
        message = "The adapter could not be read; the server's log has the details."
        return ErrorInfo(status=422, message=message, param="lora_path")


def read(path: str, sites: Mapping[str, Site], config: LoRAConfig, dtype: torch.dtype) -> HostAdapter:
    """The adapter at `path`, or the random one that a `dummy:` path describes. Raises AdapterError."""
    if path.startswith(DUMMY_PREFIX):
        rank, seed = parse_dummy_spec(path)
        return dummy_adapter(sites, rank, seed, dtype=dtype)
    return read_adapter(path, sites, max_rank=config.max_lora_rank, strict=config.lora_strict_loading)


class AdapterLoader:
    """Reads adapters one after the other, in the order they were asked for."""

    def __init__(
        self,
        sites: Mapping[str, Site],
        config: LoRAConfig,
        dtype: torch.dtype,
        done: Callable[[Loaded], None],
        delay_s: float = 0.0,
    ) -> None:
        self._sites = sites
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
        read = read_safely(request.name, request.path, self._sites, self._config, self._dtype)
        if isinstance(read, ErrorInfo):
            self._done(Loaded(request, None, read))
        else:
            self._done(Loaded(request, read))
