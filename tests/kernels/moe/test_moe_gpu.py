"""The MoE kernels on a device in bf16: accuracy, CUDA graphs, base rows, repeatability."""

import dataclasses
import random

import pytest
import torch

from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.weights import LoRAWeights
from loraplex.kernels.moe.forward import moe_lora_forward
from loraplex.kernels.moe.pairs import order_pairs, order_pairs_reference
from loraplex.kernels.moe.reference import moe_lora_reference
from loraplex.kernels.testing import listed_chunks, plain_batch, random_weights, request_slots

pytestmark = pytest.mark.gpu

EXPERTS, TOP_K, HIDDEN, INNER = 32, 4, 512, 256
MIXED = [(16, 16, 16), (64, 64, 64), (1, 3, 5), (0, 0, 8), (33, 0, 0), (0, 16, 128), (8, 8, 8), (4, 4, 4)]
SIZES = [1, 7, 64, 128, 129, 400, 512, 513, 1500, 5000]
"""Tokens: every form of the LoRA kernels and every tile of the GEMMs, with ragged ends."""


class Layer:
    def __init__(self, ranks: list[tuple[int, int, int]], *, hidden: int = HIDDEN, inner: int = INNER, seed: int = 0):
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.hidden, self.inner = hidden, inner
        self.w13 = self.normal(EXPERTS, 2 * inner, hidden) / hidden**0.5
        self.w2 = self.normal(EXPERTS, hidden, inner) / inner**0.5
        self.lora = random_weights(
            ranks, [hidden, hidden, inner], [inner, inner, hidden], num_experts=EXPERTS, dtype=torch.bfloat16,
            device="cuda", seed=seed,
        )  # fmt: skip

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device="cuda", dtype=torch.float32).bfloat16()

    def inputs(self, tokens: int, *, foreign: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = torch.rand(tokens, EXPERTS, generator=self.generator, device="cuda")
        weights, ids = torch.topk(scores, TOP_K, dim=-1)
        ids[torch.rand(ids.shape, generator=self.generator, device="cuda") < foreign] = -1
        return self.normal(tokens, self.hidden), ids, weights

    def exact(self, x, ids, weights, lora: LoRAWeights | None, batch: LoRABatchInfo | None) -> torch.Tensor:
        if lora is not None:
            lora = dataclasses.replace(lora, arena=lora.arena.float())
        return moe_lora_reference(x.float(), ids, weights, self.w13.float(), self.w2.float(), lora, batch)


def assert_near(got: torch.Tensor, exact: torch.Tensor) -> None:
    """Row by row: one wrong row must not drown among many."""
    error = (got.float() - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-3)
    assert error.max() < 0.02, (error.max(), error.argmax())


@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize("popularity", ["uniform", "identical"])
def test_against_fp32(tokens, popularity):
    layer = Layer(MIXED)
    x, ids, weights = layer.inputs(tokens, foreign=0.05)
    batch = plain_batch(request_slots(popularity, tokens, 8), [1] * tokens, [3, 1, 0, 2, 7, 6, 5, 4], device="cuda")
    out = moe_lora_forward(x, ids, weights, layer.w13, layer.w2, layer.lora, batch)
    assert_near(out, layer.exact(x, ids, weights, layer.lora, batch))
    base = moe_lora_forward(x, ids, weights, layer.w13, layer.w2)
    assert_near(base, layer.exact(x, ids, weights, None, None))
    rows = batch.token_slot < 0
    assert torch.equal(out[rows], base[rows])
    again = moe_lora_forward(x, ids, weights, layer.w13, layer.w2, layer.lora, batch)
    assert torch.equal(out, again)


@pytest.mark.parametrize("tokens", [3, 200, 1000])
@pytest.mark.parametrize(("hidden", "inner"), [(200, 104), (130, 70)])
def test_odd_widths(tokens, hidden, inner):
    layer = Layer([(8, 8, 8), (64, 1, 3)], hidden=hidden, inner=inner)
    x, ids, weights = layer.inputs(tokens)
    batch = plain_batch(request_slots("uniform", tokens, 2), [1] * tokens, [1, 0], device="cuda")
    out = moe_lora_forward(x, ids, weights, layer.w13, layer.w2, layer.lora, batch)
    assert_near(out, layer.exact(x, ids, weights, layer.lora, batch))


@pytest.mark.parametrize("tokens", [1, 128, 256, 700, 5000])
def test_order(tokens):
    layer = Layer([(1, 1, 1)])
    _, ids, _ = layer.inputs(tokens, foreign=0.1)
    slot = torch.randint(-1, 8, (tokens,), device="cuda", dtype=torch.int32)
    got = order_pairs(ids, slot, num_experts=EXPERTS, num_slots=8, chunk_rows=16)
    want = order_pairs_reference(ids, slot, EXPERTS, 8, 16)
    for name in ("order_P", "position_P", "starts"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.chunks is not None
    assert want.chunks is not None
    assert listed_chunks(got.chunks) == listed_chunks(want.chunks)


def test_graph_replay_with_more_adapters_than_at_capture():
    """Captured with one adapter; replayed with eight others in rows rewritten in between, at every decode size, with
    padding after the last request."""
    layer = Layer([*MIXED, *MIXED[::-1]])
    table = dataclasses.replace(
        layer.lora, **{name: getattr(layer.lora, name)[:8].clone() for name in ("places", "ranks", "scales")}
    )
    slot_row = torch.zeros(8, dtype=torch.int32, device="cuda")
    rng = random.Random(0)
    for bucket in (1, 2, 4, 8, 16, 33, 64, 160):
        x, ids, weights = layer.inputs(bucket)
        token_slot, token_row = torch.zeros(2, bucket, dtype=torch.int32, device="cuda")
        static = dataclasses.replace(
            plain_batch([0] * bucket, [1] * bucket, [0] * 8, device="cuda"),
            token_slot=token_slot, token_row=token_row, slot_row=slot_row, max_rank_in_batch=16,
        )  # fmt: skip

        def run(x=x, ids=ids, weights=weights, static=static):
            return moe_lora_forward(x, ids, weights, layer.w13, layer.w2, table, static, rank_capacity=128)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        for trial in range(3):
            live = bucket if trial == 0 else rng.randint(1, bucket)
            rows = rng.sample(range(16), 8)
            for name in ("places", "ranks", "scales"):
                getattr(table, name).copy_(getattr(layer.lora, name)[rows])
            order = rng.sample(range(8), 8)
            slots = [i % 9 - 1 for i in range(live)]
            rng.shuffle(slots)
            batch = plain_batch(slots, [1] * live, [rows[i] for i in order], padding=bucket - live, device="cuda")
            new_x, new_ids, new_weights = layer.inputs(bucket)
            new_ids[live:] = 0
            slot_row.copy_(torch.tensor(order, dtype=torch.int32))
            for static_buffer, new in ((x, new_x), (ids, new_ids), (weights, new_weights)):
                static_buffer.copy_(new)
            token_slot.copy_(batch.token_slot)
            token_row.copy_(torch.tensor([*order, -1], dtype=torch.int32)[batch.token_slot.long().cpu()])
            graph.replay()
            assert_near(out[:live], layer.exact(x, ids, weights, layer.lora, batch)[:live])
            eager = moe_lora_forward(x, ids, weights, layer.w13, layer.w2, table, static, rank_capacity=128)
            assert torch.equal(out[:live], eager[:live])
