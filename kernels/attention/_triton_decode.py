# mypy: ignore-errors
"""One query per row: a row's positions are shared by several programs, whose results a second kernel joins in order.

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


@triton.jit(do_not_specialize=["table_row", "min_share"], do_not_specialize_on_alignment=TABLES)
def decode(
    q,
    k,
    v,
    out,
    partial,
    lse,
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
    D: tl.constexpr,
    D_POW2: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    MIXED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: key/value heads, rows, splits. A row that one program does alone is done; else fp32 partial results
    [B, HEADS, splits, D] and the base-2 logs of their sums."""
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


@triton.jit(do_not_specialize=["splits", "min_share"], do_not_specialize_on_alignment=TABLES)
def join(
    partial,
    lse,
    out,
    seq_lens,
    query_start,
    splits,
    min_share,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_POW2: tl.constexpr,
    WINDOW: tl.constexpr,
    MIXED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = Σ 2^lse · partial / Σ 2^lse over the programs of a row. Grid: HEADS, rows."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(0)
    row = tl.program_id(1)
    token, single = _token_of(row, query_start, MIXED)
    if not single:
        return
    _, _, at_work = _stretch(tl.load(seq_lens + row), splits, min_share, WINDOW, BLOCK_N)
    if at_work <= 1:
        return
    s = tl.arange(0, MAX_SPLITS)
    d = tl.arange(0, D_POW2)
    part = (row.to(tl.int64) * HEADS + head) * splits + s
    logs = tl.load(lse + part, mask=s < at_work, other=float("-inf"))
    weight = tl.exp2(logs - tl.max(logs, 0))
    live = (s < at_work)[:, None] & (d < D)[None, :]
    values = tl.load(partial + part[:, None] * D + d[None, :], mask=live, other=0.0)
    result = tl.sum(values * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + (token * HEADS + head) * D + d, result.to(out.dtype.element_ty), mask=d < D)
