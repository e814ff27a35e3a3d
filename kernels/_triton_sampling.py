# mypy: ignore-errors
"""Kernels of `sampling.draw` and `sampling.log_normaliser`. x is a logit divided by its row's temperature,
in fp32 whatever the logits are in."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

INF = tl.constexpr(float("inf"))
LEAST = tl.constexpr(-1e38)
"""Stands for −inf where a difference is taken."""


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
    counts,
    masses,
    lows,
    ROW: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    NOISY: tl.constexpr,
    CUT: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best score of one row's chunk and its token; +inf for a chunk with NaN or +inf. Grid: rows, chunks.

    Score: x, plus noise where the row draws from all tokens. Of rows that do not, the chunk's finite x as well: how
    many, the sum of exp(x − best), the smallest.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    inverse = 1.0
    noisy = False
    cut = False
    key = tl.full([], 0, tl.uint32)
    if NOISY:
        t = tl.load(temperature + row)
        inverse = 1.0 / tl.where(t > 0, t, 1.0)
        noisy = t > 0
        key = row_key(tl.load(seeds + row), tl.load(positions + row))
    if CUT:
        cut = noisy & is_cut(row, top_k, top_p, min_p, SIZE)
        noisy = noisy & ~cut
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -INF, tl.float32)
    index = part * CHUNK + lanes
    broken = tl.full([BLOCK], 0, tl.int32)
    count = tl.full([BLOCK], 0, tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    low = tl.full([BLOCK], INF, tl.float32)
    for start in range(part * CHUNK, min(part * CHUNK + CHUNK, SIZE), BLOCK):
        tokens = start + lanes
        x = tl.load(logits + row * ROW + tokens, mask=tokens < SIZE, other=-INF).to(tl.float32)
        broken |= ((x != x) | (x == INF)).to(tl.int32)
        if NOISY:
            x = x * inverse
            if noisy:
                x += gumbel(tokens, key, FAST)
        if CUT:  # noqa: SIM102 (one is for the compiler)
            if cut:
                higher = tl.maximum(tl.maximum(best, x), LEAST)
                mass = mass * tl.exp(best - higher) + tl.exp(x - higher)
                count += (x > -INF).to(tl.int32)
                low = tl.minimum(low, tl.where(x > -INF, x, INF))
        better = x > best
        best = tl.where(better, x, best)
        index = tl.where(better, tokens, index)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, index, SIZE - 1), 0)
    at = row * PARTS + part
    tl.store(values + at, tl.where(tl.max(broken, 0) > 0, INF, top))
    tl.store(indices + at, token)
    if CUT:
        tl.store(counts + at, tl.sum(count, 0))
        tl.store(masses + at, tl.sum(mass * tl.exp(tl.maximum(best, LEAST) - tl.maximum(top, LEAST)), 0))
        tl.store(lows + at, tl.min(low, 0))


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
    counts,
    masses,
    lows,
    list_x,
    list_token,
    ids,
    broken,
    ROW: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """`finish`, and for rows with a truncation the draw from what it keeps. A row a program.

    Kept are the tokens with x > cut and, of those with x = cut, the first `ties` ones. Passes over the row narrow down
    where the cut is, until the tokens in question fit the row's list; what is above them is kept for certain.
    """
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    top, token = best_part(values, indices, row, PARTS, BLOCK_P)
    t = tl.load(temperature + row)
    sane = (top < INF) & (top > -INF)
    if (t > 0) & sane & is_cut(row, top_k, top_p, min_p, SIZE):
        inverse = 1.0 / t
        at = logits + row * ROW
        p = tl.load(top_p + row)
        k = tl.load(top_k + row)
        least_p = tl.load(min_p + row)
        key = row_key(tl.load(seeds + row), tl.load(positions + row))
        floor = -INF
        count, mass, low = part_totals(values, counts, masses, lows, row, top, PARTS, BLOCK_P)
        if least_p > 0:
            floor = top + tl.log(tl.maximum(least_p, 1e-37))
            count, mass, low = totals(at, inverse, floor, -INF, top, SIZE, BLOCK, STAGES)
        k = tl.where((k > 0) & (k < count), k, 0)
        first_x = list_x + row * CAPACITY
        first_token = list_token + row * CAPACITY
        length = CAPACITY + 1
        cut = -INF
        ties = 0
        known = False
        if ((k > 0) & (k <= CAPACITY // 2)) | ((k == 0) & (p < 1.0)):
            by_mass = k == 0
            target = tl.where(by_mass, p * mass, k.to(tl.float32))
            total = tl.where(by_mass, mass, count.to(tl.float32))
            lo, hi, above, single = boundary(
                at, inverse, floor, top, low, by_mass, target, total, CAPACITY, SIZE, BLOCK, STAGES
            )
            if single == 1:
                known = by_mass | (p >= 1.0)
                cut = lo
                ties = k - tl.where(by_mass, 0.0, above).to(tl.int32)
                if by_mass:
                    cut, ties = cut_by_mass(lo, above, target, top, -INF, 0)
            else:
                hi = tl.where(by_mass, hi, INF)
                length, best, winner = collect(
                    at, inverse, floor, lo, hi, key, first_x, first_token, CAPACITY, SIZE, BLOCK, STAGES, FAST
                )
                if length <= CAPACITY:
                    token = draw_listed(
                        first_x, first_token, length, lo, hi, tl.where(by_mass, above, 0.0), k, p, mass, top, key,
                        best, winner, CAPACITY, FAST,
                    )  # fmt: skip
        if length > CAPACITY:
            if not known:
                cut, ties = kept_set(at, inverse, floor, top, low, count, mass, k, p, SIZE, BLOCK, STAGES)
            token = race(at, inverse, floor, cut, ties, key, SIZE, BLOCK, STAGES, FAST)
    tl.store(ids + row, token.to(tl.int64))
    tl.store(broken + row, (top == INF).to(tl.uint8))


@triton.jit
def part_totals(values, counts, masses, lows, row, top, PARTS: tl.constexpr, BLOCK_P: tl.constexpr):
    """`totals` of a row without a floor, from those of its chunks."""
    i = tl.arange(0, BLOCK_P)
    at = row * PARTS + i
    best = tl.load(values + at, mask=i < PARTS, other=-INF)
    mass = tl.load(masses + at, mask=i < PARTS, other=0.0) * tl.exp(best - top)
    count = tl.load(counts + at, mask=i < PARTS, other=0)
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(tl.load(lows + at, mask=i < PARTS, other=INF), 0)


@triton.jit
def kept_set(
    at, inverse, floor, top, low, count, mass, k, p, SIZE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """(cut, ties) of a kept set of any size, by passes over the row. k: 0 for all."""
    cut = -INF
    ties = 0
    if k > 0:
        total = count.to(tl.float32)
        target = k.to(tl.float32)
        cut, _hi, above, _single = boundary(at, inverse, floor, top, low, False, target, total, -1, SIZE, BLOCK, STAGES)
        ties = k - above.to(tl.int32)
        if p < 1.0:
            _count, mass, _low = totals(at, inverse, floor, cut, top, SIZE, BLOCK, STAGES)
            mass += ties * tl.exp(cut - top)
            low = cut
    if p < 1.0:
        value, _hi, above, _single = boundary(
            at, inverse, floor, top, low, True, p * mass, mass, -1, SIZE, BLOCK, STAGES
        )
        cut, ties = cut_by_mass(value, above, p * mass, top, cut, ties)
    return cut, ties


@triton.jit
def cut_by_mass(value, above, target, top, cut, ties):
    """The cut that keeps `target` of mass: enough of the tokens at `value`, whose greater ones have mass `above`; with
    `cut` and `ties` as they were before it."""
    wanted = tl.ceil((target - above) / tl.maximum(tl.exp(value - top), 1e-37))
    wanted = tl.minimum(tl.maximum(wanted, 1.0), 1e9).to(tl.int32)
    return value, tl.where(value > cut, wanted, tl.minimum(ties, wanted))


@triton.jit
def collect(
    at,
    inverse,
    floor,
    lo,
    hi,
    key,
    first_x,
    first_token,
    CAPACITY: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
):
    """Lists the tokens with lo ≤ x < hi in order, as far as there is room. Returns their number, and the best score and
    the winner of the tokens from hi on."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -INF, tl.float32)
    index = tl.full([BLOCK], SIZE, tl.int32)
    length = 0
    for start in tl.range(0, SIZE, BLOCK, num_stages=STAGES):
        tokens = start + lanes
        x = scaled(at, tokens, inverse, floor, SIZE)
        if tl.max((x >= lo).to(tl.int32), 0) > 0:
            inside = ((x >= lo) & (x < hi)).to(tl.int32)
            place = length + tl.cumsum(inside, 0) - inside
            fits = (inside > 0) & (place < CAPACITY)
            tl.store(first_x + place, x, mask=fits)
            tl.store(first_token + place, tokens, mask=fits)
            length += tl.sum(inside, 0)
            score = tl.where(x >= hi, x + gumbel(tokens, key, FAST), -INF)
            better = score > best
            best = tl.where(better, score, best)
            index = tl.where(better, tokens, index)
    tl.debug_barrier()
    score = tl.max(best, 0)
    return length, score, tl.min(tl.where(best == score, index, SIZE), 0)


