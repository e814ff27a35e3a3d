"""One order of a step's (token, choice) pairs that serves the base GEMMs and the adapters alike.

T tokens, K experts per token, P = T · K pairs (pair p belongs to token p // K), E experts, S slots. Pairs are sorted by
(expert, slot), so that an expert's pairs lie together for its GEMM, and within them the pairs of one adapter for its
matrices. Base pairs (slot −1) come first within their expert; pairs of foreign experts
(id −1) come last of all and belong to nothing. Everything is made on the device and nothing is read back.
"""

from dataclasses import dataclass

import torch

from loraplex.kernels.devices import INTERPRETED, has_dependent_launch
from loraplex.kernels.tuning import power_of_two

RANK_SORT_PAIRS = 2048
"""Up to here one launch compares every pair with every other: 3 µs for 512 pairs, 4.6 for 2048 on an H200."""


@dataclass(frozen=True)
class Chunks:
    """Runs of at most `rows` sorted pairs with the same expert and slot, base pairs too.

    Entries from `num` on are undefined; with num None those with a key of −1 are no chunks.
    """

    rows: int
    key: torch.Tensor
    """int32 [C_max]: expert · (S + 1) + slot + 1."""
    start: torch.Tensor
    """int32 [C_max]: place of the first pair in the sorted order."""
    count: torch.Tensor
    """int32 [C_max]: pairs in the chunk."""
    num: torch.Tensor | None
    """int32 [1], on the device."""


@dataclass(frozen=True)
class PairOrder:
    """Example: E 3, S 2, K 2, ids [[1, 0], [1, −1], [1, 0]], slots [1, 0, −1] → order [5, 1, 4, 2, 0, 3],
    position [4, 1, 3, 5, 2, 0], starts [0, 2, 5, 5]; chunks of (expert, slot), from places 0 to 4: (0, −1), (0, 1),
    (1, −1), (1, 0) and (1, 1), one pair each."""

    order_P: torch.Tensor
    """int32 [P]: pair at each place."""
    position_P: torch.Tensor
    """int32 [P]: place of each pair."""
    starts: torch.Tensor
    """int32 [E + 1]: first place of each expert; the last is the number of pairs with an expert here."""
    chunks: Chunks | None

    @property
    def num_experts(self) -> int:
        return self.starts.shape[0] - 1


