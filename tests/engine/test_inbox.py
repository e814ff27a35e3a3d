"""The thread that hears the front."""

from multiprocessing import Pipe
from pathlib import Path

import pytest
from kit.engine import TestEngine

from loraplex.engine.messages import Abort, encode


def test_an_engine_that_no_longer_hears_ends(t1: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise everyone would wait for it for ever."""
    engine = TestEngine(t1)
    ours, theirs = Pipe()
    engine.loop.listen(theirs)
    ours.send_bytes(encode(Abort(id=7)))
    ours.send_bytes(b"no message")
    engine.loop.run()
    assert "not understood" in caplog.text
