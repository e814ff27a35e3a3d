"""Tile sizes of the experts' kernels, measured on an H200 with Qwen3-30B-A3B's shapes.

Chosen from the number of pairs, the experts and the model's widths alone, never from what the adapters of a step do: a
base row is computed alike whoever shares the batch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class ExpertTiles:
    """Tiles of one MoE block at one size. Shrinks and expands have a tile for each form of `lora/experts_ops.py`."""

    gate_up: Tile
    down: Tile
    tail: bool
    """Blocks of at most half of block_m rows run at half the tile."""


# Decode streams the experts' weights once whatever the tile is, as long as a block holds an expert's rows and several
# blocks fit a multiprocessor. At 256 rows per expert a quarter of 128-row tiles would be padding without the tail.
_FEW = ExpertTiles(Tile(16, 64, 128, 4, 4), Tile(16, 128, 128, 4, 4), tail=False)
_SOME = ExpertTiles(Tile(32, 64, 128, 4, 4), Tile(32, 128, 128, 4, 4), tail=False)
_MANY = ExpertTiles(Tile(64, 128, 64, 8, 4), Tile(64, 128, 64, 4, 3), tail=False)
_FULL = ExpertTiles(Tile(128, 128, 64, 8, 4), Tile(128, 128, 64, 4, 3), tail=True)

ROW_FORM_PAIRS = 512
"""Up to here one program per pair wins: 412 of 512 pairs of 8 adapters have matrices of their own."""
SEPARATE_PAIRS = 2048
"""Up to here expands are kernels of their own, beyond they run in the epilogues of the base GEMMs."""
DECODE_CHUNK_ROWS = 16
PREFILL_CHUNK_ROWS = 64
WINDOW = 32
"""Rank columns that one step of the fused expand takes."""


def expert_tiles(num_pairs: int, num_experts: int) -> ExpertTiles:
    """By rows per expert, as if the router were uniform."""
    rows = num_pairs / num_experts
    if rows <= 8:
        return _FEW
    if rows <= 24:
        return _SOME
    if rows <= 64:
        return _MANY
    return _FULL


def shrink_rows_tile(rank: int, width: int) -> tuple[int, int, int]:
    """(block_r, block_k, num_warps) of the row form. Few rank rows, a long stretch of K."""
    if rank > 32:
        return 8, 512, 2
    return (4, 1024, 4) if width > 512 else (4, 512, 2)


SHRINK_CHUNKS = {DECODE_CHUNK_ROWS: Tile(16, 16, 256, 2, 3), PREFILL_CHUNK_ROWS: Tile(64, 16, 64, 4, 4)}
"""block_n: rank rows of each part."""
ACTIVATE_ROWS = Tile(1, 128, 16, 1, 1)
"""One warp, so that the sum over the rank stays within a thread or two; block_k: rank rows of a step."""
ACTIVATE_CHUNKS = Tile(16, 64, 16, 2, 1)
EXPAND_ROWS = Tile(1, 128, 16, 1, 1)
EXPAND_CHUNKS = Tile(16, 128, 16, 2, 1)
