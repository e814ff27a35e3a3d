# mypy: ignore-errors
"""Kernel of `rotary.norm_rotate_store`. Before `gdc_wait` it reads the norms' weights only: positions, slots and angles
may come from the kernel before."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def norm_weights(weight, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr):
    """A norm's weight in the three pieces of a head: both elements of the pairs, and what is not rotated. Ones where
    there is no norm."""
    r = tl.arange(0, BLOCK_R)
    low = tl.full([BLOCK_R], 1.0, tl.float32)
    high = low
    rest = low
    if weight is not None:
        low = tl.load(weight + r, mask=r < HALF, other=0.0).to(tl.float32)
        high = tl.load(weight + HALF + r, mask=r < HALF, other=0.0).to(tl.float32)
        if BLOCK_REST > 0:
            m = 2 * HALF + tl.arange(0, BLOCK_REST)
            rest = tl.load(weight + m, mask=m < DIM, other=0.0).to(tl.float32)
    return low, high, rest


@triton.jit
def weigh(x, scale, weight, DTYPE: tl.constexpr):
    """A norm's two roundings."""
    normed = (x * scale[:, None]).to(DTYPE).to(tl.float32)
    return (normed * weight[None, :]).to(DTYPE).to(tl.float32)


@triton.jit
def keep(at, x, inverse_scale, mask, FP8: tl.constexpr):
    """Stores x · inverse_scale in the type of its place; e4m3 has no infinity, larger values saturate."""
    x = x.to(tl.float32) * inverse_scale
    if FP8:
        x = tl.clamp(x, -448.0, 448.0)
    tl.store(at, x.to(at.dtype.element_ty), mask=mask)


@triton.jit
def turn_heads(
    source,
    dest,
    heads,
    NUM_HEADS: tl.constexpr,
    cos,
    sin,
    token,
    w_low,
    w_high,
    w_rest,
    inverse_scale,
    HAS_NORM: tl.constexpr,
    EPS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    FP8: tl.constexpr,
):
    """dest[head] = source[head], normed and rotated, times inverse_scale, for a block of heads; both lie DIM apart."""
    DTYPE: tl.constexpr = source.dtype.element_ty
    r = tl.arange(0, BLOCK_R)
    at = heads[:, None] * DIM + r[None, :]
    mask = (heads < NUM_HEADS)[:, None] & (r < HALF)[None, :]
    low = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + at, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + token * HALF + r, mask=r < HALF, other=0.0)[None, :]
    s = tl.load(sin + token * HALF + r, mask=r < HALF, other=0.0)[None, :]
    if BLOCK_REST > 0:
        m = 2 * HALF + tl.arange(0, BLOCK_REST)
        at_rest = heads[:, None] * DIM + m[None, :]
        mask_rest = (heads < NUM_HEADS)[:, None] & (m < DIM)[None, :]
        rest = tl.load(source + at_rest, mask=mask_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(low * low + high * high, 1)
        if BLOCK_REST > 0:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / DIM + EPS)
        low = weigh(low, scale, w_low, DTYPE)
        high = weigh(high, scale, w_high, DTYPE)
        if BLOCK_REST > 0:
            rest = weigh(rest, scale, w_rest, DTYPE)
    keep(dest + at, (low * c - high * s).to(DTYPE), inverse_scale, mask, FP8)
    keep(dest + HALF + at, (high * c + low * s).to(DTYPE), inverse_scale, mask, FP8)
    if BLOCK_REST > 0:
        keep(dest + at_rest, rest.to(DTYPE), inverse_scale, mask_rest, FP8)


@triton.jit
def norm_rotate_store(
    qkv,
    q_out,
    cos,
    sin,
    k_cache,
    v_cache,
    slot_mapping,
    q_weight,
    k_weight,
    inverse_k_scale,
    inverse_v_scale,
    EPS: tl.constexpr,
    QKV_ROW: tl.constexpr,
    CACHE_ROW: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: tokens; blocks of q heads, then of k heads, then of v heads."""
    Q_BLOCKS: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    KV_BLOCKS: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = qkv + token * QKV_ROW
    if block < Q_BLOCKS:
        heads = block * BLOCK_H + tl.arange(0, BLOCK_H)
        w_low, w_high, w_rest = norm_weights(q_weight, DIM, HALF, BLOCK_R, BLOCK_REST)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        out = q_out + token * Q_HEADS * DIM
        turn_heads(
            row, out, heads, Q_HEADS, cos, sin, token, w_low, w_high, w_rest, 1.0, q_weight is not None,
            EPS, DIM, HALF, BLOCK_R, BLOCK_REST, False,
        )  # fmt: skip
    elif block < Q_BLOCKS + KV_BLOCKS:
        heads = (block - Q_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
        w_low, w_high, w_rest = norm_weights(k_weight, DIM, HALF, BLOCK_R, BLOCK_REST)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:
            turn_heads(
                row + Q_HEADS * DIM, k_cache + slot * CACHE_ROW, heads, KV_HEADS, cos, sin, token,
                w_low, w_high, w_rest, inverse_k_scale, k_weight is not None, EPS, DIM, HALF, BLOCK_R, BLOCK_REST, FP8,
            )  # fmt: skip
    else:
        first = (block - Q_BLOCKS - KV_BLOCKS) * BLOCK_H * DIM
        n = first + tl.arange(0, BLOCK_H * BLOCK_D)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:
            inside = (n < KV_HEADS * DIM) & (n < first + BLOCK_H * DIM)
            v = tl.load(row + (Q_HEADS + KV_HEADS) * DIM + n, mask=inside, other=0.0)
            keep(v_cache + slot * CACHE_ROW + n, v, inverse_v_scale, inside, FP8)
