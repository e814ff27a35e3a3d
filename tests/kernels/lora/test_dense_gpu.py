"""csgmv and triton compiled, in bf16: against fp32 references, and replayed in CUDA graphs."""

import random

import numpy as np
import pytest
import torch
from kit.dense_lora import RANK_MIXES, Step, backend, make_step, max_ranks

from loraplex.engine.lora.planning import PlannedBackend, StaticBatch
from loraplex.kernels.lora.weights import LoRAWeights
from loraplex.kernels.testing import Popularity, random_weights, request_slots

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
TOLERANCE = 0.008
"""bf16 rounding of z and of y: about 0.003 each."""
BACKENDS = ["csgmv", "triton"]


def weights(
    ranks: list[tuple[int, ...]], width: int = 2048, slices: tuple[int, ...] = (512, 128, 128), seed: int = 0
) -> LoRAWeights:
    return random_weights(ranks, [width] * len(slices), slices, dtype=torch.bfloat16, device=CUDA, seed=seed, std=0.05)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("mix", RANK_MIXES)
@pytest.mark.parametrize(
    ("popularity", "requests"), [("uniform", 1), ("distinct", 7), ("zipf", 64), ("identical", 100), ("skewed", 300)]
)
def test_decode_against_fp32(name: str, mix: str, popularity: Popularity, requests: int) -> None:
    w = weights(RANK_MIXES[mix], seed=requests)
    slots = request_slots(popularity, requests, 5, seed=requests)
    slots[0] = 0
    run(backend(name), make_step(slots, [1] * requests, [4, 2, 0, 1, 3], w, seed=requests), w)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("mix", RANK_MIXES)
@pytest.mark.parametrize(
    ("num_tokens", "width", "slices"),
    [
        ([2000], 4096, (2048, 256, 256)),
        ([300, 1, 77, 513, 2, 64], 2048, (4096, 512, 512)),
        ([17] * 9, 200, (24, 1000, 7)),
    ],
    ids=["one", "ragged", "odd"],
)
def test_prefill_against_fp32(name: str, mix: str, num_tokens: list[int], width: int, slices: tuple[int, ...]) -> None:
    w = weights(RANK_MIXES[mix], width, slices)
    slots = [i % 6 - 1 if i else 3 for i in range(len(num_tokens))]
    run(backend(name), make_step(slots, num_tokens, [4, 2, 0, 1, 3], w), w)


@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
def test_chunk_sizes(chunk_size: int) -> None:
    w = weights(RANK_MIXES["wide"])
    run(backend("csgmv", chunk_size), make_step([0, 1, -1, 4], [300, 200, 50, 130], [0, 1, 2, 3, 4], w), w)


@pytest.mark.parametrize("requests", [5, 200])
def test_a_vocabulary_wide_head(requests: int) -> None:
    w = weights([(16,), (64,)], slices=(151936,))
    run(backend("csgmv"), make_step([i % 3 - 1 for i in range(requests)], [1] * requests, [0, 1], w), w)


def test_an_output_of_more_than_two_to_the_31_elements() -> None:
    tokens = 15_000
    w = weights([(8,)], width=64, slices=(151936,))
    x = torch.randn(tokens, 64, device=CUDA, dtype=torch.bfloat16)
    y = torch.zeros(tokens, 151936, device=CUDA, dtype=torch.bfloat16)
    kernels = backend("csgmv")
    kernels.add_(y, x, w, kernels.plan([0], [tokens], [0], max_ranks(w), CUDA))
    delta = w.part(0, 0)
    assert delta is not None
    last = (x[-4:].float() @ delta.a_ERD[0].float().T * delta.scale) @ delta.b_ERN[0].float()
    assert (y[-4:].float() - last).norm() / last.norm() < TOLERANCE


def run(kernels: PlannedBackend, step: Step, w: LoRAWeights) -> None:
    """Checks one call, and that another gives the same bits."""
    plan = kernels.plan(step.slots, step.num_tokens, step.slot_rows, max_ranks(w), CUDA)
    results = []
    for _ in range(2):
        y = step.y_TN.clone()
        kernels.add_(y, step.x_TD, w, plan)
        results.append(y)
    step.check(results[0], w, TOLERANCE)
    assert torch.equal(results[0].view(torch.uint8), results[1].view(torch.uint8))


class Captured:
    """A graph of one layer over static buffers, captured while all requests have the same adapter."""

    def __init__(self, kernels: PlannedBackend, w: LoRAWeights, tokens: int, requests: int) -> None:
        self.w = w
        self.static: StaticBatch = kernels.static(tokens, requests, CUDA)
        self.x = torch.zeros(tokens, w.in_features[0], device=CUDA, dtype=torch.bfloat16)
        self.y = torch.zeros(tokens, sum(w.slices), device=CUDA, dtype=torch.bfloat16)
        self.static.fill([0] * requests, [tokens // requests] * requests, [0], max_ranks(w))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            kernels.add_(self.y, self.x, w, self.static.info)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            kernels.add_(self.y, self.x, w, self.static.info)

    def check(self, step: Step) -> None:
        self.x.copy_(step.x_TD)
        self.y.copy_(step.y_TN)
        self.static.fill(step.slots, step.num_tokens, step.slot_rows, max_ranks(self.w))
        self.graph.replay()
        step.check(self.y, self.w, TOLERANCE)


EIGHT = [(16, 16, 16), (1, 3, 5), (64, 64, 64), (33, 0, 8), (8, 8, 8), (0, 0, 512), (4, 128, 4), (16, 16, 16)]


@pytest.mark.parametrize("bucket", [1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_graph_captured_with_one_adapter_replays_with_eight(name: str, bucket: int) -> None:
    w = weights(EIGHT, seed=bucket)
    captured = Captured(backend(name), w, bucket, bucket)
    sizes = range(1, bucket + 1) if bucket <= 64 else [bucket - 63, bucket - 1, bucket]
    for n in sizes:
        rows = random.Random(n).sample(range(8), 8)
        slots = [i % 8 for i in range(n)] if n % 3 else [i % 9 - 1 for i in range(n)]
        captured.check(make_step(slots, [1] * n, rows, w, padding=bucket - n, seed=n))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_prefill_graph_replays_with_other_requests(name: str) -> None:
    w = weights(EIGHT)
    captured = Captured(backend(name), w, 512, 8)
    for slots, num_tokens in (([0, 1, -1, 2], [100, 200, 30, 150]), ([7, 6, 5, 4, 3, 2, 1, 0], [64] * 8), ([5], [512])):
        step = make_step(slots, num_tokens, list(range(8)), w, padding=512 - sum(num_tokens))
        captured.check(step)


@pytest.mark.parametrize("tokens", [8, 128])
@pytest.mark.parametrize("name", BACKENDS)
def test_table_rows_replaced_between_replays(name: str, tokens: int) -> None:
    """Loading and evicting rewrite rows; the graph reads them through stable pointers."""
    w = weights(EIGHT)
    captured = Captured(backend(name), w, tokens, tokens)
    slots = [i % 3 for i in range(tokens)]
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [2, 2, 5, 1, 0, 7, 3, 6]):
        for host, device in ((w.host_places, w.places), (w.host_ranks, w.ranks), (w.host_scales, w.scales)):
            host[:] = host[order].copy()
            device.copy_(torch.from_numpy(np.ascontiguousarray(host)))
        captured.check(make_step(slots, [1] * tokens, [0, 1, 2], w))
