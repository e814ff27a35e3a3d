# mypy: ignore-errors
"""Kernels of `pairs.py`. A key is expert · (S + 1) + slot + 1; foreign pairs have the key after the last."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def pair_key(
    ids,
    token_slot,
    pair,
    mask,
    NUM_EXPERTS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
):
    expert = tl.load(ids + pair, mask=mask, other=-1).to(tl.int32)
    key = expert * (NUM_SLOTS + 1)
    if NUM_SLOTS > 0:
        key += tl.load(token_slot + pair // TOP_K, mask=mask, other=-1) + 1
    return tl.where(expert < 0, NUM_EXPERTS * (NUM_SLOTS + 1), key)


@triton.jit(do_not_specialize=["num_pairs"])
def rank_sort(
    ids,
    token_slot,
    num_pairs,
    order,
    position,
    starts,
    sorted_key,
    segment_start,
    NUM_EXPERTS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Counts, for each pair and for the first key of each expert, the pairs that come before.

    (key << SHIFT) + pair orders pairs stably with one comparison each.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    item = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    is_pair = item < num_pairs
    key_i = pair_key(ids, token_slot, item, is_pair, NUM_EXPERTS, NUM_SLOTS, TOP_K)
    expert = item - tl.cdiv(num_pairs, BLOCK_I) * BLOCK_I
    bound_i = tl.where(is_pair, (key_i << SHIFT) + item, (expert * (NUM_SLOTS + 1)) << SHIFT)
    before = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)
    outside = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)
    for j0 in range(0, num_pairs, BLOCK_J):
        j = j0 + tl.arange(0, BLOCK_J)
        key_j = pair_key(ids, token_slot, j, j < num_pairs, NUM_EXPERTS, NUM_SLOTS, TOP_K)
        packed_j = tl.where(j < num_pairs, (key_j << SHIFT) + j, 0x7FFFFFFF)
        before += (packed_j[None, :] < bound_i[:, None]).to(tl.int32)
        if SEGMENTS:
            outside += (packed_j[None, :] < (key_i << SHIFT)[:, None]).to(tl.int32)
    rank = tl.sum(before, 1)
    tl.store(order + rank, item, mask=is_pair)
    tl.store(position + item, rank, mask=is_pair)
    tl.store(starts + expert, rank, mask=(expert >= 0) & (expert <= NUM_EXPERTS))
    if SEGMENTS:
        tl.store(sorted_key + rank, key_i, mask=is_pair)
        tl.store(segment_start + rank, tl.sum(outside, 1), mask=is_pair)


@triton.jit
def _opens_chunk(key, start, place, num_pairs, LAST_KEY: tl.constexpr, SLOT_STRIDE: tl.constexpr, ROWS: tl.constexpr):
    return (place < num_pairs) & (key < LAST_KEY) & (key % SLOT_STRIDE > 0) & ((place - start) % ROWS == 0)


@triton.jit(do_not_specialize=["num_pairs"])
def list_chunks(
    sorted_key,
    segment_start,
    num_pairs,
    chunk_key,
    chunk_start,
    chunk_count,
    num_chunks,
    LAST_KEY: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A chunk's index is the number of places before it that open one."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    key = tl.load(sorted_key + i, mask=i < num_pairs, other=LAST_KEY)
    opens = _opens_chunk(
        key, tl.load(segment_start + i, mask=i < num_pairs, other=0), i, num_pairs, LAST_KEY, SLOT_STRIDE, ROWS
    )
    before = tl.zeros([BLOCK_I, BLOCK_J], tl.int32)
    for j0 in range(0, tl.minimum(num_pairs, (tl.program_id(0) + 1) * BLOCK_I), BLOCK_J):
        j = j0 + tl.arange(0, BLOCK_J)
        key_j = tl.load(sorted_key + j, mask=j < num_pairs, other=LAST_KEY)
        start_j = tl.load(segment_start + j, mask=j < num_pairs, other=0)
        opens_j = _opens_chunk(key_j, start_j, j, num_pairs, LAST_KEY, SLOT_STRIDE, ROWS)
        before += (opens_j[None, :] & (j[None, :] < i[:, None])).to(tl.int32)
    index = tl.sum(before, 1)
    m = i[:, None] + tl.arange(0, ROWS)[None, :]
    same = tl.load(sorted_key + m, mask=m < num_pairs, other=LAST_KEY) == key[:, None]
    tl.store(chunk_key + index, key, mask=opens)
    tl.store(chunk_start + index, i, mask=opens)
    tl.store(chunk_count + index, tl.sum(same.to(tl.int32), 1), mask=opens)
    tl.store(num_chunks + i * 0, index + opens.to(tl.int32), mask=i == num_pairs - 1)


@triton.jit(do_not_specialize=["num_pairs"])
def count_keys(
    ids,
    token_slot,
    num_pairs,
    counts,
    NUM_EXPERTS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pair < num_pairs
    key = pair_key(ids, token_slot, pair, mask, NUM_EXPERTS, NUM_SLOTS, TOP_K)
    tl.store(counts + tl.program_id(0) * KEYS + tl.arange(0, KEYS), tl.histogram(key, KEYS, mask=mask))


@triton.jit(do_not_specialize=["num_blocks"])
def scan_blocks(counts, totals, num_blocks, KEYS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """counts[b, key] becomes the number of pairs with this key in the blocks before b."""
    key = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    total = tl.zeros([BLOCK_KEYS], tl.int32)
    for b0 in range(0, num_blocks, BLOCK_ROWS):
        block = b0 + tl.arange(0, BLOCK_ROWS)
        here = counts + block[:, None] * KEYS + key[None, :]
        count = tl.load(here, mask=(block < num_blocks)[:, None], other=0)
        tl.store(here, tl.cumsum(count, 0) - count + total[None, :], mask=(block < num_blocks)[:, None])
        total += tl.sum(count, 0)
    tl.store(totals + key, total)


@triton.jit
def scan_keys(
    totals,
    key_start,
    key_chunk,
    starts,
    num_chunks,
    NUM_EXPERTS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """First place and first chunk of each key; the places of the experts' first keys."""
    key = tl.arange(0, KEYS)
    total = tl.load(totals + key)
    start = tl.cumsum(total, 0) - total
    tl.store(key_start + key, start)
    last: tl.constexpr = NUM_EXPERTS * (NUM_SLOTS + 1)
    tl.store(starts + key // (NUM_SLOTS + 1), start, mask=(key <= last) & (key % (NUM_SLOTS + 1) == 0))
    if ROWS > 0:
        chunks = tl.where((key < last) & (key % (NUM_SLOTS + 1) > 0), tl.cdiv(total, ROWS), 0)
        tl.store(key_chunk + key, tl.cumsum(chunks, 0) - chunks)
        tl.store(num_chunks, tl.sum(chunks, 0))


@triton.jit(do_not_specialize=["num_pairs"])
def scatter_pairs(
    ids,
    token_slot,
    num_pairs,
    counts,
    totals,
    key_start,
    key_chunk,
    order,
    position,
    chunk_key,
    chunk_start,
    chunk_count,
    NUM_EXPERTS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """A pair's place: its key's first place, plus the same key in earlier blocks, plus earlier in this block."""
    first = tl.program_id(0) * BLOCK
    i = first + tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = i < num_pairs
    key = pair_key(ids, token_slot, i, mask, NUM_EXPERTS, NUM_SLOTS, TOP_K)
    before = tl.zeros([BLOCK_I, BLOCK_I], tl.int32)
    for j0 in range(first, first + (tl.program_id(1) + 1) * BLOCK_I, BLOCK_I):
        j = j0 + tl.arange(0, BLOCK_I)
        key_j = pair_key(ids, token_slot, j, j < num_pairs, NUM_EXPERTS, NUM_SLOTS, TOP_K)
        before += ((key_j[None, :] == key[:, None]) & (j[None, :] < i[:, None])).to(tl.int32)
    rank = tl.load(counts + tl.program_id(0) * KEYS + key, mask=mask, other=0) + tl.sum(before, 1)
    place = tl.load(key_start + key, mask=mask, other=0) + rank
    tl.store(order + place, i, mask=mask)
    tl.store(position + i, place, mask=mask)
    if ROWS > 0:
        opens = mask & (key < NUM_EXPERTS * (NUM_SLOTS + 1)) & (key % (NUM_SLOTS + 1) > 0) & (rank % ROWS == 0)
        index = tl.load(key_chunk + key, mask=opens, other=0) + rank // ROWS
        total = tl.load(totals + key, mask=opens, other=0)
        tl.store(chunk_key + index, key, mask=opens)
        tl.store(chunk_start + index, place, mask=opens)
        tl.store(chunk_count + index, tl.minimum(total - rank, ROWS), mask=opens)
