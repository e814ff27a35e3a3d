"""Paged attention against softmax written out per query, over a cache that is NaN wherever nothing was stored."""

import pytest
import torch

from loraplex.kernels.attention.paged import paged_attention, store_kv

HEADS, KV_HEADS, DIM = 6, 2, 8


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([(1, 1), (1, 9), (1, 33)], id="decode"),
        pytest.param([(12, 12), (5, 20), (2, 2)], id="prefill"),
        pytest.param([(1, 7), (6, 30), (1, 1), (17, 17), (1, 18)], id="mixed"),
    ],
)
def test_paged_attention(page_size, rows):
    """rows: (new tokens, all tokens)."""
    generator = torch.Generator().manual_seed(1)
    num_pages = 80
    shuffled = torch.randperm(num_pages, generator=generator).tolist()
    k_cache = torch.full((num_pages * page_size, KV_HEADS, DIM), float("nan"))
    v_cache = k_cache.clone()
    keys, values, tables = [], [], []
    for _, length in rows:
        pages = [shuffled.pop() for _ in range(-(-length // page_size))]
        slots = torch.tensor([pages[p // page_size] * page_size + p % page_size for p in range(length)])
        k, v = torch.randn(2, length, KV_HEADS, DIM, generator=generator)
        store_kv(k, v, k_cache, v_cache, slots)
        keys.append(k)
        values.append(v)
        tables.append(pages)
    width = max(map(len, tables))
    query_lens, seq_lens = map(list, zip(*rows, strict=True))
    q = torch.randn(sum(query_lens), HEADS, DIM, generator=generator)
    out = paged_attention(
        q,
        k_cache,
        v_cache,
        page_table_BP=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
        seq_lens_B=torch.tensor(seq_lens, dtype=torch.int32),
        query_lens=query_lens,
        seq_lens=seq_lens,
        page_size=page_size,
        scale=0.3,
    )
    token = 0
    for (new, length), k, v in zip(rows, keys, values, strict=True):
        for position in range(length - new, length):
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                scores = k[: position + 1, kv_head] @ q[token, head] * 0.3
                expected = scores.softmax(0) @ v[: position + 1, kv_head]
                torch.testing.assert_close(out[token, head], expected, atol=2e-6, rtol=1e-5)
            token += 1
