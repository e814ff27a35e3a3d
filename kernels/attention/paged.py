"""Attention over a paged KV cache: checks shapes, chooses the implementation."""

from collections.abc import Sequence

import torch

from loraplex.kernels.attention.reference import paged_attention_reference, store_kv_reference


def store_kv(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
) -> None:
    """cache[slot_mapping[t]] = k[t], v[t]. Caches: [slots, H_kv, D], written in place; slots int64, all different but
    −1, which stores nothing."""
    assert k_THD.shape == v_THD.shape, (k_THD.shape, v_THD.shape)
    assert k_THD.shape[0] == slot_mapping_T.shape[0], (k_THD.shape, slot_mapping_T.shape)
    store_kv_reference(k_THD, v_THD, k_cache, v_cache, slot_mapping_T)


def paged_attention(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    page_table_BP: torch.Tensor,
    seq_lens_B: torch.Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    page_size: int,
    scale: float,
) -> torch.Tensor:
    """softmax(scale · q kᵀ) v over each row's cached tokens, causal, its own new ones included. Returns [T, H, D].

    Row b's queries are the last query_lens[b] positions of its seq_lens[b]; rows follow each other in q. Tokens and
    rows of the tensors beyond those of the lists are padding.
    Query head h reads key/value head h // (H / H_kv). page_table: int32 [B, P], pages of row b in order.
    """
    num_tokens, num_heads, _ = q_THD.shape
    assert sum(query_lens) <= num_tokens, (query_lens, q_THD.shape)
    assert num_heads % k_cache.shape[1] == 0, (q_THD.shape, k_cache.shape)
    assert page_table_BP.shape[1] * page_size >= max(seq_lens), (page_table_BP.shape, page_size, seq_lens)
    return paged_attention_reference(
        q_THD, k_cache, v_cache, page_table_BP, seq_lens_B, query_lens, seq_lens, page_size, scale
    )
