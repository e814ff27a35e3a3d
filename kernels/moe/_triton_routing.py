# mypy: ignore-errors
"""Kernel of `routing.route`."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

TAKEN = tl.constexpr(-(2**31))
"""Below the key of every logit, −inf too."""
NAN = tl.constexpr(2**31 - 1)


@triton.jit
def route(
    logits,
    kv_slots,
    weights,
    ids,
    ROW: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token a program; kv_slots: None, or negative for padding. A logit's bits become an int that orders as the
    logit does: integer maxima over a warp are one instruction."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    live = True
    if kv_slots is not None:
        live = tl.load(kv_slots + token) >= 0
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(logits + token * ROW + e, mask=e < NUM_EXPERTS, other=-float("inf")).to(tl.float32)
    x = tl.where(x == 0.0, 0.0, x)  # −0 is no less than 0
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(x != x, NAN, key)
    key = tl.where(e < NUM_EXPERTS, key, TAKEN)
    total = tl.sum(tl.exp(x - tl.max(x, 0)), 0)
    chosen = tl.full([BLOCK_K], 0.0, tl.float32)
    experts = tl.full([BLOCK_K], 0, tl.int32)
    for i in tl.static_range(TOP_K):
        best = tl.max(key, 0)
        expert = tl.min(tl.where(key == best, e, BLOCK_E), 0)
        key = tl.where(e == expert, TAKEN, key)
        value = tl.where(best < 0, best ^ 0x7FFFFFFF, best).to(tl.float32, bitcast=True)
        chosen = tl.where(k == i, value, chosen)
        experts = tl.where(k == i, expert, experts)
    p = tl.exp(chosen - tl.max(x, 0)) / total
    if NORM:
        p = p / tl.sum(tl.where(k < TOP_K, p, 0.0), 0)
    tl.store(weights + token * TOP_K + k, tl.where(live, p, 0.0), mask=k < TOP_K)
    tl.store(ids + token * TOP_K + k, tl.where(live, experts, -1).to(tl.int64), mask=k < TOP_K)
