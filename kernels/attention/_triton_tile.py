# mypy: ignore-errors
"""The softmax over a stretch of one row's cached positions, shared by decode and prefill."""

import triton
import triton.language as tl

TABLES = ["page_table", "seq_lens", "query_start"]
"""Parameters that are parts of one packed tensor: whether they start at a multiple of 16 bytes changes from step to
step, and must not compile anew."""


@triton.jit
def attend(
    q,
    m,
    total,
    acc,
    pos,
    k,
    v,
    pages,
    begin,
    end,
    score_scale,
    K_TOKEN: tl.constexpr,
    V_TOKEN: tl.constexpr,
    D: tl.constexpr,
    D_POW2: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """(m, total, acc) after positions begin … end − 1: running maximum (base 2), sum and weighted values of each query.

    q [M, D_POW2] are queries at positions `pos`; k and v point at the row's head, `pages` at its page table. Not
    MASKED: every query sees every position, and the stretch is a multiple of BLOCK_N. score_scale > 0.
    """
    d = tl.arange(0, D_POW2)
    for n0 in range(begin, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        stored = n < end
        if MASKED:
            page = tl.load(pages + n // PAGE, mask=stored, other=0)
        else:
            page = tl.load(pages + n // PAGE)
        slot = page.to(tl.int64) * PAGE + n % PAGE
        k_at = k + slot[None, :] * K_TOKEN + d[:, None]
        v_at = v + slot[:, None] * V_TOKEN + d[None, :]
        # Positions not yet stored may hold NaN, and 0 · NaN is not 0: they are not read.
        if D != D_POW2:
            k_tile = tl.load(k_at, mask=stored[None, :] & (d < D)[:, None], other=0.0)
            v_tile = tl.load(v_at, mask=stored[:, None] & (d < D)[None, :], other=0.0)
        elif MASKED:
            k_tile = tl.load(k_at, mask=stored[None, :], other=0.0)
            v_tile = tl.load(v_at, mask=stored[:, None], other=0.0)
        else:
            k_tile = tl.load(k_at)
            v_tile = tl.load(v_at)
        s = tl.dot(q, k_tile.to(q.dtype), input_precision="ieee")
        if MASKED:
            sees = stored[None, :] & (n[None, :] <= pos[:, None])
            if WINDOW > 0:
                sees = sees & (n[None, :] > pos[:, None] - WINDOW)
            s = tl.where(sees, s, float("-inf"))
        # Scaled after the maximum: one fused multiply-subtract for each score.
        m_new = tl.maximum(m, tl.max(s, 1) * score_scale)
        p = tl.exp2(s * score_scale - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), v_tile.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
        m = m_new
    return m, total, acc


@triton.jit
def start_softmax(sinks, head, live, HAS_SINKS: tl.constexpr):
    """(m, total) before the first position: a sink is a first score without a value.

    The maximum starts at a finite number, so that a query which sees nothing of a block gets weights of 0, not NaN.
    """
    m = tl.full(head.shape, -1.0e30, tl.float32)
    total = tl.zeros(head.shape, tl.float32)
    if HAS_SINKS:
        m = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        total = total + 1.0
    return m, total
