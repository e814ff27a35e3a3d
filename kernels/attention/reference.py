"""Paged attention in torch: the specification.

k and v caches are flat: token position p of a row with pages `pt` lies at `pt[p // page_size] * page_size +
p % page_size`. Example: page_size 4, pages [7, 2] → position 5 is at 2·4 + 1 = 9.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def store_kv_reference(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
) -> None:
    stored_T = slot_mapping_T >= 0
    k_cache[slot_mapping_T[stored_T]] = k_THD[stored_T]
    v_cache[slot_mapping_T[stored_T]] = v_THD[stored_T]


def decode_reference(
    q_BHD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table_BP: torch.Tensor,
    seq_lens_B: torch.Tensor,
    max_seq_len: int,
    page_size: int,
    scale: float,
) -> torch.Tensor:
    """One query per row, all rows at once, padded to the longest. Returns [B, H, D]."""
    positions_L = torch.arange(max_seq_len, device=q_BHD.device)
    inside_BL = positions_L < seq_lens_B[:, None]
    slots_BL = _slots(page_table_BP, positions_L, page_size)
    # Padding re-reads the row's own first token: another row's page could hold NaN, and 0 · NaN is not 0.
    slots_BL = torch.where(inside_BL, slots_BL, slots_BL[:, :1])
    k_BHLD = k_cache[slots_BL].transpose(1, 2)
    v_BHLD = v_cache[slots_BL].transpose(1, 2)
    out = F.scaled_dot_product_attention(
        q_BHD[:, :, None], k_BHLD, v_BHLD, attn_mask=inside_BL[:, None, None], scale=scale, enable_gqa=True
    )
    return out[:, :, 0]


def prefill_reference(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pages_P: torch.Tensor,
    seq_len: int,
    page_size: int,
    scale: float,
) -> torch.Tensor:
    """The last T positions of one row of `seq_len` tokens, causal. Returns [T, H, D]."""
    num_queries, num_heads, _ = q_THD.shape
    positions_L = torch.arange(seq_len, device=q_THD.device)
    slots_L = _slots(pages_P[None], positions_L, page_size)[0]
    # Repeated heads and, without a prefix, is_causal instead of a mask let CUDA choose a kernel that never holds the
    # [H, T, L] scores.
    repeats = num_heads // k_cache.shape[1]
    k_HLD = k_cache[slots_L].transpose(0, 1).repeat_interleave(repeats, dim=0)
    v_HLD = v_cache[slots_L].transpose(0, 1).repeat_interleave(repeats, dim=0)
    whole = num_queries == seq_len
    sees_TL = None if whole else positions_L <= positions_L[seq_len - num_queries :, None]
    out = F.scaled_dot_product_attention(
        q_THD.transpose(0, 1)[None], k_HLD[None], v_HLD[None], attn_mask=sees_TL, is_causal=whole, scale=scale
    )
    return out[0].transpose(0, 1)


def paged_attention_reference(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table_BP: torch.Tensor,
    seq_lens_B: torch.Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    page_size: int,
    scale: float,
) -> torch.Tensor:
    """Rows with one query together, the others one by one. Reads nothing back from the device. Zeros for padding."""
    if len(query_lens) == q_THD.shape[0]:
        return decode_reference(q_THD, k_cache, v_cache, page_table_BP, seq_lens_B, max(seq_lens), page_size, scale)
    out_THD = torch.zeros_like(q_THD)
    single: list[tuple[int, int]] = []
    start = 0
    for row, (num_queries, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if num_queries == 1:
            single.append((row, start))
        else:
            tokens = slice(start, start + num_queries)
            out_THD[tokens] = prefill_reference(
                q_THD[tokens], k_cache, v_cache, page_table_BP[row], seq_len, page_size, scale
            )
        start += num_queries
    if single:
        rows, tokens_B = torch.tensor(single, device=q_THD.device).unbind(1)
        longest = max(seq_lens[row] for row, _ in single)
        out_THD[tokens_B] = decode_reference(
            q_THD[tokens_B],
            k_cache,
            v_cache,
            page_table_BP[rows],
            seq_lens_B[rows],
            longest,
            page_size,
            scale,
        )
    return out_THD


def _slots(page_table_BP: torch.Tensor, positions_L: torch.Tensor, page_size: int) -> torch.Tensor:
    """[B, L] cache slots of positions."""
    return page_table_BP[:, positions_L // page_size].long() * page_size + positions_L % page_size