def max_chunks(num_pairs: int, num_experts: int, num_slots: int, rows: int) -> int:
    """Bound on the number of chunks: at most one that is not full for each (expert, slot) that occurs."""
    return min(num_pairs, num_pairs // rows + num_experts * (num_slots + 1))


def order_pairs(
    ids_TK: torch.Tensor,
    token_slot: torch.Tensor | None,
    *,
    num_experts: int,
    num_slots: int = 0,
    chunk_rows: int | None = None,
) -> PairOrder:
    """Stable sort of the pairs by (expert, slot).

    ids: int [T, K], −1 = foreign. token_slot: int32 [T], None = all base.
    chunk_rows: the chunks' length, a power of two; None when nobody reads them.
    """
    assert (token_slot is None) == (num_slots == 0), (token_slot, num_slots)
    assert ids_TK.is_contiguous(), ids_TK.stride()
    if not (ids_TK.is_cuda or INTERPRETED):
        return order_pairs_reference(ids_TK, token_slot, num_experts, num_slots, chunk_rows)
    if ids_TK.numel() <= RANK_SORT_PAIRS:
        return _rank_sort(ids_TK, token_slot, num_experts, num_slots, chunk_rows)
    return _count_sort(ids_TK, token_slot, num_experts, num_slots, chunk_rows)


def order_pairs_reference(
    ids_TK: torch.Tensor,
    token_slot: torch.Tensor | None,
    num_experts: int,
    num_slots: int,
    chunk_rows: int | None,
) -> PairOrder:
    """The same in torch; the chunk tables have exactly as many entries as there are chunks."""
    expert_P = ids_TK.flatten().to(torch.int64)
    slot_P = torch.full_like(expert_P, -1)
    if token_slot is not None:
        slot_P = token_slot.to(torch.int64).repeat_interleave(ids_TK.shape[1])
    stride = num_slots + 1
    key_P = torch.where(expert_P < 0, num_experts * stride, expert_P * stride + slot_P + 1)
    sorted_P, order_P = torch.sort(key_P, stable=True)
    position_P = torch.empty_like(order_P)
    position_P[order_P] = torch.arange(order_P.shape[0], device=order_P.device)
    firsts = torch.arange(num_experts + 1, device=order_P.device) * stride
    return PairOrder(
        order_P=order_P.to(torch.int32),
        position_P=position_P.to(torch.int32),
        starts=torch.searchsorted(sorted_P, firsts, out_int32=True),
        chunks=None if chunk_rows is None else _chunks_reference(sorted_P, num_experts, stride, chunk_rows),
    )


def _chunks_reference(sorted_P: torch.Tensor, num_experts: int, stride: int, rows: int) -> Chunks:
    place_P = torch.arange(sorted_P.shape[0], device=sorted_P.device)
    rank_P = place_P - torch.searchsorted(sorted_P, sorted_P)
    ends_P = torch.searchsorted(sorted_P, sorted_P, right=True)
    opens_P = (sorted_P < num_experts * stride) & (rank_P % rows == 0)
    start = place_P[opens_P]
    return Chunks(
        rows=rows,
        key=sorted_P[opens_P].to(torch.int32),
        start=start.to(torch.int32),
        count=(ends_P[opens_P] - start).clamp(max=rows).to(torch.int32),
        num=torch.tensor([start.shape[0]], dtype=torch.int32, device=sorted_P.device),
    )


def _empty(
    ids_TK: torch.Tensor, num_experts: int, most: int | None, chunk_rows: int | None, *, listed: bool = False
) -> PairOrder:
    """Tables for the kernels to fill."""

    def ints(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=ids_TK.device)

    pairs, chunks = ids_TK.numel(), None
    if chunk_rows is not None and most is not None:
        chunks = Chunks(chunk_rows, ints(most), ints(most), ints(most), ints(1) if listed else None)
    return PairOrder(ints(pairs), ints(pairs), ints(num_experts + 1), chunks)


def _rank_sort(
    ids_TK: torch.Tensor, token_slot: torch.Tensor | None, num_experts: int, num_slots: int, chunk_rows: int | None
) -> PairOrder:
    """A pair's place is the number of pairs that come before it. One launch: a chunk's entry is at its first place."""
    from loraplex.kernels.moe import _triton_pairs as kernels

    pairs, block = ids_TK.numel(), 8
    out = _empty(ids_TK, num_experts, None if chunk_rows is None else pairs, chunk_rows)
    chunks = out.chunks
    padded = max(64, power_of_two(pairs))
    kernels.rank_sort[(-(-pairs // block) + -(-(num_experts + 1) // block),)](
        ids_TK,
        token_slot,
        pairs,
        out.order_P,
        out.position_P,
        out.starts,
        chunks.key if chunks else None,
        chunks.start if chunks else None,
        chunks.count if chunks else None,
        NUM_EXPERTS=num_experts,
        NUM_SLOTS=num_slots,
        TOP_K=ids_TK.shape[1],
        ROWS=chunks.rows if chunks else 0,
        SHIFT=RANK_SORT_PAIRS.bit_length() - 1,
        PAIRS_POW2=padded,
        BLOCK_I=block,
        DEPENDENT=has_dependent_launch(ids_TK),
        num_warps=8 if padded > 512 else 4,
    )
    return out


def _count_sort(
    ids_TK: torch.Tensor, token_slot: torch.Tensor | None, num_experts: int, num_slots: int, chunk_rows: int | None
) -> PairOrder:
    """Histogram per block of pairs, scan over blocks, scan over keys, scatter. Stable: no atomic decides an order."""
    from loraplex.kernels.moe import _triton_pairs as kernels

    pairs, block = ids_TK.numel(), 512
    most = None if chunk_rows is None else max_chunks(pairs, num_experts, num_slots, chunk_rows)
    out = _empty(ids_TK, num_experts, most, chunk_rows, listed=True)
    chunks = out.chunks
    keys = num_experts * (num_slots + 1) + 1
    padded_keys = max(64, power_of_two(keys))
    num_blocks = -(-pairs // block)
    counts = torch.empty(num_blocks, padded_keys, dtype=torch.int32, device=ids_TK.device)
    totals, key_start, key_chunk = torch.empty(3, padded_keys, dtype=torch.int32, device=ids_TK.device)
    shape = {"NUM_EXPERTS": num_experts, "NUM_SLOTS": num_slots, "TOP_K": ids_TK.shape[1]}
    dependent = has_dependent_launch(ids_TK)
    early = {"DEPENDENT": dependent, **({"launch_pdl": True} if dependent else {})}
    kernels.count_keys[(num_blocks,)](
        ids_TK, token_slot, pairs, counts, **shape, KEYS=padded_keys, BLOCK=block, DEPENDENT=dependent
    )
    kernels.scan_blocks[(padded_keys // 32,)](
        counts, totals, num_blocks, KEYS=padded_keys, BLOCK_KEYS=32, BLOCK_ROWS=128, **early
    )
    kernels.scan_keys[(1,)](
        totals,
        key_start,
        key_chunk,
        out.starts,
        chunks.num if chunks else None,
        NUM_EXPERTS=num_experts,
        NUM_SLOTS=num_slots,
        KEYS=padded_keys,
        ROWS=chunks.rows if chunks else 0,
        num_warps=8,
        **early,
    )
    kernels.scatter_pairs[(num_blocks, block // 64)](
        ids_TK,
        token_slot,
        pairs,
        counts,
        totals,
        key_start,
        key_chunk,
        out.order_P,
        out.position_P,
        chunks.key if chunks else None,
        chunks.start if chunks else None,
        chunks.count if chunks else None,
        **shape,
        KEYS=padded_keys,
        ROWS=chunks.rows if chunks else 0,
        BLOCK=block,
        BLOCK_I=64,
        **early,
    )
    return out
