# mypy: ignore-errors
"""Kernels of `sampling.draw` and `sampling.log_normaliser`. x is a logit divided by its row's temperature."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

INF = tl.constexpr(float("inf"))


@triton.jit
def mix32(x):
    """As `sampling._mix32`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_key(seed, position):
    key = mix32((seed & 0xFFFFFFFF).to(tl.uint32))
    key = mix32(key ^ ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    return mix32(key ^ (position.to(tl.int64) & 0xFFFFFFFF).to(tl.uint32))


@triton.jit
def log(x, FAST: tl.constexpr):
    return libdevice.fast_logf(x) if FAST else tl.log(x)


@triton.jit
def gumbel(tokens, key, FAST: tl.constexpr):
    """As `sampling.gumbel_noise`. The winning draws have a small w, where −log1p(−w) is its series."""
    bits = mix32(mix32(tokens.to(tl.uint32) * 0x9E3779B1) ^ key)
    w = (bits.to(tl.float32) + 0.5) * 2.0**-32
    series = 1 / 7 + w * (1 / 8)
    series = 1 / 5 + w * (1 / 6 + w * series)
    series = 1 / 3 + w * (1 / 4 + w * series)
    series = w * (1 + w * (1 / 2 + w * series))
    return -log(tl.where(w < 0.125, series, -log(1 - w, FAST)), FAST)


@triton.jit
def race_parts(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    values,
    indices,
    ROW: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    NOISY: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best score of one row's chunk and its token; +inf for a chunk with NaN or +inf. Grid: rows, chunks.

    Score: x, plus noise where the row draws from all tokens."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    inverse = 1.0
    noisy = False
    key = tl.full([], 0, tl.uint32)
    if NOISY:
        t = tl.load(temperature + row)
        inverse = 1.0 / tl.where(t > 0, t, 1.0)
        noisy = (t > 0) & ~is_cut(row, top_k, top_p, min_p, SIZE)
        key = row_key(tl.load(seeds + row), tl.load(positions + row))
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -INF, tl.float32)
    index = part * CHUNK + lanes
    broken = tl.full([BLOCK], 0, tl.int32)
    for start in range(part * CHUNK, min(part * CHUNK + CHUNK, SIZE), BLOCK):
        tokens = start + lanes
        x = tl.load(logits + row * ROW + tokens, mask=tokens < SIZE, other=-INF)
        broken |= ((x != x) | (x == INF)).to(tl.int32)
        if NOISY:
            x = x * inverse
            if noisy:
                x += gumbel(tokens, key, FAST)
        better = x > best
        best = tl.where(better, x, best)
        index = tl.where(better, tokens, index)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, index, SIZE - 1), 0)
    tl.store(values + row * PARTS + part, tl.where(tl.max(broken, 0) > 0, INF, top))
    tl.store(indices + row * PARTS + part, token)


@triton.jit
def is_cut(row, top_k, top_p, min_p, SIZE: tl.constexpr):
    """Whether the row draws from a part of the tokens."""
    k = tl.load(top_k + row)
    return ((k > 0) & (k < SIZE)) | (tl.load(top_p + row) < 1.0) | (tl.load(min_p + row) > 0.0)


@triton.jit
def best_part(values, indices, row, PARTS: tl.constexpr, BLOCK_P: tl.constexpr):
    """The row's best score and the lowest token that has it."""
    p = tl.arange(0, BLOCK_P)
    v = tl.load(values + row * PARTS + p, mask=p < PARTS, other=-INF)
    i = tl.load(indices + row * PARTS + p, mask=p < PARTS, other=2**31 - 1)
    top = tl.max(v, 0)
    return top, tl.min(tl.where(v == top, i, 2**31 - 1), 0)


@triton.jit
def finish(values, indices, ids, broken, PARTS: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr):
    """A row a program."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    top, token = best_part(values, indices, row, PARTS, BLOCK_P)
    tl.store(ids + row, token.to(tl.int64))
    tl.store(broken + row, (top == INF).to(tl.uint8))


@triton.jit
def finish_cut(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    values,
    indices,
    ids,
    broken,
    ROW: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """`finish`, and for rows with a truncation the draw from what it keeps. A row a program."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    top, token = best_part(values, indices, row, PARTS, BLOCK_P)
    t = tl.load(temperature + row)
    sane = (top < INF) & (top > -INF)
    if (t > 0) & sane & is_cut(row, top_k, top_p, min_p, SIZE):
        inverse = 1.0 / t
        floor = top + tl.log(tl.maximum(tl.load(min_p + row), 1e-37))
        floor = tl.where(tl.load(min_p + row) > 0, floor, -INF)
        at = logits + row * ROW
        k = tl.load(top_k + row)
        p = tl.load(top_p + row)
        cut, ties = kept_set(at, inverse, floor, top, k, p, SIZE, BLOCK, STAGES)
        key = row_key(tl.load(seeds + row), tl.load(positions + row))
        token = race(at, inverse, floor, cut, ties, key, SIZE, BLOCK, STAGES, FAST)
    tl.store(ids + row, token.to(tl.int64))
    tl.store(broken + row, (top == INF).to(tl.uint8))


