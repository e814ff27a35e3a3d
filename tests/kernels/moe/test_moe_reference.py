"""Routing, sorting, grouped GEMM and combination against plain loops."""

import pytest
import torch

from loraplex.kernels.elementwise import silu_mul
from loraplex.kernels.moe.grouped_gemm import grouped_gemm
from loraplex.kernels.moe.reference import moe_reference
from loraplex.kernels.moe.routing import combine, route, sort_by_expert

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_route_takes_softmax_over_all_experts():
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    probs = logits.softmax(-1)[0]
    weights, ids = route(logits, 2, norm=False)
    assert ids.tolist() == [[1, 2]]
    assert torch.equal(weights[0], probs[[1, 2]])
    weights, _ = route(logits, 2, norm=True)
    torch.testing.assert_close(weights[0], probs[[1, 2]] / probs[[1, 2]].sum())


def test_order_example():
    order = sort_by_expert(torch.tensor([[1, 0], [1, 2]]), 4)
    assert order.token_M.tolist() == [0, 0, 1, 1]
    assert order.ends_E.tolist() == [1, 3, 4, 4]
    assert order.position_TK.tolist() == [[1, 0], [2, 3]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (7, 5, 5), (64, 4, 1), (33, 60, 4)])
def test_moe_path(device, dtype, tokens, experts, top_k):
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    x_TD, w13, w2 = normal(tokens, 64), normal(experts, 96, 64) / 8, normal(experts, 64, 48) / 7
    weights_TK, ids_TK = route(normal(tokens, experts), top_k, norm=True)
    order = sort_by_expert(ids_TK, experts)
    h = silu_mul(grouped_gemm(x_TD[order.token_M], w13, order.ends_E))
    out = combine(grouped_gemm(h, w2, order.ends_E), order.position_TK, ids_TK, weights_TK)
    exact = moe_reference(x_TD.double().float(), w13.float(), w2.float(), ids_TK, weights_TK)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.float(), exact, atol=tolerance, rtol=tolerance)
    assert out.dtype == dtype
