"""Launchers of the dense-LoRA kernels: shrink z = scale · x Aᵀ, then expand y += z B, two launches for all parts.

Both compute what `reference.lora_add_` specifies. Neither reads anything of the batch on the host: grids come from
buffer lengths and shapes, segments whose table row is −1 are passed over, loops run to the live rank. A CUDA graph
therefore replays with other adapters, ranks and segments than those it was captured with, up to
`max_rank_in_batch`. No atomics: results do not depend on scheduling.
"""

import math
from typing import Any

import torch

from loraplex.kernels.devices import dependent_launch, use_triton
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.reference import lora_add_
from loraplex.kernels.lora.weights import LoRAWeights
from loraplex.kernels.tuning import TileConfig, choose_tile, power_of_two

TYPICAL_RANK = 64
"""Rank per part up to which each tile of rank rows gets a program of its own; larger ranks loop."""
WANTED_PROGRAMS = 132
"""Shrink programs below which the inner dimension is split: one for each SM of an H200."""


def rows_add_(y_TN: torch.Tensor, x_TD: torch.Tensor, w: LoRAWeights, batch: LoRABatchInfo) -> None:
    """`lora_add_` by matrix-vector products, a program per token: reads `token_row`, no segments.

    y [T, sum of slices], x [T, in], T ≤ len(token_row); both with contiguous rows.
    """
    if not use_triton(x_TD):
        lora_add_(y_TN, x_TD, w, batch)
        return
    from loraplex.kernels.lora import _triton_rows as kernels

    _check(y_TN, x_TD, w)
    tokens, parts = x_TD.shape[0], len(w.slices)
    pdl = dependent_launch(x_TD.device)
    shape = _shape(w, batch)
    shrink = choose_tile("dense_rows_shrink", x_TD.device, _rows_shrink_tile(x_TD.shape[1]), tokens, **shape)
    expand = choose_tile("dense_rows_expand", x_TD.device, ROWS_EXPAND_TILE, tokens, **shape)
    z = x_TD.new_empty(tokens, parts, _scratch_rank(batch, expand))
    kernels.shrink_rows[(tokens, _rank_programs(parts, batch, shrink))](
        x_TD,
        z,
        w.arena,
        w.places,
        w.ranks,
        w.scales,
        batch.token_row,
        K=x_TD.shape[1],
        X_ROW=x_TD.stride(0),
        z_part=z.shape[2],
        BLOCK_R=shrink.block_r,
        BLOCK_K=shrink.block_k,
        num_warps=shrink.num_warps,
        **_table_strides(w),
        **pdl,
    )
    kernels.expand_rows[(tokens, _column_tiles(w, expand))](
        y_TN,
        z,
        w.arena,
        w.places,
        w.ranks,
        batch.token_row,
        WIDTHS=w.slices,
        WIDTH_DIV=math.gcd(16, *w.slices),
        Y_ROW=y_TN.stride(0),
        z_part=z.shape[2],
        BLOCK_N=expand.block_n,
        BLOCK_R=expand.block_r,
        num_warps=expand.num_warps,
        **_table_strides(w),
        **pdl,
    )


def segments_add_(
    y_TN: torch.Tensor, x_TD: torch.Tensor, w: LoRAWeights, batch: LoRABatchInfo, *, block_m: int, longest: int
) -> None:
    """`lora_add_` by matrix products over the segments of the batch: all tokens of a segment have one adapter.

    block_m: tokens of one tile (a power of two, at least 16). longest: what no segment is expected to exceed; only
    parallelism follows from it. y and x as for `rows_add_`.
    """
    if not use_triton(x_TD):
        lora_add_(y_TN, x_TD, w, batch)
        return
    from loraplex.kernels.lora import _triton_segments as kernels

    _check(y_TN, x_TD, w)
    pdl = dependent_launch(x_TD.device)
    tokens, parts, segments = x_TD.shape[0], len(w.slices), batch.weight_indices.shape[0]
    if segments == 0:
        return
    shape = _shape(w, batch)
    default = _segments_shrink_tile(tokens, parts, segments, x_TD.shape[1], batch)
    shrink = choose_tile("dense_segments_shrink", x_TD.device, default, tokens, **shape)
    default = _segments_expand_tile(tokens, block_m, batch)
    expand = choose_tile("dense_segments_expand", x_TD.device, default, tokens, **shape)
    dtype = torch.float32 if shrink.split_k > 1 else x_TD.dtype
    z = x_TD.new_empty(tokens, shrink.split_k, parts, _scratch_rank(batch, expand), dtype=dtype)
    order = (batch.seg_indptr, batch.segment_row, batch.permutation)
    tiles = _segment_tiles(tokens, segments, longest, block_m)
    kernels.shrink_segments[(segments * tiles, shrink.split_k, _rank_programs(parts, batch, shrink))](
        x_TD,
        z,
        w.arena,
        w.places,
        w.ranks,
        w.scales,
        *order,
        K=x_TD.shape[1],
        X_ROW=x_TD.stride(0),
        z_part=z.shape[3],
        tiles=tiles,
        SPLIT_K=shrink.split_k,
        BLOCK_M=block_m,
        BLOCK_R=shrink.block_r,
        BLOCK_K=shrink.block_k,
        STAGES=shrink.num_stages,
        num_warps=shrink.num_warps,
        **_table_strides(w),
        **pdl,
    )
    kernels.expand_segments[(segments * tiles, _column_tiles(w, expand))](
        y_TN,
        z,
        w.arena,
        w.places,
        w.ranks,
        *order,
        WIDTHS=w.slices,
        WIDTH_DIV=math.gcd(16, *w.slices),
        Y_ROW=y_TN.stride(0),
        z_part=z.shape[3],
        tiles=tiles,
        SPLIT_K=shrink.split_k,
        BLOCK_M=block_m,
        BLOCK_N=expand.block_n,
        BLOCK_R=expand.block_r,
        num_warps=expand.num_warps,
        **_table_strides(w),
        **pdl,
    )


