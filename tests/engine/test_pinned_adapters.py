"""Pinning beside adapters that have lost their name but are still waited for."""

from pathlib import Path

import pytest
from kit.adapters import make_a
from kit.engine import TestEngine


@pytest.mark.parametrize("how", ["unload", "replace", "replace pinned"])
def test_a_pin_leaves_room_for_what_requests_still_hold(t1: Path, how: str) -> None:
    folders = {f"a{i}": make_a(i, t1) for i in (2, 3, 5)}
    largest = max(i.bytes for i in TestEngine(t1, folders).loop.manager.registry.infos())
    engine = TestEngine(t1, {}, lora_memory=str(largest))
    assert engine.load("a5", folders["a5"]).error is None
    assert engine.load("a2", folders["a2"]).error is None
    running = engine.submit([1, 2], "a2", max_tokens=20, ignore_eos=True)
    engine.turn()
    waits = engine.submit([3, 4], "a5", max_tokens=3, ignore_eos=True)
    engine.turn()
    if how == "unload":
        assert engine.unload("a5").error is None
        refused = engine.load("a3", folders["a3"], pinned=True)
    elif how == "replace":
        assert engine.load("a5", folders["a2"], replace=True).error is None
        refused = engine.load("a3", folders["a3"], pinned=True)
    else:
        refused = engine.load("a5", folders["a3"], replace=True, pinned=True)
    assert refused.error is not None
    assert (refused.error.status, refused.error.param) == (507, "pinned")
    engine.run(most=200)
    assert len(engine.tokens(running)) == 20
    assert len(engine.tokens(waits)) == 3
    if how != "replace pinned":
        assert engine.load("a3", folders["a3"], pinned=True).error is None


def test_the_only_adapter_may_be_pinned(t1: Path) -> None:
    engine = TestEngine(t1, {}, max_loaded_loras=1, max_loras_per_batch=1)
    assert engine.load("a1", make_a(1, t1), pinned=True).error is None
    assert engine.generate([[1, 2]], ["a1"])[0]


def test_a_held_adapter_may_be_pinned(t1: Path) -> None:
    folder = make_a(1, t1)
    size = TestEngine(t1, {"a1": folder}).loop.manager.bytes
    engine = TestEngine(t1, {}, lora_memory=str(size))
    assert engine.load("a1", folder).error is None
    engine.submit([1, 2], "a1")
    engine.turn()
    assert engine.load("a1", folder, pinned=True).error is None
    engine.run()
