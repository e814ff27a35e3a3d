"""Adapters that do not all fit on the device: who waits, who leaves, and that everyone's answers stay right."""

import gc
import random
from pathlib import Path

import pytest
import torch
from kit.adapters import make_a, make_adapter
from kit.engine import TestEngine
from kit.oracle import Oracle

from loraplex.engine.lora.registry import AdapterVersion
from loraplex.engine.memory import CPU_ARENA_BYTES, arena_bytes

TOL = 1e-4
NAMES = ["a1", "a2", "a3", "a4", "a5"]


@pytest.fixture(scope="module")
def folders(t1: Path) -> dict[str, Path]:
    """Ranks 4, 1, 2, 3, 8."""
    return {f"a{i}": make_a(i, t1) for i in range(1, 6)}


@pytest.fixture(scope="module")
def sizes(t1: Path, folders: dict[str, Path]) -> dict[str, int]:
    engine = TestEngine(t1, folders)
    return {info.name: info.bytes for info in engine.loop.manager.registry.infos()}


def loaded(t1: Path, folders: dict[str, Path], memory: int, **settings) -> TestEngine:
    engine = TestEngine(t1, {}, lora_memory=str(memory), **settings)
    for name, folder in folders.items():
        assert engine.load(name, folder).error is None
    return engine


def version(engine: TestEngine, name: str) -> AdapterVersion:
    found = engine.loop.manager.registry.get(name)
    assert found is not None
    return found


def resident(engine: TestEngine) -> list[str]:
    return [v.info.name for v in engine.loop.manager.residency.resident]


def check(engine: TestEngine, id: int, oracle: Oracle, prompt: list[int], folder: Path | None) -> None:
    tokens = engine.tokens(id)
    expected = oracle.logprobs(prompt + tokens, folder)[len(prompt) - 1 :]
    assert tokens
    for step, out in enumerate(engine.outputs(id)):
        assert out.error is None
        (lp,) = out.logprobs
        assert abs(lp.logprob - expected[step, lp.token].item()) <= TOL, (id, step)


@pytest.mark.parametrize("policy", ["lru", "fifo"])
@pytest.mark.parametrize("virtual", [True, False], ids=["virtual", "per-adapter"])
def test_five_adapters_in_room_for_two_under_traffic(
    t1: Path, t1_oracle: Oracle, folders: dict[str, Path], sizes: dict[str, int], policy: str, virtual: bool
) -> None:
    """Random arrivals over five adapters and base: each answer is its own adapter's, through many replacements."""
    room = sum(sorted(sizes.values())[-2:])
    engine = loaded(t1, folders, room, lora_eviction_policy=policy, lora_use_virtual_experts=virtual, page_size=4)
    rng = random.Random(1)
    jobs, seen, moved, before = [], set(), 0, resident(engine)
    for i in range(40):
        name = rng.choice([None, *NAMES])
        prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 20))]
        jobs.append((engine.submit(prompt, name, logprobs=0, max_tokens=rng.randrange(1, 7)), prompt, name))
        for _ in range(rng.randrange(4)):
            engine.turn()
            now = resident(engine)
            assert engine.loop.manager.bytes == sum(sizes[n] for n in now) <= room
            moved += len(set(now) - set(before))
            seen |= {tuple(sorted(now))}
            before = now
        if i == 20:
            engine.run()
    engine.run()
    assert moved >= 8, "adapters came and went"
    assert len(seen) >= 4
    for id, prompt, name in jobs:
        check(engine, id, t1_oracle, prompt, folders.get(name or ""))


def test_waiting_for_room_does_not_hold_back_others(
    t1: Path, t1_oracle: Oracle, folders: dict[str, Path], sizes: dict[str, int]
) -> None:
    room = max(sizes["a1"], sizes["a5"])
    engine = loaded(t1, {n: folders[n] for n in ("a1", "a5")}, room)
    long = engine.submit([1, 2], "a1", max_tokens=20, ignore_eos=True, logprobs=0)
    engine.turn()
    assert resident(engine) == ["a1"]
    cold = engine.submit([3, 4], "a5", max_tokens=3, logprobs=0)
    base = engine.submit([5, 6], None, max_tokens=3, logprobs=0)
    warm = engine.submit([7, 8], "a1", max_tokens=3, logprobs=0)
    for _ in range(5):
        engine.turn()
    assert engine.outputs(base)[-1].finish_reason
    assert engine.outputs(warm)[-1].finish_reason
    assert not engine.outputs(cold)
    assert version(engine, "a5").row < 0
    engine.run()
    assert resident(engine) == ["a5"]
    for id, prompt, name in [(long, [1, 2], "a1"), (cold, [3, 4], "a5"), (base, [5, 6], ""), (warm, [7, 8], "a1")]:
        check(engine, id, t1_oracle, prompt, folders.get(name))


