"""One step as every rank sees it: flat ints on the host (`StepPlan`), tensors on the device (`ForwardContext`).

Shape letters used in the project: T tokens of the step, B sequences of the step, D hidden, K experts per token,
E experts, I expert width, H heads, R rank, P pages per sequence, V vocabulary.
"""

from dataclasses import dataclass

import msgspec
import torch

from loraplex.kernels.attention.plan import AttentionPlan
from loraplex.kernels.lora.batch_info import LoRABatchInfo


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A step as flat ints, made by rank 0's scheduler; all that a follower rank ever sees. Row i is one sequence.

    Rows are ordered as scheduled; a row contributes `num_new[i]` consecutive tokens.
    """

    is_decode: bool
    """Every row has exactly one new token."""
    rows: list[int]
    """Persistent row of each sequence in the device-side state (last token, penalty counts)."""
    num_new: list[int]
    seq_lens: list[int]
    """KV length after this step: computed before + new."""
    ids: list[int]
    """[T] token ids; −1 means: the last token sampled for this row, taken from the device buffer."""
    first_page: list[int]
    """[B] place of the row's first new page among its pages; 0 when a sequence begins in the row."""
    new_pages: list[list[int]]
    """KV page numbers that each row has got since its last step: every rank keeps the table of the rest. Together they
    cover seq_lens."""
    slots: list[int]
    """[B] adapter slot of each row, 0…S−1; −1 is the base model."""
    slot_rows: list[int]
    """[S'] resident-adapter table row of each slot used in this step."""
    sample: list[bool]
    """[B] whether the row's last position is sampled in this step (False: more prompt chunks to come)."""
    prompt_logprobs: list[int]
    """[B] −1: none; k ≥ 0: logprobs of this chunk's prompt positions with k alternatives."""


@dataclass(frozen=True)
class ForwardContext:
    """What a forward needs besides its input: passed explicitly to every layer, no globals."""

    positions_T: torch.Tensor
    """int64 [T]."""
    attn: AttentionPlan
    kv: list[tuple[torch.Tensor, torch.Tensor]]
    """Per layer (k, v), each [num_pages · page_size, H_kv_local, head_dim]."""
    lora: LoRABatchInfo | None
    """None: no token of this step uses an adapter; no LoRA code runs."""
    rank_capacity: int | None = None
    """Largest rank that `lora` may come to describe when this forward is replayed; None: the forward runs once."""
