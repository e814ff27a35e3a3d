"""Look-up of tile tables."""

import logging
from pathlib import Path

import pytest
import torch

from loraplex.kernels import tuning
from loraplex.kernels.tuning import TileConfig, choose_tile, nearest


def entry(inner: int, tokens: int, block_n: int) -> dict[str, object]:
    return {"inner": inner, "tokens": tokens, "tile": {"block_n": block_n}}


@pytest.mark.parametrize(
    ("tokens", "inner", "block_n"),
    [(1, 2048, 16), (64, 2048, 16), (65, 2048, 32), (9999, 2048, 32), (1, 1500, 16), (1, 3000, 64), (1, 10**6, 64)],
)
def test_nearest_shape_then_next_larger_token_count(tokens: int, inner: int, block_n: int) -> None:
    entries = [entry(2048, 256, 32), entry(4096, 64, 64), entry(2048, 64, 16)]
    assert nearest(entries, tokens, {"inner": inner}) == TileConfig(block_n=block_n)


def test_one_warning_where_there_is_no_table(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Unheard Of 9000")
    choose_tile.cache_clear()
    default = TileConfig(block_n=64)
    with caplog.at_level(logging.WARNING, "loraplex"):
        for tokens in (1, 2):
            assert choose_tile("some_op", torch.device("cuda"), default, tokens, inner=2048) == default
    assert [record.getMessage() for record in caplog.records] == [
        "no tuned kernel tiles for this device (configs/kernels/unheard-of-9000): defaults are used"
    ]
    assert choose_tile("some_op", torch.device("cpu"), default, 1, inner=2048) == default
    choose_tile.cache_clear()


def test_every_committed_table_can_be_read() -> None:
    for path in (Path(__file__).parents[2] / "configs" / "kernels").rglob("*.json"):
        entries = tuning.read_table(path.stem, path.parent.name)
        assert entries
        for one in entries:
            assert one["tokens"] > 0
            TileConfig(**one["tile"])
