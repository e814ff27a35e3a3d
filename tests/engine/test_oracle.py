"""The engine against transformers with merged adapters: same logprobs (≤ 1e-4) and same greedy ids, however the work is
cut: chunk and page sizes, cold and cached prefixes, mixed batches, preemption, both MoE-LoRA implementations."""

import random
from pathlib import Path

import pytest
import torch
from kit import models
from kit.adapters import make_a, make_adapter
from kit.engine import TestEngine
from kit.oracle import Oracle, assert_logprobs_close

TOL = 1e-4
TYING = [
    {"ensure_weight_tying": True, "rank_pattern": ranks, "alpha_pattern": alphas, "use_rslora": rslora}
    for ranks, alphas, rslora in (
        ({}, {}, False),
        ({"embed_tokens": 5}, {"embed_tokens": 24}, False),
        ({"lm_head": 5}, {"lm_head": 24}, True),
        ({"lm_head|embed_tokens": 5}, {"embed_tokens": 24}, False),
    )
]
"""An adapter of the head too, by the embedding's own matrices. PEFT scales each as the patterns say of its name."""


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(length)]


def assert_matches(engine: TestEngine, id: int, oracle: Oracle, prompt: list[int], adapter: Path | None) -> None:
    """Every logprob the engine reported for request `id`, prompt and output, and that greedy ids are the argmax."""
    outs = engine.outputs(id)
    tokens = engine.tokens(id)
    expected = oracle.logprobs(prompt + tokens, adapter)
    start = len(prompt) - 1
    assert tokens == expected[start : start + len(tokens)].argmax(-1).tolist()
    for step, out in enumerate(outs):
        for lp in out.logprobs:
            _assert_row(lp, expected[start + step])
    if outs[0].prompt_logprobs is not None:
        first, *rest = outs[0].prompt_logprobs
        assert first is None
        assert [lp.token for lp in rest] == prompt[1:]
        for position, lp in enumerate(rest):
            _assert_row(lp, expected[position])


def _assert_row(lp, expected: torch.Tensor) -> None:
    assert abs(lp.logprob - expected[lp.token].item()) <= TOL
    for token, value in lp.top:
        assert abs(value - expected[token].item()) <= TOL
    best = expected.topk(len(lp.top)).values.tolist()
    assert all(abs(value - b) <= TOL for (_, value), b in zip(lp.top, best))


@pytest.fixture(scope="module")
def adapters(t1: Path) -> dict[str, Path]:
    return {f"a{i}": make_a(i, t1) for i in range(1, 9)}


CUTS = [(chunk, page) for chunk in (1, 7, 16, -1) for page in (4, 16)]


