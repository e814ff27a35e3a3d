"""Paged attention in torch: the specification.

k and v caches are flat: token position p of a row with pages `pt` lies at `pt[p // page_size] * page_size +
p % page_size`. Example: page_size 4, pages [7, 2] → position 5 is at 2·4 + 1 = 9.

An 8-bit cache holds k / k_scale and v / v_scale.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from loraplex.kernels.attention.plan import AttentionPlan

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""e4m3 has no infinity: larger values would become NaN."""


@dataclass(frozen=True)
class Masking:
    """What a model's layer says of its softmax."""

    scale: float
    window: int | None = None
    """Positions that a query sees, its own included: 128 means itself and the 127 before it. None: all."""
    sinks_H: torch.Tensor | None = None
    """fp32 [H]: a logit of each head that joins the softmax and carries no value."""
    k_scale: float = 1.0
    v_scale: float = 1.0
    """What stored keys and values are multiplied by."""


def store_kv_reference(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """cache[slot_mapping[t]] = k[t] / k_scale, v[t] / v_scale, rounded to the cache's dtype; slots of −1 are skipped.
    Reads the slots back from the device."""
    stored_T = slot_mapping_T >= 0
    for x_THD, cache, scale in ((k_THD, k_cache, k_scale), (v_THD, v_cache, v_scale)):
        x_NHD = x_THD[stored_T] if scale == 1.0 else x_THD[stored_T].float() / scale
        if cache.dtype == FP8:
            x_NHD = x_NHD.float().clamp(-FP8_MAX, FP8_MAX)
        _bits(cache).index_copy_(0, slot_mapping_T[stored_T], _bits(x_NHD.to(cache.dtype)))


def paged_attention_reference(
    q_THD: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: AttentionPlan, masking: Masking
) -> torch.Tensor:
    """Rows with one query together, the others one by one."""
    out_THD = torch.zeros_like(q_THD)
    single: list[tuple[int, int]] = []
    start = 0
    for row, (num_queries, seq_len) in enumerate(zip(plan.query_lens, plan.seq_lens, strict=True)):
        if num_queries == 1 and seq_len > 0:
            single.append((row, start))
        elif num_queries > 1:
            tokens = slice(start, start + num_queries)
            out_THD[tokens] = _prefill(q_THD[tokens], k_cache, v_cache, plan, row, masking)
        start += num_queries
    if len(single) == len(q_THD) == len(plan.seq_lens):
        return _decode(q_THD, k_cache, v_cache, plan.page_table_BP, plan.seq_lens_B, max(plan.seq_lens), plan, masking)
    if single:
        rows, tokens_B = torch.tensor(single, device=q_THD.device).unbind(1)
        longest = max(plan.seq_lens[row] for row, _ in single)
        table_BP, lens_B = plan.page_table_BP[rows], plan.seq_lens_B[rows]
        out_THD[tokens_B] = _decode(q_THD[tokens_B], k_cache, v_cache, table_BP, lens_B, longest, plan, masking)
    return out_THD


def _decode(
    q_BHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table_BP: torch.Tensor,
    seq_lens_B: torch.Tensor,
    max_seq_len: int,
    plan: AttentionPlan,
    masking: Masking,
) -> torch.Tensor:
    """One query per row, all rows at once, padded to the longest. Returns [B, H, D]."""
    positions_L = torch.arange(max_seq_len, device=q_BHD.device)
    inside_BL = positions_L < seq_lens_B[:, None]
    slots_BL = _slots(page_table_BP, positions_L, plan.page_size)
    # Padding re-reads the row's own first token: another row's page could hold NaN, and 0 · NaN is not 0.
    slots_BL = torch.where(inside_BL, slots_BL, slots_BL[:, :1])
    if masking.window is not None:
        inside_BL = inside_BL & (positions_L >= seq_lens_B[:, None] - masking.window)
    k_BHLD = _values(k_cache[slots_BL], masking.k_scale, q_BHD.dtype).transpose(1, 2)
    v_BHLD = _values(v_cache[slots_BL], masking.v_scale, q_BHD.dtype).transpose(1, 2)
    return _attend(q_BHD[:, :, None], k_BHLD, v_BHLD, inside_BL[:, None, None], masking)[:, :, 0]


def _prefill(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    row: int,
    masking: Masking,
) -> torch.Tensor:
    """The last T positions of one row, causal. Returns [T, H, D]."""
    seq_len = plan.seq_lens[row]
    positions_L = torch.arange(seq_len, device=q_THD.device)
    slots_L = _slots(plan.page_table_BP[row][None], positions_L, plan.page_size)[0]
    k_HLD = _values(k_cache[slots_L], masking.k_scale, q_THD.dtype).transpose(0, 1)
    v_HLD = _values(v_cache[slots_L], masking.v_scale, q_THD.dtype).transpose(0, 1)
    query_T1 = positions_L[seq_len - len(q_THD) :, None]
    sees_TL = positions_L <= query_T1
    if masking.window is not None:
        sees_TL &= positions_L > query_T1 - masking.window
    return _attend(q_THD.transpose(0, 1)[None], k_HLD[None], v_HLD[None], sees_TL, masking)[0].transpose(0, 1)


def _attend(
    q_BHTD: torch.Tensor, k_BGLD: torch.Tensor, v_BGLD: torch.Tensor, sees: torch.Tensor, masking: Masking
) -> torch.Tensor:
    """Query head h reads key/value head h // (H / G)."""
    if masking.sinks_H is None:
        return F.scaled_dot_product_attention(
            q_BHTD, k_BGLD, v_BGLD, attn_mask=sees, scale=masking.scale, enable_gqa=True
        )
    repeats = q_BHTD.shape[1] // k_BGLD.shape[1]
    k_BHLD, v_BHLD = k_BGLD.repeat_interleave(repeats, dim=1), v_BGLD.repeat_interleave(repeats, dim=1)
    scores = (q_BHTD.float() @ k_BHLD.float().mT * masking.scale).masked_fill(~sees, -torch.inf)
    sinks = masking.sinks_H[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    return (weights @ v_BHLD.float()).to(q_BHTD.dtype)


def _values(stored: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    return stored.to(dtype) if scale == 1.0 else (stored.float() * scale).to(dtype)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """8-bit floats as integers: torch copies those by index, not the floats."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def _slots(page_table_BP: torch.Tensor, positions_L: torch.Tensor, page_size: int) -> torch.Tensor:
    """[B, L] cache slots of positions."""
    return page_table_BP[:, positions_L // page_size].long() * page_size + positions_L % page_size