@pytest.mark.parametrize(("policy", "gone"), [("lru", "a2"), ("fifo", "a1")])
def test_which_adapter_leaves(
    t1: Path, folders: dict[str, Path], sizes: dict[str, int], policy: str, gone: str
) -> None:
    first = {n: folders[n] for n in ("a1", "a2")}
    engine = loaded(t1, first, sizes["a1"] + sizes["a2"], lora_eviction_policy=policy)
    engine.generate([[1, 2]], ["a1"])
    assert engine.load("a3", make_a(2, t1)).error is None  # as large as a2
    if policy == "fifo":
        assert sorted(resident(engine)) == ["a2", "a3"]
    else:
        assert sorted(resident(engine)) == ["a1", "a3"]
    assert version(engine, gone).row < 0


def test_evicted_adapter_answers_as_before_and_its_cached_prefix_holds(
    t1: Path, t1_oracle: Oracle, folders: dict[str, Path], sizes: dict[str, int]
) -> None:
    engine = loaded(t1, {n: folders[n] for n in ("a1", "a5")}, max(sizes.values()))
    prompt = list(range(40))

    def ask(name: str) -> int:
        id = engine.submit(prompt, name, logprobs=0)
        engine.run()
        check(engine, id, t1_oracle, prompt, folders[name])
        assert resident(engine) == [name]
        return engine.outputs(id)[0].cached_tokens

    assert [ask(name) for name in ("a1", "a5", "a1", "a5")] == [0, 0, 32, 32]


def test_unload_frees_device_and_host(t1: Path, folders: dict[str, Path], sizes: dict[str, int]) -> None:
    engine = loaded(t1, folders, sizes["a1"] + sizes["a5"])
    manager = engine.loop.manager
    assert manager.host_bytes == sum(sizes.values())
    gc.collect()
    for name in NAMES:
        before = manager.host_bytes
        assert engine.unload(name).error is None
        assert manager.host_bytes == before - sizes[name]
        assert name not in resident(engine)
    assert (manager.bytes, manager.host_bytes) == (0, 0)
    assert engine.loop.runner.adapters.arena.largest_free == engine.loop.runner.adapters.arena.capacity
    refused = engine.submit([1], "a1")
    engine.run()
    assert engine.outputs(refused)[0].error is not None


def test_unload_of_an_evicted_adapter_and_of_one_that_waits(
    t1: Path, t1_oracle: Oracle, folders: dict[str, Path], sizes: dict[str, int]
) -> None:
    engine = loaded(t1, {n: folders[n] for n in ("a1", "a5")}, max(sizes.values()))
    held = engine.submit([1, 2], "a1", max_tokens=10, ignore_eos=True)
    engine.turn()
    waits = engine.submit([3, 4], "a5", max_tokens=3, logprobs=0)
    engine.turn()
    assert engine.unload("a5").error is None
    engine.run()
    check(engine, waits, t1_oracle, [3, 4], folders["a5"])
    assert len(engine.tokens(held)) == 10
    assert engine.loop.manager.host_bytes == sizes["a1"]


def test_replacement_under_memory_pressure(
    t1: Path, t1_oracle: Oracle, folders: dict[str, Path], sizes: dict[str, int]
) -> None:
    """The new version waits until the old one's requests are done; each request has one version's answer."""
    engine = loaded(t1, {"x": folders["a1"]}, max(sizes["a1"], sizes["a5"]))
    old = engine.submit([1, 2], "x", max_tokens=10, ignore_eos=True, logprobs=0)
    engine.turn()
    assert engine.load("x", folders["a5"], replace=True).error is None
    new = engine.submit([1, 2], "x", max_tokens=5, logprobs=0)
    engine.run()
    check(engine, old, t1_oracle, [1, 2], folders["a1"])
    check(engine, new, t1_oracle, [1, 2], folders["a5"])
    assert engine.loop.manager.host_bytes == sizes["a5"]


def test_start_with_too_little_names_the_flag_and_the_least_that_works(
    t1: Path, folders: dict[str, Path], sizes: dict[str, int]
) -> None:
    least = sum(sizes.values())
    with pytest.raises(ValueError, match=f"--lora-memory.* smallest value that works is {least}$"):
        TestEngine(t1, folders, lora_memory=str(least - 1))
    engine = TestEngine(t1, folders, lora_memory=str(least))
    assert sorted(resident(engine)) == NAMES
    table = dict(engine.loop.runner.memory_table)
    assert table[f"adapters ({least / 2**20:,.1f} MiB used)"] == least


