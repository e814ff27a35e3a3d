"""Dense LoRA token by token: matrix-vector products. Fastest up to about 64 tokens, where nothing is shared anyway."""

import triton
import triton.language as tl

from loraplex.kernels.lora._triton_dense import ALIGN, locate_columns, rank_columns, total_rank


@triton.jit
def shrink_rows(
    x,
    z,
    arena,
    places,
    ranks,
    scales,
    token_slot,
    slot_row,
    K: tl.constexpr,
    X_ROW: tl.constexpr,
    Z_PART: tl.constexpr,
    PARTS: tl.constexpr,
    PLACES_ROW: tl.constexpr,
    PLACES_PART: tl.constexpr,
    RANKS_ROW: tl.constexpr,
    RANKS_PART: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """z[t, part, r] = scale · x[t] · A[r]. Grid: tokens, any number of programs that share the rank rows."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(token_slot + token)
    if slot < 0:
        return
    row = tl.load(slot_row + slot).to(tl.int64)
    total = total_rank(ranks, row, PARTS, RANKS_ROW, RANKS_PART)
    kk = tl.arange(0, BLOCK_K)
    for j0 in range(tl.program_id(1) * BLOCK_R, total, tl.num_programs(1) * BLOCK_R):
        j = j0 + tl.arange(0, BLOCK_R)
        # Rows past the last one read it again and are not stored: no mask in the loop, nothing read beyond it.
        offset, column, scale = rank_columns(
            tl.minimum(j, total - 1),
            row,
            places,
            ranks,
            scales,
            K,
            Z_PART,
            PARTS,
            PLACES_ROW,
            PLACES_PART,
            RANKS_ROW,
            RANKS_PART,
        )
        acc = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            if K % BLOCK_K == 0:
                a = tl.load(arena + offset[:, None] + (k + kk)[None, :])
                xv = tl.load(x + token * X_ROW + k + kk)
            else:
                inner = k + kk < K
                a = tl.load(arena + offset[:, None] + (k + kk)[None, :], mask=inner[None, :], other=0.0)
                xv = tl.load(x + token * X_ROW + k + kk, mask=inner, other=0.0)
            acc += a.to(tl.float32) * xv.to(tl.float32)[None, :]
        tl.store(z + token * PARTS * Z_PART + column, tl.sum(acc, 1) * scale, mask=j < total)


@triton.jit
def expand_rows(
    y,
    z,
    arena,
    places,
    ranks,
    token_slot,
    slot_row,
    WIDTHS: tl.constexpr,
    WIDTH_DIV: tl.constexpr,
    Y_ROW: tl.constexpr,
    Z_PART: tl.constexpr,
    PARTS: tl.constexpr,
    PLACES_ROW: tl.constexpr,
    PLACES_PART: tl.constexpr,
    RANKS_ROW: tl.constexpr,
    RANKS_PART: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """y[t, n] += Σ_r z[t, part, r] · B[r, n]. Grid: tokens, column tiles of all parts."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(token_slot + token)
    if slot < 0:
        return
    row = tl.load(slot_row + slot).to(tl.int64)
    part, width, begin, n0 = locate_columns(tl.program_id(1), WIDTHS, WIDTH_DIV, BLOCK_N)
    rank = tl.load(ranks + row * RANKS_ROW + part * RANKS_PART)
    if rank == 0:
        return
    b = arena + tl.multiple_of(tl.load(places + row * PLACES_ROW + part * PLACES_PART + 1), ALIGN)
    n = n0 + tl.arange(0, BLOCK_N)
    inside = n < width
    rr = tl.arange(0, BLOCK_R)
    out = y + token * Y_ROW + begin + n
    before = tl.load(out, mask=inside, other=0.0)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for r0 in range(0, rank, BLOCK_R):
        # Rows past the rank read its last one again; their z counts as 0.
        r = tl.minimum(r0 + rr, rank - 1)
        weights = tl.load(b + r[:, None] * width + n[None, :], mask=inside[None, :], other=0.0)
        # z is wide enough for whole tiles: an unmasked read stays inside and can be a wide one.
        zv = tl.load(z + token * PARTS * Z_PART + part * Z_PART + r0 + rr)
        acc += tl.sum(weights.to(tl.float32) * tl.where(r0 + rr < rank, zv.to(tl.float32), 0.0)[:, None], 0)
    tl.store(out, (before.to(tl.float32) + acc).to(y.dtype.element_ty), mask=inside)
