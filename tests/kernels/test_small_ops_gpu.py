"""Fused small kernels compiled: bf16 and fp32 against fp32 references, model sizes, graph replay."""

import numpy as np
import pytest
import torch
from kit import small_ops
from kit.draws import WAYS, check_draws, draw_params

from loraplex.kernels import sampling
from loraplex.kernels.lora.embedding import embedding_lora_add_
from loraplex.kernels.lora.weights import LoRAWeights
from loraplex.kernels.testing import plain_batch

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float32]
VOCABULARY = 151_936


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 2048), (300, 2048), (4096, 2048), (7, 5120), (33, 129), (5, 16384)])
def test_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    small_ops.check_norms(rows, width, "cuda", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 6144), (64, 1408), (4096, 768), (3, 77)])
def test_silu_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    small_ops.check_silu_mul(rows, width, "cuda", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "half"),
    [(32, 4, 128, 64), (16, 16, 64, 32), (28, 4, 96, 48), (7, 1, 256, 128), (8, 2, 192, 96), (6, 2, 128, 32)],
)
@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_norm_rotate_store(
    tokens: int, heads: int, kv_heads: int, dim: int, half: int, normed: bool, dtype: torch.dtype
) -> None:
    small_ops.check_norm_rotate_store(tokens, heads, kv_heads, dim, half, normed, "cuda", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (1 / 200, 1 / 300)])
def test_norm_rotate_store_in_a_cache_of_another_dtype(
    dtype: torch.dtype, cache_dtype: torch.dtype, scales: tuple[float, float]
) -> None:
    small_ops.check_norm_rotate_store(100, 32, 4, 128, 64, True, "cuda", dtype, cache_dtype, scales)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (60, 4), (8, 2), (512, 10), (32, 32), (512, 32)])
@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_route(tokens: int, experts: int, top_k: int, norm: bool, dtype: torch.dtype) -> None:
    small_ops.check_route(tokens, experts, top_k, norm, "cuda", dtype)


def test_odd_logits() -> None:
    small_ops.check_odd_logits("cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocabulary", "hidden"), [(VOCABULARY, 2048), (333, 300)])
def test_embedding(vocabulary: int, hidden: int, dtype: torch.dtype) -> None:
    small_ops.check_embedding([3, 0, 1, 16, 64], vocabulary, hidden, "cuda", dtype)


def test_embedding_in_a_graph_replays_with_other_adapters() -> None:
    ranks, vocabulary = [3, 40, 0, 512], 1000
    x, ids, w = small_ops.embedding_case(ranks, [0] * 13, vocabulary, 256, "cuda", torch.bfloat16)
    tokens = len(x)
    batch = plain_batch([0] * tokens, [1] * tokens, [0, 1, 2, 3], device="cuda")
    y = x.clone()
    embedding_lora_add_(y, ids, w, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        embedding_lora_add_(y, ids, w, batch)
    for seed in range(3):
        slots = np.random.default_rng(seed).integers(-1, 4, tokens).tolist()
        other = plain_batch(slots, [1] * tokens, [3, 1, 0, 2], device="cuda")
        batch.token_slot.copy_(other.token_slot)
        batch.slot_row.copy_(other.slot_row)
        y.copy_(x)
        graph.replay()
        expected = x.float()
        upcast = LoRAWeights(**{**vars(w), "arena": w.arena.float()})
        small_ops.embedding_lora_add_reference_(expected, ids, upcast, other)
        small_ops.close(y, expected)


@pytest.mark.parametrize("rounded", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("size", [VOCABULARY, 32_003])
def test_draws(size: int, rounded: bool) -> None:
    """A few draws in a thousand may fall on a pair of scores, or the end of a kept set, that rounding decides."""
    ways = WAYS * 6
    generator = torch.Generator("cuda").manual_seed(size)
    logits = torch.randn(len(ways), size, generator=generator, device="cuda") * 3
    if rounded:
        logits = logits.bfloat16().float()
    assert check_draws(logits, draw_params(ways, "cuda")) <= 1
    for way in WAYS[:3]:
        assert check_draws(logits, draw_params([way] * len(ways), "cuda")) <= 1


def test_broken_rows_and_rows_of_one_value() -> None:
    logits = torch.randn(len(WAYS), VOCABULARY, device="cuda")
    logits[::3, 77_777] = torch.nan
    logits[1::6, -1] = torch.inf
    logits[2::6] = -torch.inf
    logits[5::6] = 0.25
    check_draws(logits, draw_params(WAYS, "cuda"))


def test_draws_follow_the_softmax() -> None:
    n = 20_000
    target = torch.tensor([0.5, 0.3, 0.15, 0.05], device="cuda")
    params = draw_params([(1.0, 0, 1.0, 0.0)] * n, "cuda")
    ids, _ = sampling.draw(target.log().repeat(n, 1), params)
    counts = torch.bincount(ids, minlength=4)
    assert ((counts - n * target) ** 2 / (n * target)).sum() < 16.3  # 0.1 % quantile at 3 degrees of freedom


@pytest.mark.parametrize("rows", [1, 40])
def test_log_normaliser(rows: int) -> None:
    logits = torch.randn(rows, VOCABULARY, device="cuda") * 5
    logits[0, :9000] = -torch.inf
    torch.testing.assert_close(sampling.log_normaliser(logits), torch.logsumexp(logits, dim=-1))


def test_everything_can_be_captured() -> None:
    logits = torch.randn(len(WAYS), VOCABULARY, device="cuda")
    params = draw_params(WAYS, "cuda")
    expected, _ = sampling.draw(logits, params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, _ = sampling.draw(logits, params)
        sampling.log_normaliser(logits)
    graph.replay()
    assert torch.equal(ids, expected)
