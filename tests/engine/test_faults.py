"""Fault hooks in the engine: what fails is told to its requests, everything else goes on, nothing leaks."""

from pathlib import Path

import pytest
from kit.engine import TestEngine

from loraplex.engine import ranks, worker
from loraplex.engine.hooks import Hooks, read_hooks


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch):
    def switch_on(name: str, value: str) -> None:
        monkeypatch.setenv("LORAPLEX_TEST_HOOKS", "1")
        monkeypatch.setenv(f"LORAPLEX_TEST_{name}", value)

    return switch_on


def test_hooks_do_nothing_without_the_switch(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.delenv("LORAPLEX_TEST_HOOKS", raising=False)
    monkeypatch.setenv("LORAPLEX_TEST_FAIL_STEP", "1")
    assert read_hooks() == Hooks()
    assert "LORAPLEX_TEST_HOOKS=1" in capsys.readouterr().err
    assert read_hooks(warn=False) == Hooks()
    assert not capsys.readouterr().err


def test_sizes_by_hook(t1: Path, hook) -> None:
    for name, value in (("KV_BLOCKS", "24"), ("BLOCK_SIZE", "4"), ("CHUNK", "7"), ("MAX_LORAS", "2")):
        hook(name, value)
    engine = TestEngine(t1)
    limits = engine.loop.scheduler.limits
    assert (limits.page_size, limits.chunk, limits.adapter_slots) == (4, 7, 2)
    assert engine.loop.scheduler.pool.num_pages == 24
    engine.generate([list(range(30))])


def test_unknown_hook_is_an_error(hook) -> None:
    hook("FAIL_STAP", "1")
    with pytest.raises(ValueError, match="FAIL_STAP"):
        read_hooks()


@pytest.mark.parametrize(("name", "value"), [("FAIL_STEP", "4"), ("OOM_ALLOC", "4")])
def test_failed_step_ends_the_requests_it_held(t1: Path, hook, name: str, value: str) -> None:
    good = TestEngine(t1).generate([[1, 2, 3]], max_tokens=4)[0]
    hook(name, value)
    engine = TestEngine(t1)
    held = [engine.submit([1, 2, 3], max_tokens=20, ignore_eos=True) for _ in range(3)]
    engine.run()
    for id in held:
        last = engine.outputs(id)[-1]
        assert last.finish_reason == "error"
        assert last.error is not None
        assert last.error.status == 500
        assert "injected" not in last.error.message, "inner words stay in the log"
    assert engine.generate([[1, 2, 3]], max_tokens=4)[0] == good


def test_failure_aimed_at_a_request_waits_for_it(t1: Path, hook) -> None:
    hook("FAIL_STEP", "1:3")
    engine = TestEngine(t1)
    first = engine.submit([1, 2, 3])
    second = engine.submit([4, 5])
    engine.run()
    third = engine.submit([6])
    engine.run()
    assert [engine.outputs(id)[-1].finish_reason for id in (first, second, third)] == ["length", "length", "error"]


def test_repeated_failures_end_the_engine(t1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TestEngine(t1)

    def broken(*_: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine.loop.runner, "launch", broken)
    for _ in range(2):
        engine.submit([1])
        engine.turn()
    engine.submit([1])
    with pytest.raises(RuntimeError, match="in a row"):
        engine.turn()


def test_nan_logits_fail_their_request_only(t1: Path, hook) -> None:
    """Field case G42."""
    alone = TestEngine(t1).generate([[9, 9], [8]])
    hook("NAN_LOGITS", "2")
    engine = TestEngine(t1)
    one, two, three = engine.submit([9, 9]), engine.submit([1, 2, 3]), engine.submit([8])
    engine.run()
    last = engine.outputs(two)[-1]
    assert (last.finish_reason, last.tokens) == ("error", [])
    assert last.error is not None
    assert last.error.code == "numerical_error"
    assert [engine.tokens(one), engine.tokens(three)] == alone


def test_abort_while_running_waiting_and_unknown(t1: Path) -> None:
    engine = TestEngine(t1, max_running_requests=2)
    ids = [engine.submit([i, 2, 3], max_tokens=50, ignore_eos=True, n=2) for i in range(3)]
    for _ in range(3):
        engine.turn()
    for id in (*ids, ids[0], 999):
        engine.abort(id)
    engine.run()
    assert not any(out.finish_reason for id in ids for i in range(2) for out in engine.outputs(id, i))


def test_broken_adapter_load_names_the_reason_and_changes_nothing(t1: Path, tmp_path: Path) -> None:
    engine = TestEngine(t1, {})
    reply = engine.load("x", tmp_path)
    assert reply.error is not None
    assert reply.error.status == 404
    assert engine.loop.manager.registry.infos() == []
    assert engine.unload("x").error is not None
    assert engine.loop.manager.bytes == 0


def test_unload_frees_the_bytes_when_the_last_request_ends(t1: Path) -> None:
    from kit.adapters import make_a

    engine = TestEngine(t1, {"x": make_a(1, t1)})
    held = engine.loop.manager.bytes
    assert held > 0
    id = engine.submit([1, 2, 3], "x", max_tokens=10, ignore_eos=True)
    engine.turn()
    assert engine.unload("x").error is None
    assert engine.loop.manager.bytes == held
    refused = engine.submit([1, 2, 3], "x")
    engine.run()
    assert len(engine.tokens(id)) == 10
    error = engine.outputs(refused)[0].error
    assert error is not None
    assert (error.status, error.param) == (404, "model")
    assert engine.loop.manager.bytes == 0
    assert engine.load("x", make_a(1, t1)).error is None


def test_loading_the_same_content_again_is_no_change(t1: Path) -> None:
    from kit.adapters import make_a

    engine = TestEngine(t1, {"x": make_a(1, t1)}, max_loaded_loras=8)
    first = engine.loop.manager.registry.infos()[0]
    again = engine.load("x", make_a(1, t1))
    assert again.result is not None
    assert again.result["version"] == first.version
    other = engine.load("x", make_a(2, t1))
    assert other.error is not None
    assert other.error.status == 409


def test_more_adapters_than_allowed_are_refused(t1: Path) -> None:
    from kit.adapters import make_a

    engine = TestEngine(t1, {"x": make_a(1, t1)}, max_loaded_loras=1, max_loras_per_batch=1)
    reply = engine.load("y", make_a(2, t1))
    assert reply.error is not None
    assert reply.error.status == 507
    assert "--max-loaded-loras" in reply.error.message
    assert engine.load("x", make_a(2, t1), replace=True).error is None


def test_a_disk_error_on_a_follower_fails_that_load_only(t1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has read the files before; the second reading may still find anything."""
    from kit.adapters import make_a

    engine = TestEngine(t1, {"x": make_a(1, t1)})
    info = engine.loop.manager.registry.infos()[0]
    message = ranks.Store(99, info.path, info.digest)
    with monkeypatch.context() as broken:

        def raises(*_: object, **__: object) -> None:
            raise OSError(5, "Input/output error", "/secret/path")

        broken.setattr("loraplex.engine.lora.loader.read_adapter", raises)
        error = worker._store(engine.loop.runner, engine.config, message)
        assert error is not None
        assert (error.status, error.param) == (422, "lora_path")
        assert "secret" not in error.message
        reply = engine.load("y", make_a(2, t1))
        assert reply.error == error
    assert worker._store(engine.loop.runner, engine.config, message) is None
