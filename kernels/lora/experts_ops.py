"""The adapters' part of the routed experts, one launch each: shrink, expand + activation, expand.

P pairs in a `PairOrder`, C parts (gate and up, or down), I expert width. `t` is [P, C · capacity]: the scaled x Aᵀ of
each pair. A step's pairs are taken in chunks when the order has them (t is then sorted as they are), else one by one.
No launch depends on what the adapters of the step are: grids come from the number of pairs, loops from the tables on
the device.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from loraplex.kernels.devices import has_dependent_launch
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.weights import LoRAWeights
from loraplex.kernels.moe import tiles
from loraplex.kernels.moe.pairs import Chunks, PairOrder
from loraplex.kernels.tuning import TileConfig

_GATE, _DOWN = 0, 2


@dataclass(frozen=True)
class AdapterStep:
    """What every launch of one layer's step shares."""

    lora: LoRAWeights
    batch: LoRABatchInfo
    ids_TK: torch.Tensor
    order: PairOrder
    capacity: int
    """Rank columns of t for each part: no adapter of this step, or of a replay of its graph, has more."""

    @property
    def expected_rank(self) -> int:
        """Chooses tiles and how many programs share a shrink; a wrong value costs time only."""
        return min(self.batch.max_rank_in_batch or self.capacity, self.capacity)


def shrink_gate_up(x_TD: torch.Tensor, step: AdapterStep) -> torch.Tensor:
    """t = scale · A x for gate and up, each with its own A."""
    return _shrink(x_TD, step, _GATE, 2, by_place=False)


def shrink_down(h_PI: torch.Tensor, step: AdapterStep) -> torch.Tensor:
    """t = scale · A h, from the h that gate's and up's adapters have changed."""
    return _shrink(h_PI, step, _DOWN, 1, by_place=True)


