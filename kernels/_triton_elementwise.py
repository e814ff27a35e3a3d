# mypy: ignore-errors
"""Kernels of `elementwise.py`. Before `gdc_wait` they read nothing but weights."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def rms_norm(
    x,
    residual,
    weight,
    out,
    summed,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row a program. With a residual (not None) the row is x + residual, which goes to `summed`."""
    n = tl.arange(0, BLOCK)
    inside = n < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + n
    w = tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        v += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        rounded = v.to(out.dtype.element_ty)
        tl.store(summed + at, rounded, mask=inside)
        v = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 0) / WIDTH + EPS)
    normed = (v * scale).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (normed * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul(g, out, ROW: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid: rows, column blocks."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < WIDTH
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(g + row * ROW + n, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(g + row * ROW + WIDTH + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + n, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rope_angles(
    positions,
    inv_freq,
    cos,
    sin,
    total,
    FACTOR: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """cos and sin of position · inv_freq, times FACTOR, both [T, HALF] as one long row of `total`."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    freq = tl.load(inv_freq + i % HALF, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    angle = tl.load(positions + i // HALF, mask=inside, other=0).to(tl.float32) * freq
    tl.store(cos + i, tl.cos(angle) * FACTOR, mask=inside)
    tl.store(sin + i, tl.sin(angle) * FACTOR, mask=inside)
