"""Attention over a paged KV cache: checks shapes, chooses the implementation.

A cache is [slots, H_kv, D]: each head of a token is one or two whole 128-byte lines, and the heads of a page, which
neighbouring programs read at the same time, lie side by side.
"""

import math
from typing import Any

import torch

from loraplex.kernels.attention.plan import AttentionPlan
from loraplex.kernels.attention.reference import Masking, paged_attention_reference
from loraplex.kernels.attention.tiles import (
    FEW_SPLITS,
    MAX_SPLITS,
    DecodeTile,
    PrefillTile,
    decode_tile,
    prefill_tile,
)
from loraplex.kernels.devices import dependent_launch, use_triton
from loraplex.kernels.tuning import power_of_two

LOG2_E = math.log2(math.e)
MAX_HEAD_DIM = 256


def paged_attention(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """softmax(scale · q kᵀ) v over each row's cached tokens, causal, its own new ones included. Returns [T, H, D].

    Row b's queries are the last positions of its seq_lens[b]; rows follow each other in q, padding comes last and gives
    0. Query head h reads key/value head h // (H / H_kv). k = k_scale · what is cached, v likewise.

    window: positions a query sees, its own included (None: all). sinks_H: fp32 [H], a logit of each head that joins the
    softmax and carries no value.
    """
    num_tokens, num_heads, dim = q_THD.shape
    assert k_cache.shape[1:] == v_cache.shape[1:], (k_cache.shape, v_cache.shape)
    assert num_heads % k_cache.shape[1] == 0, (q_THD.shape, k_cache.shape)
    assert dim == k_cache.shape[2] <= MAX_HEAD_DIM, (q_THD.shape, k_cache.shape)
    assert scale * k_scale > 0, (scale, k_scale)
    assert window is None or window >= 1, window
    assert sinks_H is None or (sinks_H.shape == (num_heads,) and sinks_H.dtype == torch.float32), sinks_H
    assert len(plan.query_start_B1) == len(plan.seq_lens_B) + 1 or plan.is_decode, plan
    if plan.is_decode:
        assert num_tokens == len(plan.seq_lens_B) == len(plan.page_table_BP), (q_THD.shape, plan)
    masking = Masking(scale, window, sinks_H, k_scale, v_scale)
    if not _uses_triton(q_THD, plan):
        assert sum(plan.query_lens) <= num_tokens, (plan.query_lens, q_THD.shape)
        assert plan.page_table_BP.shape[1] * plan.page_size >= max(plan.seq_lens), plan
        return paged_attention_reference(q_THD, k_cache, v_cache, plan, masking)
    return triton_attention(q_THD, k_cache, v_cache, plan, masking)


def _uses_triton(x: torch.Tensor, plan: AttentionPlan) -> bool:
    return plan.backend != "torch" and use_triton(x)


def triton_attention(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    masking: Masking,
    tiles: tuple[DecodeTile | None, PrefillTile | None] = (None, None),
) -> torch.Tensor:
    """`paged_attention` by the Triton kernels; None: the tile that the shapes call for."""
    assert q_THD.stride(2) == 1, q_THD.stride()
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert plan.page_table_BP.stride(1) == 1, plan.page_table_BP.stride()
    out_THD = q_THD.new_empty(q_THD.shape)
    if plan.is_decode or plan.is_mixed:
        _decode(q_THD, k_cache, v_cache, out_THD, plan, masking, tiles[0])
    if not plan.is_decode:
        _prefill(q_THD, k_cache, v_cache, out_THD, plan, masking, tiles[1])
    return out_THD


def _decode(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_THD: torch.Tensor,
    plan: AttentionPlan,
    masking: Masking,
    tile: DecodeTile | None,
) -> None:
    """Rows of one new token: all in a decode step, those that the device finds in a mixed one."""
    from loraplex.kernels.attention._triton_decode import decode, join

    (_, heads, dim), kv_heads, rows = q_THD.shape, k_cache.shape[1], len(plan.seq_lens_B)
    group = heads // kv_heads
    tile = tile or decode_tile(rows, kv_heads, group, dim, q_THD.element_size())
    assert tile.min_share % tile.block_n == 0, tile
    assert tile.splits <= MAX_SPLITS, tile
    shared = _shared(q_THD, masking) | {"MIXED": not plan.is_decode, "BLOCK_N": tile.block_n}
    split = tile.splits > 1
    partial = q_THD.new_empty((rows, heads, tile.splits, dim) if split else 1, dtype=torch.float32)
    lse = q_THD.new_empty((rows, heads, tile.splits) if split else 1, dtype=torch.float32)
    decode[(kv_heads, rows, tile.splits)](
        q_THD,
        k_cache,
        v_cache,
        out_THD,
        partial,
        lse,
        plan.page_table_BP,
        plan.seq_lens_B,
        plan.query_start_B1,
        masking.sinks_H,
        masking.scale * masking.k_scale * LOG2_E,
        masking.v_scale,
        plan.page_table_BP.stride(0),
        tile.min_share,
        **_layout(q_THD, k_cache, v_cache, plan, masking),
        **shared,
        GROUP_POW2=max(16, power_of_two(group)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if split:
        few = tile.splits <= FEW_SPLITS
        join[(heads, rows)](
            partial,
            lse,
            out_THD,
            plan.seq_lens_B,
            plan.query_start_B1,
            tile.splits,
            tile.min_share,
            **shared,
            MAX_SPLITS=FEW_SPLITS if few else MAX_SPLITS,
            num_warps=1 if few else 4,
        )


def _prefill(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_THD: torch.Tensor,
    plan: AttentionPlan,
    masking: Masking,
    tile: PrefillTile | None,
) -> None:
    from loraplex.kernels.attention._triton_prefill import prefill

    (tokens, heads, dim), kv_heads, rows = q_THD.shape, k_cache.shape[1], len(plan.seq_lens_B)
    group = heads // kv_heads
    tile = tile or prefill_tile(tokens, group, dim, q_THD.element_size())
    blocks = tokens // (tile.block_m // group) + rows + 1
    prefill[(kv_heads, blocks)](
        q_THD,
        k_cache,
        v_cache,
        out_THD,
        plan.page_table_BP,
        plan.seq_lens_B,
        plan.query_start_B1,
        masking.sinks_H,
        masking.scale * masking.k_scale * LOG2_E,
        masking.v_scale,
        tokens,
        rows,
        plan.page_table_BP.stride(0),
        **_layout(q_THD, k_cache, v_cache, plan, masking),
        **_shared(q_THD, masking),
        MIXED=plan.is_mixed,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _shared(q_THD: torch.Tensor, masking: Masking) -> dict[str, Any]:
    """What every kernel takes."""
    _, heads, dim = q_THD.shape
    return {
        "HEADS": heads,
        "D": dim,
        "D_POW2": max(16, power_of_two(dim)),
        "WINDOW": masking.window or 0,
        **dependent_launch(q_THD.device),
    }


def _layout(
    q_THD: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: AttentionPlan, masking: Masking
) -> dict[str, Any]:
    return {
        "Q_TOKEN": q_THD.stride(0),
        "Q_HEAD": q_THD.stride(1),
        "K_TOKEN": k_cache.stride(0),
        "K_HEAD": k_cache.stride(1),
        "V_TOKEN": v_cache.stride(0),
        "V_HEAD": v_cache.stride(1),
        "GROUP": q_THD.shape[1] // k_cache.shape[1],
        "PAGE": plan.page_size,
        "HAS_SINKS": masking.sinks_H is not None,
    }
