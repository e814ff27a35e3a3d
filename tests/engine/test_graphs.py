"""Steps in padded static buffers, on a CPU without capture: all that a CUDA graph depends on but the replay itself."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.adapters import make_a, make_adapter
from kit.engine import TestEngine
from kit.oracle import Oracle

from loraplex.engine.config import Config, LoRAConfig, ModelConfig
from loraplex.engine.graphs import StepGraphs, decode_sizes, reason_against, token_sizes
from loraplex.kernels.moe.tiles import rank_capacity

TOL = 1e-4


@pytest.fixture(autouse=True)
def _static(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_TEST_HOOKS", "1")
    monkeypatch.setenv("LORAPLEX_TEST_STATIC_STEPS", "1")
    monkeypatch.setenv("LORAPLEX_TEST_OVERLAP", "1")


class Ran(list[tuple[bool, int, int, int]]):
    """(decode?, tokens of the step, tokens of its bucket, rank capacity) of each step; a bucket of 0 ran eagerly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = StepGraphs.run

        def noting(graphs, plan, ranks):
            out = run(graphs, plan, ranks)
            bucket = graphs.bucket_of(plan, max((ranks[row] for row in plan.slot_rows), default=0))
            size, capacity = (0, 0) if out is None else (bucket.shape.tokens, bucket.capacity)
            self.append((plan.is_decode, len(plan.ids), size, capacity))
            return out

        monkeypatch.setattr(StepGraphs, "run", noting)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    return Ran(monkeypatch)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(length)]


def assert_matches(engine: TestEngine, id: int, oracle: Oracle, prompt: list[int], adapter: Path | None) -> None:
    tokens = engine.tokens(id)
    expected = oracle.logprobs(prompt + tokens, adapter)[len(prompt) - 1 :]
    assert tokens == expected[: len(tokens)].argmax(-1).tolist()
    for out, row in zip(engine.outputs(id), expected):
        for lp in out.logprobs:
            assert abs(lp.logprob - row[lp.token].item()) <= TOL


@pytest.mark.parametrize("most", [1, 3, 8, 33, 256, 300])
def test_decode_sizes(most: int) -> None:
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, most)


@pytest.mark.parametrize("most", [5, 513, 2304, 8448])
def test_token_sizes_waste_little(most: int) -> None:
    sizes = token_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    assert all(after <= 1.125 * before for before, after in pairwise(sizes) if before >= 512)


def test_rank_capacity() -> None:
    assert [rank_capacity(r) for r in (1, 16, 17, 64, 65, 512)] == [16, 16, 32, 64, 128, 512]


@pytest.mark.parametrize(
    ("dtype", "lora", "reason"),
    [
        (torch.bfloat16, {}, None),
        (torch.float16, {"enable_lora": True, "lora_backend": "triton"}, None),
        (torch.bfloat16, {"enable_lora": False, "lora_backend": "torch"}, None),
        (torch.float32, {}, "--dtype"),
        (torch.bfloat16, {"enable_lora": True, "lora_backend": "torch"}, "--lora-backend"),
        (torch.bfloat16, {"enable_lora": True, "lora_use_virtual_experts": False}, "--no-lora-use-virtual-experts"),
    ],
)
def test_what_cannot_be_captured_is_named(dtype: torch.dtype, lora: dict[str, Any], reason: str | None) -> None:
    found = reason_against(Config(model=ModelConfig(model_path="m"), lora=LoRAConfig(**lora)), dtype)
    assert (found is None) if reason is None else (found is not None and found.startswith(reason))


