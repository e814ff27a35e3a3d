"""The order of the pairs and the references' treatment of foreign experts, against plain loops."""

import random

import pytest
import torch

from loraplex.kernels.lora.experts import per_adapter_add_, virtual_experts_add_
from loraplex.kernels.moe.pairs import max_chunks, order_pairs, order_pairs_reference
from loraplex.kernels.moe.reference import moe_lora_reference
from loraplex.kernels.testing import plain_batch, random_weights


def test_example():
    slots = torch.tensor([1, 0, -1], dtype=torch.int32)
    order = order_pairs(torch.tensor([[1, 0], [1, -1], [1, 0]]), slots, num_experts=3, num_slots=2, chunk_rows=16)
    assert order.order_P.tolist() == [5, 1, 4, 2, 0, 3]
    assert order.position_P.tolist() == [4, 1, 3, 5, 2, 0]
    assert order.starts.tolist() == [0, 2, 5, 5]
    assert order.chunks is not None
    assert order.chunks.key.tolist() == [0 * 3, 0 * 3 + 2, 1 * 3, 1 * 3 + 1, 1 * 3 + 2]
    assert order.chunks.start.tolist() == [0, 1, 2, 3, 4]
    assert order.chunks.count.tolist() == [1, 1, 1, 1, 1]


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize(("tokens", "top_k", "experts", "slots"), [(1, 1, 1, 1), (40, 3, 5, 4), (200, 2, 3, 2)])
def test_chunks_cover_every_pair_once(tokens, top_k, experts, slots, rows):
    rng = random.Random(tokens + rows)
    ids = torch.tensor([[rng.randrange(-1, experts) for _ in range(top_k)] for _ in range(tokens)])
    slot = [rng.randrange(-1, slots) for _ in range(tokens)]
    order = order_pairs_reference(ids, torch.tensor(slot, dtype=torch.int32), experts, slots, rows)
    chunks = order.chunks
    assert chunks is not None
    assert len(chunks.key) <= max_chunks(ids.numel(), experts, slots, rows)
    seen = []
    for key, start, count in zip(chunks.key.tolist(), chunks.start.tolist(), chunks.count.tolist(), strict=True):
        assert 0 < count <= rows
        for pair in order.order_P[start : start + count].tolist():
            assert ids.flatten()[pair] * (slots + 1) + slot[pair // top_k] + 1 == key
            seen.append(pair)
    flat = ids.flatten().tolist()
    assert sorted(seen) == [p for p in range(len(flat)) if flat[p] >= 0]
    for expert in range(experts):
        here = order.order_P[order.starts[expert] : order.starts[expert + 1]].tolist()
        assert sorted(here) == [p for p in range(len(flat)) if flat[p] == expert]
        assert here == sorted(here, key=lambda p: (slot[p // top_k], p))


@pytest.mark.parametrize("op", [virtual_experts_add_, per_adapter_add_])
def test_reference_against_loops(op):
    """Also with experts that are elsewhere: their pairs count for nothing."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    tokens, experts, hidden, inner = 6, 3, 20, 12
    ranks = [(2, 3, 4), (1, 0, 0), (0, 0, 2)]
    w = random_weights(ranks, [hidden, hidden, inner], [inner, inner, hidden], num_experts=experts, std=0.5)
    slots, rows = [0, -1, 2, 1, 0, 2], [2, 0, 1]
    ids = torch.tensor([[0, 1], [2, -1], [1, 2], [-1, -1], [0, 2], [1, 0]])
    x, weights = normal(tokens, hidden), normal(tokens, 2).abs()
    w13, w2 = normal(experts, 2 * inner, hidden), normal(experts, hidden, inner)
    batch = plain_batch(slots, [1] * tokens, rows)
    out = moe_lora_reference(x, ids, weights, w13, w2, w, batch, lora_op=op)
    for t in range(tokens):
        expected = torch.zeros(hidden)
        for k, e in enumerate(ids[t].tolist()):
            if e < 0:
                continue

            def project(base, value, part, t=t, e=e):
                delta = w.part(rows[slots[t]], part) if slots[t] >= 0 else None
                y = base @ value
                return y if delta is None else y + delta.scale * (delta.a_ERD[e] @ value) @ delta.b_ERN[e]

            gate, up = project(w13[e, :inner], x[t], 0), project(w13[e, inner:], x[t], 1)
            expected += weights[t, k] * project(w2[e], torch.nn.functional.silu(gate) * up, 2)
        torch.testing.assert_close(out[t], expected, atol=1e-4, rtol=1e-4)