@triton.jit
def kept_set(at, inverse, floor, top, k, p, SIZE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """(cut, ties): kept are the tokens with x > cut and, of those with x = cut, the first `ties` ones."""
    cut = -INF
    ties = 0
    if ((k > 0) & (k < SIZE)) | (p < 1.0):
        count, mass, low = totals(at, inverse, floor, -INF, top, SIZE, BLOCK, STAGES)
        if (k > 0) & (k < count):
            cut, above = boundary(at, inverse, floor, top, low, False, k.to(tl.float32), SIZE, BLOCK, STAGES)
            ties = k - above.to(tl.int32)
            if p < 1.0:
                _, mass, _ = totals(at, inverse, floor, cut, top, SIZE, BLOCK, STAGES)
                mass += ties * tl.exp(cut - top)
                low = cut
        if p < 1.0:
            value, above = boundary(at, inverse, floor, top, low, True, p * mass, SIZE, BLOCK, STAGES)
            wanted = tl.ceil((p * mass - above) / tl.maximum(tl.exp(value - top), 1e-37))
            wanted = tl.minimum(tl.maximum(wanted, 1.0), SIZE).to(tl.int32)
            ties = tl.where(value > cut, wanted, tl.minimum(ties, wanted))
            cut = value
    return cut, ties


@triton.jit
def scaled(at, tokens, inverse, floor, SIZE: tl.constexpr):
    """x, −inf under the floor and past the end."""
    x = tl.load(at + tokens, mask=tokens < SIZE, other=-INF) * inverse
    return tl.where(x >= floor, x, -INF)


@triton.jit
def totals(at, inverse, floor, under, top, SIZE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Of the tokens with x > under: how many, the sum of exp(x − top), the smallest x."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    low = tl.full([BLOCK], INF, tl.float32)
    for start in tl.range(0, SIZE, BLOCK, num_stages=STAGES):
        x = scaled(at, start + tl.arange(0, BLOCK), inverse, floor, SIZE)
        kept = x > under
        count += kept.to(tl.int32)
        mass += tl.where(kept, tl.exp(x - top), 0.0)
        low = tl.minimum(low, tl.where(kept, x, INF))
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(low, 0)


@triton.jit
def past(value):
    """A number little greater."""
    return value + tl.abs(value) * 1e-6 + 1e-30


@triton.jit
def boundary(
    at,
    inverse,
    floor,
    top,
    low,
    by_mass,
    target,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The largest x so that S(tokens of at least x) ≥ target, and S(tokens above x); S counts, or sums exp(x − top).

    Each pass cuts the bracket [lo, hi) in five: S from lo on is enough, S from hi on, `above`, is not. It ends when the
    bracket holds one distinct value.
    """
    lo = low
    hi = past(top)
    above = 0.0
    passes = 0
    while passes < 64:
        step = (hi - lo) * 0.2
        t1 = lo + step
        t2 = lo + step * 2
        t3 = lo + step * 3
        t4 = lo + step * 4
        a1 = tl.zeros([BLOCK], tl.float32)
        a2 = tl.zeros([BLOCK], tl.float32)
        a3 = tl.zeros([BLOCK], tl.float32)
        a4 = tl.zeros([BLOCK], tl.float32)
        least = tl.full([BLOCK], INF, tl.float32)
        most = tl.full([BLOCK], -INF, tl.float32)
        for start in tl.range(0, SIZE, BLOCK, num_stages=STAGES):
            x = scaled(at, start + tl.arange(0, BLOCK), inverse, floor, SIZE)
            weight = tl.where(by_mass, tl.exp(x - top), 1.0)
            a1 += tl.where(x >= t1, weight, 0.0)
            a2 += tl.where(x >= t2, weight, 0.0)
            a3 += tl.where(x >= t3, weight, 0.0)
            a4 += tl.where(x >= t4, weight, 0.0)
            inside = (x >= lo) & (x < hi)
            least = tl.minimum(least, tl.where(inside, x, INF))
            most = tl.maximum(most, tl.where(inside, x, -INF))
        first = tl.min(least, 0)
        last = tl.max(most, 0)
        passes += 1
        if first >= last:
            lo = first
            passes = 64
        else:
            s1 = tl.sum(a1, 0)
            s2 = tl.sum(a2, 0)
            s3 = tl.sum(a3, 0)
            s4 = tl.sum(a4, 0)
            if s4 >= target:
                lo = t4
            elif s3 >= target:
                lo, hi, above = t3, t4, s4
            elif s2 >= target:
                lo, hi, above = t2, t3, s3
            elif s1 >= target:
                lo, hi, above = t1, t2, s2
            else:
                hi, above = t1, s1
            lo = tl.maximum(lo, first)
            hi = tl.minimum(hi, past(last))
    return lo, above


@triton.jit
def race(
    at,
    inverse,
    floor,
    cut,
    ties,
    key,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
):
    """The kept token with the greatest x + noise."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -INF, tl.float32)
    index = lanes
    seen = 0
    for start in tl.range(0, SIZE, BLOCK, num_stages=STAGES):
        tokens = start + lanes
        x = scaled(at, tokens, inverse, floor, SIZE)
        if tl.max((x >= cut).to(tl.int32), 0) > 0:
            tie = (x == cut).to(tl.int32)
            before = seen + tl.cumsum(tie, 0) - tie
            kept = (x > cut) | ((tie > 0) & (before < ties))
            seen += tl.sum(tie, 0)
            score = tl.where(kept, x + gumbel(tokens, key, FAST), -INF)
            better = score > best
            best = tl.where(better, score, best)
            index = tl.where(better, tokens, index)
    winner = tl.max(best, 0)
    return tl.min(tl.where(best == winner, index, SIZE - 1), 0)


@triton.jit
def normaliser_parts(
    logits,
    out,
    ROW: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """log Σ exp over one row's chunk. Grid: rows, chunks."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -INF, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(part * CHUNK, min(part * CHUNK + CHUNK, SIZE), BLOCK):
        tokens = start + lanes
        x = tl.load(logits + row * ROW + tokens, mask=tokens < SIZE, other=-INF)
        higher = tl.maximum(tl.maximum(top, x), -1e38)
        mass = mass * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    highest = tl.max(top, 0)
    total = tl.sum(mass * tl.exp(top - highest), 0)
    tl.store(out + row * PARTS + part, highest + tl.log(total))