def test_adapter_that_can_never_fit_is_refused(t1: Path, folders: dict[str, Path], sizes: dict[str, int]) -> None:
    engine = loaded(t1, {"a2": folders["a2"]}, sizes["a5"] - 256)
    reply = engine.load("a5", folders["a5"])
    assert reply.error is not None
    assert reply.error.status == 507
    assert "--lora-memory" in reply.error.message
    assert str(sizes["a5"]) in reply.error.message
    assert engine.loop.manager.host_bytes == sizes["a2"]
    assert engine.generate([[1, 2]], ["a2"])[0]


def test_host_memory_bound(t1: Path, folders: dict[str, Path], sizes: dict[str, int]) -> None:
    bound = sizes["a1"] + sizes["a5"]
    engine = loaded(t1, {n: folders[n] for n in ("a1", "a5")}, bound, lora_host_memory=str(bound))
    reply = engine.load("a2", folders["a2"])
    assert reply.error is not None
    assert reply.error.status == 507
    assert "--lora-host-memory" in reply.error.message
    assert engine.loop.manager.host_bytes == bound
    assert engine.load("a1", folders["a2"], replace=True).error is None  # the old one goes
    assert engine.unload("a5").error is None
    assert engine.load("a3", folders["a3"]).error is None


def test_without_lora_there_is_no_arena(t1: Path) -> None:
    engine = TestEngine(t1, enable_lora=False)
    assert not any(name.startswith("adapters") for name, _ in engine.loop.runner.memory_table)
    assert engine.loop.runner.adapters.capacity_bytes == 0


def test_size_of_the_arena() -> None:
    gib, cpu, cuda = 1 << 30, torch.device("cpu"), torch.device("cuda")
    assert arena_bytes(None, [], 50 * gib, cuda) == 5 * gib
    assert arena_bytes(None, [3 * gib, 4 * gib], 50 * gib, cuda) == 11 * gib
    assert arena_bytes(None, [], 50 * gib, cpu) == CPU_ARENA_BYTES
    assert arena_bytes(7 * gib, [3 * gib, 4 * gib], 50 * gib, cuda) == 7 * gib
    with pytest.raises(ValueError, match="--lora-memory"):
        arena_bytes(60 * gib, [], 50 * gib, cuda)
    with pytest.raises(ValueError, match=f"take {9 * gib}"):
        arena_bytes(None, [4 * gib, 5 * gib], 12 * gib, cuda)


def test_pinned_adapter_stays_and_leaves_room_for_others(
    t1: Path, t1_oracle: Oracle, folders: dict[str, Path], sizes: dict[str, int]
) -> None:
    room = sizes["a1"] + sizes["a5"]
    engine = TestEngine(t1, {}, lora_memory=str(room))
    reply = engine.load("a1", folders["a1"], pinned=True)
    assert reply.result is not None
    assert reply.result["pinned"] is True
    for name in NAMES[1:]:
        assert engine.load(name, folders[name]).error is None
    prompt = [5, 6, 7]
    for name in [*NAMES, *NAMES]:
        id = engine.submit(prompt, name, logprobs=0, max_tokens=3)
        engine.run()
        check(engine, id, t1_oracle, prompt, folders[name])
        assert {"a1", name} <= set(resident(engine))
    reply = engine.load("a3", folders["a3"], pinned=True)
    assert reply.error is not None
    assert (reply.error.status, reply.error.param) == (507, "pinned")
    assert engine.load("a1", folders["a1"]).error is None  # not pinned any more
    assert engine.load("a3", folders["a3"], pinned=True).error is None
    assert engine.unload("a3").error is None
    assert engine.load("a5", folders["a5"], pinned=True).error is None


def test_fragments_do_not_keep_an_adapter_out(t1: Path, t1_oracle: Oracle) -> None:
    """Two running adapters with gaps between and around; the one that comes needs their sum, in larger pieces."""
    folders = {f"r{r}": make_adapter(t1, "EXP", r=r, seed=r) for r in (1, 2, 3, 4)}
    probe = {i.name: i.bytes for i in TestEngine(t1, folders).loop.manager.registry.infos()}
    engine = loaded(t1, folders, probe["r1"] + probe["r2"] + probe["r3"] + probe["r1"])
    prompt = [9, 8, 7]
    jobs = [(engine.submit(prompt, n, logprobs=0, max_tokens=12, ignore_eos=True), n) for n in ("r1", "r2")]
    engine.turn()
    jobs.append((engine.submit(prompt, "r4", logprobs=0, max_tokens=3), "r4"))
    engine.turn()
    assert {"r1", "r2", "r4"} <= set(resident(engine)), "they fit together by their bytes"
    jobs.append((engine.submit(prompt, "r3", logprobs=0, max_tokens=3), "r3"))
    engine.run()
    for id, name in jobs:
        check(engine, id, t1_oracle, prompt, folders[name])
