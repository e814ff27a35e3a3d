"""What the dense-LoRA kernels share: where a program's rank rows and output columns lie."""

import triton
import triton.language as tl

ALIGN = tl.constexpr(16)
"""Elements; every matrix of an arena begins at a multiple of it, so 16-byte loads are safe."""


@triton.jit
def total_rank(ranks, row, PARTS: tl.constexpr, RANKS_ROW: tl.constexpr, RANKS_PART: tl.constexpr):
    """Sum over the parts of an adapter's ranks."""
    total = 0
    for part in tl.static_range(PARTS):
        total += tl.load(ranks + row * RANKS_ROW + part * RANKS_PART)
    return total


@triton.jit
def rank_columns(
    j,
    row,
    places,
    ranks,
    scales,
    K: tl.constexpr,
    z_part,
    PARTS: tl.constexpr,
    PLACES_ROW: tl.constexpr,
    PLACES_PART: tl.constexpr,
    RANKS_ROW: tl.constexpr,
    RANKS_PART: tl.constexpr,
):
    """For indices j into the parts' rank rows laid end to end: offset of the A row in the arena, column of z, scale.

    j must be below the total rank. Example: ranks (2, 0, 3), j = 3 → second row
    of part 2's A, z column 2 · z_part + 1.
    """
    offset = tl.zeros_like(j).to(tl.int64)
    column = tl.zeros_like(j)
    scale = tl.zeros_like(j).to(tl.float32)
    first = 0
    for part in tl.static_range(PARTS):
        rank = tl.load(ranks + row * RANKS_ROW + part * RANKS_PART)
        place = tl.multiple_of(tl.load(places + row * PLACES_ROW + part * PLACES_PART), ALIGN)
        inside = (j >= first) & (j < first + rank)
        offset = tl.where(inside, place + (j - first).to(tl.int64) * K, offset)
        column = tl.where(inside, part * z_part + j - first, column)
        scale = tl.where(inside, tl.load(scales + row * RANKS_ROW + part * RANKS_PART), scale)
        first += rank
    if K % 16 == 0:
        offset = tl.multiple_of(offset, [16])  # Triton 3.9 does not see it through the choices above
    return offset, column, scale


@triton.jit
def locate_columns(tile, WIDTHS: tl.constexpr, WIDTH_DIV: tl.constexpr, BLOCK_N: tl.constexpr):
    """Part of a column tile, the part's width and first column of y, and the tile's first column within the part.

    A part has ceil(width / BLOCK_N) tiles of its own. Example: widths (40, 16), BLOCK_N 16, tile 3 → (1, 16, 40, 0).
    """
    part = 0
    width = WIDTHS[0]
    begin = 0
    tile_begin = 0
    seen = 0
    columns = 0
    for c in tl.static_range(len(WIDTHS)):
        inside = tile >= seen
        part = tl.where(inside, c, part)
        width = tl.where(inside, WIDTHS[c], width)
        begin = tl.where(inside, columns, begin)
        tile_begin = tl.where(inside, seen, tile_begin)
        seen += (WIDTHS[c] + BLOCK_N - 1) // BLOCK_N
        columns += WIDTHS[c]
    n0 = (tile - tile_begin) * BLOCK_N
    return part, tl.multiple_of(width, WIDTH_DIV), tl.multiple_of(begin, WIDTH_DIV), n0
