"""csgmv: tokens sorted by slot and cut into chunks, so that skewed popularity still gives even work."""

from collections.abc import Sequence

import numpy as np
import torch

from loraplex.engine.lora.planning import PlannedBackend, Segments
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.dense import rows_add_, segments_add_
from loraplex.kernels.lora.weights import LoRAWeights

ROWS_UP_TO = 64
"""Tokens up to which a program per token is faster than any chunk (measured on an H200)."""


class ChunkedSGMV(PlannedBackend):
    def cut(self, slots: Sequence[int], num_tokens: Sequence[int], bucket: int) -> Segments:
        return chunks_by_slot(slots, num_tokens, self.chunk_size(bucket))

    def max_segments(self, max_tokens: int, max_requests: int) -> int:
        size = self.chunk_size(max_tokens)
        used = min(max_tokens, max_requests, self.options.max_slots)
        return (max_tokens + used * (size - 1)) // size

    def chunk_size(self, tokens: int) -> int:
        """Tokens of a chunk: longer ones reuse an adapter's weights more, shorter ones waste less of a tile."""
        return self.options.chunk_size or (16 if tokens <= 256 else 32)

    def add_(self, y_TN: torch.Tensor, x_TD: torch.Tensor, w: LoRAWeights, batch: LoRABatchInfo) -> None:
        tokens = x_TD.shape[0]
        if tokens <= ROWS_UP_TO:
            rows_add_(y_TN, x_TD, w, batch)
        else:
            size = self.chunk_size(tokens)
            segments_add_(y_TN, x_TD, w, batch, block_m=min(size, 64), longest=size)


def chunks_by_slot(slots: Sequence[int], num_tokens: Sequence[int], size: int) -> Segments:
    """Tokens in the order of their slots, each slot's run cut into chunks of at most `size`; base tokens come last, in
    no segment.

    Example: slots (1, −1, 0), 3, 1 and 2 tokens, size 2 → permutation (4, 5, 0, 1, 2, 3), bounds (0, 2, 4, 5), slots
    (0, 1, 1).
    """
    token_slot = np.repeat(np.asarray(slots, dtype=np.int64), num_tokens)
    last = max(slots, default=-1) + 1
    permutation = np.argsort(np.where(token_slot < 0, last, token_slot), kind="stable")
    counts = np.bincount(token_slot[token_slot >= 0], minlength=last)
    pieces = -(-counts // size)
    chunk_slots = np.repeat(np.arange(last), pieces)
    within = np.arange(len(chunk_slots)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.repeat(np.cumsum(counts) - counts, pieces) + within * size
    return Segments(permutation, np.concatenate([starts, [counts.sum()]]), chunk_slots)
