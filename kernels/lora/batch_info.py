"""`LoRABatchInfo`: which adapter each token of a step uses. Built once per step, read by every layer.

Two independent segmentations live side by side. `req_seg_indptr` / `req_weight_indices` describe *requests*: MoE
routing finds a token's adapter through them. `seg_indptr` / `weight_indices` / `permutation` belong to the dense
backend, which may cut the step differently (csgmv: chunks of the slot-sorted token order). Using the second pair for
MoE gives tokens the wrong adapter (SGLang #24007).
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LoRABatchInfo:
    """Device description of a step's adapters. S = slots of the step (distinct adapters), T tokens, B requests."""

    token_slot: torch.Tensor
    """int32 [T]: slot of each token, −1 = base or padding."""
    token_row: torch.Tensor
    """int32 [T]: slot_row[token_slot], −1 = base or padding: spares kernels that take tokens one by one a look-up."""
    req_seg_indptr: torch.Tensor
    """int32 [B + 1]: token offsets of the requests: 0…B for decode, exclusive sum of extend lengths for prefill."""
    req_weight_indices: torch.Tensor
    """int32 [B]: slot of each request, −1 = base."""
    slot_row: torch.Tensor
    """int32 [S]: resident-adapter table row of each slot."""
    seg_indptr: torch.Tensor
    """int32 [num_segments + 1]: dense backend's segments, over `permutation`."""
    weight_indices: torch.Tensor
    """int32 [num_segments]: slot of each dense segment, −1 = base."""
    segment_row: torch.Tensor
    """int32 [num_segments]: slot_row[weight_indices], −1 = base or no segment: spares the kernels a look-up."""
    permutation: torch.Tensor
    """int64 [T]: dense backend's token order."""
    num_segments: torch.Tensor
    """int32 [1], on the device: no Python scalar that depends on the batch reaches a launch."""
    max_rank_in_batch: int
    """Host value, not below any rank that kernels launched with this description will meet: sizes scratch and chooses a
    kernel variant. Static buffers keep the one they were made with. Loops go to the rank that the tables say."""
    segments_host: tuple[tuple[int, int, int], ...]
    """(table row, start, end) over `permutation` for each segment with an adapter: lets the torch reference run
    without reading the device."""
