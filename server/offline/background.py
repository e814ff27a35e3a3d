"""The engine and its text side behind blocking calls: an event loop in a thread of its own."""

import asyncio
import concurrent.futures
import logging
import threading
import time
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

from loraplex.engine.config import Config
from loraplex.engine.hooks import read_hooks
from loraplex.server.client import EngineClient, EngineStartError
from loraplex.server.front import Front
from loraplex.server.metrics import Metrics
from loraplex.server.model_files import StartError, check_files
from loraplex.server.ranks import RankMain, worker_main
from loraplex.server.tokenizer_files import read_defaults, read_text

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0

T = TypeVar("T")


class BackgroundEngine:
    """Engine processes that live until `close`, the end of the interpreter, or their own death."""

    def __init__(self, config: Config, target: RankMain = worker_main) -> None:
        """Returns when the model has done its first forward. Raises RuntimeError; leaves no process behind then."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="loraplex", daemon=True)
        self._thread.start()
        self._close = weakref.finalize(self, _end, self._loop, self._thread)
        try:
            client = self.run(_start(config, target))
            self._close.detach()
            self._close = weakref.finalize(self, _end, self._loop, self._thread, client)
            self.client = client
            self.front = _front(client, config)
        except (StartError, EngineStartError) as error:
            self.close()
            raise RuntimeError(str(error)) from None
        except BaseException:
            self.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Ctrl-C cancels it, waits until it has cleaned up, and is raised here."""
        if not self._thread.is_alive() or self._loop.is_closed():
            work.close()
            raise RuntimeError("this LLM is closed")
        ended = threading.Event()

        async def whole() -> T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(whole(), self._loop)
        try:
            return future.result()
        except BaseException:
            if not ended.is_set():
                future.cancel()
                ended.wait(STOP_SECONDS)
            raise

    def close(self) -> None:
        """Ends the engine's processes. Harmless twice."""
        self._close()


async def _start(config: Config, target: RankMain) -> EngineClient:
    check_files(config)
    return await EngineClient.start(config, log.info, target=target)


def _front(client: EngineClient, config: Config) -> Front:
    defaults = read_defaults(config.model)
    text = read_text(config.model, client.info.vocab_size)
    metrics = Metrics(client, config.model.served_names[0])
    return Front(client, text, config, defaults, metrics, read_hooks(), created=int(time.time()))


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, client: EngineClient | None = None) -> None:
    if client is not None:
        stopping = asyncio.run_coroutine_threadsafe(client.shutdown(STOP_SECONDS), loop)
        concurrent.futures.wait([stopping], 3 * STOP_SECONDS)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
