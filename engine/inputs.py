"""StepPlan → device tensors: ids, positions, where KV goes, where it is read. One packed copy a step.

T tokens, B sequences and P pages per sequence of the buffers; N rows that are sampled.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from loraplex.engine.batch import StepPlan
from loraplex.engine.words import Field, WordLayout
from loraplex.kernels.attention.plan import AttentionBackend, AttentionPlan


@dataclass(frozen=True)
class StepShape:
    """Sizes of the tensors a step runs in: its own, or those of buffers that it fills in part."""

    tokens: int
    rows: int
    is_decode: bool


@dataclass(frozen=True)
class StepInputs:
    ids_T: torch.Tensor
    """int64; −1 − r stands for the token that persistent row r sampled last."""
    positions_T: torch.Tensor
    """int64."""
    attn: AttentionPlan
    sample_at_B: torch.Tensor
    """int64: index in T of the last token of each sampled row; N of them count."""
    sample_rows_B: torch.Tensor
    """int64: persistent row of each sampled row; N of them count."""


class PageTable:
    """The KV pages of each persistent row on the host, kept up to date by the new pages that plans bring."""

    def __init__(self, rows: int, width: int, page_size: int, backend: AttentionBackend = "auto") -> None:
        self.page_size = page_size
        self.backend = backend
        self.pages = np.zeros((rows, width), dtype=np.int32)

    def update(self, plan: StepPlan) -> None:
        for row, first, pages in zip(plan.rows, plan.first_page, plan.new_pages):
            if pages:
                self.pages[row, first : first + len(pages)] = pages


class StaticInputs:
    """Device buffers of fixed addresses in which steps of any shape up to the largest run."""

    def __init__(self, tokens: int, rows: int, width: int, device: torch.device) -> None:
        self.device = device
        self.words = torch.zeros(_layout(tokens, rows).num_words, dtype=torch.int32, device=device)
        self.page_table_BP = torch.zeros(rows, width, dtype=torch.int32, device=device)

    def views(self, shape: StepShape, pages: PageTable) -> StepInputs:
        """Inputs of one shape, for capture: padding only, once `clear` has run."""
        table_BP = self.page_table_BP[: shape.rows]
        views = _layout(shape.tokens, shape.rows).views(self.words)
        return _inputs(views, table_BP, shape, [], [], pages)

    def clear(self, shape: StepShape) -> None:
        """Makes the buffers of this shape all padding: a step over them writes no KV."""
        layout = _layout(shape.tokens, shape.rows)
        host = torch.empty(layout.num_words, dtype=torch.int32)
        layout.clear(host)
        self.words[: len(host)].copy_(host)

    def fill(self, plan: StepPlan, pages: PageTable, shape: StepShape) -> StepInputs:
        """Describes a step in the buffers, on the current stream."""
        layout = _layout(shape.tokens, shape.rows)
        words = layout.num_words
        packed, table = _pack(plan, pages, shape, self.device)
        staged = packed.to(self.device, non_blocking=True)
        self.words[:words].copy_(staged[:words])
        table_BP = self.page_table_BP[: shape.rows]
        table_BP[: table[0], : table[1]].copy_(staged[words:].view(table))
        return _inputs(layout.views(self.words), table_BP, shape, plan.num_new, plan.seq_lens, pages)


def build_inputs(plan: StepPlan, pages: PageTable, device: torch.device) -> StepInputs:
    """A step in fresh tensors of its own size."""
    shape = StepShape(len(plan.ids), len(plan.rows), plan.is_decode)
    packed, table = _pack(plan, pages, shape, device)
    on_device = packed.to(device, non_blocking=True)
    layout = _layout(shape.tokens, shape.rows)
    table_BP, views = on_device[layout.num_words :].view(table), layout.views(on_device)
    return _inputs(views, table_BP, shape, plan.num_new, plan.seq_lens, pages, is_mixed=1 in plan.num_new)


def known_ids(ids_T: torch.Tensor, last_token: torch.Tensor) -> torch.Tensor:
    """Replaces what stands for a row's last token by that token. last_token: int64 [persistent rows]."""
    return torch.where(ids_T < 0, last_token[(-1 - ids_T).clamp_(min=0)], ids_T)


def _pack(
    plan: StepPlan, pages: PageTable, shape: StepShape, device: torch.device
) -> tuple[torch.Tensor, tuple[int, int]]:
    """The words of the step and, behind them, the used part of its page table, whose size comes second. Pinned for
    CUDA: torch's allocator gives the memory to no one else before the copy from it is done."""
    rows = np.asarray(plan.rows)
    num_new = np.asarray(plan.num_new)
    seq_lens = np.asarray(plan.seq_lens)
    ids = np.asarray(plan.ids)
    ends = np.cumsum(num_new)
    if plan.is_decode:
        row_T, positions = rows, seq_lens - 1
    else:
        row_T = np.repeat(rows, num_new)
        positions = np.arange(ends[-1]) + np.repeat(seq_lens - ends, num_new)
    page, offset = np.divmod(positions, pages.page_size)
    sampled = np.flatnonzero(plan.sample)
    table = (len(rows), -(-int(seq_lens.max()) // pages.page_size))
    layout = _layout(shape.tokens, shape.rows)
    words = layout.num_words
    packed = torch.empty(words + table[0] * table[1], dtype=torch.int32, pin_memory=device.type == "cuda")
    layout.fill(
        packed[:words],
        {
            "ids": np.where(ids < 0, -1 - row_T, ids),
            "positions": positions,
            "slots": pages.pages[row_T, page].astype(np.int64) * pages.page_size + offset,
            "sample_at": ends[sampled] - 1,
            "sample_rows": rows[sampled],
            "query_start": np.concatenate([[0], ends]),
            "seq_lens": seq_lens,
        },
    )
    packed[words:].numpy().reshape(table)[:] = pages.pages[rows, : table[1]]
    return packed, table


@lru_cache(maxsize=1024)
def _layout(tokens: int, rows: int) -> WordLayout:
    """Tails are padding: it stores nowhere and has no rows."""
    return WordLayout(
        {
            "ids": Field(tokens, wide=True),
            "positions": Field(tokens, wide=True),
            "slots": Field(tokens, tail=-1, wide=True),
            "sample_at": Field(rows, wide=True),
            "sample_rows": Field(rows, wide=True),
            "query_start": Field(rows + 1, tail=None),
            "seq_lens": Field(rows),
        }
    )


def _inputs(
    views: dict[str, torch.Tensor],
    table_BP: torch.Tensor,
    shape: StepShape,
    query_lens: list[int],
    seq_lens: list[int],
    pages: PageTable,
    is_mixed: bool = True,
) -> StepInputs:
    return StepInputs(
        ids_T=views["ids"],
        positions_T=views["positions"],
        attn=AttentionPlan(
            slot_mapping_T=views["slots"],
            page_table_BP=table_BP,
            query_start_B1=views["query_start"],
            seq_lens_B=views["seq_lens"],
            query_lens=query_lens,
            seq_lens=seq_lens,
            page_size=pages.page_size,
            is_decode=shape.is_decode,
            is_mixed=is_mixed and not shape.is_decode,
            backend=pages.backend,
        ),
        sample_at_B=views["sample_at"],
        sample_rows_B=views["sample_rows"],
    )
