"""The load generator's command against a server without a model."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.bench_target import Target

from loraplex.server.cli import main

Run = Callable[..., tuple[int, dict[str, Any]]]


@contextmanager
def running(target: Target) -> Iterator[str]:
    """In a thread: the command under test has an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    context = target.running()
    try:
        yield asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(_stop(context), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _stop(context: Any) -> None:
    await context.__aexit__(None, None, None)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0)  # transports close in the next turn


@pytest.fixture
def bench(tmp_path: Path) -> Run:
    """bench(target, *flags) → (exit status, report); the report is {} when there is none."""

    def run(target: Target, *flags: str) -> tuple[int, dict[str, Any]]:
        output = tmp_path / "report.json"
        with running(target) as url:
            status = main(["bench", "serve", "--base-url", url, "--no-progress", "--output", str(output), *flags])
        return status, json.loads(output.read_text()) if output.exists() else {}

    return run
