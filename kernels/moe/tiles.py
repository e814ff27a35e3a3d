"""Tile sizes of the experts' kernels: a table of the device where there is one, else what an H200 measured best.

Chosen from the number of pairs, the experts and the model's widths alone, never from what the adapters of a step do: a
base row is computed alike whoever shares the batch.
"""

import torch

from loraplex.kernels.tuning import TileConfig, choose_tile, power_of_two

ROW_FORM_PAIRS = 512
"""Up to here one program per pair wins: 412 of 512 pairs of 8 adapters have matrices of their own."""
FEW_PAIRS = 64
"""Below this many the programs of a launch do not fill the device: smaller tiles."""
SEPARATE_PAIRS = 2048
"""Up to here expands are kernels of their own, beyond they run in the epilogues of the base GEMMs."""
DECODE_CHUNK_ROWS = 16
PREFILL_CHUNK_ROWS = 64


def gate_up_tile(device: torch.device, pairs: int, experts: int, inner: int, hidden: int) -> TileConfig:
    """block_n columns of gate and as many of up.

    Decode streams the experts' weights once whatever the tile is, as long as a block holds an expert's rows and several
    blocks fit a multiprocessor.
    """
    default = _by_rows_per_expert(
        pairs / experts,
        TileConfig(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4),
        TileConfig(block_m=32, block_n=64, block_k=128, num_warps=4, num_stages=4),
        TileConfig(block_m=64, block_n=128, block_k=64, num_warps=8, num_stages=4),
        TileConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=4),
    )
    return choose_tile("expert_gate_up", device, default, pairs, experts=experts, inner=inner, hidden=hidden)


def down_tile(device: torch.device, pairs: int, experts: int, inner: int, hidden: int) -> TileConfig:
    """Two blocks per multiprocessor hide each other's epilogue: 4 warps and 3 stages for the large tile."""
    default = _by_rows_per_expert(
        pairs / experts,
        TileConfig(block_m=16, block_n=128, block_k=128, num_warps=4, num_stages=4),
        TileConfig(block_m=32, block_n=128, block_k=128, num_warps=4, num_stages=4),
        TileConfig(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=3),
        TileConfig(block_m=128, block_n=128, block_k=64, num_warps=4, num_stages=3),
    )
    return choose_tile("expert_down", device, default, pairs, experts=experts, inner=inner, hidden=hidden)


def rank_capacity(rank: int) -> int:
    """Rank columns of scratch in which `rank` fits: few of them, so that few CUDA graphs serve all adapters. Ranks
    below 16 share one: tiles have 16 rank rows anyway."""
    return max(16, power_of_two(rank))


def rank_window(capacity: int, pairs: int) -> int:
    """Rank columns that one step of the fused expand takes. The fewer tokens, the more adapters meet in a block: with
    eight of rank 16, 64 columns save 22 to 35 µs up to 4096 tokens and nothing at 16384."""
    return 32 if capacity <= 32 and pairs > 65536 else 64


def has_tail(tile: TileConfig) -> bool:
    """At 256 rows per expert a quarter of 128-row tiles is padding; half tiles for the last rows save half of it."""
    return tile.block_m >= 128


def shrink_rows_tile(pairs: int, rank: int, width: int) -> TileConfig:
    """Few rank rows, a long stretch of the inner dimension; one warp when there are many programs anyway."""
    if pairs >= FEW_PAIRS:
        return TileConfig(block_r=4, block_k=512, num_warps=1)
    return TileConfig(block_r=4 if rank > 32 else 8, block_k=1024 if width > 512 else 512, num_warps=4)


def expand_rows_tile(pairs: int) -> TileConfig:
    """One warp, so that the sum over the rank stays within a thread or two: 21 µs where two warps take 44."""
    return TileConfig(block_n=256 if pairs >= FEW_PAIRS else 128, block_r=16, num_warps=1)


def shrink_chunks_tile(rows: int, rank: int) -> TileConfig:
    """block_r: rank rows of each part."""
    if rows == DECODE_CHUNK_ROWS:
        return TileConfig(block_m=16, block_r=16, block_k=128, num_warps=2, num_stages=4)
    return TileConfig(
        block_m=64, block_r=16 if rank <= 16 else 32 if rank <= 32 else 64, block_k=64, num_warps=4, num_stages=4
    )


def parts_together(rows: int) -> bool:
    """Whether one program shrinks gate and up: x is read once at prefill; decode wants more programs in flight."""
    return rows != DECODE_CHUNK_ROWS


CHUNK_PROGRAMS = 2
"""Programs that share a chunk's columns in the expands."""
ACTIVATE_ROWS = TileConfig(block_n=128, block_r=16, num_warps=1)
ACTIVATE_CHUNKS = TileConfig(block_m=DECODE_CHUNK_ROWS, block_n=128, block_r=16, num_warps=4)
EXPAND_CHUNKS = TileConfig(block_m=DECODE_CHUNK_ROWS, block_n=256, block_r=16, num_warps=4)


def _by_rows_per_expert(
    rows: float, few: TileConfig, some: TileConfig, many: TileConfig, full: TileConfig
) -> TileConfig:
    """As if the router were uniform."""
    for bound, tile in ((8, few), (24, some), (64, many)):
        if rows <= bound:
            return tile
    return full
