"""EngineClient against real processes that speak the messages without a model (`fake_rank`)."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from loraplex.engine.config import Config, LoRAConfig, ModelConfig, ParallelConfig, SchedulerConfig
from loraplex.engine.request import Request, SamplingParams
from loraplex.server.client import EngineClient, EngineStartError
from loraplex.server.engine_api import EngineError

HERE = Path(__file__).parent


@pytest.fixture
def fake_rank(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imported by its plain name, so that the spawned process finds it too."""
    monkeypatch.syspath_prepend(str(HERE))
    import fake_rank

    return fake_rank


def make_config(path: str = "fake", *, tp: int = 1, watchdog: float = 30.0, **scheduler: Any) -> Config:
    return Config(
        model=ModelConfig(model_path=path),
        parallel=ParallelConfig(tp_size=tp),
        scheduler=SchedulerConfig(watchdog_timeout=watchdog, **scheduler),
        lora=LoRAConfig(lora_paths=("first=/adapters/first",)),
    )


def run(fake_rank: ModuleType, body: Callable[[EngineClient], Awaitable[None]], config: Config | None = None) -> None:
    """Runs `body` with a started client, then checks that shutting down leaves no process."""

    async def main() -> None:
        client = await EngineClient.start(config or make_config(), target=fake_rank.rank_main)
        pids = [process.pid for process in client._ranks.processes]
        try:
            await asyncio.wait_for(body(client), 20)
        finally:
            await client.shutdown()
        assert not any(map(psutil.pid_exists, pids))

    asyncio.run(main())


def request(client: EngineClient, behaviour: int, *, n: int = 1, max_tokens: int = 5) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(id=client.new_id(), prompt_ids=[behaviour, 7], sampling=sampling, n=n)


async def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        await asyncio.sleep(0.01)


async def read_error(stream: Any) -> EngineError:
    with pytest.raises(EngineError) as caught:
        async for _ in stream:
            pass
    return caught.value


def test_start_reports_progress_ready_and_adapters(fake_rank: ModuleType) -> None:
    async def main() -> None:
        words: list[str] = []
        client = await EngineClient.start(make_config(tp=2), words.append, target=fake_rank.rank_main)
        assert words == ["loading 1/2"]
        assert client.info.context_length == 128
        assert list(client.adapters) == ["first"]
        assert client.healthy
        await client.shutdown()
        assert not client.healthy
        await client.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "words"),
    [("exits", "engine rank 0 ended with exit code 3"), ("fatal", "tensor lm_head.weight is missing")],
)
def test_failed_start_says_why_and_leaves_nothing(fake_rank: ModuleType, path: str, words: str) -> None:
    async def main() -> None:
        with pytest.raises(EngineStartError) as caught:
            await EngineClient.start(make_config(path, tp=2), target=fake_rank.rank_main)
        assert words in str(caught.value).splitlines()[-1]
        assert not ranks_of(os.getpid())

    asyncio.run(main())


def ranks_of(pid: int) -> list[psutil.Process]:
    """Engine processes below `pid`; multiprocessing's resource tracker lives as long as its parent and is not one."""
    return [
        child
        for child in psutil.Process(pid).children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and "spawn_main" in " ".join(child.cmdline())
    ]


def test_cancelled_start_leaves_nothing(fake_rank: ModuleType) -> None:
    async def main() -> None:
        starting = asyncio.create_task(EngineClient.start(make_config("hangs"), target=fake_rank.rank_main))
        await asyncio.sleep(0.3)
        assert ranks_of(os.getpid())
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not ranks_of(os.getpid())

    asyncio.run(main())


def test_outputs_arrive_in_order_for_each_choice(fake_rank: ModuleType) -> None:
    async def body(client: EngineClient) -> None:
        async def collect(max_tokens: int) -> None:
            tokens: dict[int, list[int]] = {}
            async for outputs in client.submit(request(client, fake_rank.COUNTS, n=3, max_tokens=max_tokens)):
                for output in outputs:
                    tokens.setdefault(output.index, []).extend(output.tokens)
            assert tokens == {i: list(range(max_tokens)) for i in range(3)}

        await asyncio.gather(*(collect(k) for k in range(1, 20)))
        assert client._streams == {}
        assert client._live_sequences == 0

    run(fake_rank, body)


