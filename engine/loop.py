"""Rank 0's life: start-up, then receive → step → send until the front goes away.

A reader thread turns the pipe into an inbox, which finished adapter reads share; the loop empties it between steps and
sleeps on it when there is nothing to run.
"""

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol

import msgspec

from loraplex.engine import ranks
from loraplex.engine.config import Config
from loraplex.engine.device import resolve_device
from loraplex.engine.hooks import Hooks, read_hooks
from loraplex.engine.kv_cache import PagePool
from loraplex.engine.launched import LaunchedStep
from loraplex.engine.lora.errors import AdapterError
from loraplex.engine.lora.loader import AdapterLoader, Loaded, Prepared, prepare
from loraplex.engine.lora.manager import AdapterManager
from loraplex.engine.messages import (
    Abort,
    EngineMessage,
    EngineState,
    ErrorInfo,
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
    decode_front,
)
from loraplex.engine.parallel import init_parallel
from loraplex.engine.runner import ModelRunner
from loraplex.engine.scheduler import Limits, Scheduler
from loraplex.engine.step import Batch

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
FAILED_STEPS_ALLOWED = 3
"""Consecutive failing steps after which the device is taken to be broken and the process exits."""

STEP_FAILED = ErrorInfo(
    status=500,
    message="The step that held this request failed; it may be sent again.",
    type="server_error",
    code="step_failed",
)


class Sender(Protocol):
    """Where messages for the front go: the `Outbox`, or a list in tests."""

    def send(self, message: EngineMessage) -> None: ...


