# mypy: ignore-errors
"""One query per row: a row's positions are shared by several programs, the last of which joins their results in order.

PDL (programmatic dependent launch): a kernel may start while its predecessor still runs. Every program first waits.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from loraplex.kernels.attention._triton_tile import TABLES, attend, start_softmax


@triton.jit
def _stretch(seq_len, splits, min_share, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """(first position, positions of each program, programs at work) of a row: whole blocks, no fewer than min_share."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0) // BLOCK_N * BLOCK_N
    blocks = (seq_len - first + BLOCK_N - 1) // BLOCK_N
    share = tl.maximum((blocks + splits - 1) // splits * BLOCK_N, min_share)
    return first, share, (seq_len - first + share - 1) // share


@triton.jit
def _token_of(row, query_start, MIXED: tl.constexpr):
    """(index in q of the row's only new token, whether it has exactly one)."""
    token = row
    single = True
    if MIXED:
        token = tl.load(query_start + row)
        single = tl.load(query_start + row + 1) - token == 1
    return token.to(tl.int64), single


@triton.jit
def _join(
    partial,
    lse,
    out,
    part,
    at_work,
    heads,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    D_POW2: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """out [heads, D] = Σ 2^lse · partial / Σ 2^lse over the programs of a row, in their order, for up to BLOCK_H heads;
    their results start at `part`, one head every num_programs(2).

    Other multiprocessors wrote these values: they are read from L2, those of AHEAD programs at a time.
    """
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, D_POW2)
    s = tl.arange(0, MAX_SPLITS)
    live_h = h < heads
    part += h * tl.num_programs(2)
    known = live_h[:, None] & (s < at_work)[None, :]
    logs = tl.load(lse + part[:, None] + s[None, :], mask=known, other=-1.0e30, cache_modifier=".cg")
    most = tl.max(logs, 1)
    total = tl.sum(tl.exp2(logs - most[:, None]), 1)
    acc = tl.zeros([BLOCK_H, D_POW2], tl.float32)
    for s0 in range(0, at_work, AHEAD):
        some = s0 + tl.arange(0, AHEAD)
        of = part[None, :] + some[:, None]
        live = live_h[None, :] & (some < at_work)[:, None]
        at = partial + of[:, :, None] * D + d[None, None, :]
        values = tl.load(at, mask=live[:, :, None] & (d < D)[None, None, :], other=0.0, cache_modifier=".cg")
        log = tl.load(lse + of, mask=live, other=-1.0e30, cache_modifier=".cg")
        acc += tl.sum(values * tl.exp2(log - most[None, :])[:, :, None], 0)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + h[:, None] * D + d[None, :], result, mask=live_h[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["table_row", "min_share"], do_not_specialize_on_alignment=TABLES)
def decode(
    q,
    k,
    v,
    out,
    partial,
    lse,
    arrivals,
    page_table,
    seq_lens,
    query_start,
    sinks,
    score_scale,
    v_scale,
    table_row,
    min_share,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    K_TOKEN: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_TOKEN: tl.constexpr,
    V_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    D_POW2: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    MIXED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: key/value heads, rows, splits. What several programs do of a row goes through fp32 partial results [B,
    HEADS, splits, D] and the base-2 logs of their sums [B, HEADS, splits].

    arrivals [B, key/value heads]: programs that have written theirs; 0 before the launch and after it. Launches that
    may run at the same time must not share them: the wait comes before the first count.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    token, single = _token_of(row, query_start, MIXED)
    if not single:
        return
    seq_len = tl.load(seq_lens + row)
    first, share, at_work = _stretch(seq_len, splits, min_share, WINDOW, BLOCK_N)
    if split >= tl.maximum(at_work, 1):
        return
    h = tl.arange(0, GROUP_POW2)
    d = tl.arange(0, D_POW2)
    head = kv_head * GROUP + h
    live = (h < GROUP)[:, None] & (d < D)[None, :]
    q_tile = tl.load(q + token * Q_TOKEN + head[:, None] * Q_HEAD + d[None, :], mask=live, other=0.0)
    begin = first + split * share
    end = tl.minimum(begin + share, seq_len)
    m, total = start_softmax(sinks, head, h < GROUP, HAS_SINKS)
    if HAS_SINKS:
        m = tl.where(split == 0, m, -1.0e30)
        total = tl.where(split == 0, total, 0.0)
    m, total, acc = attend(
        q_tile, m, total, tl.zeros([GROUP_POW2, D_POW2], tl.float32), tl.full([GROUP_POW2], 0, tl.int32) + seq_len - 1,
        k + kv_head * K_HEAD, v + kv_head * V_HEAD, page_table + row.to(tl.int64) * table_row, begin, end, score_scale,
        K_TOKEN, V_TOKEN, D, D_POW2, PAGE, WINDOW, BLOCK_N, MASKED=True,
    )  # fmt: skip
    # A padding row has seen nothing: zeros.
    total = tl.where(total > 0, total, 1.0)
    result = acc / total[:, None] * v_scale
    if at_work <= 1:
        at = out + (token * HEADS + head[:, None]) * D + d[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=live)
    else:
        part = (row.to(tl.int64) * HEADS + head) * splits + split
        tl.store(partial + part[:, None] * D + d[None, :], result, mask=live)
        tl.store(lse + part, m + tl.log2(total), mask=h < GROUP)
        # All warps have written before one thread counts; who counts last sees what all the others wrote.
        tl.debug_barrier()
        arrival = arrivals + row * tl.num_programs(0) + kv_head
        if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == at_work - 1:
            tl.debug_barrier()
            for h0 in range(0, GROUP, BLOCK_H):
                head0 = kv_head * GROUP + h0
                parts = (row.to(tl.int64) * HEADS + head0) * splits
                at0 = out + (token * HEADS + head0) * D
                _join(partial, lse, at0, parts, at_work, GROUP - h0, BLOCK_H, D, D_POW2, MAX_SPLITS, AHEAD)
            tl.store(arrival, 0)
