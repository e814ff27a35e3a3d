"""CUDA graphs in the engine, bf16: what they replay is what the same kernels compute when each is launched by itself.

Eager steps run at their own size and graphs at their bucket's, and a size chooses tiles: logprobs agree to bf16's
noise, and greedy ids are compared as long as the likeliest two tokens are further apart than that.
"""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.adapters import make_a, make_adapter
from kit.engine import TestEngine

from loraplex.engine.graphs import StepGraphs

pytestmark = pytest.mark.gpu

NOISE = 0.25
"""On logprobs of T1, whose logits are large; a wrong adapter moves them by several."""


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(length)]


def engine_of(t1: Path, adapters: dict[str, Path] | None = None, **settings: Any) -> TestEngine:
    options = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_running_requests": 64,
        "max_total_tokens": 16384,
        "chunked_prefill_size": 512,
    }
    return TestEngine(t1, adapters, **(options | settings))


def ask(
    engine: TestEngine, jobs: list[tuple[list[int], str | None]], *, every: int = 100, **sampling: Any
) -> list[Any]:
    """Outputs of each job; `every` so many are submitted, two steps run: the later ones make mixed steps."""
    options = {"max_tokens": 10, "ignore_eos": True, "logprobs": 2} | sampling
    ids = []
    for i, (prompt, name) in enumerate(jobs):
        ids.append(engine.submit(prompt, name, **options))
        if i % every == every - 1:
            engine.turn()
            engine.turn()
    engine.run()
    return [engine.outputs(id) for id in ids]


