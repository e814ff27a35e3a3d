"""Dense and expert LoRA references against per-token loops, and the two expert implementations against each other."""

import pytest
import torch

from loraplex.kernels.lora import experts
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.embedding import embedding_lora_add_
from loraplex.kernels.lora.reference import lora_add_
from loraplex.kernels.moe.routing import sort_by_expert
from loraplex.kernels.testing import weights_of

EXPERTS, WIDTH, OUT = 6, 24, 20
ROWS_OF_TOKENS = [2, -1, 0, 2, 2, -1, 1, 0, 0, 2, 3]
"""Table row of each token; −1 is the base model."""


def batch_of(rows):
    order = sorted(range(len(rows)), key=lambda t: (rows[t] < 0, -rows[t], -t))
    segments = []
    for i, token in enumerate(order):
        if rows[token] < 0:
            continue
        if segments and segments[-1][0] == rows[token] and segments[-1][2] - segments[-1][1] < 2:
            segments[-1][2] = i + 1
        else:
            segments.append([rows[token], i, i + 1])
    empty = torch.empty(0, dtype=torch.int32)
    return LoRABatchInfo(*[empty] * 8, torch.tensor(order), empty, 0, tuple(map(tuple, segments)))


@pytest.fixture
def normal():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding(normal, dtype):
    vocabulary, hidden = 50, 24
    rows = [[(normal(r, vocabulary), normal(hidden, r), scale)] for r, scale in ((3, 0.5), (1, 2.0), (17, 1.5))]
    rows.insert(1, [None])
    rows = [[d and (d[0].to(dtype), d[1].to(dtype), d[2])] for (d,) in rows]
    tokens = [3, 0, 1, 2, 2, -1, 1, 0, 0, 2, 3]
    ids = torch.tensor([0, 49, 7, 7, 31, 7, 3, 3, 12, 0, 48])
    base = normal(len(tokens), hidden).to(dtype)
    x = base.clone()
    embedding_lora_add_(x, ids, weights_of(rows, [vocabulary], [hidden]), batch_of(tokens))
    for t, row in enumerate(tokens):
        if row in (-1, 1):
            assert torch.equal(x[t], base[t])
        else:
            a, b, scale = rows[row][0]
            expected = base[t].float() + scale * (b.float() @ a.float()[:, ids[t]])
            torch.testing.assert_close(x[t], expected.to(dtype))


def test_dense(normal):
    slices = (12, 4, 8)
    rows = [
        [(normal(3, WIDTH), normal(n, 3), 0.5) for n in slices],
        [None, None, None],
        [None, (normal(1, WIDTH), normal(4, 1), 2.0), None],
        [(normal(16, WIDTH), normal(12, 16), 1.5), None, None],
    ]
    table = weights_of(rows, [WIDTH] * 3, slices)
    x, base = normal(len(ROWS_OF_TOKENS), WIDTH), normal(len(ROWS_OF_TOKENS), 24)
    y = base.clone()
    lora_add_(y, x, table, batch_of(ROWS_OF_TOKENS))
    for t, row in enumerate(ROWS_OF_TOKENS):
        expected = base[t].clone()
        for first, delta in zip((0, 12, 16), rows[row] if row >= 0 else (), strict=False):
            if delta is not None:
                a, b, scale = delta
                expected[first : first + len(b)] += scale * (b @ (a @ x[t]))
        torch.testing.assert_close(y[t], expected)
        if row in (-1, 1):
            assert torch.equal(y[t], base[t])


def expert_rows(normal):
    def delta(rank, a_experts, b_experts, scale):
        return normal(a_experts, rank, WIDTH), normal(b_experts, OUT, rank), scale

    return [
        [delta(3, EXPERTS, EXPERTS, 0.5), delta(5, 1, EXPERTS, 1.5), None],
        [None, None, delta(2, EXPERTS, 1, 2.0)],
        [delta(1, 1, EXPERTS, 0.25), delta(4, EXPERTS, EXPERTS, 1.0), delta(8, 1, 1, 1.0)],
        [None, None, None],
    ]


@pytest.mark.parametrize("op", [experts.virtual_experts_add_, experts.per_adapter_add_])
@pytest.mark.parametrize("projection", experts.PARTS)
@pytest.mark.parametrize("gather_bytes", [1, 5000, 1 << 28])
def test_experts(normal, monkeypatch, op, projection, gather_bytes):
    monkeypatch.setattr(experts, "GATHER_BYTES", gather_bytes)
    rows = expert_rows(normal)
    table = weights_of(rows, [WIDTH] * 3, [OUT] * 3, EXPERTS)
    tokens = len(ROWS_OF_TOKENS)
    ids_TK = torch.stack(
        [torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(t))[:3] for t in range(tokens)]
    )
    position_TK = sort_by_expert(ids_TK, EXPERTS).position_TK
    x, wide = normal(tokens * 3, WIDTH), normal(tokens * 3, 2 * OUT)
    y = wide.clone()
    op(y[:, OUT:], x, position_TK, ids_TK, table, projection, batch_of(ROWS_OF_TOKENS))
    assert torch.equal(y[:, :OUT], wide[:, :OUT])
    for t, row in enumerate(ROWS_OF_TOKENS):
        delta = rows[row][experts.PARTS.index(projection)] if row >= 0 else None
        for k, expert in enumerate(ids_TK[t].tolist()):
            m = position_TK[t, k]
            if delta is None:
                assert torch.equal(y[m], wide[m])
                continue
            a, b = (matrices[expert % len(matrices)] for matrices in delta[:2])
            torch.testing.assert_close(y[m, OUT:], wide[m, OUT:] + delta[2] * (b @ (a @ x[m])))
