# mypy: ignore-errors
"""Kernels of `expert_gemm.py`: one GEMM per expert over pairs sorted by (expert, slot), and the sum over choices.

WAIT (dependent launch): 0 no, 1 the predecessor makes an input, 2 only a later kernel needs the predecessor: it has
itself waited for everything that is read here, so the wait may come after the products. The next kernel may start at
once: it waits until this one has ended, and so until the predecessor has.
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


GRANULE = tl.constexpr(8)
"""Rank columns that lie together: 16 bytes of t, one load. A rank that is no multiple wastes the rest."""


@triton.jit
def _adapters_of_rows(
    row_slot,
    ranks,
    slot_row,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    RANKS_STRIDE: tl.constexpr,
    SLOTS_POW2: tl.constexpr,
):
    """Of the slots that the block's rows have: table row, and last column when the ranks are laid end to end."""
    s = tl.arange(0, SLOTS_POW2)
    occurs = tl.max((row_slot[:, None] == s[None, :]).to(tl.int32), 0) > 0
    row_s = tl.load(slot_row + s, mask=occurs, other=0)
    rank_s = tl.load(ranks + row_s * RANKS_STRIDE + PART, mask=occurs, other=0)
    for part in tl.static_range(1, PARTS):
        rank_s = tl.maximum(rank_s, tl.load(ranks + row_s * RANKS_STRIDE + PART + part, mask=occurs, other=0))
    return row_s, tl.cumsum((rank_s + GRANULE - 1) // GRANULE * GRANULE, 0)


@triton.jit
def _window(row_s, end_s, first, SLOTS_POW2: tl.constexpr, WINDOW: tl.constexpr):
    """Slot, table row and first rank row of each granule of the columns first…first + WINDOW − 1.

    A granule from the last end on has a slot that no row has.
    """
    c_g = first + tl.arange(0, WINDOW // GRANULE) * GRANULE
    passed = end_s[None, :] <= c_g[:, None]
    slot_g = tl.sum(passed.to(tl.int32), 1)
    hot = slot_g[:, None] == tl.arange(0, SLOTS_POW2)[None, :]
    row_g = tl.sum(tl.where(hot, row_s[None, :], 0), 1)
    r_g = c_g - tl.max(tl.where(passed, end_s[None, :], 0), 1)
    return slot_g, row_g, tl.multiple_of(r_g, GRANULE)


@triton.jit
def _add_window(
    acc,
    own_MG,
    row_g,
    r_g,
    n,
    expert,
    t_at,
    arena,
    places,
    ranks,
    part,
    PLACES_STRIDE: tl.constexpr,
    RANKS_STRIDE: tl.constexpr,
    N: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """acc += t B for one window of rank columns."""
    j = tl.arange(0, GRANULE)
    rank_g = tl.load(ranks + row_g * RANKS_STRIDE + part)
    place_g = places + row_g.to(tl.int64) * PLACES_STRIDE + part * 4
    b_g = tl.load(place_g + 1) + expert * tl.load(place_g + 3)
    r_gj = r_g[:, None] + j[None, :]
    live_gj = r_gj < rank_g[:, None]
    z = tl.load(t_at[:, None, None] + r_g[None, :, None] + j[None, None, :], mask=own_MG[:, :, None], other=0.0)
    z = tl.where(live_gj[None, :, :], z, 0.0)  # the rest of a granule is never written
    b_c = tl.reshape(b_g[:, None] + r_gj * N, [WINDOW])
    live = tl.reshape(live_gj, [WINDOW])
    if EVEN:
        w = tl.load(arena + tl.multiple_of(b_c, 8)[:, None] + n[None, :], mask=live[:, None], other=0.0)
    else:
        w = tl.load(arena + b_c[:, None] + n[None, :], mask=live[:, None] & (n < N)[None, :], other=0.0)
    return tl.dot(tl.reshape(z, [BLOCK_M, WINDOW]), w, acc, input_precision="ieee")


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
    rank_cap,
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
    part: tl.constexpr = 0 if GATED else 2
    parts: tl.constexpr = 2 if GATED else 1
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
    if WINDOW > 0:
        # Looked up before the products, which hide it.
        row_slot = tl.load(token_slot + pair // TOP_K, mask=live, other=-1)
        row_s, end_s = _adapters_of_rows(row_slot, ranks, slot_row, part, parts, RANKS_STRIDE, SLOTS_POW2)
    for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if even:
            x_tile = tl.load(x_at + k0, mask=live[:, None], other=0.0)
        else:
            x_tile = tl.load(x_at + k0, mask=live[:, None] & (k0 + k < K)[None, :], other=0.0)
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
    if WINDOW > 0:
        t_at = t + row_place.to(tl.int64) * (parts * rank_cap)
        for c0 in tl.range(0, tl.max(end_s, 0), WINDOW, num_stages=1):
            slot_g, row_g, r_g = _window(row_s, end_s, c0, SLOTS_POW2, WINDOW)
            own = row_slot[:, None] == slot_g[None, :]
            acc = _add_window(
                acc, own, row_g, r_g, n0 + n, expert, t_at, arena, places, ranks, part, PLACES_STRIDE, RANKS_STRIDE,
                N, N % BLOCK_N == 0, BLOCK_M, WINDOW,
            )  # fmt: skip
            if GATED:
                acc_up = _add_window(
                    acc_up, own, row_g, r_g, n0 + n, expert, t_at + rank_cap, arena, places, ranks, 1, PLACES_STRIDE,
                    RANKS_STRIDE, N, N % BLOCK_N == 0, BLOCK_M, WINDOW,
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
    rank_cap,
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
    if WAIT > 0:
        gdc_launch_dependents()
    expert, place, rows = _locate(starts, block, NUM_EXPERTS, EXPERTS_POW2, BLOCK_M, BY_PLACE)
    if rows > 0:
        half: tl.constexpr = BLOCK_M // 2
        if TAIL and rows <= half:
            _tile(
                x, w, w_tiles, out, order, expert, place, rows, n0, token_slot, t, arena, places, ranks, slot_row,
                N, K, TOP_K, GATED, ACT, rank_cap, PLACES_STRIDE, RANKS_STRIDE, SLOTS_POW2, WINDOW,
                half, BLOCK_N, BLOCK_K, STAGES, TMA, WAIT,
            )  # fmt: skip
        else:
            _tile(
                x, w, w_tiles, out, order, expert, place, rows, n0, token_slot, t, arena, places, ranks, slot_row,
                N, K, TOP_K, GATED, ACT, rank_cap, PLACES_STRIDE, RANKS_STRIDE, SLOTS_POW2, WINDOW,
                BLOCK_M, BLOCK_N, BLOCK_K, STAGES, TMA, WAIT,
            )  # fmt: skip
    elif WAIT == 2:
        gdc_wait()


@triton.jit
def combine(
    y,
    delta,
    ids,
    weights,
    out,
    token_row,
    ranks,
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
        row = tl.load(token_row + token)
        rank = tl.where(row < 0, 0, tl.load(ranks + tl.maximum(row, 0) * RANKS_STRIDE + 2))
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
