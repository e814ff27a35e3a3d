# mypy: ignore-errors
"""Kernels of `expert_gemm.py`: one GEMM per expert over pairs sorted by (expert, slot), and the sum over choices.

WAIT (dependent launch): 0 no, 1 the predecessor makes an input, 2 only a later kernel needs the predecessor: it has
itself waited for everything that is read here, so the wait may come after the products.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _locate(
    starts,
    block,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BY_PLACE: tl.constexpr,
):
    """The rows of a block: expert, first place, number of rows (≤ 0: none).

    BY_PLACE: block b begins at place b if that is a multiple of BLOCK_M within its expert. Otherwise expert e owns the
    blocks from starts[e] // BLOCK_M + e on: one more than it fills at most, without a table or a scan.
    """
    e = tl.arange(0, EXPERTS_POW2)
    start = tl.load(starts + e, mask=e < NUM_EXPERTS, other=0x3FFFFFFF)
    first = start if BY_PLACE else start // BLOCK_M + e
    expert = tl.sum((first <= block).to(tl.int32), 0) - 1
    start = tl.load(starts + expert)
    if BY_PLACE:
        place = block
    else:
        place = start + (block - start // BLOCK_M - expert) * BLOCK_M
    rows = tl.minimum(tl.load(starts + expert + 1) - place, BLOCK_M)
    if BY_PLACE:
        rows = tl.where((place - start) % BLOCK_M == 0, rows, 0)
    return expert, place, rows


@triton.jit
def _add_adapters(
    acc,
    row_slot,
    row_place,
    n,
    expert,
    t,
    arena,
    places,
    ranks,
    slot_row,
    PART: tl.constexpr,
    T_COLUMN: tl.constexpr,
    T_STRIDE: tl.constexpr,
    PLACES_STRIDE: tl.constexpr,
    RANKS_STRIDE: tl.constexpr,
    SLOTS_POW2: tl.constexpr,
    N: tl.constexpr,
    WINDOW: tl.constexpr,
    EVEN: tl.constexpr,
):
    """acc += t B for the adapters of the block's rows, WINDOW rank columns of whichever adapters at a time.

    Columns enumerate the live ranks of the slots that occur, one slot after the other; a row sees those of its slot.
    Columns beyond them have a slot that no row has.
    """
    s = tl.arange(0, SLOTS_POW2)
    occurs = tl.max((row_slot[:, None] == s[None, :]).to(tl.int32), 0) > 0
    table_row = tl.load(slot_row + s, mask=occurs, other=0)
    end_s = tl.cumsum(tl.load(ranks + table_row * RANKS_STRIDE + PART, mask=occurs, other=0), 0)
    total = tl.max(end_s, 0)
    for c0 in tl.range(0, total, WINDOW):
        c = c0 + tl.arange(0, WINDOW)
        passed = end_s[None, :] <= c[:, None]
        slot = tl.sum(passed.to(tl.int32), 1)
        r = c - tl.max(tl.where(passed, end_s[None, :], 0), 1)
        live = c < total
        row = tl.load(slot_row + slot, mask=live, other=0)
        place = places + row.to(tl.int64) * PLACES_STRIDE + PART * 4
        b = tl.load(place + 1, mask=live, other=0) + expert * tl.load(place + 3, mask=live, other=0) + r * N
        own = row_slot[:, None] == slot[None, :]
        z = tl.load(t + row_place[:, None].to(tl.int64) * T_STRIDE + T_COLUMN + r[None, :], mask=own, other=0.0)
        if EVEN:
            w = tl.load(arena + tl.multiple_of(b, 8)[:, None] + n[None, :], mask=live[:, None], other=0.0)
        else:
            w = tl.load(arena + b[:, None] + n[None, :], mask=live[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(z, w, acc, input_precision="ieee")
    return acc


@triton.jit
def _tile(
    x,
    w,
    w_tiles,
    out,
    order,
    expert,
    place,
    rows,
    n0,
    token_slot,
    t,
    arena,
    places,
    ranks,
    slot_row,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    RANK_CAP: tl.constexpr,
    PLACES_STRIDE: tl.constexpr,
    RANKS_STRIDE: tl.constexpr,
    SLOTS_POW2: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    WAIT: tl.constexpr,
):
    m = tl.arange(0, BLOCK_M)
    live = m < rows
    pair = tl.load(order + place + m, mask=live, other=0)
    row_place = tl.where(live, place + m, place)
    if GATED:
        source = pair // TOP_K
        w_row = expert * (2 * N) + n0
    else:
        source = row_place
        w_row = expert * N + n0
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    even: tl.constexpr = (K % BLOCK_K == 0) and (N % BLOCK_N == 0)
    x_at = x + source[:, None].to(tl.int64) * K + k[None, :]
    w_at = w + (w_row + n)[None, :].to(tl.int64) * K + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if even:
            x_tile = tl.load(x_at + k0)
        else:
            x_tile = tl.load(x_at + k0, mask=(k0 + k < K)[None, :], other=0.0)
        w_mask = (k0 + k < K)[:, None] & (n0 + n < N)[None, :]
        if TMA:
            w_tile = w_tiles.load([w_row, k0]).T
        elif even:
            w_tile = tl.load(w_at + k0)
        else:
            w_tile = tl.load(w_at + k0, mask=w_mask, other=0.0)
        acc = tl.dot(x_tile, w_tile, acc, input_precision="ieee")
        if GATED:
            if TMA:
                w_tile = w_tiles.load([w_row + N, k0]).T
            elif even:
                w_tile = tl.load(w_at + N * K + k0)
            else:
                w_tile = tl.load(w_at + N * K + k0, mask=w_mask, other=0.0)
            acc_up = tl.dot(x_tile, w_tile, acc_up, input_precision="ieee")
    if WAIT == 2:
        gdc_wait()
        gdc_launch_dependents()
    if WINDOW > 0:
        row_slot = tl.load(token_slot + pair // TOP_K, mask=live, other=-1)
        cols = n0 + n
        acc = _add_adapters(
            acc, row_slot, row_place, cols, expert, t, arena, places, ranks, slot_row,
            0 if GATED else 2, 0, (2 if GATED else 1) * RANK_CAP,
            PLACES_STRIDE, RANKS_STRIDE, SLOTS_POW2, N, WINDOW, N % BLOCK_N == 0,
        )  # fmt: skip
        if GATED:
            acc_up = _add_adapters(
                acc_up, row_slot, row_place, cols, expert, t, arena, places, ranks, slot_row,
                1, RANK_CAP, 2 * RANK_CAP,
                PLACES_STRIDE, RANKS_STRIDE, SLOTS_POW2, N, WINDOW, N % BLOCK_N == 0,
            )  # fmt: skip
    mask = live[:, None] & (n0 + n < N)[None, :]
    if GATED:
        if ACT:
            out_at = out + row_place[:, None].to(tl.int64) * N + (n0 + n)[None, :]
            h = acc * tl.sigmoid(acc) * acc_up
            tl.store(out_at, h.to(out.dtype.element_ty), mask=mask)
        else:
            out_at = out + row_place[:, None].to(tl.int64) * (2 * N) + (n0 + n)[None, :]
            tl.store(out_at, acc, mask=mask)
            tl.store(out_at + N, acc_up, mask=mask)
    else:
        out_at = out + pair[:, None].to(tl.int64) * N + (n0 + n)[None, :]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_blocks"])
def expert_gemm(
    x,
    w,
    w_tiles,
    out,
    order,
    starts,
    num_blocks,
    token_slot,
    t,
    arena,
    places,
    ranks,
    slot_row,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,
    RANK_CAP: tl.constexpr,
    PLACES_STRIDE: tl.constexpr,
    RANKS_STRIDE: tl.constexpr,
    SLOTS_POW2: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    BY_PLACE: tl.constexpr,
    TAIL: tl.constexpr,
    TMA: tl.constexpr,
    WAIT: tl.constexpr,
):
    """GATED: x is [T, K], w [E, 2N, K], out the sorted pairs' [P, N] after SiLU·mul, or [P, 2N] fp32 without ACT.
    Otherwise: x is the sorted pairs' [P, K], w [E, N, K], out [P, N] in the order of the pairs.

    TAIL: blocks of at most half the rows run at half the tile: an eighth of the padding less at 256 rows per expert.
    """
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    group = pid // (GROUP * columns) * GROUP
    size = tl.minimum(num_blocks - group, GROUP)
    block = group + pid % (GROUP * columns) % size
    n0 = pid % (GROUP * columns) // size * BLOCK_N
    if WAIT == 1:
        gdc_wait()
        gdc_launch_dependents()
    expert, place, rows = _locate(starts, block, NUM_EXPERTS, EXPERTS_POW2, BLOCK_M, BY_PLACE)
    if rows > 0:
        half: tl.constexpr = BLOCK_M // 2
        if TAIL and rows <= half:
            _tile(
                x, w, w_tiles, out, order, expert, place, rows, n0, token_slot, t, arena, places, ranks, slot_row,
                N, K, TOP_K, GATED, ACT, RANK_CAP, PLACES_STRIDE, RANKS_STRIDE, SLOTS_POW2, WINDOW,
                half, BLOCK_N, BLOCK_K, STAGES, TMA, WAIT,
            )  # fmt: skip
        else:
            _tile(
                x, w, w_tiles, out, order, expert, place, rows, n0, token_slot, t, arena, places, ranks, slot_row,
                N, K, TOP_K, GATED, ACT, RANK_CAP, PLACES_STRIDE, RANKS_STRIDE, SLOTS_POW2, WINDOW,
                BLOCK_M, BLOCK_N, BLOCK_K, STAGES, TMA, WAIT,
            )  # fmt: skip
    elif WAIT == 2:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def combine(
    y,
    delta,
    ids,
    weights,
    out,
    token_slot,
    ranks,
    slot_row,
    D: tl.constexpr,
    TOP_K: tl.constexpr,
    RANKS_STRIDE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WAIT: tl.constexpr,
):
    """out[t] = Σ_k weights[t, k] · (y[t, k] + delta[t, k]), in fp32 in the order of k. Foreign pairs are not read, nor
    delta where the token's adapter does not touch down."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rank = 0
    if HAS_DELTA:
        slot = tl.load(token_slot + token)
        row = tl.load(slot_row + tl.maximum(slot, 0))
        rank = tl.where(slot < 0, 0, tl.load(ranks + row * RANKS_STRIDE + 2))
    acc = tl.zeros([BLOCK_N], tl.float32)
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        width = tl.where(tl.load(ids + pair) < 0, 0, D)
        value = tl.load(y + pair * D + n, mask=n < width, other=0.0).to(tl.float32)
        if HAS_DELTA:
            value += tl.load(delta + pair * D + n, mask=n < tl.where(rank > 0, width, 0), other=0.0).to(tl.float32)
        acc += value * tl.load(weights + pair)
    tl.store(out + token * D + n, acc.to(out.dtype.element_ty), mask=n < D)