def assert_alike(found: list[Any], expected: list[Any]) -> float:
    """Returns the largest difference of a logprob; compares each answer up to a near tie that went the other way."""
    largest, compared = 0.0, 0
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            (lp,), (other,) = a.logprobs, b.logprobs
            if lp.token != other.token:
                gap = other.top[0][1] - other.top[1][1]
                assert gap < NOISE, (lp, other)
                break
            largest = max(largest, abs(lp.logprob - other.logprob))
            compared += 1
    assert largest < NOISE
    assert compared > len(found) * 2
    return largest


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step was replayed."""
    steps: list[bool] = []
    run = StepGraphs.run

    def noting(*args: Any) -> Any:
        out = run(*args)
        steps.append(out is not None)
        return out

    monkeypatch.setattr(StepGraphs, "run", noting)
    return steps


@pytest.mark.parametrize("backend", ["csgmv", "triton"])
def test_on_equals_off_with_more_adapters_than_at_capture(t1: Path, backend: str, replayed: list[bool]) -> None:
    folders = {f"a{i}": make_a(i, t1) for i in range(1, 9)}
    names = [None, *folders]
    jobs = [(prompt_of(5 + 3 * i, i), names[i % 9]) for i in range(40)]
    off = engine_of(t1, folders, disable_cuda_graph=True, lora_backend=backend)
    on = engine_of(t1, {"a7": folders["a7"]}, lora_backend=backend)  # the largest rank
    for name, folder in folders.items():
        assert on.load(name, folder).error is None
    replayed.clear()
    print(f"\nlargest |dlogprob| {assert_alike(ask(on, jobs, every=7), ask(off, jobs, every=7)):.3f}", end="")
    assert len(replayed) > 10
    assert all(replayed)
    apart = ask(on, [(prompt_of(20), name) for name in names], max_tokens=3)
    assert len({tuple(lp.logprob for out in outs for lp in out.logprobs) for outs in apart}) == len(names)


def test_every_decode_batch_size(t1: Path) -> None:
    folders = {f"a{i}": make_a(i, t1) for i in range(1, 9)}
    names = [None, *folders]
    on, off = engine_of(t1, folders), engine_of(t1, folders, disable_cuda_graph=True)
    for n in (*range(1, 18), 31, 33, 47, 63, 64):
        jobs = [(prompt_of(4 + i % 5, i), names[(i + n) % 9]) for i in range(n)]
        assert_alike(ask(on, jobs, max_tokens=4), ask(off, jobs, max_tokens=4))


def test_adapters_replaced_and_evicted_between_replays(t1: Path) -> None:
    """Room for two; five take turns, and one name gets new content."""
    folders = {f"a{i}": make_adapter(t1, "ALL", r=8, seed=i) for i in range(5)}
    off = engine_of(t1, folders, disable_cuda_graph=True)
    room = 2 * max(info.bytes for info in off.loop.manager.registry.infos())
    on = engine_of(t1, {"a0": folders["a0"]}, lora_memory=str(room))
    for name, folder in folders.items():
        assert on.load(name, folder).error is None
    for turn in range(3):
        jobs = [(prompt_of(6 + i, i), f"a{(i + turn) % 5}") for i in range(10)]
        assert_alike(ask(on, jobs), ask(off, jobs))
    for engine in (on, off):
        assert engine.load("a0", folders["a3"], replace=True).error is None
    jobs = [(prompt_of(9, i), "a0") for i in range(3)]
    assert_alike(ask(on, jobs), ask(off, jobs))


def test_larger_rank_is_captured_under_way(t1: Path, replayed: list[bool]) -> None:
    folders = {"small": make_adapter(t1, "ALL", r=4), "large": make_adapter(t1, "ALL", r=100, seed=2)}
    on, off = engine_of(t1, {"small": folders["small"]}), engine_of(t1, folders, disable_cuda_graph=True)
    assert on.load("large", folders["large"]).error is None
    replayed.clear()
    jobs = [(prompt_of(9), "large"), (prompt_of(9), "small"), (prompt_of(9), None)]
    assert_alike(ask(on, jobs, max_tokens=40), ask(off, jobs, max_tokens=40))
    assert not replayed[0]
    assert replayed[-1]


def test_padding_writes_no_kv(t1: Path) -> None:
    engine = engine_of(t1, {"x": make_a(1, t1)}, page_size=16, max_total_tokens=2048)
    engine.loop.scheduler.pool._free.reverse()  # page 0, where a wrong default would write, stays free
    for k, v in engine.loop.runner.kv:
        k.fill_(7.25)
        v.fill_(7.25)
    ids = [engine.submit(prompt_of(3 + 9 * i, i), "x" if i else None, max_tokens=30, ignore_eos=True) for i in range(5)]
    held: set[int] = set()
    while not all(engine.outputs(id) and engine.outputs(id)[-1].finish_reason for id in ids):
        engine.turn()
        held |= {page for seq in engine.loop.scheduler.running for page in seq.pages}
    torch.cuda.synchronize()
    free = torch.tensor(sorted(set(range(engine.loop.scheduler.pool.num_pages)) - held), device="cuda")
    assert len(free)
    for caches in engine.loop.runner.kv:
        for cache in caches:
            assert (cache.unflatten(0, (-1, 16))[free] == 7.25).all()


@pytest.mark.parametrize("graphs", [True, False])
def test_overlap_on_equals_off(t1: Path, graphs: bool) -> None:
    """The same steps in the same order, so the same bits: all requests arrive before the first step, end by count."""
    folders = {f"a{i}": make_a(i, t1) for i in range(1, 5)}
    names = [None, *folders]
    jobs = [(prompt_of(5 + 4 * i, i), names[i % 5]) for i in range(16)]
    answers = []
    for overlap in (True, False):
        engine = engine_of(t1, folders, disable_overlap_schedule=not overlap, disable_cuda_graph=not graphs)
        answers.append(
            [
                [(out.tokens, out.logprobs, out.finish_reason) for outs in ask(engine, jobs, **options) for out in outs]
                for options in ({}, {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.5, "top_p": 0.9})
            ]
        )
    assert answers[0] == answers[1]


def test_a_launch_does_not_wait_for_the_device(t1: Path) -> None:
    """With the device kept busy, a step is launched long before it can run: nothing on its way reads the device."""
    engine = engine_of(t1, {"x": make_a(1, t1)})
    options = {"max_tokens": 30, "ignore_eos": True}
    for i in range(4):
        engine.submit(prompt_of(9, i), "x" if i % 2 else None, **options)
        engine.submit(prompt_of(9, i), None, temperature=0.7, seed=i, top_k=5, presence_penalty=0.3, **options)
    for _ in range(4):
        engine.turn()
    loop = engine.loop
    loop._collect()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    began = time.monotonic()
    batch = loop.scheduler.next_batch()
    assert batch is not None
    step = loop._launch(batch)
    seconds = time.monotonic() - began
    assert step is not None
    assert step.done is not None
    assert not step.done.query(), "the launch took as long as the device was busy"
    assert seconds < 0.3
    loop._in_flight = batch, step
    engine.run()


def test_memory_table_has_the_graphs(t1: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = dict(engine_of(t1, {"x": make_a(1, t1)}).loop.runner.memory_table)
    graphs = next(name for name in table if name.startswith("CUDA graphs"))
    assert table[graphs] >= 0
    with capsys.disabled():
        print(f"\n{graphs}: {table[graphs] / 2**20:.0f} MiB, activations {table['activations'] / 2**20:.0f} MiB")