class EngineLoop:
    """Owns scheduler and runner of rank 0; everything happens on the thread that calls `run`."""

    def __init__(
        self,
        config: Config,
        runner: ModelRunner,
        manager: AdapterManager,
        num_pages: int,
        followers: ranks.Followers,
        outbox: Sender,
        hooks: Hooks,
    ) -> None:
        self.config = config
        self.runner = runner
        self.manager = manager
        self.followers = followers
        self.outbox = outbox
        self.hooks = hooks
        self.inbox: queue.SimpleQueue[FrontMessage | Loaded | None] = queue.SimpleQueue()
        pool = PagePool(num_pages, prefix_cache=not config.cache.disable_radix_cache)
        limits = Limits(
            page_size=config.cache.page_size,
            context_length=runner.context_length,
            max_running=config.scheduler.max_running_requests,
            max_queued=config.scheduler.max_queued_requests,
            chunk=runner.prompt_budget,
            adapter_slots=config.lora.max_loras_per_batch,
            eos_token_ids=frozenset(runner.eos_token_ids),
        )
        self.scheduler = Scheduler(
            limits,
            pool,
            manager.registry,
            manager.residency,
            seed=config.model.random_seed,
            preempt_every=hooks.preempt_every,
        )
        self.loader = AdapterLoader(
            runner.adapters, config.lora, runner.dtype, self.inbox.put, hooks.load_delay_ms / 1000
        )
        self._overlap = hooks.overlap or (
            runner.device.type == "cuda" and not config.scheduler.disable_overlap_schedule
        )
        """A step is prepared and launched while the one before it runs. On a CPU, which computes a step during its
        launch, that would only send every token a step later."""
        self._in_flight: tuple[Batch, LaunchedStep] | None = None
        self._steps = 0
        self._failed_in_a_row = 0
        self._last_heartbeat = 0.0

    @classmethod
    def start(cls, config: Config, followers: ranks.Followers, rendezvous: str, outbox: Sender) -> "EngineLoop":
        """Loads model and start-up adapters, sizes KV, runs the first forwards and reports Ready."""
        hooks = read_hooks(warn=False)
        config = hooks.resized(config)

        def say(text: str) -> None:
            outbox.send(Progress(text=text))

        device = resolve_device(config.model.device, 0)
        parallel = init_parallel(0, config.parallel.tp_size, rendezvous, device)
        runner = ModelRunner(config, parallel, device, say, static_steps=bool(hooks.static_steps))
        manager = AdapterManager(config.lora, runner.adapters, followers)
        if config.lora.enable_lora:
            _start_adapters(manager, runner, followers, say)
        say("allocating KV")
        followers.send(ranks.AllocateKV())
        num_pages = runner.allocate_kv()
        runner.warm_up()
        loop = cls(config, runner, manager, num_pages, followers, outbox, hooks)
        gc.collect()
        gc.freeze()
        outbox.send(loop._ready(num_pages))
        return loop

    def listen(self, connection: Connection) -> None:
        """Starts filling the inbox from the front's pipe."""
        threading.Thread(target=self._read, args=(connection,), name="inbox", daemon=True).start()

    def run(self) -> None:
        """Until the front closes the pipe or says Shutdown."""
        while self.turn():
            pass
        self.loader.close()
        self.followers.close()
        self.runner.parallel.close()

    def turn(self) -> bool:
        """Handles what came in, launches the next step if there is one, and sends the outputs of the step before it
        (without overlap: of this one). False: the front has gone."""
        if not self._receive():
            return False
        batch = self.scheduler.next_batch()
        launched = self._launch(batch) if batch is not None else None
        self._collect()
        if batch is not None and launched is not None:
            self._in_flight = batch, launched
            if not self._overlap:
                self._collect()
        self.manager.sweep()
        self._beat()
        return True

    @property
    def is_idle(self) -> bool:
        """Nothing to run and nothing running."""
        return not self.scheduler.has_work and self._in_flight is None

    # ---- messages

    def _read(self, connection: Connection) -> None:
        try:
            while True:
                self.inbox.put(decode_front(connection.recv_bytes()))
        except (EOFError, OSError):
            pass
        except Exception:  # an engine that no longer hears must not stay, or everyone waits for it
            log.exception("a message from the front is not understood; the engine ends")
        self.inbox.put(None)

    def _receive(self) -> bool:
        """Handles all messages waiting; with nothing to run, waits for one until the next heartbeat is due."""
        wait = self.is_idle
        while True:
            try:
                message = self.inbox.get(wait, HEARTBEAT_S if wait else None)
            except queue.Empty:
                return True
            if message is None or isinstance(message, Shutdown):
                return False
            self._handle(message)
            wait = False

    def _handle(self, message: FrontMessage | Loaded) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            self.scheduler.abort(message.id)
        elif isinstance(message, LoadAdapter):
            self.loader.submit(message)
        elif isinstance(message, Loaded):
            self.outbox.send(self.manager.finish_load(message))
        elif isinstance(message, UnloadAdapter):
            self.outbox.send(self.manager.unload(message))
        elif isinstance(message, GetState):
            self.outbox.send(self._state(message))

    def _submit(self, message: Submit) -> None:
        request = message.request
        error = self.scheduler.add(request)
        if error is not None:
            failed = [TokenOut(id=request.id, index=i, finish_reason="error", error=error) for i in range(request.n)]
            self.outbox.send(StepOutput(outputs=failed))

    # ---- a step

    def _launch(self, batch: Batch) -> LaunchedStep | None:
        """Starts a step; None, and its requests have ended, when that failed."""
        self._steps += 1
        sent = False
        try:
            self.hooks.before_step(self._steps, batch.request_ids)
            plan = batch.plan()
            sent = self.followers.send(plan)
            return self.runner.launch(plan, batch.sampling_plan(), self._poisoned(batch))
        except Exception:
            if sent:
                raise  # the ranks no longer stand at the same collective
            log.exception("step %d failed (%d sequences)", self._steps, len(batch.seqs))
            self._collect()  # what the step before has drawn belongs to its requests
            self._fail(batch)
            return None

    def _collect(self) -> None:
        """Waits for the step in flight, if there is one, and sends its outputs."""
        if self._in_flight is None:
            return
        (batch, step), self._in_flight = self._in_flight, None
        try:
            result = step.result()
        except Exception:
            if self.runner.parallel.size > 1:
                raise
            log.exception("a step failed on the device (%d sequences)", len(batch.seqs))
            self._fail(batch)
            return
        self._failed_in_a_row = 0
        self._send(self.scheduler.commit(batch, result))

    def _fail(self, batch: Batch) -> None:
        self._failed_in_a_row += 1
        self._send(self.scheduler.fail(batch, STEP_FAILED))
        if self._failed_in_a_row >= FAILED_STEPS_ALLOWED:
            raise RuntimeError(f"{self._failed_in_a_row} steps failed in a row; see the log above")

    def _send(self, outputs: list[TokenOut]) -> None:
        if outputs:
            self.outbox.send(StepOutput(outputs=outputs))

    def _poisoned(self, batch: Batch) -> frozenset[int]:
        return frozenset(i for i, id in enumerate(batch.request_ids) if id == self.hooks.nan_logits)

    # ---- reports

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._last_heartbeat < HEARTBEAT_S:
            return
        self._last_heartbeat = now
        counts, page = self.scheduler.pool.counts(), self.config.cache.page_size
        self.outbox.send(
            Heartbeat(
                step=self._steps,
                num_running=len(self.scheduler.running),
                num_waiting=len(self.scheduler.waiting),
                kv_used_tokens=counts.held * page,
                kv_cached_tokens=counts.cached * page,
                preemptions=self.scheduler.num_preemptions,
            )
        )

    def _state(self, message: GetState) -> Reply:
        """The counters, after checking that they add up: a leak is an error, not a number."""
        self.manager.sweep()
        try:
            self.scheduler.check()
        except AssertionError as error:
            log.error("accounting is broken: %s", error)
            return Reply(
                op=message.op, error=ErrorInfo(status=500, message=f"accounting: {error}", type="server_error")
            )
        counts = self.scheduler.pool.counts()
        state = EngineState(
            total=counts.total,
            free=counts.free,
            cached=counts.cached,
            held=counts.held,
            adapter_refs=self.manager.registry.refs(),
            live_requests=self.scheduler.num_live,
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            preemptions=self.scheduler.num_preemptions,
        )
        return Reply(op=message.op, result=msgspec.to_builtins(state))

    def _ready(self, num_pages: int) -> Ready:
        runner = self.runner
        return Ready(
            vocab_size=runner.spec.vocab_size,
            context_length=runner.context_length,
            max_total_tokens=num_pages * self.config.cache.page_size,
            page_size=self.config.cache.page_size,
            eos_token_ids=list(runner.eos_token_ids),
            model_type=runner.spec.model_type,
            dtype=str(runner.dtype).removeprefix("torch."),
            device=str(runner.device),
            memory_table=runner.memory_table,
            adapters=self.manager.registry.infos(),
        )


def _start_adapters(
    manager: AdapterManager, runner: ModelRunner, followers: ranks.Followers, say: Callable[[str], None]
) -> None:
    """Reads the start-up adapters, sizes the arena by them, loads them. Raises ValueError naming flag and adapter."""
    loaded = []
    for name, path in runner.config.lora.adapters:
        say(f"loading adapter {name}")
        request = LoadAdapter(op=0, name=name, path=path)
        try:
            loaded.append(Loaded(request, prepare(request, runner.adapters, runner.config.lora, runner.dtype)))
        except (AdapterError, MemoryError) as error:
            raise ValueError(f"--lora-paths {name}={path}: {error}") from error
    startup = [item.result.packed.nbytes for item in loaded if isinstance(item.result, Prepared)]
    followers.send(ranks.AllocateArena(startup))
    runner.allocate_arena(startup)
    for item in loaded:
        reply = manager.finish_load(item)
        if reply.error is not None:
            raise ValueError(f"--lora-paths {item.request.name}={item.request.path}: {reply.error.message}")
    words = f"adapters ({manager.bytes / 2**20:,.1f} MiB used)"
    runner.memory_table.append((words, runner.adapters.capacity_bytes))