def test_waiting_outputs_are_joined(fake_rank: ModuleType) -> None:
    async def body(client: EngineClient) -> None:
        stream = client.submit(request(client, fake_rank.COUNTS, max_tokens=50))
        await until(lambda: not stream.unfinished, 5)
        turns = [outputs async for outputs in stream]
        assert [len(outputs) for outputs in turns] == [50]

    run(fake_rank, body)


def test_error_of_one_request_arrives_as_output_and_ends_it(fake_rank: ModuleType) -> None:
    async def body(client: EngineClient) -> None:
        stream = client.submit(request(client, fake_rank.FAILS, n=4))
        [outputs] = [outputs async for outputs in stream]
        assert outputs[0].error is not None
        assert outputs[0].error.message == "never fits"
        assert client._live_sequences == 0
        assert client.healthy

    run(fake_rank, body)


def test_abort_ends_the_stream_and_reaches_the_engine_once(fake_rank: ModuleType) -> None:
    async def body(client: EngineClient) -> None:
        stream = client.submit(request(client, fake_rank.SILENT, n=2))
        reading = asyncio.create_task(drain(stream))
        await asyncio.sleep(0.05)
        assert (await client.state()).live_requests == 1
        stream.abort()
        stream.abort()
        assert await reading == []
        state = await client.state()
        assert (state.live_requests, state.preemptions) == (0, 1)  # the fake counts aborts as preemptions
        finished = client.submit(request(client, fake_rank.COUNTS))
        await drain(finished)
        finished.abort()
        assert (await client.state()).preemptions == 1

    run(fake_rank, body)


async def drain(stream: Any) -> list[Any]:
    return [outputs async for outputs in stream]


def test_messages_beyond_the_pipe_buffer_do_not_block_the_loop(fake_rank: ModuleType) -> None:
    async def body(client: EngineClient) -> None:
        os.kill(client._ranks.processes[0].pid, signal.SIGSTOP)
        started = time.monotonic()
        sampling = SamplingParams(max_tokens=1)
        big = [
            Request(id=client.new_id(), prompt_ids=[fake_rank.COUNTS] * 100_000, sampling=sampling) for _ in range(20)
        ]
        streams = [client.submit(one) for one in big]
        assert time.monotonic() - started < 1
        os.kill(client._ranks.processes[0].pid, signal.SIGCONT)
        for stream in streams:
            assert len(await drain(stream)) == 1

    run(fake_rank, body)


@pytest.mark.parametrize("victim", [0, 1])
def test_death_of_a_rank_fails_everything_at_once(fake_rank: ModuleType, victim: int) -> None:
    async def body(client: EngineClient) -> None:
        streams = [client.submit(request(client, fake_rank.SILENT)) for _ in range(8)]
        await client.state()
        os.kill(client._ranks.processes[0].pid, signal.SIGSTOP)  # so that the operation below stays open
        operation = asyncio.create_task(client.load_adapter("late", "/adapters/late"))
        await asyncio.sleep(0.05)
        os.kill(client._ranks.processes[victim].pid, signal.SIGKILL)
        started = time.monotonic()
        errors = await asyncio.gather(*(read_error(stream) for stream in streams))
        with pytest.raises(EngineError):
            await operation
        assert time.monotonic() - started < 1
        assert {(error.info.status, error.info.code) for error in errors} == {(503, "engine_dead")}
        assert not client.healthy
        assert client.dead.is_set()
        with pytest.raises(EngineError, match="engine has stopped"):
            client.submit(request(client, fake_rank.COUNTS))
        with pytest.raises(EngineError):
            await client.state()

    run(fake_rank, body, make_config(tp=2))


@pytest.mark.parametrize("behaviour", ["DIES", "CLOSES_PIPE"])
def test_engine_lost_by_a_request_fails_its_neighbours(fake_rank: ModuleType, behaviour: str) -> None:
    async def body(client: EngineClient) -> None:
        neighbour = client.submit(request(client, fake_rank.SILENT))
        culprit = client.submit(request(client, getattr(fake_rank, behaviour)))
        for error in await asyncio.gather(read_error(neighbour), read_error(culprit)):
            assert error.info.status == 503
        assert not client.healthy

    run(fake_rank, body)