@triton.jit
def draw_listed(
    first_x,
    first_token,
    length,
    lo,
    hi,
    above,
    k,
    p,
    mass,
    top,
    key,
    best,
    winner,
    CAPACITY: tl.constexpr,
    FAST: tl.constexpr,
):
    """The row's token, the list holding all that may be cut, with `above` the mass of what is greater. `best` and
    `winner`: of the tokens that are not listed."""
    j = tl.arange(0, CAPACITY)
    x = tl.load(first_x + j, mask=j < length, other=-INF)
    tokens = tl.load(first_token + j, mask=j < length, other=2**31 - 1)
    weight = tl.exp(x - top)
    cut = -INF
    ties = 0
    if k > 0:
        none = tl.full([], 0.0, tl.float32)
        cut, greater = listed_boundary(x, tl.where(j < length, 1.0, 0.0), lo, hi, none, k.to(tl.float32))
        ties = k - greater.to(tl.int32)
        mass = tl.sum(tl.where(x > cut, weight, 0.0), 0) + ties * tl.exp(cut - top)
        lo = cut
    if p < 1.0:
        value, greater = listed_boundary(x, weight, lo, hi, above, p * mass)
        cut, ties = cut_by_mass(value, greater, p * mass, top, cut, ties)
    tie = (x == cut).to(tl.int32)
    kept = (x > cut) | ((tie > 0) & (tl.cumsum(tie, 0) <= ties))
    score = tl.where(kept, x + gumbel(tokens, key, FAST), -INF)
    listed = tl.max(score, 0)
    token = tl.min(tl.where(score == listed, tokens, 2**31 - 1), 0)
    lower = tl.minimum(token, winner)
    return tl.where(listed > best, token, tl.where(listed < best, winner, lower))


