"""The engine's processes: one per tensor-parallel rank, spawned, tied to this process's life, ended for certain.

Rank 0 has a duplex pipe to this process and one to each follower; nothing else is shared. A rank ends when this
process does, however that happened, because a thread in it waits for that.
"""

import asyncio
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from loraplex.engine.config import Config

RankMain = Callable[[Config, int, Connection, list[Connection], str], None]
"""(config, rank, conn, follower_conns, init_file): `conn` goes to the front for rank 0, to rank 0 for a follower;
`follower_conns` is empty but for rank 0; `init_file` names a file not yet there, for the ranks to find each other."""

POLL_SECONDS = 0.02


def worker_main(config: Config, rank: int, conn: Connection, followers: list[Connection], init_file: str) -> None:
    """The real engine. Imported only in the child, so that the front never loads torch."""
    from loraplex.engine.worker import rank_main

    rank_main(config, rank, conn, followers, init_file)


def _run(
    target: RankMain, config: Config, rank: int, conn: Connection, followers: list[Connection], init_file: str
) -> None:
    # From here on for whatever comes; up to here `_sigint_blocked` has kept it away.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    target(config, rank, conn, followers, init_file)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Processes started meanwhile begin with SIGINT blocked. Ctrl-C in a terminal reaches the whole process group, the
    front alone decides what it means, and an interpreter at its first imports would answer with a traceback."""
    resource_tracker.ensure_running()  # starting it would unblock the signal again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Spawned processes would import this one's main script again, and what a user's script does at its top level must
    not happen in every rank: a rank needs nothing of it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class Ranks:
    """Started when made. `conn` is the front's end of rank 0's pipe."""

    def __init__(self, config: Config, target: RankMain = worker_main) -> None:
        context = multiprocessing.get_context("spawn")
        size = config.parallel.tp_size
        self._folder = Path(tempfile.mkdtemp(prefix="loraplex-"))
        self.conn, rank0_end = context.Pipe(duplex=True)
        pairs = [context.Pipe(duplex=True) for _ in range(1, size)]
        ends = [rank0_end, *(follower for _, follower in pairs)]
        self.processes: list[SpawnProcess] = []
        try:
            for rank, end in enumerate(ends):
                followers = [leader for leader, _ in pairs] if rank == 0 else []
                args = (target, config, rank, end, followers, str(self._folder / "init"))
                process = context.Process(target=_run, args=args, name=f"loraplex-rank{rank}", daemon=True)
                with _sigint_blocked(), _main_hidden():
                    process.start()
                self.processes.append(process)
        except BaseException:
            self.kill()
            self.close()
            raise
        finally:
            # A pipe reads as closed only when no process but its two owners holds an end.
            for end in [*ends, *(leader for leader, _ in pairs)]:
                end.close()

    def watch(self, on_exit: Callable[[int], None]) -> None:
        """Calls `on_exit(rank)` in the running loop once for each process that ends."""
        loop = asyncio.get_running_loop()

        def ended(rank: int) -> None:
            loop.remove_reader(self.processes[rank].sentinel)
            on_exit(rank)

        for rank, process in enumerate(self.processes):
            loop.add_reader(process.sentinel, ended, rank)

    def exit_words(self, rank: int) -> str:
        """How a process that has ended did."""
        process = self.processes[rank]
        process.join(1.0)
        code = process.exitcode
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    async def stop(self, timeout: float) -> None:
        """Waits for the processes to end by themselves, then asks the system, then forces them."""
        loop = asyncio.get_running_loop()
        if not await self._ended_within(timeout):
            for process in self.processes:
                process.terminate()
            if not await self._ended_within(1.0):
                self.kill()
                await self._ended_within(5.0)
        for process in self.processes:
            loop.remove_reader(process.sentinel)
        self.close()

    async def _ended_within(self, seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while any(process.is_alive() for process in self.processes):
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    def close(self) -> None:
        """Frees the pipe and the folder. Processes still alive see the pipe close."""
        self.conn.close()
        shutil.rmtree(self._folder, ignore_errors=True)
