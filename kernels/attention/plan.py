"""What one step's attention needs besides queries and caches."""

from dataclasses import dataclass
from typing import Literal

import torch

AttentionBackend = Literal["auto", "triton", "torch"]


@dataclass(frozen=True)
class AttentionPlan:
    """Where this step's keys and values go and what each query sees.

    Triton's launches depend on the shapes of the tensors, on `page_size`, `is_decode` and `is_mixed`, never on what the
    tensors hold, so a CUDA graph captured over static tensors serves every step that is written into them. The host
    lists are for the torch reference alone.

    Padding comes last. Padding tokens have slot −1. Padding rows have sequence length 0, and in a step that is no
    decode they repeat the last value of query_start; their pages are not read. Outputs of padding tokens are 0.
    """

    slot_mapping_T: torch.Tensor
    """int64 [T]: flat KV position (page · page_size + offset) each token's k and v are stored at; −1: not stored."""
    page_table_BP: torch.Tensor
    """int32 [B, P]: pages of each row in order; what lies beyond its sequence length is not read."""
    query_start_B1: torch.Tensor
    """int32 [B + 1]: exclusive prefix sum of the rows' new tokens. T may be larger than the last: padding tokens. Not
    read in a decode step."""
    seq_lens_B: torch.Tensor
    """int32 [B]: KV length after this step; 0: a padding row."""
    query_lens: list[int]
    """New tokens of each row; padding rows have 0, or may be missing."""
    seq_lens: list[int]
    page_size: int
    is_decode: bool
    """T = B and token b is the only new one of row b."""
    is_mixed: bool = True
    """Rows of one token may stand beside longer ones: they then go to the decode kernel, in launches of their own.
    False saves these launches; right in any case, slow for rows of one token with a long context."""
    backend: AttentionBackend = "auto"
    """auto: Triton on CUDA, torch on CPU."""
