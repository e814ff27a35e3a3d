"""Tiles that every shape leads to, and how rows are split."""

from itertools import product

import pytest

from loraplex.kernels.attention.tiles import MAX_SPLITS, decode_tile, prefill_tile

SHAPES = list(product((1, 7, 71, 128), (8, 64, 96, 128, 256), (2, 4)))


@pytest.mark.parametrize(("group", "dim", "item_bytes"), SHAPES)
def test_every_shape_has_tiles_that_fit_together(group, dim, item_bytes):
    for rows, kv_heads in product((1, 3, 64, 500, 4096), (1, 4, 32)):
        tile = decode_tile(rows, kv_heads, group, dim, item_bytes)
        assert 1 <= tile.splits <= MAX_SPLITS
        assert tile.min_share % tile.block_n == 0
    for tokens in (1, 512, 513, 16384):
        tile = prefill_tile(tokens, group, dim, item_bytes)
        assert tile.block_m >= group


def test_splits_fill_an_h200_at_any_batch():
    """132 multiprocessors; programs at work at 8192 positions, with 4 key/value heads."""
    for rows in (1, 2, 8, 16, 64, 256):
        tile = decode_tile(rows, 4, 8, 128, 2)
        at_work = min(tile.splits, 8192 // tile.min_share)
        assert rows * 4 * at_work >= 2 * 132 or rows == 1
        assert rows * 4 * at_work <= 4096
    assert min(decode_tile(64, 4, 8, 128, 2).splits, 512 // decode_tile(64, 4, 8, 128, 2).min_share) == 2
