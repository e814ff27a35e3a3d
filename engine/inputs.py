"""StepPlan → device tensors: ids, positions, where KV goes, where it is read. One packed copy a step.

T tokens, B sequences and P pages per sequence of the buffers; N rows that are sampled.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from loraplex.engine.batch import StepPlan
from loraplex.engine.device import aligned
from loraplex.kernels.attention.plan import AttentionBackend, AttentionPlan

Ints = npt.NDArray[np.int64]


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
        self.words = torch.zeros(_num_words(tokens, rows), dtype=torch.int32, device=device)
        self.page_table_BP = torch.zeros(rows, width, dtype=torch.int32, device=device)

    def views(self, shape: StepShape, pages: PageTable) -> StepInputs:
        """Inputs of one shape, for capture: padding only, once `clear` has run."""
        table_BP = self.page_table_BP[: shape.rows]
        return _inputs(_views(self.words, shape.tokens, shape.rows), table_BP, shape, [], [], pages)

    def clear(self, shape: StepShape) -> None:
        """Makes the buffers of this shape all padding: a step over them writes no KV."""
        host = torch.empty(_num_words(shape.tokens, shape.rows), dtype=torch.int32)
        _fill(host, shape, {})
        self.words[: len(host)].copy_(host)

    def fill(self, plan: StepPlan, pages: PageTable, shape: StepShape) -> StepInputs:
        """Describes a step in the buffers, on the current stream."""
        words = _num_words(shape.tokens, shape.rows)
        packed, table = _pack(plan, pages, shape, self.device)
        staged = packed.to(self.device, non_blocking=True)
        self.words[:words].copy_(staged[:words])
        table_BP = self.page_table_BP[: shape.rows]
        table_BP[: table[0], : table[1]].copy_(staged[words:].view(table))
        views = _views(self.words, shape.tokens, shape.rows)
        return _inputs(views, table_BP, shape, plan.num_new, plan.seq_lens, pages)


def build_inputs(plan: StepPlan, pages: PageTable, device: torch.device) -> StepInputs:
    """A step in fresh tensors of its own size."""
    shape = StepShape(len(plan.ids), len(plan.rows), plan.is_decode)
    packed, table = _pack(plan, pages, shape, device)
    on_device = packed.to(device, non_blocking=True)
    table_BP = on_device[_num_words(shape.tokens, shape.rows) :].view(table)
    views = _views(on_device, shape.tokens, shape.rows)
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
    words = _num_words(shape.tokens, shape.rows)
    packed = torch.empty(words + table[0] * table[1], dtype=torch.int32, pin_memory=device.type == "cuda")
    _fill(
        packed[:words],
        shape,
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


def _fill(packed: torch.Tensor, shape: StepShape, fields: dict[str, Ints]) -> None:
    """Writes the fields (none: no token at all) and neutral values behind them."""
    nothing = np.zeros(1, dtype=np.int64)
    for name, view in _views(packed, shape.tokens, shape.rows).items():
        values = fields.get(name, nothing[: name == "query_start"])
        out = view.numpy()
        out[: len(values)] = values
        out[len(values) :] = values[-1] if name == "query_start" else -1 if name == "slots" else 0


@lru_cache(maxsize=1024)
def _layout(tokens: int, rows: int) -> dict[str, tuple[int, int, bool]]:
    """First word, end and whether it is int64, of each field. Each begins where `aligned` allows."""
    sizes = {
        "ids": (tokens, True),
        "positions": (tokens, True),
        "slots": (tokens, True),
        "sample_at": (rows, True),
        "sample_rows": (rows, True),
        "query_start": (rows + 1, False),
        "seq_lens": (rows, False),
    }
    layout, start = {}, 0
    for name, (size, wide) in sizes.items():
        end = start + size * (2 if wide else 1)
        layout[name] = start, end, wide
        start = aligned(end)
    return layout


def _num_words(tokens: int, rows: int) -> int:
    return aligned(_layout(tokens, rows)["seq_lens"][1])


def _views(words: torch.Tensor, tokens: int, rows: int) -> dict[str, torch.Tensor]:
    return {
        name: words[start:end].view(torch.int64) if wide else words[start:end]
        for name, (start, end, wide) in _layout(tokens, rows).items()
    }


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
