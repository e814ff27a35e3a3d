# mypy: ignore-errors
"""Several queries per row, causal, over whatever of the row is cached.

A tile holds the GROUP query heads of one key/value head for BLOCK_M // GROUP consecutive tokens: keys and values are
read once for all of them, and a short row wastes less of the tile than with one head per tile.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from loraplex.kernels.attention._triton_tile import TABLES, attend, start_softmax

ROWS = tl.constexpr(256)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "table_row"], do_not_specialize_on_alignment=TABLES)
def prefill(
    q,
    k,
    v,
    out,
    page_table,
    seq_lens,
    query_start,
    sinks,
    score_scale,
    v_scale,
    num_tokens,
    num_rows,
    table_row,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    K_TOKEN: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_TOKEN: tl.constexpr,
    V_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_POW2: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    MIXED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: key/value heads, T // TOKENS + B + 1. MIXED: rows of one token are left to the decode kernel.

    Row b owns the blocks from query_start[b] // TOKENS + b on: as many as it fills, or one more. What follows the last
    row is padding, a row B that ends at T and whose output is 0. Late tokens, which see most, come first.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    row = -1
    for b0 in range(0, num_rows + 1, ROWS):
        b = b0 + tl.arange(0, ROWS)
        first_block = tl.load(query_start + b, mask=b <= num_rows, other=0x3FFFFFFF) // TOKENS + b
        row += tl.sum((first_block <= block).to(tl.int32), 0)
    row_begin = tl.load(query_start + row)
    row_end = tl.load(query_start + row + 1, mask=row < num_rows, other=0)
    row_end = tl.where(row < num_rows, row_end, num_tokens)
    first = row_begin + (block - row_begin // TOKENS - row) * TOKENS
    if first >= row_end:
        return
    LEFT_OUT: tl.constexpr = 1 if MIXED else 0
    if (row < num_rows) & (row_end - row_begin == LEFT_OUT):
        return
    i = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_POW2)
    token = first + i // GROUP
    head = kv_head * GROUP + i % GROUP
    in_tile = (i < TOKENS * GROUP) & (token < row_end)
    live = in_tile[:, None] & (d < D)[None, :]
    out_at = out + (token.to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
    if row == num_rows:
        tl.store(out_at, tl.zeros([BLOCK_M, D_POW2], out.dtype.element_ty), mask=live)
        return
    q_at = q + token.to(tl.int64)[:, None] * Q_TOKEN + head[:, None] * Q_HEAD + d[None, :]
    q_tile = tl.load(q_at, mask=live, other=0.0)
    to_position = tl.load(seq_lens + row) - row_end
    pos = to_position + token
    end = to_position + tl.minimum(first + TOKENS, row_end)
    begin = 0
    unmasked = (to_position + first + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        begin = tl.maximum(to_position + first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        unmasked = begin
    k += kv_head * K_HEAD
    v += kv_head * V_HEAD
    pages = page_table + row.to(tl.int64) * table_row
    m, total = start_softmax(sinks, head, in_tile, HAS_SINKS)
    acc = tl.zeros([BLOCK_M, D_POW2], tl.float32)
    if WINDOW == 0:
        m, total, acc = attend(
            q_tile, m, total, acc, pos, k, v, pages, begin, unmasked, score_scale,
            K_TOKEN, V_TOKEN, D, D_POW2, PAGE, WINDOW, BLOCK_N, MASKED=False,
        )  # fmt: skip
    m, total, acc = attend(
        q_tile, m, total, acc, pos, k, v, pages, unmasked, end, score_scale,
        K_TOKEN, V_TOKEN, D, D_POW2, PAGE, WINDOW, BLOCK_N, MASKED=True,
    )  # fmt: skip
    total = tl.where(total > 0, total, 1.0)
    tl.store(out_at, (acc / total[:, None] * v_scale).to(out.dtype.element_ty), mask=live)