# ---- tiles. Defaults measured on an H200 with Qwen3-30B-A3B shapes.

ROWS_EXPAND_TILE = TileConfig(block_n=128, block_r=16, num_warps=1)
"""One warp: a [16, 256] tile in two warps takes twice as long, because the sum over the rank then crosses warps."""


def _rows_shrink_tile(width: int) -> TileConfig:
    """Few rank rows times a long stretch of the inner dimension."""
    return TileConfig(block_r=4, block_k=min(1024, power_of_two(width)), num_warps=4)


def _segments_shrink_tile(tokens: int, parts: int, segments: int, width: int, batch: LoRABatchInfo) -> TileConfig:
    """Rank rows of all parts in one tile at prefill, so that x is read once; small tiles and a split inner dimension
    while there are few segments."""
    block_k = min(128, max(16, power_of_two(width)))
    most = min(64, power_of_two(parts * batch.max_rank_in_batch)) if tokens > 256 else 16
    block_r = max(16, most)
    if tokens <= 256:
        return TileConfig(
            block_r=block_r, block_k=block_k, split_k=4 if width >= 16 * block_k else 1, num_warps=2, num_stages=3
        )
    programs = segments * -(-parts * min(batch.max_rank_in_batch, TYPICAL_RANK) // block_r)
    split_k = 1
    while split_k < 4 and programs * split_k < WANTED_PROGRAMS and width >= 4 * split_k * block_k:
        split_k *= 2
    return TileConfig(block_r=block_r, block_k=block_k, split_k=split_k, num_warps=4, num_stages=3)


def _segments_expand_tile(tokens: int, block_m: int, batch: LoRABatchInfo) -> TileConfig:
    block_r = 16 if batch.max_rank_in_batch <= 16 else 32
    if tokens > 256:
        return TileConfig(block_n=128, block_r=block_r, num_warps=4)
    return TileConfig(block_n=256, block_r=block_r, num_warps=4)


def _rank_programs(parts: int, batch: LoRABatchInfo, tile: TileConfig) -> int:
    return -(-parts * min(batch.max_rank_in_batch, TYPICAL_RANK) // tile.block_r)


def _segment_tiles(tokens: int, segments: int, longest: int, block_m: int) -> int:
    """Programs along one segment's tokens: enough for the longest, but no more than four times an even share."""
    return max(1, min(-(-longest // block_m), 4 * -(-tokens // (block_m * segments))))


def _scratch_rank(batch: LoRABatchInfo, expand: TileConfig) -> int:
    """Width of a part in z: no rank is larger, and the expand's reads of whole tiles stay inside."""
    return max(power_of_two(batch.max_rank_in_batch), expand.block_r)


def _column_tiles(w: LoRAWeights, tile: TileConfig) -> int:
    return sum(-(-width // tile.block_n) for width in w.slices)


def _shape(w: LoRAWeights, batch: LoRABatchInfo) -> dict[str, int]:
    """What tiles are looked up by, besides the token count."""
    return {"inner": w.in_features[0], "outer": sum(w.slices), "rank": batch.max_rank_in_batch}


def _table_strides(w: LoRAWeights) -> dict[str, Any]:
    return {
        "PARTS": len(w.slices),
        "PLACES_ROW": w.places.stride(0),
        "PLACES_PART": w.places.stride(1),
        "RANKS_ROW": w.ranks.stride(0),
        "RANKS_PART": w.ranks.stride(1),
    }


def _check(y_TN: torch.Tensor, x_TD: torch.Tensor, w: LoRAWeights) -> None:
    assert y_TN.shape == (x_TD.shape[0], sum(w.slices)), (y_TN.shape, x_TD.shape, w.slices)
    assert set(w.in_features) == {x_TD.shape[1]}, (w.in_features, x_TD.shape)
    assert y_TN.stride(1) == x_TD.stride(1) == 1, "rows must be contiguous"
    assert y_TN.dtype == x_TD.dtype == w.arena.dtype, (y_TN.dtype, x_TD.dtype, w.arena.dtype)
    assert w.ranks.stride() == w.scales.stride(), "ranks and scales are laid out alike"
    assert w.places.stride(2) == 1, w.places.stride()
