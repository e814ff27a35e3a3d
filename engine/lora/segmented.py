"""triton: one segment per request, tokens in the order they came."""

from collections.abc import Sequence

import numpy as np
import torch

from loraplex.engine.lora.csgmv import ROWS_UP_TO
from loraplex.engine.lora.planning import PlannedBackend, Segments
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.dense import rows_add_, segments_add_
from loraplex.kernels.lora.weights import LoRAWeights


class Segmented(PlannedBackend):
    def cut(self, slots: Sequence[int], num_tokens: Sequence[int], bucket: int) -> Segments:
        bounds = np.concatenate([[0], np.cumsum(num_tokens, dtype=np.int64)])
        return Segments(np.arange(bounds[-1]), bounds, np.asarray(slots, dtype=np.int64))

    def max_segments(self, max_tokens: int, max_requests: int) -> int:
        return max_requests

    def add_(self, y_TN: torch.Tensor, x_TD: torch.Tensor, w: LoRAWeights, batch: LoRABatchInfo) -> None:
        tokens = x_TD.shape[0]
        one_each = batch.weight_indices.shape[0] == tokens
        if tokens <= ROWS_UP_TO or one_each:
            rows_add_(y_TN, x_TD, w, batch)
        else:
            segments_add_(y_TN, x_TD, w, batch, block_m=16 if tokens <= 256 else 32, longest=tokens)
