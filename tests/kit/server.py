"""A real server process for end-to-end tests."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

START_TIMEOUT = 180.0
"""Seconds until /ready; a loaded two-core machine imports torch slowly in each process."""


class Server(str):
    """Base URL of a running server, with its process and log."""

    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def log(self) -> str:
        """Standard output and error so far."""
        return self.log_path.read_text(errors="replace")


@contextmanager
def serve(
    model_dir: Path | str,
    *flags: str,
    env: Mapping[str, str] | None = None,
    hooks: bool = True,
    wait: bool = True,
) -> Iterator[Server]:
    """Runs `loraplex serve MODEL_DIR --port FREE FLAGS` until the block ends.

    On exit no process of it may be left.
    hooks: LORAPLEX_TEST_HOOKS=1, which opens /debug/state. wait=False yields before /ready answers 200.
    """
    port = free_port()
    server = Server(f"http://127.0.0.1:{port}")
    with tempfile.TemporaryDirectory() as folder, _killed_at_exit() as started:
        server.log_path = Path(folder) / "server.log"
        with server.log_path.open("wb") as log:
            server.process = subprocess.Popen(
                [*_COMMAND, "serve", str(model_dir), "--host", "127.0.0.1", "--port", str(port), *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(env or {}, hooks),
            )
        started.append(server.process)
        if wait:
            wait_ready(server)
        yield server
        _stop(server)


def wait_ready(server: Server, timeout: float = START_TIMEOUT) -> None:
    """Until /ready answers 200; an error with the log when the process ends or the time is up."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if (code := server.process.poll()) is not None:
            raise AssertionError(f"server ended with code {code}:\n{server.log[-4000:]}")
        with suppress(httpx.TransportError):
            if httpx.get(f"{server}/ready", timeout=5, trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"server not ready after {timeout} s:\n{server.log[-4000:]}")


def state(url: str) -> dict[str, Any]:
    """The accounting counters of /debug/state."""
    answer = httpx.get(f"{url}/debug/state", timeout=30, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def assert_idle(url: str, within: float = 5.0) -> dict[str, Any]:
    """No request holds anything: pages free or cached, leases 0. Aborts may need a moment (`within` s)."""
    deadline = time.monotonic() + within
    while True:
        now = state(url)
        idle = now["held"] == 0 and now["live_requests"] == 0 and not any(now["adapter_refs"].values())
        if idle or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert idle, f"not idle: {now}"
    assert now["free"] + now["cached"] == now["total"], f"pages lost: {now}"
    return now


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# -P and -c: neither the test folder nor the repository root may be importable in the server
_COMMAND = (sys.executable, "-P", "-c", "import sys; from loraplex.server.cli import main; sys.exit(main())")


def _environment(extra: Mapping[str, str], hooks: bool) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
    env |= {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    env.setdefault("OMP_NUM_THREADS", "1")
    if hooks:
        env["LORAPLEX_TEST_HOOKS"] = "1"
    if "PYTHONPATH" in env:  # relative entries such as .typing must survive a changed folder
        env["PYTHONPATH"] = os.pathsep.join(str(Path(p).resolve()) for p in env["PYTHONPATH"].split(os.pathsep) if p)
    return env | dict(extra)


def _stop(server: Server, timeout: float = 30.0) -> None:
    """SIGTERM, then checks that the server and all it started are gone."""
    family = _family(server.process)
    server.process.send_signal(signal.SIGTERM)
    try:
        server.process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"server ignores SIGTERM:\n{server.log[-4000:]}") from None
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, f"processes left behind: {alive}\n{server.log[-4000:]}"


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@contextmanager
def _killed_at_exit() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Kills what is still running of the listed processes and their children, whatever went wrong."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield started
    finally:
        for process in started:
            for member in reversed(_family(process)):
                with suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()
