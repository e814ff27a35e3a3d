"""The command as a process: statuses, messages, signals, and what is left behind."""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from loraplex.server.flags import parse
from loraplex.server.serve import check_files

HERE = Path(__file__).parent


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LORAPLEX_")}
    return kept | {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}


def loraplex(*argv: str, module: str = "loraplex.server") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", module, *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Fake"]}))
    return folder


class Server:
    """A running `serve_fake`, its address and what it wrote to stderr so far."""

    def __init__(self, *argv: str) -> None:
        command = [sys.executable, "-P", str(HERE / "serve_fake.py"), "--port", "0", *argv]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
        self.lines: queue.Queue[str] = queue.Queue()
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            self.lines.put(line)

    def wait_for(self, pattern: str) -> re.Match[str]:
        while True:
            found = re.search(pattern, self.lines.get(timeout=20))
            if found:
                return found

    def url(self) -> str:
        return self.wait_for(r"serving \S+ at (http://\S+)")[1]

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, children: list[psutil.Process], within: float) -> int:
        """Exit status; checks that no child outlives the server."""
        code = self.process.wait(within)
        _, alive = psutil.wait_procs(children, timeout=1)
        assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []
        self._reader.join(5)
        return code


@pytest.fixture
def server(model_dir: Path) -> Iterator[Server]:
    running = Server(str(model_dir), "--served-model-name", "tiny", "--watchdog-timeout", "1")
    yield running
    running.process.kill()
    running.process.wait()
    running._reader.join(5)
    assert running.process.stderr is not None
    running.process.stderr.close()


def health(url: str) -> int:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    started = time.monotonic()
    result = loraplex("serve", "--help")
    assert time.monotonic() - started < 2  # 0.1 s on an idle machine
    assert result.returncode == 0
    assert "--lora-paths NAME=PATH" in result.stdout
    script = (
        "import sys; from loraplex.server.flags import parse; parse(['m'])\n"
        "assert not {'torch', 'transformers', 'fastapi', 'uvicorn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True, timeout=60, env=environment())


def test_commands() -> None:
    assert loraplex("--version").stdout.startswith("loraplex ")
    assert "loraplex serve MODEL_DIR" in loraplex("help").stdout
    wrong = loraplex("-m", module="loraplex.server")
    assert wrong.returncode == 2


def test_unknown_command_and_flag_are_one_line_and_status_2(model_dir: Path) -> None:
    result = loraplex(str(model_dir), "--prot", "1")
    assert result.returncode == 2
    assert result.stderr == ("loraplex serve: error: the command line: --prot is unknown; did you mean --port?\n")


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("missing", "nowhere does not exist; models are not downloaded"),
        ("heads", "--tp-size 3 cannot split num_key_value_heads 4 of"),
        ("file", "config.json is not a folder"),
        ("no_config", "config.json does not exist"),
        ("template", "--chat-template: nowhere.jinja is not a file"),
        ("adapter", "--lora-paths a: nowhere does not exist"),
        ("root", "--adapter-root: nowhere does not exist"),
    ],
)
def test_files_are_checked_before_anything_starts(model_dir: Path, tmp_path: Path, broken: str, words: str) -> None:
    (model_dir / "config.json").write_text(json.dumps({"num_attention_heads": 6, "num_key_value_heads": 4}))
    argv = {
        "heads": [str(model_dir), "--tp-size", "3"],
        "missing": ["nowhere"],
        "file": [str(model_dir / "config.json")],
        "no_config": [str(tmp_path)],
        "template": [str(model_dir), "--chat-template", "nowhere.jinja"],
        "adapter": [str(model_dir), "--lora-paths", "a=nowhere"],
        "root": [str(model_dir), "--adapter-root", "nowhere"],
    }[broken]
    result = loraplex("serve", *argv)
    assert result.returncode == 1
    assert words in result.stderr.splitlines()[-1]


