"""A step launched before the last one's outputs are known gives each request what it gets without."""

import random
from pathlib import Path
from typing import Any

import pytest
from kit.adapters import make_a
from kit.engine import TestEngine

from loraplex.engine.messages import TokenLogprobs, TokenOut


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(length)]


def requests(stop: int) -> list[tuple[list[int], str | None, dict[str, Any]]]:
    """Every way to be sampled and to end."""
    options: list[dict[str, Any]] = [
        {"max_tokens": 1},
        {"max_tokens": 12, "ignore_eos": True, "logprobs": 3},
        {"max_tokens": 20, "stop_token_ids": (stop,)},
        {"max_tokens": 20, "stop_token_ids": (stop,), "min_tokens": 9, "logprobs": 0},
        {"temperature": 0.9, "seed": 5, "max_tokens": 14},
        {"temperature": 0.9, "seed": 6, "n": 3, "top_p": 0.8, "max_tokens": 9},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2, "max_tokens": 16},
        {"temperature": 1.1, "seed": 7, "frequency_penalty": 0.7, "max_tokens": 16, "ignore_eos": True},
        {"prompt_logprobs": 2, "logprobs": 2, "max_tokens": 5},
        {"logit_bias": {17: 3.0}, "max_tokens": 8},
    ]
    return [(prompt_of(4 + 9 * i, seed=i), (None, "x", "y")[i % 3], o) for i, o in enumerate(options)]


def answers(engine: TestEngine, stop: int) -> list[list[TokenOut]]:
    jobs = []
    for i, (prompt, name, options) in enumerate(requests(stop)):
        jobs.append((engine.submit(prompt, name, **options), options.get("n", 1)))
        if i % 4 == 3:
            engine.turn()
            engine.turn()
    engine.run()
    return [engine.outputs(id, index) for id, n in jobs for index in range(n)]


def assert_alike(found: TokenLogprobs | None, expected: TokenLogprobs | None) -> None:
    """Batches are made up otherwise, and a CPU's products round by their number of rows."""
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.token == expected.token
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)


@pytest.mark.parametrize(
    "hooks",
    [{}, {"PREEMPT_EVERY": "3"}, {"CHUNK": "5", "BLOCK_SIZE": "4"}, {"BLOCK_SIZE": "4", "KV_BLOCKS": "26"}],
    ids=["", "preempt", "chunks", "small-pool"],
)
@pytest.mark.parametrize("static", ["0", "1"], ids=["", "static"])
def test_on_equals_off(t1: Path, monkeypatch: pytest.MonkeyPatch, hooks: dict[str, str], static: str) -> None:
    adapters = {"x": make_a(1, t1), "y": make_a(2, t1)}
    stop = TestEngine(t1).generate([prompt_of(22, seed=2)], max_tokens=6, ignore_eos=True)[0][4]
    expected = answers(TestEngine(t1, adapters), stop)
    monkeypatch.setenv("LORAPLEX_TEST_HOOKS", "1")
    monkeypatch.setenv("LORAPLEX_TEST_OVERLAP", "1")
    monkeypatch.setenv("LORAPLEX_TEST_STATIC_STEPS", static)
    for name, value in hooks.items():
        monkeypatch.setenv(f"LORAPLEX_TEST_{name}", value)
    engine = TestEngine(t1, adapters)
    found = answers(engine, stop)
    for ours, theirs in zip(found, expected, strict=True):
        assert [o.tokens for o in ours] == [o.tokens for o in theirs]
        assert [(o.finish_reason, o.stop_token) for o in ours] == [(o.finish_reason, o.stop_token) for o in theirs]
        for a, b in zip(ours, theirs, strict=True):
            for lp, other in zip(a.logprobs, b.logprobs, strict=True):
                assert_alike(lp, other)
            for prompt_lp, other_lp in zip(a.prompt_logprobs or [], b.prompt_logprobs or [], strict=True):
                assert_alike(prompt_lp, other_lp)
    if "PREEMPT_EVERY" in hooks or "KV_BLOCKS" in hooks:
        assert engine.loop.scheduler.num_preemptions > 0


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_TEST_HOOKS", "1")
    monkeypatch.setenv("LORAPLEX_TEST_OVERLAP", "1")


@pytest.mark.usefixtures("overlap")
def test_last_step_does_not_wait_for_new_work(t1: Path) -> None:
    engine = TestEngine(t1)
    id = engine.submit([1, 2, 3], max_tokens=2, ignore_eos=True)
    for _ in range(3):
        assert not engine.loop.is_idle or not engine.outputs(id)
        engine.turn()
    assert [out.finish_reason for out in engine.outputs(id)] == [None, "length"]
    assert engine.loop.is_idle


@pytest.mark.usefixtures("overlap")
def test_failed_step_leaves_the_tokens_before_it(t1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = TestEngine(t1).generate([[1, 2, 3]], max_tokens=9, ignore_eos=True)[0]
    monkeypatch.setenv("LORAPLEX_TEST_FAIL_STEP", "4")
    engine = TestEngine(t1)
    id = engine.submit([1, 2, 3], max_tokens=9, ignore_eos=True)
    engine.run()
    assert engine.tokens(id) == good[:3]
    assert engine.outputs(id)[-1].finish_reason == "error"
    assert engine.generate([[1, 2, 3]], max_tokens=9, ignore_eos=True)[0] == good


@pytest.mark.usefixtures("overlap")
def test_step_that_fails_on_the_device_ends_its_requests(t1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA tells of it when the results are waited for, one step later."""
    engine = TestEngine(t1)
    id = engine.submit([1, 2, 3], max_tokens=9, ignore_eos=True)
    engine.turn()
    with monkeypatch.context() as broken:

        def raises(_: object) -> None:
            raise RuntimeError("device lost")

        broken.setattr("loraplex.engine.launched.LaunchedStep.result", raises)
        engine.turn()
    assert engine.outputs(id)[-1].finish_reason == "error"
    other = engine.submit([4, 5], max_tokens=3, ignore_eos=True)
    engine.run()
    assert len(engine.tokens(other)) == 3
