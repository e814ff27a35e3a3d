"""Dense LoRA by segments: runs of tokens of one adapter, through tensor cores."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from loraplex.kernels.lora._triton_dense import ALIGN, locate_columns, rank_columns, total_rank


@triton.jit(do_not_specialize=["tiles"])
def shrink_segments(
    x,
    z,
    arena,
    places,
    ranks,
    scales,
    seg_indptr,
    segment_row,
    permutation,
    K: tl.constexpr,
    X_ROW: tl.constexpr,
    z_part,
    PARTS: tl.constexpr,
    PLACES_ROW: tl.constexpr,
    PLACES_PART: tl.constexpr,
    RANKS_ROW: tl.constexpr,
    RANKS_PART: tl.constexpr,
    tiles,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """z[m, split, part, r] = scale · x[permutation[m]] · A[r] over one K range.

    Grid: segments × tiles (programs that share a segment's tokens), SPLIT_K, programs that share the rank rows.
    """
    segment = tl.program_id(0) // tiles
    row = tl.load(segment_row + segment).to(tl.int64)
    start = tl.load(seg_indptr + segment)
    end = tl.load(seg_indptr + segment + 1)
    if row < 0:
        if PDL:
            gdc_wait()
        return
    total = total_rank(ranks, row, PARTS, RANKS_ROW, RANKS_PART)
    SPAN: tl.constexpr = (K + SPLIT_K * BLOCK_K - 1) // (SPLIT_K * BLOCK_K) * BLOCK_K
    split = tl.program_id(1)
    kk = split * SPAN + tl.arange(0, BLOCK_K)
    mm = tl.arange(0, BLOCK_M)
    if PDL:  # see _triton_rows.py; the step's tables are older than the predecessor
        gdc_wait()
        gdc_launch_dependents()
    for m0 in range(start + tl.program_id(0) % tiles * BLOCK_M, end, tiles * BLOCK_M):
        filled = m0 + mm < end
        token = tl.load(permutation + m0 + mm, mask=filled, other=0)
        for j0 in range(tl.program_id(2) * BLOCK_R, total, tl.num_programs(2) * BLOCK_R):
            j = j0 + tl.arange(0, BLOCK_R)
            # Rows past the last one read it again and are not stored: no mask in the loop, nothing read beyond it.
            offset, column, scale = rank_columns(
                tl.minimum(j, total - 1),
                row,
                places,
                ranks,
                scales,
                K,
                z_part,
                PARTS,
                PLACES_ROW,
                PLACES_PART,
                RANKS_ROW,
                RANKS_PART,
            )
            x_at = x + token[:, None] * X_ROW + kk[None, :]
            a_at = arena + offset[None, :] + kk[:, None]
            acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for k in tl.range(0, SPAN, BLOCK_K, num_stages=STAGES):
                if K % (SPLIT_K * BLOCK_K) == 0:
                    xv = tl.load(x_at + k, mask=filled[:, None], other=0.0)
                    a = tl.load(a_at + k)
                else:
                    inner = k + kk < K
                    xv = tl.load(x_at + k, mask=filled[:, None] & inner[None, :], other=0.0)
                    a = tl.load(a_at + k, mask=inner[:, None], other=0.0)
                acc = tl.dot(xv, a, acc, input_precision="ieee")
            z_at = z + ((m0 + mm).to(tl.int64) * SPLIT_K + split)[:, None] * (PARTS * z_part) + column[None, :]
            tl.store(z_at, (acc * scale[None, :]).to(z.dtype.element_ty), mask=filled[:, None] & (j < total)[None, :])


@triton.jit(do_not_specialize=["tiles"])
def expand_segments(
    y,
    z,
    arena,
    places,
    ranks,
    seg_indptr,
    segment_row,
    permutation,
    WIDTHS: tl.constexpr,
    WIDTH_DIV: tl.constexpr,
    Y_ROW: tl.constexpr,
    z_part,
    PARTS: tl.constexpr,
    PLACES_ROW: tl.constexpr,
    PLACES_PART: tl.constexpr,
    RANKS_ROW: tl.constexpr,
    RANKS_PART: tl.constexpr,
    tiles,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[permutation[m], n] += Σ_r (Σ_split z[m, split, part, r]) · B[r, n], splits added in order.

    Grid: segments × tiles, column tiles of all parts.
    """
    segment = tl.program_id(0) // tiles
    row = tl.load(segment_row + segment).to(tl.int64)
    start = tl.load(seg_indptr + segment)
    end = tl.load(seg_indptr + segment + 1)
    part, width, begin, n0 = locate_columns(tl.program_id(1), WIDTHS, WIDTH_DIV, BLOCK_N)
    rank = tl.load(ranks + tl.maximum(row, 0) * RANKS_ROW + part * RANKS_PART)
    b = arena + tl.multiple_of(tl.load(places + tl.maximum(row, 0) * PLACES_ROW + part * PLACES_PART + 1), ALIGN)
    if (row < 0) | (rank == 0):
        if PDL:
            gdc_wait()
        return
    n = n0 + tl.arange(0, BLOCK_N)
    inside = n < width
    rr = tl.arange(0, BLOCK_R)
    mm = tl.arange(0, BLOCK_M)
    # The first rank rows of B travel while the shrink ends.
    ahead = tl.load(b + tl.minimum(rr, rank - 1)[:, None] * width + n[None, :], mask=inside[None, :], other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for m0 in range(start + tl.program_id(0) % tiles * BLOCK_M, end, tiles * BLOCK_M):
        filled = m0 + mm < end
        token = tl.load(permutation + m0 + mm, mask=filled, other=0)
        z_at = z + (m0 + mm).to(tl.int64)[:, None] * (SPLIT_K * PARTS * z_part) + part * z_part + rr[None, :]
        out = y + token[:, None] * Y_ROW + begin + n[None, :]
        kept = filled[:, None] & inside[None, :]
        before = tl.load(out, mask=kept, other=0.0)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for r0 in range(0, rank, BLOCK_R):
            # Rows past the rank read its last one again; their z counts as 0.
            weights = ahead
            if r0 > 0:
                r = tl.minimum(r0 + rr, rank - 1)
                weights = tl.load(b + r[:, None] * width + n[None, :], mask=inside[None, :], other=0.0)
            # z is wide enough for whole tiles: an unmasked read stays inside and can be a wide one.
            zv = tl.load(z_at + r0, mask=filled[:, None], other=0.0).to(tl.float32)
            for split in tl.static_range(1, SPLIT_K):
                zv += tl.load(z_at + r0 + split * PARTS * z_part, mask=filled[:, None], other=0.0).to(tl.float32)
            zv = tl.where((r0 + rr < rank)[None, :], zv, 0.0).to(weights.dtype)
            acc = tl.dot(zv, weights, acc, input_precision="ieee")
        tl.store(out, (before.to(tl.float32) + acc).to(y.dtype.element_ty), mask=kept)
