"""Inputs for kernel tests and benchmarks: arenas filled with random adapters, ragged batches, adapter popularity."""

import random
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.mapping import expand_token_slot
from loraplex.kernels.lora.weights import LoRAWeights
from loraplex.kernels.moe.pairs import Chunks

Popularity = Literal["distinct", "uniform", "zipf", "identical", "skewed"]
ALIGN = 64
"""Elements; what the arena aligns each matrix to."""


def random_weights(
    ranks: Sequence[Sequence[int]],
    in_features: Sequence[int],
    slices: Sequence[int],
    *,
    num_experts: int = 1,
    shared_a: bool = False,
    shared_b: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    std: float = 0.1,
) -> LoRAWeights:
    """Random A and B for every (row, part) of `ranks` ([rows][C], 0 = untouched), in an arena whose other elements are
    NaN: whatever reads beyond a live rank is seen."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    places = np.zeros((len(ranks), len(slices), 4), dtype=np.int64)
    scales = np.zeros((len(ranks), len(slices)), dtype=np.float32)
    chunks: list[tuple[int, torch.Tensor]] = []
    end = ALIGN
    for row, row_ranks in enumerate(ranks):
        for part, rank in enumerate(row_ranks):
            if rank == 0:
                places[row, part] = 1 << 40  # reading it is an error
                continue
            scales[row, part] = rng.choice([0.25, 0.5, 1.0, 1.5, 2.0])
            for column, width, shared in ((0, in_features[part], shared_a), (1, slices[part], shared_b)):
                num = 1 if shared else num_experts
                size = rank * width
                stride = -(-size // ALIGN) * ALIGN
                places[row, part, column] = end
                places[row, part, 2 + column] = 0 if num == 1 else stride
                for e in range(num):
                    chunks.append((end + e * stride, torch.randn(size, generator=generator) * std))
                end += num * stride + ALIGN
    arena = torch.full((end,), torch.nan)
    for start, values in chunks:
        arena[start : start + len(values)] = values
    host_ranks = np.asarray(ranks, dtype=np.int32).reshape(len(ranks), len(slices))
    return LoRAWeights(
        arena=arena.to(device, dtype),
        places=torch.from_numpy(places).to(device),
        ranks=torch.from_numpy(host_ranks).to(device),
        scales=torch.from_numpy(scales).to(device),
        host_places=places,
        host_ranks=host_ranks,
        host_scales=scales,
        in_features=tuple(in_features),
        slices=tuple(slices),
        num_experts=num_experts,
    )


Delta = tuple[torch.Tensor, torch.Tensor, float]
"""A [(E or 1,) r, in], B [(E or 1,) out, r] and scale, as an adapter file has them."""


def weights_of(
    rows: Sequence[Sequence[Delta | None]], in_features: Sequence[int], slices: Sequence[int], num_experts: int = 1
) -> LoRAWeights:
    """An arena that holds these deltas, [rows][C], and its tables. Gaps are NaN."""
    places = np.zeros((len(rows), len(slices), 4), dtype=np.int64)
    ranks = np.zeros((len(rows), len(slices)), dtype=np.int32)
    scales = np.zeros((len(rows), len(slices)), dtype=np.float32)
    pieces = [torch.full((ALIGN,), torch.nan)]
    end = ALIGN
    for row, deltas in enumerate(rows):
        for part, delta in enumerate(deltas):
            if delta is None:
                continue
            a, b, scales[row, part] = delta
            ranks[row, part] = a.shape[-2]
            for column, matrices in ((0, a), (1, b.mT)):
                m_EX = matrices.reshape(len(matrices) if matrices.dim() == 3 else 1, -1)
                assert m_EX.shape[0] in (1, num_experts)
                gap = m_EX.new_full((len(m_EX), -m_EX.shape[1] % ALIGN), torch.nan)
                padded = torch.cat((m_EX, gap), dim=1)
                places[row, part, column] = end
                places[row, part, 2 + column] = 0 if len(m_EX) == 1 else padded.shape[1]
                pieces.append(padded.flatten())
                end += padded.numel()
    return LoRAWeights(
        arena=torch.cat(pieces),
        places=torch.from_numpy(places),
        ranks=torch.from_numpy(ranks),
        scales=torch.from_numpy(scales),
        host_places=places,
        host_ranks=ranks,
        host_scales=scales,
        in_features=tuple(in_features),
        slices=tuple(slices),
        num_experts=num_experts,
    )


def request_slots(
    popularity: Popularity, requests: int, slots: int, *, base_share: float = 0.2, seed: int = 0
) -> list[int]:
    """Slot of each request, −1 = base. distinct: in turn; skewed: nine of ten on slot 0; zipf: 1/k."""
    rng = random.Random(seed)
    if popularity == "distinct":
        chosen = [i % slots for i in range(requests)]
    elif popularity == "identical":
        chosen = [0] * requests
    elif popularity == "skewed":
        chosen = [0 if rng.random() < 0.9 else rng.randrange(slots) for _ in range(requests)]
    else:
        weights = [1.0 if popularity == "uniform" else 1 / (k + 1) for k in range(slots)]
        chosen = rng.choices(range(slots), weights, k=requests)
    return [-1 if rng.random() < base_share else slot for slot in chosen]


def listed_chunks(chunks: Chunks) -> list[tuple[int, int, int]]:
    """(key, start, count) of the entries that are chunks, in order of their places."""
    entries = torch.stack([chunks.key, chunks.start, chunks.count], 1)
    entries = entries[chunks.key >= 0] if chunks.num is None else entries[: int(chunks.num)]
    return [(key, start, count) for key, start, count in entries.tolist()]


def plain_batch(
    slots: Sequence[int],
    num_tokens: Sequence[int],
    slot_rows: Sequence[int],
    *,
    padding: int = 0,
    device: torch.device | str = "cpu",
) -> LoRABatchInfo:
    """A batch description with the reference's segments (one per slot), for comparing kernels with the reference.

    `padding`: tokens after the last request, as in a CUDA graph's bucket.
    """
    indptr = torch.tensor([0, *np.cumsum(num_tokens).tolist()], dtype=torch.int32, device=device)
    weights = torch.tensor(list(slots), dtype=torch.int32, device=device)
    total = int(sum(num_tokens)) + padding
    token_slot = expand_token_slot(indptr, weights, total)
    order = torch.argsort(token_slot, stable=True)
    values, counts = torch.unique_consecutive(token_slot[order], return_counts=True)
    bounds = [0, *torch.cumsum(counts, 0).tolist()]
    segments = [(s, bounds[i], bounds[i + 1]) for i, s in enumerate(values.tolist())]
    return LoRABatchInfo(
        token_slot=token_slot,
        token_row=torch.tensor([*slot_rows, -1], dtype=torch.int32, device=device)[token_slot.long()],
        req_seg_indptr=indptr,
        req_weight_indices=weights,
        slot_row=torch.tensor(list(slot_rows), dtype=torch.int32, device=device),
        seg_indptr=torch.tensor(bounds, dtype=torch.int32, device=device),
        weight_indices=values.to(torch.int32),
        segment_row=torch.tensor([*slot_rows, -1], dtype=torch.int32, device=device)[values.long()],
        permutation=order,
        num_segments=torch.tensor([len(segments)], dtype=torch.int32, device=device),
        max_rank_in_batch=0,
        segments_host=tuple((slot_rows[s], a, b) for s, a, b in segments if s >= 0),
    )
