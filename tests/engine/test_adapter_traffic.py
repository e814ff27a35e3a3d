"""Many adapters in little room and everything at once: aborts, choices, loads, pins and unloads, preemption, a follower
rank that now and then cannot store. Answers stay right and nothing leaks."""

import random
from pathlib import Path
from typing import Any

import pytest
from kit.adapters import make_adapter
from kit.engine import TestEngine
from kit.oracle import Oracle

from loraplex.engine import ranks
from loraplex.engine.lora.pool import AdapterPool
from loraplex.engine.lora.reader import read_adapter
from loraplex.engine.messages import ErrorInfo

KINDS = ("A1", "ATT", "EXP", "FUSED", "OUTER", "GATE_UP", "ROUTER", "ALL", "STACK", "MIXTRAL")
LOST = ErrorInfo(status=507, message="no memory on rank 1")


class Mirror(ranks.Followers):
    """A second rank in this process that does to its own pool what it is told."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__([])
        self.rng = rng
        self.pool: AdapterPool | None = None

    def send(self, message: ranks.FollowerMessage) -> bool:
        if self.pool is not None and isinstance(message, ranks.Place):
            self.pool.place(message.version, message.row)
        elif self.pool is not None and isinstance(message, ranks.Evict):
            self.pool.evict(message.version)
        elif self.pool is not None and isinstance(message, ranks.Drop):
            self.pool.drop(message.version)
        return True

    def store(self, message: ranks.Store) -> ErrorInfo | None:
        assert self.pool is not None
        if self.rng.random() < 0.2:
            return LOST
        self.pool.store(message.version, self.pool.pack(read_adapter(message.path, self.pool.sites, max_rank=64)))
        return None


@pytest.fixture(scope="module")
def folders(t1: Path) -> dict[str, Path]:
    return {f"x{i}": make_adapter(t1, KINDS[i % 10], r=(1, 2, 3, 5, 8, 4)[i % 6], seed=i) for i in range(14)}


def make_engine(t1: Path, room: int, rng: random.Random, **settings: Any) -> TestEngine:
    settings |= {"page_size": 4, "chunked_prefill_size": 5, "max_total_tokens": 64, "context_length": 64}
    settings |= {"max_running_requests": 7, "max_loras_per_batch": 3, "max_loaded_loras": 14}
    engine = TestEngine(t1, {}, lora_memory=str(room), **settings)
    manager, mirror = engine.loop.manager, Mirror(rng)
    twin = TestEngine(t1, {}, lora_memory=str(room), **settings)
    mirror.pool = twin.loop.runner.adapters
    manager._followers = manager.residency._followers = engine.loop.followers = mirror
    return engine


def check(engine: TestEngine) -> None:
    manager, pool = engine.loop.manager, engine.loop.runner.adapters
    mirror = manager._followers
    assert isinstance(mirror, Mirror)
    assert mirror.pool is not None
    pool.arena.check()
    rows = [v.row for v in manager.residency.resident]
    assert sorted([*rows, *manager.residency._free_rows]) == list(range(manager.residency._rows))
    assert {v.info.version for v in manager.residency.resident} == set(pool._resident)
    assert {v.info.version for v in manager.registry.versions()} == set(pool._stored) == set(mirror.pool._stored)
    assert pool._resident == mirror.pool._resident, "every rank has the same at the same place"
    assert pool.ranks == mirror.pool.ranks
    assert all(seq.adapter is None or seq.adapter.row >= 0 for seq in engine.loop.scheduler.running)


@pytest.mark.parametrize(
    ("backend", "virtual", "limit"), [("torch", True, 10.0), ("csgmv", False, 0.0), ("triton", True, 0.0)]
)
def test_everything_at_once(
    t1: Path,
    t1_oracle: Oracle,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    virtual: bool,
    limit: float,
) -> None:
    monkeypatch.setattr("loraplex.engine.scheduler.ADAPTER_WAIT_LIMIT_S", limit)
    rng = random.Random(backend)
    sizes = sorted(i.bytes for i in TestEngine(t1, folders).loop.manager.registry.infos())
    policy = rng.choice(["lru", "fifo"])
    engine = make_engine(
        t1, sum(sizes[-2:]), rng, lora_backend=backend, lora_use_virtual_experts=virtual, lora_eviction_policy=policy
    )
    engine.loop.scheduler._preempt_every = 5
    loaded: dict[str, Path] = {}
    jobs: list[tuple[int, list[int], Path | None, int]] = []
    aborted: set[int] = set()
    shared = [rng.randrange(256) for _ in range(12)]
    for _ in range(60):
        for _ in range(rng.choice([0, 1, 1, 3])):
            name, folder = rng.choice(list(folders)), rng.choice(list(folders.values()))
            reply = engine.load(name, folder, replace=True, pinned=rng.random() < 0.2)
            if reply.error is None:
                loaded[name] = folder
            else:
                assert reply.error == LOST or reply.error.param == "pinned"
        prompt = shared[: rng.randrange(13)] + [rng.randrange(256) for _ in range(rng.randrange(1, 12))]
        name, n = rng.choice([None, *loaded]), rng.choice([1, 1, 1, 2, 3])
        sampling = {"max_tokens": rng.randrange(1, 9), "temperature": rng.choice([0.0, 1.0]), "ignore_eos": True}
        jobs.append((engine.submit(prompt, name, n=n, logprobs=0, **sampling), prompt, loaded.get(name or ""), n))
        engine.loop._receive()
        for _ in range(rng.randrange(5)):
            engine.turn()
            check(engine)
        if rng.random() < 0.15:
            victim = rng.choice(jobs[-4:])[0]
            aborted.add(victim)
            engine.abort(victim)
        if loaded and rng.random() < 0.1:
            name = rng.choice(list(loaded))
            assert engine.unload(name).error is None
            del loaded[name]
        check(engine)
    engine.run(most=5000)
    assert engine.loop.scheduler.num_preemptions > 5
    for id, prompt, folder, n in jobs:
        for index in range(0 if id in aborted else n):
            tokens, outputs = engine.tokens(id, index), engine.outputs(id, index)
            assert outputs[-1].finish_reason == "length"
            expected = t1_oracle.logprobs(prompt + tokens, folder)[len(prompt) - 1 :]
            for step, out in enumerate(outputs):
                (lp,) = out.logprobs
                assert lp is not None
                assert abs(lp.logprob - expected[step, lp.token].item()) <= 1e-4, (id, step, folder)
    for name in loaded:
        assert engine.unload(name).error is None
    check(engine)
    assert (engine.loop.manager.bytes, engine.loop.manager.host_bytes) == (0, 0)
    arena = engine.loop.runner.adapters.arena
    assert arena.largest_free == arena.capacity