def expand_activate(g_PF: torch.Tensor, t: torch.Tensor, step: AdapterStep, dtype: torch.dtype) -> torch.Tensor:
    """h = silu(gate + t B) · (up + t B), [P, I] of dtype; for pairs without an adapter the activation alone."""
    from loraplex.kernels.lora import _triton_experts as kernels

    lora, batch, order, chunks = step.lora, step.batch, step.order, step.order.chunks
    num_pairs, inner = g_PF.shape[0], g_PF.shape[1] // 2
    h_PI = torch.empty(num_pairs, inner, dtype=dtype, device=g_PF.device)
    if chunks is None:
        tile = tiles.ACTIVATE_ROWS
        kernels.activate_rows[(num_pairs, -(-inner // tile.block_n))](
            g_PF, t, h_PI, lora.arena, lora.places, lora.ranks, batch.token_row, step.ids_TK, order.position_P,
            INNER=inner, TOP_K=step.ids_TK.shape[1], **_table_shape(step), BLOCK_N=tile.block_n, BLOCK_R=tile.block_r,
            **_launch(g_PF, tile),
        )  # fmt: skip
        return h_PI
    tile = tiles.ACTIVATE_CHUNKS
    assert tile.block_m == chunks.rows, (tile, chunks.rows)
    kernels.activate_chunks[(chunks.key.shape[0], tiles.CHUNK_PROGRAMS)](
        g_PF, t, h_PI, lora.arena, lora.places, lora.ranks, batch.slot_row, *_tables(chunks), INNER=inner,
        NUM_SLOTS=batch.slot_row.shape[0], **_table_shape(step), BLOCK_M=chunks.rows, BLOCK_N=tile.block_n,
        BLOCK_R=tile.block_r, **_launch(g_PF, tile),
    )  # fmt: skip
    return h_PI


def expand_down(t: torch.Tensor, width: int, step: AdapterStep) -> torch.Tensor:
    """t B for every pair whose adapter touches down, [P, width] in the order of the pairs; others are not written."""
    from loraplex.kernels.lora import _triton_experts as kernels

    lora, batch, order, chunks = step.lora, step.batch, step.order, step.order.chunks
    delta = t.new_empty(t.shape[0], width)
    if chunks is None:
        tile = tiles.expand_rows_tile(t.shape[0])
        kernels.expand_rows[(t.shape[0], -(-width // tile.block_n))](
            t, delta, lora.arena, lora.places, lora.ranks, batch.token_row, step.ids_TK, N=width,
            TOP_K=step.ids_TK.shape[1], **_table_shape(step), BLOCK_N=tile.block_n, BLOCK_R=tile.block_r,
            **_launch(t, tile),
        )  # fmt: skip
        return delta
    tile = tiles.EXPAND_CHUNKS
    kernels.expand_chunks[(chunks.key.shape[0], tiles.CHUNK_PROGRAMS)](
        t, delta, lora.arena, lora.places, lora.ranks, batch.slot_row, order.order_P, *_tables(chunks), N=width,
        NUM_SLOTS=batch.slot_row.shape[0], **_table_shape(step), BLOCK_M=chunks.rows, BLOCK_N=tile.block_n,
        BLOCK_R=tile.block_r, **_launch(t, tile),
    )  # fmt: skip
    return delta


def _shrink(x: torch.Tensor, step: AdapterStep, part: int, parts: int, *, by_place: bool) -> torch.Tensor:
    from loraplex.kernels.lora import _triton_experts as kernels

    lora, batch, order, chunks = step.lora, step.batch, step.order, step.order.chunks
    assert x.is_contiguous(), x.stride()
    num_pairs, width = order.order_P.shape[0], x.shape[1]
    t = x.new_empty(num_pairs, parts * step.capacity)
    shape = {
        "PART": part,
        "PARTS": parts,
        "D": width,
        "TOP_K": step.ids_TK.shape[1],
        "BY_PLACE": by_place,
        "SCALES_STRIDE": lora.scales.stride(0),
        **_table_shape(step),
    }
    if chunks is None:
        tile = tiles.shrink_rows_tile(num_pairs, step.expected_rank, width)
        splits = -(-step.expected_rank // tile.block_r)
        kernels.shrink_rows[(num_pairs, parts * splits)](
            x, t, lora.arena, lora.places, lora.ranks, lora.scales, batch.token_row, step.ids_TK, order.position_P,
            **shape, BLOCK_R=tile.block_r, BLOCK_K=tile.block_k, **_launch(x, tile),
        )  # fmt: skip
        return t
    tile = tiles.shrink_chunks_tile(chunks.rows, step.expected_rank)
    together = parts if tiles.parts_together(chunks.rows) else 1
    splits = -(-step.expected_rank // tile.block_r)
    kernels.shrink_chunks[(chunks.key.shape[0], splits * parts // together)](
        x, t, lora.arena, lora.places, lora.ranks, lora.scales, batch.slot_row, order.order_P, *_tables(chunks),
        **shape, NUM_SLOTS=batch.slot_row.shape[0], TOGETHER=together, BLOCK_M=chunks.rows, BLOCK_R=tile.block_r,
        BLOCK_K=tile.block_k, STAGES=tile.num_stages, **_launch(x, tile),
    )  # fmt: skip
    return t


def _tables(chunks: Chunks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return chunks.key, chunks.start, chunks.count, chunks.num


def _table_shape(step: AdapterStep) -> Mapping[str, int]:
    lora = step.lora
    return {
        "rank_cap": step.capacity,
        "PLACES_STRIDE": lora.places.stride(0),
        "RANKS_STRIDE": lora.ranks.stride(0),
    }


def _launch(x: torch.Tensor, tile: TileConfig) -> Mapping[str, int | bool]:
    dependent = has_dependent_launch(x)
    options: dict[str, int | bool] = {"DEPENDENT": dependent, "num_warps": tile.num_warps}
    return {**options, "launch_pdl": True} if dependent else options