def test_taken_port_is_an_error_before_the_engine_starts(model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = loraplex("serve", str(model_dir), "--port", str(port))
    assert result.returncode == 1
    assert f"--port {port}: Address already in use; choose another with --port" in result.stderr.splitlines()[-1]


def test_start_failure_of_the_engine_is_the_last_line(tmp_path: Path) -> None:
    broken = tmp_path / "fatal"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    failed = Server(str(broken))
    children = failed.children()
    assert failed.end(children, 20) == 1
    assert failed.log[-1].rstrip() == "model.safetensors: tensor lm_head.weight is missing"
    assert failed.process.stderr is not None
    failed.process.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_open_requests_and_the_server_with_status_0(server: Server, number: signal.Signals) -> None:
    url = server.url()
    assert any("weights" in line and "3.0 MiB" in line for line in server.log)
    children = server.children()
    with urllib.request.urlopen(f"{url}/work", timeout=10) as response:
        assert response.readline() == b"started\n"
        server.process.send_signal(number)
        assert response.read() == b"shutting_down"
    assert server.end(children, 4) == 0
    assert server.log[-1] == "loraplex: stopping; requests under way: 1\n"
    with pytest.raises(OSError):
        health(url)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("moment", [0, 0.1, 0.4])
def test_signal_early_in_the_start(model_dir: Path, moment: float, number: signal.Signals, status: int) -> None:
    """The real command: a signal among its imports, or those of the engine, ends all at once, without a traceback."""
    (model_dir / "config.json").write_text("{}")
    command = [sys.executable, "-P", "-m", "loraplex.server", "serve", str(model_dir), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "loraplex: starting\n"
    time.sleep(moment)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    sent = time.monotonic()
    _, log = process.communicate(timeout=20)  # its children hold stderr: it ends when the last has
    assert process.returncode == status
    assert log == "loraplex: stopping\n"
    assert time.monotonic() - sent < 3


def test_code_of_a_checkpoint_is_ignored_with_a_warning(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    (model_dir / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "code.Config"}}))
    check_files(parse([str(model_dir)], {}))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "auto_map is ignored: code that comes with a checkpoint is never run" in caplog.text


def test_signal_to_the_whole_group_while_loading(tmp_path: Path) -> None:
    slow = tmp_path / "hangs"
    slow.mkdir()
    (slow / "config.json").write_text("{}")
    loading = Server(str(slow))
    time.sleep(1)
    children = loading.children()
    assert children
    for process in [psutil.Process(loading.process.pid), *children]:
        process.send_signal(signal.SIGINT)  # as Ctrl-C in a terminal does
    assert loading.end(children, 5) == 130
    assert loading.log == ["loraplex: stopping\n"]
    assert loading.process.stderr is not None
    loading.process.stderr.close()


def test_second_signal_does_not_wait_for_a_hung_engine(server: Server) -> None:
    server.url()
    children = server.children()
    engine = next(child for child in children if "spawn_main" in " ".join(child.cmdline()))
    engine.suspend()
    server.process.terminate()
    time.sleep(0.2)
    server.process.terminate()
    assert server.end(children, 1) == 0


def test_access_lines_are_of_the_debug_level(model_dir: Path) -> None:
    running = Server(str(model_dir), "--log-level", "debug")
    url = running.url()
    children = running.children()
    assert health(url) == 200
    running.process.terminate()
    assert running.end(children, 4) == 0
    [line] = [line for line in running.log if "GET /health" in line]
    assert " DEBUG uvicorn.access: " in line
    assert running.process.stderr is not None
    running.process.stderr.close()


def test_hung_engine_turns_health_red_and_back(server: Server) -> None:
    url = server.url()
    assert health(url) == 200
    engine = next(child for child in server.children() if "spawn_main" in " ".join(child.cmdline()))
    engine.suspend()
    time.sleep(1.3)
    assert health(url) == 503
    engine.resume()
    time.sleep(0.3)
    assert health(url) == 200


def test_dead_engine_is_reported_then_ends_the_server_with_status_1(server: Server) -> None:
    url = server.url()
    children = server.children()
    with urllib.request.urlopen(f"{url}/die", timeout=10) as response:
        assert response.read() == b"started\nengine_dead"
    assert health(url) == 503
    assert server.end(children, 10) == 1
    assert any("was ended by SIGKILL" in line for line in server.log)
