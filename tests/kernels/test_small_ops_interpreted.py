"""Norms, rotation, routing, activation and the embedding's LoRA in Triton's interpreter, odd sizes."""

import pytest
import torch
from kit import small_ops

pytestmark = pytest.mark.usefixtures("interpreter")
DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 7), (5, 64), (3, 2051), (0, 8)])
def test_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    small_ops.check_norms(rows, width, "cpu", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 3), (4, 1030), (0, 8)])
def test_silu_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    small_ops.check_silu_mul(rows, width, "cpu", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "half"),
    [(4, 8, 4, 64, 32), (1, 6, 2, 96, 48), (3, 5, 5, 128, 32), (2, 7, 1, 80, 16), (0, 2, 1, 64, 32)],
)
def test_norm_rotate_store(
    tokens: int, heads: int, kv_heads: int, dim: int, half: int, normed: bool, dtype: torch.dtype
) -> None:
    small_ops.check_norm_rotate_store(tokens, heads, kv_heads, dim, half, normed, "cpu", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (1 / 200, 1 / 300)])
def test_norm_rotate_store_in_a_cache_of_another_dtype(
    dtype: torch.dtype, cache_dtype: torch.dtype, scales: tuple[float, float]
) -> None:
    small_ops.check_norm_rotate_store(3, 6, 2, 96, 32, True, "cpu", dtype, cache_dtype, scales)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(5, 8, 2), (3, 60, 4), (2, 5, 5), (2, 200, 32), (0, 4, 1)])
def test_route(tokens: int, experts: int, top_k: int, norm: bool) -> None:
    small_ops.check_route(tokens, experts, top_k, norm, "cpu", DTYPES[tokens % 2])


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_odd_logits() -> None:
    small_ops.check_odd_logits("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocabulary", "hidden"), [(50, 24), (333, 300)])
def test_embedding(vocabulary: int, hidden: int, dtype: torch.dtype) -> None:
    small_ops.check_embedding([3, 0, 1, 17, 64], vocabulary, hidden, "cpu", dtype)
