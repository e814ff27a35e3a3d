# mypy: ignore-errors
"""Kernel of `embedding.py`."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from loraplex.kernels.lora._triton_dense import ALIGN


@triton.jit
def add_columns(
    x,
    ids,
    arena,
    places,
    ranks,
    scales,
    token_slot,
    slot_row,
    VOCAB: tl.constexpr,
    HIDDEN: tl.constexpr,
    PLACES_ROW: tl.constexpr,
    RANKS_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """x[t] += scale · A[:, ids[t]] · B. Grid: tokens, column tiles. First of a step: the batch description and the ids
    may still be on their way, so that nothing is read before the wait."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(token_slot + token)
    if slot >= 0:
        row = tl.load(slot_row + slot).to(tl.int64)
        rank = tl.load(ranks + row * RANKS_ROW)
        if rank > 0:
            n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = n < HIDDEN
            rr = tl.arange(0, BLOCK_R)
            a = arena + tl.load(places + row * PLACES_ROW) + tl.load(ids + token)
            b = arena + tl.multiple_of(tl.load(places + row * PLACES_ROW + 1), ALIGN)
            acc = tl.zeros([BLOCK_N], tl.float32)
            for r0 in range(0, rank, BLOCK_R):
                r = r0 + rr
                column = tl.load(a + r.to(tl.int64) * VOCAB, mask=r < rank, other=0.0).to(tl.float32)
                tile = tl.load(
                    b + r[:, None] * HIDDEN + n[None, :], mask=(r < rank)[:, None] & inside[None, :], other=0.0
                ).to(tl.float32)
                acc += tl.sum(column[:, None] * tile, 0)
            at = x + token * HIDDEN + n
            y = tl.load(at, mask=inside, other=0.0).to(tl.float32) + acc * tl.load(scales + row * RANKS_ROW)
            tl.store(at, y.to(x.dtype.element_ty), mask=inside)