def test_capture_that_finds_no_room_is_not_tried_again(t1: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TestEngine(t1, {"small": make_adapter(t1, "ALL", r=4)}, max_running_requests=4)
    assert engine.load("large", make_adapter(t1, "ALL", r=40, seed=2)).error is None
    tried = []

    def no_room(_: StepGraphs, bucket: object) -> None:
        tried.append(bucket)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(StepGraphs, "capture", no_room)
    assert len(engine.generate([prompt_of(9)], ["large"], max_tokens=40, ignore_eos=True)[0]) == 40
    assert len(tried) == 1
    assert {size for _, _, size, _ in ran} == {0}


@pytest.mark.parametrize("backend", ["csgmv", "triton", "torch"])
def test_more_adapters_at_replay_than_at_capture(t1: Path, t1_oracle: Oracle, ran: Ran, backend: str) -> None:
    """One adapter at start; then eight, of other ranks, beside base, in batches that fill no bucket."""
    folders = {f"a{i}": make_a(i, t1) for i in range(1, 9)}
    engine = TestEngine(t1, {"a7": folders["a7"]}, max_running_requests=13, lora_backend=backend, page_size=4)
    for name, folder in folders.items():
        assert engine.load(name, folder).error is None
    names = [None, *folders, None, "a3"]
    for count in (11, 3, 1, 7):
        jobs = []
        for i, name in enumerate(names[-count:]):
            prompt = prompt_of(3 + 5 * i, seed=i)
            jobs.append((engine.submit(prompt, name, logprobs=2, max_tokens=5, ignore_eos=True), prompt, name))
            if i % 3 == 2:
                engine.turn()  # later ones join a running batch: mixed steps
        engine.run()
        for id, prompt, name in jobs:
            assert_matches(engine, id, t1_oracle, prompt, folders.get(name or ""))
    assert {size for decode, _, size, _ in ran if decode} >= {1, 3, 7, 12}
    assert any(not decode and 1 < tokens < size for decode, tokens, size, _ in ran), "no mixed step was padded"


def test_larger_rank_runs_eagerly_until_it_has_its_bucket(t1: Path, t1_oracle: Oracle, ran: Ran) -> None:
    small, large = make_adapter(t1, "ALL", r=4), make_adapter(t1, "ALL", r=40, seed=2)
    engine = TestEngine(t1, {"small": small}, max_running_requests=4)
    assert engine.load("large", large).error is None
    prompt = prompt_of(9)
    jobs = [(engine.submit(prompt, n, logprobs=1, max_tokens=30, ignore_eos=True), f) for n, f in [("large", large)]]
    engine.run()
    assert [capacity for *_, capacity in ran][-1] == 64
    assert [size for _, _, size, _ in ran].count(0) > 10
    ran.clear()
    jobs.append((engine.submit(prompt, "small", logprobs=1, max_tokens=3, ignore_eos=True), small))
    engine.run()
    assert {capacity for *_, capacity in ran} == {16}
    for id, folder in jobs:
        assert_matches(engine, id, t1_oracle, prompt, folder)


def test_smaller_rank_takes_a_larger_bucket_that_is_ready(t1: Path, t1_oracle: Oracle, ran: Ran) -> None:
    small, large = make_adapter(t1, "ALL", r=4), make_adapter(t1, "ALL", r=40, seed=2)
    engine = TestEngine(t1, {"small": small, "large": large}, max_running_requests=4)
    prompt = prompt_of(9)
    id = engine.submit(prompt, "small", logprobs=1, max_tokens=3, ignore_eos=True)
    engine.run()
    assert {capacity for *_, capacity in ran} == {64}
    assert_matches(engine, id, t1_oracle, prompt, small)


def test_base_steps_of_a_lora_server_hold_no_lora(t1: Path, ran: Ran) -> None:
    engine = TestEngine(t1, {"x": make_a(1, t1)}, max_running_requests=4)
    engine.generate([prompt_of(5), prompt_of(6)])
    assert {capacity for *_, capacity in ran} == {0}


def test_steps_beyond_the_largest_bucket_run_eagerly(t1: Path, t1_oracle: Oracle, ran: Ran) -> None:
    engine = TestEngine(t1, max_running_requests=6, cuda_graph_max_bs=2, cuda_graph_max_tokens=20)
    jobs = [
        (engine.submit(prompt_of(30, i), logprobs=1, max_tokens=4, ignore_eos=True), prompt_of(30, i)) for i in range(4)
    ]
    engine.run()
    assert {size for decode, _, size, _ in ran if not decode} == {0}
    assert {size for decode, _, size, _ in ran if decode} == {16}, "too many for a decode bucket, not for another"
    engine.generate([prompt_of(11)], max_tokens=3, ignore_eos=True)
    assert [size for _, _, size, _ in ran][-3:] == [16, 1, 1]
    for id, prompt in jobs:
        assert_matches(engine, id, t1_oracle, prompt, None)
    off = TestEngine(t1, disable_cuda_graph=True)
    assert off.loop.runner.graphs is None


def test_padding_writes_no_kv(t1: Path) -> None:
    """Every page that no sequence holds keeps the pattern it had."""
    engine = TestEngine(t1, {"x": make_a(1, t1)}, max_running_requests=8, page_size=4)
    kv = engine.loop.runner.kv
    engine.loop.scheduler.pool._free.reverse()  # page 0, where a wrong default would write, stays free
    for k, v in kv:
        k.fill_(7.25)
        v.fill_(7.25)
    ids = [engine.submit(prompt_of(3 + i, i), "x" if i else None, max_tokens=9, ignore_eos=True) for i in range(3)]
    held: set[int] = set()
    while not all(engine.outputs(id) and engine.outputs(id)[-1].finish_reason for id in ids):
        engine.turn()
        held |= {page for seq in engine.loop.scheduler.running for page in seq.pages}
    free = torch.tensor(sorted(set(range(engine.loop.scheduler.pool.num_pages)) - held))
    assert len(free)
    for k, v in kv:
        for cache in (k, v):
            assert (cache.unflatten(0, (-1, 4))[free] == 7.25).all()
            assert (cache.unflatten(0, (-1, 4))[torch.tensor(sorted(held))] != 7.25).any()
