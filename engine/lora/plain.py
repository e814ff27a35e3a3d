"""The readable backend: torch operations, one segment per adapter. What faster backends are tested against."""

from collections.abc import Sequence

import torch

from loraplex.engine.lora.csgmv import chunks_by_slot
from loraplex.engine.lora.planning import PlannedBackend, Segments
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.reference import lora_add_
from loraplex.kernels.lora.weights import LoRAWeights


class Plain(PlannedBackend):
    def cut(self, slots: Sequence[int], num_tokens: Sequence[int], bucket: int) -> Segments:
        return chunks_by_slot(slots, num_tokens, max(bucket, 1))

    def max_segments(self, max_tokens: int, max_requests: int) -> int:
        return min(max_tokens, max_requests, self.options.max_slots)

    def add_(self, y_TN: torch.Tensor, x_TD: torch.Tensor, w: LoRAWeights, batch: LoRABatchInfo) -> None:
        lora_add_(y_TN, x_TD, w, batch)
