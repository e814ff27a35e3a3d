"""Dense LoRA token by token: matrix-vector products. Fastest up to about 64 tokens, where nothing is shared anyway.

PDL (programmatic dependent launch): a kernel starts while its predecessor still runs. Before `gdc_wait` it reads only
what is older than the predecessor (tables and the arena); every program waits before it ends, so that a wait also
covers the predecessor's predecessors.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from loraplex.kernels.lora._triton_dense import ALIGN, locate_columns, rank_columns, total_rank


@triton.jit
def load_block(at, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """tl.load(at), 0 where k is not below K; without a mask where no block is cut."""
    if K % BLOCK_K == 0:
        values = tl.load(at)
    else:
        values = tl.load(at, mask=tl.broadcast_to(k < K, at.shape), other=0.0)
    return values


@triton.jit
def shrink_rows(
    x,
    z,
    arena,
    places,
    ranks,
    scales,
    token_row,
    K: tl.constexpr,
    X_ROW: tl.constexpr,
    z_part,
    PARTS: tl.constexpr,
    PLACES_ROW: tl.constexpr,
    PLACES_PART: tl.constexpr,
    RANKS_ROW: tl.constexpr,
    RANKS_PART: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """z[t, part, r] = scale · x[t] · A[r]. Grid: tokens, any number of programs that share the rank rows."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(token_row + token).to(tl.int64)
    if row < 0:
        if PDL:
            gdc_wait()
        return
    total = total_rank(ranks, row, PARTS, RANKS_ROW, RANKS_PART)
    kk = tl.arange(0, BLOCK_K)
    for j0 in range(tl.program_id(1) * BLOCK_R, total, tl.num_programs(1) * BLOCK_R):
        j = j0 + tl.arange(0, BLOCK_R)
        # Rows past the last one read it again and are not stored: no mask, nothing read beyond it.
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
        a_at = arena + offset[:, None] + kk[None, :]
        a = load_block(a_at, kk[None, :], K, BLOCK_K)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        acc = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
        for k in tl.static_range(0, K, BLOCK_K):
            xv = load_block(x + token * X_ROW + k + kk, k + kk, K, BLOCK_K)
            acc += a.to(tl.float32) * xv.to(tl.float32)[None, :]
            if k + BLOCK_K < K:
                a = load_block(a_at + (k + BLOCK_K), (k + BLOCK_K + kk)[None, :], K, BLOCK_K)
        tl.store(z + token * PARTS * z_part + column, tl.sum(acc, 1) * scale, mask=j < total)
    if PDL:
        gdc_wait()


@triton.jit
def expand_rows(
    y,
    z,
    arena,
    places,
    ranks,
    token_row,
    WIDTHS: tl.constexpr,
    WIDTH_DIV: tl.constexpr,
    Y_ROW: tl.constexpr,
    z_part,
    PARTS: tl.constexpr,
    PLACES_ROW: tl.constexpr,
    PLACES_PART: tl.constexpr,
    RANKS_ROW: tl.constexpr,
    RANKS_PART: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[t, n] += Σ_r z[t, part, r] · B[r, n]. Grid: tokens, column tiles of all parts."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(token_row + token).to(tl.int64)
    if row < 0:
        if PDL:
            gdc_wait()
        return
    part, width, begin, n0 = locate_columns(tl.program_id(1), WIDTHS, WIDTH_DIV, BLOCK_N)
    rank = tl.load(ranks + row * RANKS_ROW + part * RANKS_PART)
    if rank == 0:
        if PDL:
            gdc_wait()
        return
    n = n0 + tl.arange(0, BLOCK_N)
    inside = n < width
    rr = tl.arange(0, BLOCK_R)
    b = arena + tl.multiple_of(tl.load(places + row * PLACES_ROW + part * PLACES_PART + 1), ALIGN)
    b_at = b + rr[:, None] * width + n[None, :]
    weights = tl.load(b_at, mask=(rr < rank)[:, None] & inside[None, :], other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    out = y + token * Y_ROW + begin + n
    before = tl.load(out, mask=inside, other=0.0)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for r0 in range(0, rank, BLOCK_R):
        # z is wide enough for whole tiles: an unmasked read stays inside and can be a wide one.
        zv = tl.load(z + token * PARTS * z_part + part * z_part + r0 + rr)
        acc += tl.sum(weights.to(tl.float32) * tl.where(r0 + rr < rank, zv.to(tl.float32), 0.0)[:, None], 0)
        ahead = r0 + BLOCK_R
        weights = tl.load(
            b_at + ahead * width, mask=(ahead + rr < rank)[:, None] & inside[None, :], other=0.0
        )  # of the next step
    tl.store(out, (before.to(tl.float32) + acc).to(y.dtype.element_ty), mask=inside)
