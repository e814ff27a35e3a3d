"""StepPlan → device tensors: ids, positions, where KV goes, where it is read."""

from dataclasses import dataclass

import numpy as np
import torch

from loraplex.engine.batch import StepPlan
from loraplex.engine.device import to_device
from loraplex.kernels.attention.plan import AttentionBackend, AttentionPlan


@dataclass(frozen=True)
class StepInputs:
    ids_T: torch.Tensor
    """int64; tokens the device holds already filled in."""
    positions_T: torch.Tensor
    """int64."""
    attn: AttentionPlan
    rows_B: torch.Tensor
    """int64: persistent row of each sequence."""
    last_B: torch.Tensor
    """int64: index in T of each sequence's last token."""


def build_inputs(
    plan: StepPlan,
    page_size: int,
    last_token: torch.Tensor,
    device: torch.device,
    backend: AttentionBackend = "auto",
) -> StepInputs:
    """`last_token` int64 [rows]: what each row sampled last; stands in for ids of −1."""
    num_new = np.asarray(plan.num_new)
    seq_lens = np.asarray(plan.seq_lens)
    ends = np.cumsum(num_new)
    starts = ends - num_new
    row_of_T = np.repeat(np.arange(len(num_new)), num_new)
    positions = np.arange(ends[-1]) - np.repeat(starts, num_new) + np.repeat(seq_lens - num_new, num_new)
    width = max(len(pages) for pages in plan.pages)
    table = np.zeros((len(plan.pages), width), dtype=np.int32)
    for i, pages in enumerate(plan.pages):
        table[i, : len(pages)] = pages
    slot_mapping = table[row_of_T, positions // page_size].astype(np.int64) * page_size + positions % page_size
    ids, pos, slots, state_rows, query_start, lens, last, pages_flat, rows = to_device(
        [
            plan.ids,
            positions,
            slot_mapping,
            np.asarray(plan.rows)[row_of_T],
            np.concatenate([[0], ends]),
            seq_lens,
            ends - 1,
            table.ravel(),
            plan.rows,
        ],
        device,
    )
    ids = ids.long()
    return StepInputs(
        ids_T=torch.where(ids < 0, last_token[state_rows.long()], ids),
        positions_T=pos.long(),
        attn=AttentionPlan(
            slot_mapping_T=slots.long(),
            page_table_BP=pages_flat.view(len(plan.pages), width),
            query_start_B1=query_start,
            seq_lens_B=lens,
            query_lens=plan.num_new,
            seq_lens=plan.seq_lens,
            page_size=page_size,
            is_decode=plan.is_decode,
            is_mixed=not plan.is_decode and 1 in plan.num_new,
            backend=backend,
        ),
        rows_B=rows.long(),
        last_B=last.long(),
    )
