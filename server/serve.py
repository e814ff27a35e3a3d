"""The life of a server: check, start the engine, open the port, serve, stop.

The port is bound first, so that a taken one is known at once, but listens only when the engine has done its first
forward. Signals are ours, not uvicorn's, which would end with the signal instead of with status 0: the first one
ends open requests with an error and stops in order, the second stops at once. A signal before the port is open ends
with status 128 + its number.
"""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import uvicorn

from loraplex.engine.config import Config
from loraplex.engine.messages import Ready
from loraplex.server.client import EngineClient, EngineStartError
from loraplex.server.model_files import StartError, check_files
from loraplex.server.ranks import RankMain, worker_main

log = logging.getLogger(__name__)

ENGINE_STOP_SECONDS = 1.5
DEAD_ENGINE_SECONDS = 5.0
"""How long the front goes on answering 503 after the engine has died: long enough for clients to get their errors and
for a probe to see it; then the process ends with status 1, for its supervisor to start it anew."""
CONNECTION_CLOSE_SECONDS = 2

AppBuilder = Callable[[EngineClient, Config], Any]


class _Stop:
    """What signals have asked for so far."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.forced = asyncio.Event()
        loop = asyncio.get_running_loop()
        self.status = 0
        """That of a process which the first signal ended."""
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.asked.is_set():
            self.forced.set()
        else:
            self.status = 128 + number
            self.asked.set()


class _HTTPServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()


def load_front() -> AppBuilder:
    """Imports the HTTP side, which takes seconds, and returns what makes the application over a ready engine.

    That raises StartError when the tokenizer or the sampling defaults cannot be read.
    """
    from loraplex.server.app import create_app
    from loraplex.server.tokenizer_files import read_defaults, read_text

    def build(client: EngineClient, config: Config) -> Any:
        defaults = read_defaults(config.model)
        return create_app(client, read_text(config.model, client.info.vocab_size), config, defaults)

    return build


async def serve(config: Config, *, target: RankMain = worker_main, load: Callable[[], AppBuilder] = load_front) -> int:
    """Serves until a signal or the engine's death; returns the exit status. Raises StartError before it serves."""
    logging.basicConfig(level=config.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    check_files(config)
    stop = _Stop()
    with _bound_socket(config.server.host, config.server.port) as listener:
        loading = asyncio.create_task(asyncio.to_thread(load))
        client = await _start_engine(config, target, stop)
        if client is None:
            return stop.status
        try:
            print(_memory_table(client.info), file=sys.stderr)
            building = asyncio.create_task(_build(loading, client, config))
            if not await _finishes_before(building, stop.asked.wait()):
                _say("stopping")
                return stop.status
            return await _serve_http(building.result(), client, config, listener, stop)
        finally:
            ending = asyncio.create_task(client.shutdown(ENGINE_STOP_SECONDS))
            if not await _finishes_before(ending, stop.forced.wait()):
                client.kill()
                await ending


async def _build(loading: "asyncio.Task[AppBuilder]", client: EngineClient, config: Config) -> Any:
    build = await loading
    return await asyncio.to_thread(build, client, config)


async def _start_engine(config: Config, target: RankMain, stop: _Stop) -> EngineClient | None:
    """None when a signal came first."""
    starting = asyncio.create_task(EngineClient.start(config, _say, target=target))
    if not await _finishes_before(starting, stop.asked.wait()):
        _say("stopping")
        starting.cancel()
        await asyncio.wait([starting])
        return None
    try:
        return starting.result()
    except EngineStartError as error:
        raise StartError(str(error)) from None


async def _serve_http(app: Any, client: EngineClient, config: Config, listener: socket.socket, stop: _Stop) -> int:
    debug = config.server.log_level == "debug"
    logging.getLogger("uvicorn.access").addFilter(_as_debug)
    http = uvicorn.Config(
        app,
        http="h11",  # bounds a request's head; httptools takes headers of any size into memory
        log_config=None,
        log_level="debug" if debug else "warning",
        access_log=debug,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=CONNECTION_CLOSE_SECONDS,
    )
    name = config.model.served_names[0]
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    server = _HTTPServer(http, lambda: _say(f"serving {name} at {url}"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    ended = await _first(serving, stop.asked.wait(), client.dead.wait())
    if ended == 1:
        _say(f"stopping; requests under way: {client.num_open}")
    if ended == 2:
        await _first(stop.asked.wait(), asyncio.sleep(DEAD_ENGINE_SECONDS))
    client.refuse()
    server.should_exit = True
    if not await _finishes_before(serving, stop.forced.wait()):
        server.force_exit = True
    await serving
    return 0 if ended == 1 else 1


def _as_debug(record: logging.LogRecord) -> bool:
    """uvicorn calls its access lines INFO; they are shown only with --log-level debug."""
    record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    return True


async def _first(*awaitables: Awaitable[Any]) -> int:
    """Index of the one that ends first. Coroutines are cancelled then; tasks are left running."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    first = next(i for i, task in enumerate(tasks) if task.done())
    for task, awaitable in zip(tasks, awaitables):
        if task is not awaitable:
            task.cancel()
    return first


async def _finishes_before(task: "asyncio.Task[Any]", other: Awaitable[Any]) -> bool:
    return await _first(task, other) == 0


def _bound_socket(host: str, port: int) -> socket.socket:
    """Bound, not listening: connections are refused until the server is ready."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartError(f"--host {host}: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        advice = "; choose another with --port" if error.errno == errno.EADDRINUSE else ""
        raise StartError(f"--host {host} --port {port}: {error.strerror}{advice}") from None
    return listener


def _say(words: str) -> None:
    print(f"loraplex: {words}", file=sys.stderr, flush=True)


def _memory_table(info: Ready) -> str:
    """What was allocated, in MiB, and what the engine can hold."""
    head = (
        f"loraplex: {info.model_type} in {info.dtype} on {info.device}, context {info.context_length}, "
        f"KV pool {info.max_total_tokens} tokens, {len(info.adapters)} adapters"
    )
    rows = [*info.memory_table, ("total", sum(size for _, size in info.memory_table))]
    width = max(len(what) for what, _ in rows)
    return "\n".join([head, *(f"  {what:<{width}}  {size / 2**20:>12,.1f} MiB" for what, size in rows)])