@triton.jit
def listed_boundary(x, weight, lo, hi, above, target):
    """As `boundary`, over a list, with `above` the sum of what is not in it; by bisection."""
    base = above
    passes = 0
    while passes < 256:
        inside = (x >= lo) & (x < hi)
        first = tl.min(tl.where(inside, x, INF), 0)
        last = tl.max(tl.where(inside, x, -INF), 0)
        passes += 1
        if first >= last:
            lo = first
            passes = 256
        else:
            middle = first + (last - first) * 0.5
            middle = tl.where(middle > first, middle, last)
            s = base + tl.sum(tl.where(x >= middle, weight, 0.0), 0)
            if s >= target:
                lo = middle
            else:
                hi = middle
                above = s
    return lo, above


@triton.jit
def scaled(at, tokens, inverse, floor, SIZE: tl.constexpr):
    """x, −inf under the floor and past the end."""
    x = tl.load(at + tokens, mask=tokens < SIZE, other=-INF).to(tl.float32) * inverse
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
def remaining(lo, above, total, top, by_mass):
    """Bound on the tokens that `boundary` has left: each weighs no less than one at lo."""
    return tl.where(by_mass, 1.05 * (total - above) / tl.maximum(tl.exp(lo - top), 1e-37) + 16, total)


@triton.jit
def boundary(
    at,
    inverse,
    floor,
    top,
    low,
    by_mass,
    target,
    total,
    room,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """(lo, hi, above, single): where the largest x lies so that S(tokens of at least x) ≥ target. S is the number of
    tokens, or the sum of their exp(x − top).

    Each pass cuts the bracket [lo, hi) in five: S from lo on, `total`, is enough, S from hi on, `above`, is not. It
    ends when the bracket holds one distinct value (single = 1, lo is that x), or (single = 0) when no more than `room`
    tokens are left in it; when counting: from lo on.
    """
    lo = low
    hi = past(top)
    above = tl.full([], 0.0, tl.float32)
    single = 0
    passes = 0
    while (passes < 64) & (remaining(lo, above, total, top, by_mass) > room):
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
            single = 1
            passes = 64
        else:
            s1 = tl.sum(a1, 0)
            s2 = tl.sum(a2, 0)
            s3 = tl.sum(a3, 0)
            s4 = tl.sum(a4, 0)
            if s4 >= target:
                lo, total = t4, s4
            elif s3 >= target:
                lo, hi, above, total = t3, t4, s4, s3
            elif s2 >= target:
                lo, hi, above, total = t2, t3, s3, s2
            elif s1 >= target:
                lo, hi, above, total = t1, t2, s2, s1
            else:
                hi, above = t1, s1
            lo = tl.maximum(lo, first)
            hi = tl.minimum(hi, past(last))
    return lo, hi, above, single


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
        x = tl.load(logits + row * ROW + tokens, mask=tokens < SIZE, other=-INF).to(tl.float32)
        higher = tl.maximum(tl.maximum(top, x), -1e38)
        mass = mass * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    highest = tl.max(top, 0)
    total = tl.sum(mass * tl.exp(top - highest), 0)
    tl.store(out + row * PARTS + part, highest + tl.log(total))