def test_stopped_engine_is_unhealthy_until_it_goes_on(fake_rank: ModuleType) -> None:
    async def body(client: EngineClient) -> None:
        pid = client._ranks.processes[0].pid
        os.kill(pid, signal.SIGSTOP)
        stream = client.submit(request(client, fake_rank.COUNTS, max_tokens=3))
        await until(lambda: not client.healthy, 1.2)
        assert not client.dead.is_set()
        os.kill(pid, signal.SIGCONT)
        await until(lambda: client.healthy, 1)
        tokens = [token for outputs in await drain(stream) for output in outputs for token in output.tokens]
        assert tokens == [0, 1, 2]

    run(fake_rank, body, make_config(watchdog=0.6))


def test_shutdown_forces_a_stopped_engine(fake_rank: ModuleType) -> None:
    async def body(client: EngineClient) -> None:
        os.kill(client._ranks.processes[0].pid, signal.SIGSTOP)
        started = time.monotonic()
        await client.shutdown(timeout=0.2)
        assert time.monotonic() - started < 3

    run(fake_rank, body)


def test_refuse_ends_streams_without_a_finish_reason(fake_rank: ModuleType) -> None:
    async def body(client: EngineClient) -> None:
        stream = client.submit(request(client, fake_rank.SILENT))
        client.refuse()
        assert (await read_error(stream)).info.code == "shutting_down"
        with pytest.raises(EngineError, match="shutting down"):
            client.submit(request(client, fake_rank.COUNTS))

    run(fake_rank, body)


def test_adapters_mirror_what_the_engine_has(fake_rank: ModuleType) -> None:
    async def body(client: EngineClient) -> None:
        info = await client.load_adapter("second", "/adapters/second")
        assert client.adapters["second"] == info
        with pytest.raises(EngineError, match="has no place") as caught:
            await client.load_adapter("bad", "/adapters/bad")
        assert caught.value.info.status == 422
        assert sorted(client.adapters) == ["first", "second"]
        unloading = asyncio.create_task(client.unload_adapter("first"))
        await asyncio.sleep(0)
        assert sorted(client.adapters) == ["second"]  # before the engine has answered
        await unloading
        assert sorted(client.adapters) == ["second"]

    run(fake_rank, body)


def test_a_load_whose_caller_went_away_is_mirrored(fake_rank: ModuleType) -> None:
    async def body(client: EngineClient) -> None:
        loading = asyncio.create_task(client.load_adapter("second", "/adapters/second"))
        await asyncio.sleep(0)
        loading.cancel()
        await until(lambda: "second" in client.adapters, 2)
        assert client._operations == {}

    run(fake_rank, body)


def test_queue_limit_counts_sequences_and_frees_them(fake_rank: ModuleType) -> None:
    async def body(client: EngineClient) -> None:
        first = client.submit(request(client, fake_rank.SILENT, n=3))
        client.submit(request(client, fake_rank.SILENT, n=2))
        with pytest.raises(EngineError) as caught:
            client.submit(request(client, fake_rank.COUNTS, n=2))
        assert (caught.value.info.status, caught.value.info.code) == (503, "queue_full")
        assert caught.value.info.type == "overloaded_error"  # as in the engine's own refusal
        await drain(client.submit(request(client, fake_rank.COUNTS, n=1)))
        first.abort()
        assert len(await drain(client.submit(request(client, fake_rank.COUNTS, n=4)))) >= 1

    run(fake_rank, body, make_config(max_running_requests=4, max_queued_requests=2))


def test_engine_ends_when_the_front_is_killed(fake_rank: ModuleType) -> None:
    script = textwrap.dedent("""
        import asyncio, sys
        from loraplex.engine.config import Config, ModelConfig, ParallelConfig
        from loraplex.server.client import EngineClient
        import fake_rank

        async def main():
            config = Config(model=ModelConfig(model_path="hangs"), parallel=ParallelConfig(tp_size=2))
            starting = asyncio.create_task(EngineClient.start(config, target=fake_rank.rank_main))
            await asyncio.sleep(0.1)
            print("started", flush=True)
            await starting

        if __name__ == "__main__":
            asyncio.run(main())
    """)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
    front = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=env)
    try:
        assert front.stdout is not None
        assert front.stdout.readline() == b"started\n"
        time.sleep(1.0)  # the children are past their imports and asleep, as a rank that loads a model is
        children = ranks_of(front.pid)
        assert len(children) == 2
    finally:
        front.kill()
        front.communicate()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []
