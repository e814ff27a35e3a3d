"""The front's side of the pipe to the engine: submits, aborts, operations, and what comes back.

Everything here runs in the event loop, but for one thread that writes: a pipe holds about 64 KiB and then blocks the
writer. Reading happens in the loop as messages arrive. The engine is alive as long as its processes are, and healthy
as long as its step loop gives signs of life; when a process ends, all that was waiting fails at once.
"""

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from loraplex.engine.config import Config
from loraplex.engine.messages import (
    Abort,
    AdapterInfo,
    EngineState,
    ErrorInfo,
    Fatal,
    FrontMessage,
    GetState,
    Heartbeat,
    LoadAdapter,
    Progress,
    Ready,
    Reply,
    Shutdown,
    StepOutput,
    Submit,
    TokenOut,
    UnloadAdapter,
    decode_engine,
    encode,
)
from loraplex.engine.request import Request
from loraplex.server.engine_api import EngineError
from loraplex.server.mailbox import Mailbox
from loraplex.server.ranks import RankMain, Ranks, worker_main

log = logging.getLogger(__name__)

PIPE_CLOSED_GRACE = 0.5
"""Seconds between the end of the pipe and of the process that held it, before the engine counts as dead anyway."""

FIRST_RANK_GRACE = 2.0
"""Seconds that rank 0 has to say what is wrong, when a follower failed to start: mostly both failed for one reason."""


QUEUE_FULL = ErrorInfo(status=503, message="The request queue is full.", code="queue_full", type="overloaded_error")
"""The words of the engine's own refusal, which comes when the front's count runs behind."""


class EngineStartError(Exception):
    """The engine did not get ready. The text is for the operator; its last line names what is wrong."""


@dataclass(frozen=True)
class _Operation:
    future: "asyncio.Future[dict[str, Any]]"
    on_result: Callable[[dict[str, Any]], None]
    """Keeps the mirror right even when the caller has gone."""


def _unavailable(message: str, code: str) -> ErrorInfo:
    return ErrorInfo(status=503, message=message, code=code, type="server_error")


class EngineClient:
    """An `Engine` in processes of its own. Made by `start`, ended by `shutdown`."""

    info: Ready

    def __init__(self, config: Config, on_progress: Callable[[str], None], target: RankMain) -> None:
        self.adapters: dict[str, AdapterInfo] = {}
        self.last_heartbeat: Heartbeat | None = None
        self.dead = asyncio.Event()
        """Set when a process of the engine has ended unasked."""
        self._limits = config.scheduler
        self._on_progress = on_progress
        self._refusal: ErrorInfo | None = None
        self._streams: dict[int, Mailbox] = {}
        self._live_sequences = 0
        self._operations: dict[int, _Operation] = {}
        self._ids = itertools.count(1)
        self._op_numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._last_sign = self._loop.time()
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._ranks = Ranks(config, target)
        self._ranks.watch(self._on_exit)
        self._loop.add_reader(self._ranks.conn.fileno(), self._on_readable)
        self._sender = threading.Thread(target=self._send_all, name="engine-sender", daemon=True)
        self._sender.start()

    @classmethod
    async def start(
        cls, config: Config, on_progress: Callable[[str], None] = log.info, *, target: RankMain = worker_main
    ) -> "EngineClient":
        """Spawns the ranks and waits until the model has done its first forward.

        `on_progress` gets a line of words now and then. Raises EngineStartError; leaves no process behind then, nor
        when cancelled.
        """
        client = cls(config, on_progress, target)
        try:
            client.info = await client._ready
        except BaseException:
            await client.shutdown(timeout=0)
            raise
        return client

    # what handlers call

    @property
    def healthy(self) -> bool:
        silent_for = self._loop.time() - self._last_sign
        return self._ready.done() and self._refusal is None and silent_for < self._limits.watchdog_timeout

    @property
    def num_open(self) -> int:
        """Requests submitted and not yet ended."""
        return len(self._streams)

    def new_id(self) -> int:
        return next(self._ids)

    def submit(self, request: Request) -> Mailbox:
        if self._refusal is not None:
            raise EngineError(self._refusal)
        assert request.id not in self._streams, f"{request.id = } is in use"
        self._check_room(request.n)
        stream = Mailbox(request.id, request.n, self._abort)
        self._streams[request.id] = stream
        self._live_sequences += request.n
        self._send(Submit(request=request))
        return stream

    async def load_adapter(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        def loaded(result: dict[str, Any]) -> None:
            self.adapters[name] = msgspec.convert(result, AdapterInfo)

        message = LoadAdapter(op=next(self._op_numbers), name=name, path=path, replace=replace, pinned=pinned)
        return msgspec.convert(await self._operate(message, loaded), AdapterInfo)

    async def unload_adapter(self, name: str) -> None:
        def unloaded(result: dict[str, Any]) -> None:
            self.adapters.pop(name, None)  # a load that was under way when the unload was asked for

        self.adapters.pop(name, None)
        await self._operate(UnloadAdapter(op=next(self._op_numbers), name=name), unloaded)

    async def state(self) -> EngineState:
        result = await self._operate(GetState(op=next(self._op_numbers)), lambda result: None)
        return msgspec.convert(result, EngineState)

    # life

    def refuse(self) -> None:
        """First half of a shutdown: open requests end with an error, new ones are refused, the engine stops them."""
        ids = list(self._streams)
        self._fail_all(_unavailable("the server is shutting down", "shutting_down"))
        for id in ids:
            self._send(Abort(id=id))

    async def shutdown(self, timeout: float = 5.0) -> None:
        """Ends the engine's processes: asked first, forced after `timeout` seconds. Harmless twice."""
        if self._ranks.conn.closed:
            return
        self.refuse()
        self._send(Shutdown())
        self._outbox.put(None)
        self._loop.remove_reader(self._ranks.conn.fileno())
        await self._ranks.stop(timeout)
        self._sender.join(1.0)

    def kill(self) -> None:
        """Ends the engine's processes at once; a `shutdown` under way then has nothing left to wait for."""
        self._ranks.kill()

    def _on_exit(self, rank: int) -> None:
        if self._refusal is not None:
            return
        self._on_readable()  # its last words
        reason = f"engine rank {rank} {self._ranks.exit_words(rank)}"
        if rank > 0 and not self._ready.done():
            self._loop.call_later(FIRST_RANK_GRACE, self._die, reason)
        else:
            self._die(reason)

    def _die(self, reason: str) -> None:
        if self.dead.is_set() or self._ranks.conn.closed:
            return
        self.dead.set()
        if not self._ready.done():
            self._ready.set_exception(EngineStartError(reason))
        else:
            log.error("the engine is dead: %s", reason)
        self._fail_all(_unavailable("the engine has stopped; the request was not finished", "engine_dead"))
        self._ranks.kill()

    def _fail_all(self, failure: ErrorInfo) -> None:
        """From now on nothing is accepted; what was waiting ends with `failure`."""
        self._refusal = self._refusal or failure
        for stream in self._streams.values():
            stream.fail(EngineError(failure))
        self._streams.clear()
        self._live_sequences = 0
        for operation in self._operations.values():
            if not operation.future.done():
                operation.future.set_exception(EngineError(failure))
        self._operations.clear()

    # out

    def _check_room(self, n: int) -> None:
        waiting_limit = self._limits.max_queued_requests
        if waiting_limit is None:
            return
        if self._live_sequences + n > self._limits.max_running_requests + waiting_limit:
            raise EngineError(QUEUE_FULL)

    def _abort(self, stream: Mailbox) -> None:
        if self._streams.pop(stream.id, None) is not None:
            self._live_sequences -= len(stream.unfinished)
            self._send(Abort(id=stream.id))
        stream.close()

    async def _operate(
        self, message: LoadAdapter | UnloadAdapter | GetState, on_result: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any]:
        if self._refusal is not None:
            raise EngineError(self._refusal)
        operation = _Operation(self._loop.create_future(), on_result)
        self._operations[message.op] = operation
        self._send(message)
        return await operation.future

    def _send(self, message: FrontMessage) -> None:
        self._outbox.put(encode(message))

    def _send_all(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._ranks.conn.send_bytes(message)
            except OSError:  # the engine is gone; the loop learns it from the process
                return

    # in

    def _on_readable(self) -> None:
        conn = self._ranks.conn
        try:
            while not conn.closed and conn.poll():
                self._dispatch(conn.recv_bytes())
        except (EOFError, OSError):
            self._loop.remove_reader(conn.fileno())
            self._loop.call_later(PIPE_CLOSED_GRACE, self._die, "the engine closed its pipe")

    def _dispatch(self, data: bytes) -> None:
        match decode_engine(data):
            case StepOutput(outputs=outputs):
                self._last_sign = self._loop.time()
                for output in outputs:
                    self._deliver(output)
            case Heartbeat() as beat:
                self._last_sign = self._loop.time()
                self.last_heartbeat = beat
            case Reply() as reply:
                self._answer(reply)
            case Ready() as ready:
                self._last_sign = self._loop.time()
                self.adapters = {adapter.name: adapter for adapter in ready.adapters}
                if not self._ready.done():
                    self._ready.set_result(ready)
            case Progress(text=text):
                self._on_progress(text)
            case Fatal(text=text):
                self._die(text)

    def _deliver(self, output: TokenOut) -> None:
        stream = self._streams.get(output.id)
        if stream is None:  # aborted, and the engine did not know yet
            return
        open_before = len(stream.unfinished)
        stream.put(output)
        self._live_sequences -= open_before - len(stream.unfinished)
        if not stream.unfinished:
            del self._streams[output.id]
            if output.error is not None and open_before > 1:
                self._send(Abort(id=output.id))  # the choices that did not fail

    def _answer(self, reply: Reply) -> None:
        operation = self._operations.pop(reply.op, None)
        if operation is None:
            return
        if reply.error is not None:
            if not operation.future.done():
                operation.future.set_exception(EngineError(reply.error))
            return
        result = reply.result or {}
        operation.on_result(result)
        if not operation.future.done():
            operation.future.set_result(result)