@pytest.mark.parametrize(("chunk", "page"), CUTS)
@pytest.mark.parametrize("preempt", [False, True], ids=["", "preempt"])
def test_mixed_batch_of_eight_adapters_and_base(
    t1: Path, t1_oracle: Oracle, adapters: dict[str, Path], monkeypatch, chunk: int, page: int, preempt: bool
) -> None:
    if preempt:
        monkeypatch.setenv("LORAPLEX_TEST_HOOKS", "1")
        monkeypatch.setenv("LORAPLEX_TEST_PREEMPT_EVERY", "3")
    engine = TestEngine(t1, adapters, chunked_prefill_size=chunk, page_size=page)
    names = [None, *adapters, None]
    jobs = []
    for _ in range(2):  # the second round finds its prefixes cached
        for i, name in enumerate(names):
            prompt = prompt_of(5 + 7 * i, seed=i)
            jobs.append((engine.submit(prompt, name, logprobs=5, max_tokens=6), prompt, name))
        engine.run()
    for id, prompt, name in jobs:
        assert_matches(engine, id, t1_oracle, prompt, adapters.get(name or ""))
    cached = [engine.outputs(id)[0].cached_tokens for id, _, _ in jobs]
    assert not any(cached[: len(names)])
    assert cached[len(names) :] == [(len(p) - 1) // page * page for _, p, _ in jobs[len(names) :]]
    if preempt:
        assert engine.loop.scheduler.num_preemptions >= 3


@pytest.mark.parametrize("virtual", [True, False], ids=["virtual", "per-adapter"])
def test_moe_lora_implementations(t1: Path, t1_oracle: Oracle, adapters: dict[str, Path], virtual: bool) -> None:
    engine = TestEngine(t1, adapters, lora_use_virtual_experts=virtual)
    prompt = prompt_of(20)
    ids = {name: engine.submit(prompt, name, logprobs=5, prompt_logprobs=2) for name in [None, *adapters]}
    engine.run()
    for name, id in ids.items():
        assert_matches(engine, id, t1_oracle, prompt, adapters.get(name or ""))


@pytest.mark.parametrize("chunk", [3, 2048])
def test_prompt_logprobs_in_a_mixed_batch(
    t1: Path, t1_oracle: Oracle, adapters: dict[str, Path], monkeypatch, chunk: int
) -> None:
    monkeypatch.setenv("LORAPLEX_TEST_HOOKS", "1")
    monkeypatch.setenv("LORAPLEX_TEST_PREEMPT_EVERY", "4")
    engine = TestEngine(t1, adapters, chunked_prefill_size=chunk)
    jobs = []
    for i, name in enumerate([None, "a1", "a6", None]):
        prompt = prompt_of(9 + 11 * i, seed=i)
        jobs.append((engine.submit(prompt, name, prompt_logprobs=3, logprobs=0, max_tokens=4), prompt, name))
    engine.run()
    for id, prompt, name in jobs:
        assert_matches(engine, id, t1_oracle, prompt, adapters.get(name or ""))


@pytest.mark.parametrize("kind", ["ATT", "EXP", "FUSED", "ROUTER", "ALL"])
def test_adapter_layouts(t1: Path, t1_oracle: Oracle, kind: str) -> None:
    folder = make_adapter(t1, kind, r=3, seed=5)
    engine = TestEngine(t1, {"x": folder})
    prompt = prompt_of(12)
    id = engine.submit(prompt, "x", logprobs=5, prompt_logprobs=0)
    base = engine.submit(prompt, None, logprobs=5, prompt_logprobs=0)
    engine.run()
    assert_matches(engine, id, t1_oracle, prompt, folder)
    assert_matches(engine, base, t1_oracle, prompt, None)
    assert engine.outputs(id)[0].prompt_logprobs != engine.outputs(base)[0].prompt_logprobs


@pytest.mark.parametrize(
    ("arch", "kind"), [("qwen2_moe", "SHARED"), ("qwen2_moe", "EXP"), ("qwen3", "MLP"), ("llama", "ATT")]
)
def test_other_architectures(arch: str, kind: str) -> None:
    model = models.make_t1(arch)
    folder = make_adapter(model, kind, r=5, seed=2)
    engine, oracle = TestEngine(model, {"x": folder}), Oracle(model)
    prompt = prompt_of(15)
    jobs = [(engine.submit(prompt, name, logprobs=5, prompt_logprobs=1), name) for name in ("x", None)]
    engine.run()
    for id, name in jobs:
        assert_matches(engine, id, oracle, prompt, folder if name else None)


MIXTRAL_KINDS = ("A1", "MIXTRAL", "EXP", "FUSED", "STACK", "OUTER", "ROUTER", "ALL")


@pytest.mark.parametrize("fused", [False, True])
def test_mixtral_and_adapters_of_either_generation(fused: bool) -> None:
    """Files of `block_sparse_moe` and w1, w3, w2, or of transformers 5; adapters with either names in one batch."""
    model = models.make_t1("mixtral", fused=fused)
    folders = {kind: make_adapter(model, kind, r=2 + i, seed=i) for i, kind in enumerate(MIXTRAL_KINDS)}
    engine, oracle = TestEngine(model, folders), Oracle(model)
    prompt = prompt_of(15)
    jobs = {name: engine.submit(prompt, name, logprobs=5, prompt_logprobs=1) for name in (*folders, None)}
    engine.run()
    for name, id in jobs.items():
        assert_matches(engine, id, oracle, prompt, folders.get(name or ""))


@pytest.mark.parametrize("norm", [True, False])
def test_router_normalisation_follows_the_config(norm: bool) -> None:
    """Field case G33."""
    model = models.make_t1(norm_topk_prob=norm)
    engine, oracle = TestEngine(model), Oracle(model)
    prompt = prompt_of(10)
    id = engine.submit(prompt, logprobs=5, prompt_logprobs=1)
    engine.run()
    assert_matches(engine, id, oracle, prompt, None)


def test_fully_cached_and_nested_prompts(t1: Path, t1_oracle: Oracle) -> None:
    """Field case G38."""
    engine = TestEngine(t1, page_size=16)
    whole = prompt_of(33)
    for _ in range(3):
        for length in (15, 16, 17, 32, 33):
            id = engine.submit(whole[:length], logprobs=5)
            engine.run()
            assert_matches(engine, id, t1_oracle, whole[:length], None)
            assert engine.outputs(id)[0].cached_tokens <= length - 1


def test_preemption_by_a_small_pool(t1: Path, t1_oracle: Oracle) -> None:
    """Field case G37."""
    engine = TestEngine(t1, page_size=4, max_total_tokens=96)
    jobs = []
    for i in range(6):
        prompt = prompt_of(8, seed=i)
        jobs.append((engine.submit(prompt, max_tokens=40, ignore_eos=True, logprobs=1), prompt))
    engine.run()
    assert engine.loop.scheduler.num_preemptions > 0
    for id, prompt in jobs:
        assert len(engine.tokens(id)) == 40
        assert [o.finish_reason for o in engine.outputs(id)].count("length") == 1
        assert_matches(engine, id, t1_oracle, prompt, None)


def test_same_name_other_content_never_uses_the_old_kv(t1: Path, t1_oracle: Oracle, tmp_path: Path) -> None:
    """Field case G25: unload + load, load in place, and the same path with new bytes."""
    one, two, three = (make_a(i, t1) for i in (1, 2, 3))
    engine = TestEngine(t1, {"x": one})
    prompt = prompt_of(150)

    def ask(folder: Path, cached: bool) -> None:
        id = engine.submit(prompt, "x", logprobs=5)
        engine.run()
        assert_matches(engine, id, t1_oracle, prompt, folder)
        assert (engine.outputs(id)[0].cached_tokens > 0) == cached

    ask(one, cached=False)
    ask(one, cached=True)
    assert engine.unload("x").error is None
    assert engine.load("x", two).error is None
    ask(two, cached=False)
    moving = tmp_path / "moving"
    moving.symlink_to(three)
    assert engine.load("x", moving, replace=True).error is None
    ask(three, cached=False)
    moving.unlink()
    moving.symlink_to(one)
    assert engine.load("x", moving, replace=True).error is None
    ask(one, cached=True)  # the same content as in the beginning: its KV is right


def test_replacement_under_traffic_keeps_each_request_on_one_version(t1: Path, t1_oracle: Oracle) -> None:
    one, two = make_a(1, t1), make_a(2, t1)
    engine = TestEngine(t1, {"x": one})
    prompt = prompt_of(10)
    before = engine.submit(prompt, "x", logprobs=1, max_tokens=12, ignore_eos=True)
    for _ in range(3):
        engine.turn()
    assert engine.load("x", two, replace=True).error is None
    after = engine.submit(prompt, "x", logprobs=1, max_tokens=12, ignore_eos=True)
    engine.run()
    assert_matches(engine, before, t1_oracle, prompt, one)
    assert_matches(engine, after, t1_oracle, prompt, two)
    assert len(engine.loop.manager.registry.refs()) == 1


def test_base_is_bit_stable_through_adapter_traffic(t1: Path) -> None:
    """Field case G35, stricter: the same floats, since each run has the same batch shape."""
    plain = TestEngine(t1, enable_lora=False)
    engine = TestEngine(t1, {})
    prompt = prompt_of(30)

    def ask(e: TestEngine) -> list:
        id = e.submit(prompt, logprobs=5, prompt_logprobs=2)
        e.run()
        return [(out.logprobs, out.prompt_logprobs) for out in e.outputs(id)]

    expected = ask(plain)
    assert ask(engine) == expected
    assert engine.load("x", make_a(1, t1)).error is None
    assert ask(engine) == expected
    engine.generate([prompt_of(100)], ["x"])
    assert ask(engine) == expected
    engine.unload("x")
    assert ask(engine) == expected


def test_base_rows_of_a_mixed_batch_do_not_move(t1: Path) -> None:
    """To 1e-5 here: an adapter's rows choose other experts, and a CPU GEMM's rounding depends on its row count. On
    CUDA, where it does not, tests/engine/test_gpu.py asks for the same bits."""
    prompts = [prompt_of(20, seed=i) for i in range(4)]

    def ask(engine: TestEngine, names: list[str | None]) -> list[list[float]]:
        ids = [
            engine.submit(p, a, logprobs=0, max_tokens=6, ignore_eos=True) for p, a in zip(prompts, names, strict=True)
        ]
        engine.run()
        return [[out.logprobs[0].logprob for out in engine.outputs(id)] for id in ids]

    off = ask(TestEngine(t1, enable_lora=False), [None] * 4)
    on = ask(TestEngine(t1, {"x": make_a(1, t1)}), [None, "x", None, "x"])
    assert on[0] == pytest.approx(off[0], abs=1e-5)
    assert on[2] == pytest.approx(off[2], abs=1e-5)
    assert on[1] != pytest.approx(off[1], abs=0.01)


def test_seeded_request_is_the_same_alone_and_in_any_company(t1: Path) -> None:
    """Field case G10, in the engine."""
    engine = TestEngine(t1, {"x": make_a(1, t1)})
    prompt = prompt_of(8)

    def seeded() -> int:
        return engine.submit(prompt, seed=42, temperature=0.8, max_tokens=16, ignore_eos=True, frequency_penalty=0.3)

    alone = seeded()
    engine.run()
    for company in range(1, 8):
        others = [
            engine.submit(prompt_of(3 + i, i), "x" if i % 2 else None, temperature=1.0, seed=i if i % 3 else None)
            for i in range(company)
        ]
        id = seeded()
        engine.run()
        assert engine.tokens(id) == engine.tokens(alone)
        assert all(engine.tokens(o) for o in others)
    unseeded = {tuple(engine.generate([prompt], temperature=1.0, max_tokens=8)[0]) for _ in range(6)}
    assert len(unseeded) >= 2


@pytest.mark.parametrize(("tied", "config"), [(False, {}), (True, {}), *((True, tying) for tying in TYING)])
def test_embedding_adapter_of_peft(tied: bool, config: dict[str, object]) -> None:
    """Beside base and another adapter. The head of a tied model is adapted by tensors of its own, or not at all."""
    model = models.make_t1(tie_word_embeddings=tied)
    oracle = Oracle(model)
    adapters = {"emb": make_adapter(model, "EMB", r=3, std=0.2, **config), "att": make_adapter(model, "ATT")}
    engine = TestEngine(model, adapters, chunked_prefill_size=7)
    prompt = prompt_of(19, 3)
    assert_logprobs_close(oracle.logprobs(prompt, adapters["emb"]), oracle.peft_logprobs(prompt, adapters["emb"]))
    options = {"logprobs": 3, "prompt_logprobs": 2, "max_tokens": 4, "ignore_eos": True}
    ids = {name: engine.submit(prompt, name, **options) for name in (None, "emb", "att")}
    engine.run()
    for name, id in ids.items():
        assert_matches(engine, id, oracle, prompt, adapters.get(name or ""))
