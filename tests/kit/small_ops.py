"""Fused small kernels against their references on upcast inputs; `device` and `dtype` are the caller's."""

import torch

from loraplex.kernels import elementwise, rotary
from loraplex.kernels.lora.embedding import embedding_lora_add_, embedding_lora_add_reference_
from loraplex.kernels.lora.weights import LoRAWeights
from loraplex.kernels.moe.routing import route, route_reference
from loraplex.kernels.testing import plain_batch, random_weights

EPS = 1e-6
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float8_e4m3fn: 0.04}
"""Of the norm; two to four roundings."""


def normal(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def close(got: torch.Tensor, expected: torch.Tensor, rounded: torch.dtype | None = None) -> None:
    """By norm, and no element off by more than rounding its largest neighbour. rounded: on the way, to this."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    if got.numel() == 0:
        return
    tolerance = max(TOLERANCE[got.dtype], TOLERANCE[rounded or got.dtype])
    error = got.float() - expected.float()
    assert error.norm() <= tolerance * expected.float().norm(), error.norm() / expected.float().norm()
    assert error.abs().max() <= 4 * tolerance * expected.float().abs().max(), error.abs().max()


def mostly_near(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """For 8 bits in the interpreter, which halves what it should round up to a power of two."""
    got, expected = got.float(), expected.float()
    return bool(((got - expected).abs() <= 0.07 * expected.abs() + 0.01).float().mean() > 0.9)


def check_norms(rows: int, width: int, device: str, dtype: torch.dtype) -> None:
    x, residual = (normal(rows, width, device=device, dtype=dtype, seed=s) for s in (0, 1))
    weight = normal(width, device=device, dtype=dtype, seed=2)
    close(elementwise.rms_norm(x, weight, EPS), elementwise.rms_norm_reference(x.float(), weight.float(), EPS))
    normed, summed = elementwise.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(summed, x + residual), "rounded as torch rounds a sum"
    close(normed, elementwise.rms_norm_reference(summed.float(), weight.float(), EPS))


def check_silu_mul(rows: int, width: int, device: str, dtype: torch.dtype) -> None:
    wide = normal(rows, 2 * width + 8, device=device, dtype=dtype) * 3
    g = wide[:, : 2 * width]
    close(elementwise.silu_mul(g), elementwise.silu_mul_reference(g.float()))


def check_norm_rotate_store(
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    half: int,
    normed: bool,
    device: str,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """A cache of another dtype, and scales: what overflows e4m3 saturates."""
    wide = normal(tokens, (heads + 2 * kv_heads) * dim + 16, device=device, dtype=dtype)
    qkv = wide[:, : (heads + 2 * kv_heads) * dim]
    generator = torch.Generator().manual_seed(tokens)
    slots = torch.randperm(tokens + 5, generator=generator)[:tokens]
    slots[::3] = -1
    slots = slots.to(device)
    positions = torch.randint(40_000, (tokens,), generator=generator).to(device)
    inv_freq = (1e6 ** (-torch.arange(half) / half)).to(device)
    cos, sin = rotary.rope_angles(positions, inv_freq, 1.25)
    for got, expected in zip((cos, sin), rotary.rope_angles_reference(positions, inv_freq, 1.25), strict=True):
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)
    weights = [normal(dim, device=device, dtype=dtype, seed=s) if normed else None for s in (3, 4)]
    stored = {"device": device, "dtype": cache_dtype or dtype}
    before = [normal(tokens + 5, kv_heads, dim, seed=s, **stored) for s in (5, 6)]
    k, v = (t.clone() for t in before)
    q = rotary.norm_rotate_store(
        qkv, cos, sin, k, v, slots,
        q_weight_D=weights[0], k_weight_D=weights[1], eps=EPS, k_scale=scales[0], v_scale=scales[1],
    )  # fmt: skip
    exact_k, exact_v = (t.clone() if cache_dtype == torch.float8_e4m3fn else t.float() for t in before)
    upcast = [w if w is None else w.float() for w in weights]
    exact_q = rotary.norm_rotate_store_reference(qkv.float(), cos, sin, exact_k, exact_v, slots, *upcast, EPS, *scales)
    close(q, exact_q)
    if device == "cpu" and cache_dtype == torch.float8_e4m3fn:
        assert mostly_near(k, exact_k)
        assert mostly_near(v, exact_v)
    else:
        close(k, exact_k, rounded=dtype)
        close(v, exact_v, rounded=dtype)
    if cache_dtype is None:
        assert torch.equal(v.float(), exact_v)
    untouched = [i for i in range(tokens + 5) if i not in slots.tolist()]
    assert torch.equal(k.float()[untouched], before[0].float()[untouched])


def check_route(tokens: int, experts: int, top_k: int, norm: bool, device: str, dtype: torch.dtype) -> None:
    """Logits of few distinct values too: ties go to the lower expert."""
    logits = normal(tokens, experts, device=device, dtype=dtype) * 3
    for x in (logits, logits.round(), torch.zeros_like(logits)):
        weights, ids = route(x, top_k, norm=norm)
        exact, exact_ids = route_reference(x, top_k, norm=norm)
        assert ids.dtype == torch.int64
        assert torch.equal(ids, exact_ids)
        torch.testing.assert_close(weights, exact, atol=1e-6, rtol=2e-5)
        slots = torch.arange(tokens, device=device) - tokens // 2
        live = slots >= 0
        some, some_ids = route(x.masked_fill(~live[:, None], torch.nan), top_k, norm=norm, kv_slots_T=slots)
        assert torch.equal(some[live], weights[live])
        assert torch.equal(some_ids[live], ids[live])
        assert (some[~live] == 0).all()
        assert (some_ids[~live] == -1).all()


def check_odd_logits(device: str) -> None:
    """NaN, infinities and signed zeros give distinct experts of the model."""
    logits = normal(6, 60, device=device)
    logits[0] = torch.nan
    logits[1, 7] = torch.nan
    logits[2, 3:] = -torch.inf
    logits[3] = -torch.inf
    logits[4, ::2], logits[4, 1::2] = -0.0, 0.0
    weights, ids = route(logits, 8, norm=True)
    assert all(len(set(row)) == 8 and set(row) <= set(range(60)) for row in ids.tolist())
    assert torch.isnan(weights[:2]).all()
    assert torch.equal(ids[4], torch.arange(8, device=device))
    torch.testing.assert_close(weights[2].sum(), torch.ones((), device=device))
    torch.testing.assert_close(weights[5], route_reference(logits[5:], 8, norm=True)[0][0])


def embedding_case(
    ranks: list[int], slots: list[int], vocabulary: int, hidden: int, device: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, LoRAWeights]:
    """x, ids and adapters; the last three tokens are padding."""
    w = random_weights([(r,) for r in ranks], [vocabulary], [hidden], dtype=dtype, device=device)
    tokens = len(slots) + 3
    ids = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(0)).to(device)
    return normal(tokens, hidden, device=device, dtype=dtype), ids, w


def check_embedding(ranks: list[int], vocabulary: int, hidden: int, device: str, dtype: torch.dtype) -> None:
    slots = [(i * 5) % (len(ranks) + 1) - 1 for i in range(17)]
    x, ids, w = embedding_case(ranks, slots, vocabulary, hidden, device, dtype)
    rows = list(range(len(ranks)))[::-1]
    batch = plain_batch(slots, [1] * len(slots), rows, padding=3, device=device)
    y, exact = x.clone(), x.float()
    embedding_lora_add_(y, ids, w, batch)
    upcast = LoRAWeights(**{**vars(w), "arena": w.arena.float()})
    embedding_lora_add_reference_(exact, ids, upcast, batch)
    close(y, exact)
    base = [i for i, s in enumerate([*slots, -1, -1, -1]) if s < 0 or ranks[rows[s]] == 0]
    assert torch.equal(y[base], x[base])
