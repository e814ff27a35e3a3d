"""Entry of every engine process. Rank 0 plans and talks to the front; follower ranks execute what it sends."""

import gc
import logging
import signal
import sys
import traceback
from multiprocessing.connection import Connection

from loraplex.engine import ranks
from loraplex.engine.config import Config
from loraplex.engine.device import resolve_device
from loraplex.engine.hooks import read_hooks
from loraplex.engine.loop import EngineLoop
from loraplex.engine.lora.errors import AdapterError
from loraplex.engine.lora.loader import guarded, read
from loraplex.engine.messages import ErrorInfo, Fatal, encode
from loraplex.engine.outbox import Outbox
from loraplex.engine.parallel import init_parallel
from loraplex.engine.runner import ModelRunner


def rank_main(config: Config, rank: int, connection: Connection, followers: list[Connection], rendezvous: str) -> None:
    """Runs one rank until the front (rank 0) or rank 0 (followers) closes the pipe.

    `connection` leads to the front on rank 0, to rank 0 on followers; `followers` is empty on followers. What goes
    wrong is told to the front as `Fatal`, and the process exits with 1.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front decides what it means
    logging.basicConfig(
        level=config.server.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        if rank == 0:
            _lead(config, connection, ranks.Followers(followers), rendezvous)
        else:
            _follow(config, rank, connection, rendezvous)
    except Exception as error:
        text = str(error) if isinstance(error, ValueError) else traceback.format_exc()
        logging.getLogger(__name__).debug("rank %d ends", rank, exc_info=True)
        if rank == 0:
            connection.send_bytes(encode(Fatal(text=text)))
        else:
            print(f"rank {rank}: {text}", file=sys.stderr, flush=True)
        sys.exit(1)


def _lead(config: Config, connection: Connection, followers: ranks.Followers, rendezvous: str) -> None:
    outbox = Outbox(connection)
    try:
        loop = EngineLoop.start(config, followers, rendezvous, outbox)
        loop.listen(connection)
        loop.run()
    finally:
        outbox.close()


def _follow(config: Config, rank: int, connection: Connection, rendezvous: str) -> None:
    hooks = read_hooks(warn=False)
    config = hooks.resized(config)
    device = resolve_device(config.model.device, rank)
    parallel = init_parallel(rank, config.parallel.tp_size, rendezvous, device)
    runner = ModelRunner(config, parallel, device, say=lambda _: None, static_steps=bool(hooks.static_steps))
    while True:
        try:
            message = ranks.decode(connection.recv_bytes())
        except EOFError:
            parallel.close()
            return
        if isinstance(message, ranks.AllocateArena):
            runner.allocate_arena(message.startup)
        elif isinstance(message, ranks.AllocateKV):
            runner.allocate_kv()
            runner.warm_up()
            gc.freeze()
        elif isinstance(message, ranks.Store):
            connection.send_bytes(ranks.encode(ranks.Stored(_store(runner, config, message))))
        elif isinstance(message, ranks.Place):
            runner.adapters.place(message.version, message.row)
        elif isinstance(message, ranks.Evict):
            runner.adapters.evict(message.version)
        elif isinstance(message, ranks.Drop):
            runner.adapters.drop(message.version)
        else:
            runner.launch(message, None)


def _store(runner: ModelRunner, config: Config, message: ranks.Store) -> ErrorInfo | None:
    """Reads the adapter again on this rank: its files must still be those that rank 0 has checked."""

    def store() -> None:
        adapter = read(message.path, runner.adapters.sites, config.lora, runner.dtype)
        if adapter.digest != message.digest:
            raise AdapterError("the adapter's files changed while it was being loaded; load it again", status=409)
        runner.adapters.store(message.version, runner.adapters.pack(adapter))

    return guarded(f"version {message.version}", store)
