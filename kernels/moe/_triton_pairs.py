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
    chunk_key,
    chunk_start,
    chunk_count,
    NUM_EXPERTS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    SHIFT: tl.constexpr,
    PAIRS_POW2: tl.constexpr,
    BLOCK_I: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Counts, for each pair and for the first key of each expert, the pairs that come before.

    (key << SHIFT) + pair orders pairs stably with one comparison each. All keys are read at once: a loop over blocks of
    them waits for memory each time.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    item = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    is_pair = item < num_pairs
    key_i = pair_key(ids, token_slot, item, is_pair, NUM_EXPERTS, NUM_SLOTS, TOP_K)
    expert = item - tl.cdiv(num_pairs, BLOCK_I) * BLOCK_I
    bound_i = tl.where(is_pair, (key_i << SHIFT) + item, (expert * (NUM_SLOTS + 1)) << SHIFT)
    j = tl.arange(0, PAIRS_POW2)
    key_j = pair_key(ids, token_slot, j, j < num_pairs, NUM_EXPERTS, NUM_SLOTS, TOP_K)
    packed_j = tl.where(j < num_pairs, (key_j << SHIFT) + j, 0x7FFFFFFF)
    rank = tl.sum((packed_j[None, :] < bound_i[:, None]).to(tl.int32), 1)
    tl.store(order + rank, item, mask=is_pair)
    tl.store(position + item, rank, mask=is_pair)
    tl.store(starts + expert, rank, mask=(expert >= 0) & (expert <= NUM_EXPERTS))
    if ROWS > 0:
        first = tl.sum((packed_j[None, :] < (key_i << SHIFT)[:, None]).to(tl.int32), 1)
        end = tl.sum((packed_j[None, :] < ((key_i + 1) << SHIFT)[:, None]).to(tl.int32), 1)
        opens = (key_i < NUM_EXPERTS * (NUM_SLOTS + 1)) & ((rank - first) % ROWS == 0)
        tl.store(chunk_key + rank, tl.where(opens, key_i, -1), mask=is_pair)
        tl.store(chunk_start + rank, rank, mask=is_pair)
        tl.store(chunk_count + rank, tl.minimum(end - rank, ROWS), mask=is_pair)


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
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pair < num_pairs
    key = pair_key(ids, token_slot, pair, mask, NUM_EXPERTS, NUM_SLOTS, TOP_K)
    tl.store(counts + tl.program_id(0) * KEYS + tl.arange(0, KEYS), tl.histogram(key, KEYS, mask=mask))


@triton.jit(do_not_specialize=["num_blocks"])
def scan_blocks(
    counts,
    totals,
    num_blocks,
    KEYS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """counts[b, key] becomes the number of pairs with this key in the blocks before b."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
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
    DEPENDENT: tl.constexpr,
):
    """First place and first chunk of each key; the places of the experts' first keys."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    key = tl.arange(0, KEYS)
    total = tl.load(totals + key)
    start = tl.cumsum(total, 0) - total
    tl.store(key_start + key, start)
    last: tl.constexpr = NUM_EXPERTS * (NUM_SLOTS + 1)
    tl.store(starts + key // (NUM_SLOTS + 1), start, mask=(key <= last) & (key % (NUM_SLOTS + 1) == 0))
    if ROWS > 0:
        chunks = tl.where(key < last, tl.cdiv(total, ROWS), 0)
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
    DEPENDENT: tl.constexpr,
):
    """A pair's place: its key's first place, plus the same key in earlier blocks, plus earlier in this block.

    The last is counted beside the scans: ids and slots are older than they.
    """
    first = tl.program_id(0) * BLOCK
    i = first + tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = i < num_pairs
    key = pair_key(ids, token_slot, i, mask, NUM_EXPERTS, NUM_SLOTS, TOP_K)
    before = tl.zeros([BLOCK_I, BLOCK_I], tl.int32)
    for j0 in range(first, first + (tl.program_id(1) + 1) * BLOCK_I, BLOCK_I):
        j = j0 + tl.arange(0, BLOCK_I)
        key_j = pair_key(ids, token_slot, j, j < num_pairs, NUM_EXPERTS, NUM_SLOTS, TOP_K)
        before += ((key_j[None, :] == key[:, None]) & (j[None, :] < i[:, None])).to(tl.int32)
    within = tl.sum(before, 1)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    rank = tl.load(counts + tl.program_id(0) * KEYS + key, mask=mask, other=0) + within
    place = tl.load(key_start + key, mask=mask, other=0) + rank
    tl.store(order + place, i, mask=mask)
    tl.store(position + i, place, mask=mask)
    if ROWS > 0:
        opens = mask & (key < NUM_EXPERTS * (NUM_SLOTS + 1)) & (rank % ROWS == 0)
        index = tl.load(key_chunk + key, mask=opens, other=0) + rank // ROWS
        total = tl.load(totals + key, mask=opens, other=0)
        tl.store(chunk_key + index, key, mask=opens)
        tl.store(chunk_start + index, place, mask=opens)
        tl.store(chunk_count + index, tl.minimum(total - rank, ROWS), mask=opens)
