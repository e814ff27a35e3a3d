# mypy: ignore-errors
"""Keys and values into their slots of the cache."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _store(x, cache, inverse_scale, at, live, FP8: tl.constexpr):
    """cache[at] = x · inverse_scale; e4m3 has no infinity, larger values saturate."""
    x = x.to(tl.float32) * inverse_scale
    if FP8:
        x = tl.clamp(x, -448.0, 448.0)
    tl.store(cache + at, x.to(cache.dtype.element_ty), mask=live)


@triton.jit
def store(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    inverse_k_scale,
    inverse_v_scale,
    K_TOKEN: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_TOKEN: tl.constexpr,
    V_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_POW2: tl.constexpr,
    D: tl.constexpr,
    D_POW2: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: tokens. Slots below 0 are skipped."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    h = tl.arange(0, HEADS_POW2)[:, None]
    d = tl.arange(0, D_POW2)[None, :]
    live = (h < HEADS) & (d < D)
    at = slot * (HEADS * D) + h * D + d
    k_tile = tl.load(k + token * K_TOKEN + h * K_HEAD + d, mask=live)
    v_tile = tl.load(v + token * V_TOKEN + h * V_HEAD + d, mask=live)
    _store(k_tile, k_cache, inverse_k_scale, at, live, FP8)
    _store(v_tile, v_cache, inverse_v_scale, at, live, FP8)
