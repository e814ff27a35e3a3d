"""The readable backend: torch operations, one segment per adapter. What faster backends are tested against."""

from collections.abc import Mapping

import numpy as np
import torch

from loraplex.engine.device import to_device
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.mapping import expand_token_slot
from loraplex.kernels.lora.reference import lora_add_
from loraplex.kernels.lora.weights import LoRAWeights


class Plain:
    def plan(
        self,
        slots: list[int],
        num_tokens: list[int],
        slot_rows: list[int],
        ranks: Mapping[int, int],
        device: torch.device,
    ) -> LoRABatchInfo:
        indptr = np.concatenate([[0], np.cumsum(num_tokens)])
        token_slot = np.repeat(slots, num_tokens)
        order = np.argsort(token_slot, kind="stable")
        weights, starts = np.unique(token_slot[order], return_index=True)
        bounds = [*starts.tolist(), len(order)]
        req_indptr, req_weights, slot_row, seg_indptr, seg_weights, permutation, num_segments = to_device(
            [indptr, slots, slot_rows, bounds, weights, order, [len(weights)]], device
        )
        return LoRABatchInfo(
            token_slot=expand_token_slot(req_indptr, req_weights, len(order)),
            req_seg_indptr=req_indptr,
            req_weight_indices=req_weights,
            slot_row=slot_row,
            seg_indptr=seg_indptr,
            weight_indices=seg_weights,
            permutation=permutation.long(),
            num_segments=num_segments,
            max_rank_in_batch=max(ranks[row] for row in slot_rows),
            segments_host=tuple(
                (slot_rows[slot], bounds[i], bounds[i + 1]) for i, slot in enumerate(weights.tolist()) if slot >= 0
            ),
        )

    def add_(self, y_TN: torch.Tensor, x_TD: torch.Tensor, w: LoRAWeights, batch: LoRABatchInfo) -> None:
        lora_add_(y_TN, x_TD, w, batch)
