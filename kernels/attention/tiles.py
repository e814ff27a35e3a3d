"""Tile sizes of the attention kernels, from shapes alone: a captured launch serves every length."""

from dataclasses import dataclass

from loraplex.kernels.tuning import power_of_two


@dataclass(frozen=True, kw_only=True)
class DecodeTile:
    block_n: int
    """Positions of one iteration."""
    splits: int
    """Most programs that share a row."""
    min_share: int
    """Positions below which a row is not split further; a multiple of block_n."""
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, kw_only=True)
class PrefillTile:
    block_m: int
    """Queries: tokens times the heads that share a key/value head."""
    block_n: int
    """Positions of one iteration."""
    num_warps: int
    num_stages: int


MAX_SPLITS = 64
FEW_SPLITS = 8
"""Up to here one warp joins the partial results of a head."""
WANTED_PROGRAMS = 2048
"""Of rows so long that they are split as far as they may be."""
FEW_TOKENS = 2048
"""Up to here smaller prefill tiles, two to a multiprocessor, are faster: 115 µs against 120 for one row of 2048."""


def decode_tile(rows: int, kv_heads: int, group: int, head_dim: int, item_bytes: int) -> DecodeTile:
    """Splits fill the device when there are few rows, and halve the wait for one long row among many short ones.

    A share under 256 positions costs more in partial results than it gains once rows fill the device: at batch 64 and
    512 positions, 2 splits take 29 µs on an H200 and 16 take 40.
    """
    pairs = rows * kv_heads
    splits = min(MAX_SPLITS, power_of_two(max(1, WANTED_PROGRAMS // pairs)))
    min_share = 64 if pairs <= 32 else 128 if pairs <= 128 else 256 if pairs <= 512 else 512
    if item_bytes > 2:
        block_n = 16
    else:
        block_n = 64 if head_dim <= 128 and group <= 32 else 32
    return DecodeTile(block_n=block_n, splits=splits, min_share=min_share)


def prefill_tile(tokens: int, group: int, head_dim: int, item_bytes: int) -> PrefillTile:
    """128 queries per tile for many tokens, which read each key and value half as often; half of that for few. What
    larger tiles of wide heads or of fp32 need does not fit the registers."""
    least = power_of_two(group)
    if item_bytes > 2:
        return PrefillTile(block_m=max(16, least), block_n=16, num_warps=4, num_stages=2)
    block_m = max(64 if tokens <= (FEW_TOKENS if head_dim <= 128 else 512) else 128, least)
    if head_dim > 128:
        return PrefillTile(block_m=block_m, block_n=32, num_warps=8, num_stages=2)
    few = block_m == 64
    return PrefillTile(block_m=block_m, block_n=64, num_warps=4 if few else 8, num_stages=2 if few else 3)
