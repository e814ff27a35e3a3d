# mypy: ignore-errors
"""Kernels of `moe.py`: the adapters' low-rank products of the routed experts.

The `_rows` form takes one pair per program and suits few pairs: nearly every pair has its own matrices. The `_chunks`
form takes a run of pairs with the same expert and adapter. Both loop over the live rank of the tables and read nothing
beyond it, whatever the grid; part 0 is gate, 1 up, 2 down. `t` has a row per pair, in the form of rows in the order of
the pairs, in that of chunks in the sorted one.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _matrix(arena, places, row, part, expert, SIDE: tl.constexpr, PLACES_STRIDE: tl.constexpr):
    """Where expert's A (SIDE 0) or B (SIDE 1) begins."""
    place = places + row.to(tl.int64) * PLACES_STRIDE + part * 4 + SIDE
    return arena + tl.multiple_of(tl.load(place) + expert * tl.load(place + 2), 16)


@triton.jit
def _chunk(chunk_key, chunk_start, chunk_count, num_chunks, slot_row, NUM_SLOTS: tl.constexpr):
    """This program's chunk: expert (−1: there is none), table row (−1: base pairs), first place, number of places."""
    chunk = tl.program_id(0)
    key = tl.load(chunk_key + chunk)
    start = tl.load(chunk_start + chunk)
    count = tl.load(chunk_count + chunk)
    if num_chunks is not None:
        key = tl.where(chunk < tl.load(num_chunks), key, -1)
    expert = tl.where(key < 0, -1, key // (NUM_SLOTS + 1))
    slot = tl.where(key < 0, -1, key % (NUM_SLOTS + 1) - 1)
    row = tl.where(slot < 0, -1, tl.load(slot_row + tl.maximum(slot, 0)))
    return expert, row, start, count


@triton.jit
def shrink_rows(
    x,
    t,
    arena,
    places,
    ranks,
    scales,
    token_row,
    ids,
    position,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    TOP_K: tl.constexpr,
    BY_PLACE: tl.constexpr,
    rank_cap,
    PLACES_STRIDE: tl.constexpr,
    RANKS_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """t[pair, part] = scale · A x. BY_PLACE: x has a row per sorted pair and is the predecessor's, else one per token.

    The first tile of A, and of an older x, is read before the wait, so that it travels while the predecessor ends.
    """
    pair = tl.program_id(0)
    part = PART + tl.program_id(1) % PARTS
    row = tl.load(token_row + pair // TOP_K)
    expert = tl.load(ids + pair).to(tl.int32)
    touched = (row >= 0) & (expert >= 0)
    row = tl.maximum(row, 0)
    rank = tl.where(touched, tl.load(ranks + row * RANKS_STRIDE + part), 0)
    scale = tl.load(scales + row * SCALES_STRIDE + part)
    a = _matrix(arena, places, row, part, expert, 0, PLACES_STRIDE)
    k = tl.arange(0, BLOCK_K)
    first = tl.program_id(1) // PARTS * BLOCK_R
    step = tl.num_programs(1) // PARTS * BLOCK_R
    for r0 in range(first, rank, step):
        r = r0 + tl.arange(0, BLOCK_R)
        a_at = a + r[:, None] * D + k[None, :]
        w = tl.load(a_at, mask=(r < rank)[:, None] & (k < D)[None, :], other=0.0)
        if BY_PLACE:
            if DEPENDENT:
                gdc_wait()
                gdc_launch_dependents()
            x_at = x + tl.load(position + pair).to(tl.int64) * D + k
            x_k = tl.load(x_at, mask=k < D, other=0.0)
        else:
            x_at = x + (pair // TOP_K).to(tl.int64) * D + k
            x_k = tl.load(x_at, mask=k < D, other=0.0)
            if DEPENDENT:
                gdc_wait()
                gdc_launch_dependents()
        acc = w.to(tl.float32) * x_k.to(tl.float32)[None, :]
        for k0 in range(BLOCK_K, D, BLOCK_K):
            w = tl.load(a_at + k0, mask=(r < rank)[:, None] & (k0 + k < D)[None, :], other=0.0)
            acc += w.to(tl.float32) * tl.load(x_at + k0, mask=k0 + k < D, other=0.0).to(tl.float32)[None, :]
        t_at = t + pair.to(tl.int64) * (PARTS * rank_cap) + (part - PART) * rank_cap + r
        tl.store(t_at, (tl.sum(acc, 1) * scale).to(t.dtype.element_ty), mask=r < rank)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def shrink_chunks(
    x,
    t,
    arena,
    places,
    ranks,
    scales,
    slot_row,
    order,
    chunk_key,
    chunk_start,
    chunk_count,
    num_chunks,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    TOP_K: tl.constexpr,
    BY_PLACE: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    rank_cap,
    PLACES_STRIDE: tl.constexpr,
    RANKS_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """t[place, part] = scale · A x for a chunk's pairs. TOGETHER parts share a program and each tile of x it reads;
    the others are programs of their own, which keeps more of them in flight."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    expert, row, start, count = _chunk(chunk_key, chunk_start, chunk_count, num_chunks, slot_row, NUM_SLOTS)
    if row < 0:
        return
    groups: tl.constexpr = PARTS // TOGETHER
    m = tl.arange(0, BLOCK_M)
    live = m < count
    part = PART + tl.program_id(1) % groups * TOGETHER
    rank = tl.load(ranks + row * RANKS_STRIDE + part)
    scale = tl.load(scales + row * SCALES_STRIDE + part)
    a = _matrix(arena, places, row, part, expert, 0, PLACES_STRIDE)
    c = tl.arange(0, TOGETHER * BLOCK_R)
    rank_c = tl.full([TOGETHER * BLOCK_R], rank, tl.int32)
    scale_c = tl.full([TOGETHER * BLOCK_R], scale, tl.float32)
    a_c = a + tl.zeros([TOGETHER * BLOCK_R], tl.int32)
    if TOGETHER == 2:
        up_rank = tl.load(ranks + row * RANKS_STRIDE + part + 1)
        rank_c = tl.where(c < BLOCK_R, rank, up_rank)
        scale_c = tl.where(c < BLOCK_R, scale, tl.load(scales + row * SCALES_STRIDE + part + 1))
        a_up = _matrix(arena, places, row, part + 1, expert, 0, PLACES_STRIDE)
        a_c = tl.where(c < BLOCK_R, a, a_up)
        rank = tl.maximum(rank, up_rank)
    if BY_PLACE:
        x_row = tl.where(live, start + m, start)
    else:
        x_row = tl.load(order + start + m, mask=live, other=0) // TOP_K
    k = tl.arange(0, BLOCK_K)
    even: tl.constexpr = D % BLOCK_K == 0
    x_at = x + x_row[:, None].to(tl.int64) * D + k[None, :]
    t_at = t + (start + m)[:, None].to(tl.int64) * (PARTS * rank_cap) + (part - PART) * rank_cap
    first = tl.program_id(1) // groups * BLOCK_R
    for r0 in range(first, rank, tl.num_programs(1) // groups * BLOCK_R):
        r_c = r0 + c % BLOCK_R
        w_at = tl.multiple_of(a_c, 16)[None, :] + r_c[None, :] * D + k[:, None]
        acc = tl.zeros([BLOCK_M, TOGETHER * BLOCK_R], tl.float32)
        for k0 in tl.range(0, D, BLOCK_K, num_stages=STAGES):
            # Rows that are not live cost no traffic: at 256 tokens and 8 adapters 14 of 16, as many bytes as A.
            if even:
                x_tile = tl.load(x_at + k0, mask=live[:, None], other=0.0)
                w_tile = tl.load(w_at + k0, mask=(r_c < rank_c)[None, :], other=0.0)
            else:
                inside = k0 + k < D
                x_tile = tl.load(x_at + k0, mask=live[:, None] & inside[None, :], other=0.0)
                w_tile = tl.load(w_at + k0, mask=(r_c < rank_c)[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(x_tile, w_tile, acc, input_precision="ieee")
        t_mask = live[:, None] & (r_c < rank_c)[None, :]
        tl.store(
            t_at + (c // BLOCK_R * rank_cap + r_c)[None, :],
            (acc * scale_c[None, :]).to(t.dtype.element_ty),
            mask=t_mask,
        )


@triton.jit
def _row_product(b, t_at, rank, n, N: tl.constexpr, BLOCK_R: tl.constexpr, DEPENDENT: tl.constexpr):
    """Σ_r t[r] B[r, n]; waits after the first tile of B is on its way."""
    acc = tl.zeros([n.shape[0]], tl.float32)
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        w = tl.load(b + r[:, None] * N + n[None, :], mask=(r < rank)[:, None] & (n < N)[None, :], other=0.0)
        if DEPENDENT:
            gdc_wait()
            gdc_launch_dependents()
        z = tl.load(t_at + r, mask=r < rank, other=0.0)
        acc += tl.sum(w.to(tl.float32) * z.to(tl.float32)[:, None], 0)
    return acc


@triton.jit
def _chunk_product(acc, b, t_at, live, rank, n, N: tl.constexpr, BLOCK_R: tl.constexpr):
    """acc + t B. The caller has waited for t: the loop is pipelined and reads it ahead of everything in its body."""
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        w = tl.load(b + r[:, None] * N + n[None, :], mask=(r < rank)[:, None] & (n < N)[None, :], other=0.0)
        z = tl.load(t_at + r[None, :], mask=live[:, None], other=0.0)  # t is wide enough for whole tiles
        z = tl.where((r < rank)[None, :], z, 0.0)
        acc = tl.dot(z, w, acc, input_precision="ieee")
    return acc


@triton.jit
def activate_rows(
    g,
    t,
    h,
    arena,
    places,
    ranks,
    token_row,
    ids,
    position,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    rank_cap,
    PLACES_STRIDE: tl.constexpr,
    RANKS_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """h = silu(gate + t_gate B_gate) · (up + t_up B_up) for one pair; without an adapter just the activation."""
    pair = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.load(token_row + pair // TOP_K)
    expert = tl.load(ids + pair).to(tl.int32)
    touched = (row >= 0) & (expert >= 0)
    row = tl.maximum(row, 0)
    rank_gate = tl.where(touched, tl.load(ranks + row * RANKS_STRIDE), 0)
    rank_up = tl.where(touched, tl.load(ranks + row * RANKS_STRIDE + 1), 0)
    b_gate = _matrix(arena, places, row, 0, expert, 1, PLACES_STRIDE)
    b_up = _matrix(arena, places, row, 1, expert, 1, PLACES_STRIDE)
    # Routing is older than the predecessor: it waited for it.
    place = tl.load(position + pair).to(tl.int64)
    t_at = t + pair.to(tl.int64) * (2 * rank_cap)
    gate = _row_product(b_gate, t_at, rank_gate, n, INNER, BLOCK_R, DEPENDENT)
    up = _row_product(b_up, t_at + rank_cap, rank_up, n, INNER, BLOCK_R, DEPENDENT)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    if expert >= 0:
        g_at = g + place * (2 * INNER) + n
        gate += tl.load(g_at, mask=n < INNER, other=0.0)
        up += tl.load(g_at + INNER, mask=n < INNER, other=0.0)
        tl.store(h + place * INNER + n, (gate * tl.sigmoid(gate) * up).to(h.dtype.element_ty), mask=n < INNER)


@triton.jit
def activate_chunks(
    g,
    t,
    h,
    arena,
    places,
    ranks,
    slot_row,
    chunk_key,
    chunk_start,
    chunk_count,
    num_chunks,
    INNER: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    rank_cap,
    PLACES_STRIDE: tl.constexpr,
    RANKS_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The same for chunks, those of base pairs included. A program takes several tiles of columns: what it looks up
    first, four loads that wait for each other, costs as long as a tile."""
    expert, row, start, count = _chunk(chunk_key, chunk_start, chunk_count, num_chunks, slot_row, NUM_SLOTS)
    if expert < 0:
        if DEPENDENT:
            gdc_wait()
            gdc_launch_dependents()
        return
    m = tl.arange(0, BLOCK_M)
    live = m < count
    rank_gate = 0
    rank_up = 0
    b_gate = arena
    b_up = arena
    if row >= 0:
        rank_gate = tl.load(ranks + row * RANKS_STRIDE)
        rank_up = tl.load(ranks + row * RANKS_STRIDE + 1)
        b_gate = _matrix(arena, places, row, 0, expert, 1, PLACES_STRIDE)
        b_up = _matrix(arena, places, row, 1, expert, 1, PLACES_STRIDE)
    place = start + m
    t_at = t + place[:, None].to(tl.int64) * (2 * rank_cap)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    for n0 in range(tl.program_id(1) * BLOCK_N, INNER, tl.num_programs(1) * BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        mask = live[:, None] & (n < INNER)[None, :]
        g_at = g + place[:, None].to(tl.int64) * (2 * INNER) + n[None, :]
        gate = tl.load(g_at, mask=mask, other=0.0)
        up = tl.load(g_at + INNER, mask=mask, other=0.0)
        gate = _chunk_product(gate, b_gate, t_at, live, rank_gate, n, INNER, BLOCK_R)
        up = _chunk_product(up, b_up, t_at + rank_cap, live, rank_up, n, INNER, BLOCK_R)
        h_at = h + place[:, None].to(tl.int64) * INNER + n[None, :]
        tl.store(h_at, (gate * tl.sigmoid(gate) * up).to(h.dtype.element_ty), mask=mask)


@triton.jit
def expand_rows(
    t,
    delta,
    arena,
    places,
    ranks,
    token_row,
    ids,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    rank_cap,
    PLACES_STRIDE: tl.constexpr,
    RANKS_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """delta[pair] = t B_down. Pairs that no adapter touches are not written."""
    pair = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.load(token_row + pair // TOP_K)
    expert = tl.load(ids + pair).to(tl.int32)
    touched = (row >= 0) & (expert >= 0)
    row = tl.maximum(row, 0)
    rank = tl.where(touched, tl.load(ranks + row * RANKS_STRIDE + 2), 0)
    b = _matrix(arena, places, row, 2, expert, 1, PLACES_STRIDE)
    t_at = t + pair.to(tl.int64) * rank_cap
    acc = _row_product(b, t_at, rank, n, N, BLOCK_R, DEPENDENT)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    if rank > 0:
        tl.store(delta + pair.to(tl.int64) * N + n, acc.to(delta.dtype.element_ty), mask=n < N)


@triton.jit
def expand_chunks(
    t,
    delta,
    arena,
    places,
    ranks,
    slot_row,
    order,
    chunk_key,
    chunk_start,
    chunk_count,
    num_chunks,
    N: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    rank_cap,
    PLACES_STRIDE: tl.constexpr,
    RANKS_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    expert, row, start, count = _chunk(chunk_key, chunk_start, chunk_count, num_chunks, slot_row, NUM_SLOTS)
    if row < 0:
        if DEPENDENT:
            gdc_wait()
            gdc_launch_dependents()
        return
    m = tl.arange(0, BLOCK_M)
    live = m < count
    rank = tl.load(ranks + row * RANKS_STRIDE + 2)
    b = _matrix(arena, places, row, 2, expert, 1, PLACES_STRIDE)
    t_at = t + (start + m)[:, None].to(tl.int64) * rank_cap
    pair = tl.load(order + start + m, mask=live, other=0).to(tl.int64)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    if rank > 0:
        for n0 in range(tl.program_id(1) * BLOCK_N, N, tl.num_programs(1) * BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            acc = _chunk_product(tl.zeros([BLOCK_M, BLOCK_N], tl.float32), b, t_at, live, rank, n, N, BLOCK_R)
            mask = live[:, None] & (n < N)[None, :]
            tl.store(delta + pair[:, None] * N + n[None, :], acc.to(delta.dtype.element_ty), mask=mask)
