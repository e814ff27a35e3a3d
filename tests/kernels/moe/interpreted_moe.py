"""The MoE kernels against their references, in Triton's interpreter. Run by `test_moe_interpreted.py`, in a process of
its own: whether Triton interprets is decided when it is imported."""

import random

import numpy as np
import pytest
import torch

from loraplex.kernels.lora.experts import per_adapter_add_
from loraplex.kernels.moe import forward, tiles
from loraplex.kernels.moe.forward import moe_lora_forward
from loraplex.kernels.moe.pairs import max_chunks, order_pairs, order_pairs_reference
from loraplex.kernels.moe.reference import moe_lora_reference
from loraplex.kernels.moe.routing import route
from loraplex.kernels.testing import listed_chunks, plain_batch, random_weights, request_slots
from loraplex.kernels.tuning import TileConfig

MIXED = [(3, 16, 5), (1, 1, 1), (0, 0, 7), (33, 0, 0), (0, 64, 16), (0, 0, 0)]
"""Ranks of gate, up and down: unequal, one part only, none."""
SMALL = [(8, 8, 8)] * 3
HUGE = [(512, 512, 512), (4, 4, 4)]
FORMS = {"rows": (512, 2048), "chunks": (0, 2048), "fused": (0, 0)}
POPULARITIES = ["distinct", "uniform", "zipf", "identical", "skewed"]


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """What a kernel does not write is NaN, or an index far outside."""

    def poisoned(make):
        def empty(*args, **kwargs):
            made = make(*args, **kwargs)
            return made.fill_(torch.nan if made.is_floating_point() else 1 << 30)

        return empty

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    rows, separate = FORMS[request.param]
    monkeypatch.setattr(tiles, "ROW_FORM_PAIRS", rows)
    monkeypatch.setattr(tiles, "SEPARATE_PAIRS", separate)
    return request.param


def expert_ids(tokens, top_k, experts, rng, *, foreign=0.1, one=False):
    """Distinct experts of each token; some −1. `one`: every token takes expert 1 first."""
    rows = []
    for _ in range(tokens):
        chosen = rng.sample(range(experts), top_k)
        if one:
            chosen[0] = 1 if 1 not in chosen else chosen[0]
        rows.append([-1 if rng.random() < foreign else e for e in chosen])
    return torch.tensor(rows)


def check(
    *, seed, tokens, top_k, experts, hidden, inner, ranks, popularity="uniform", dtype=torch.float32, padding=0,
    shared_a=False, shared_b=False, foreign=0.1, hint=0, one=False,
):  # fmt: skip
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    w = random_weights(
        ranks, [hidden, hidden, inner], [inner, inner, hidden], num_experts=experts, shared_a=shared_a,
        shared_b=shared_b, dtype=dtype, seed=seed, std=0.3,
    )  # fmt: skip
    table_rows = rng.sample(range(len(ranks)), len(ranks))
    slots = request_slots(popularity, tokens, len(ranks), seed=seed)
    batch = plain_batch(slots, [1] * tokens, table_rows, padding=padding)
    object.__setattr__(batch, "max_rank_in_batch", hint)
    ids = expert_ids(tokens, top_k, experts, rng, foreign=foreign, one=one)
    ids = torch.cat([ids, torch.zeros(padding, top_k, dtype=ids.dtype)])
    x = normal(tokens + padding, hidden).to(dtype)
    w13 = (normal(experts, 2 * inner, hidden) / hidden**0.5).to(dtype)
    w2 = (normal(experts, hidden, inner) / inner**0.5).to(dtype)
    weights = normal(tokens + padding, top_k).abs()
    out = moe_lora_forward(x, ids, weights, w13, w2, w, batch)
    expected = moe_lora_reference(x, ids, weights, w13, w2, w, batch)
    again = moe_lora_reference(x, ids, weights, w13, w2, w, batch, lora_op=per_adapter_add_)
    base = moe_lora_forward(x, ids, weights, w13, w2)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    for got, want in (
        (out, expected),
        (again, expected),
        (base, moe_lora_reference(x, ids, weights, w13, w2, None, None)),
    ):
        error = (got - want).float().norm(dim=1) / want.float().norm(dim=1).clamp(min=1e-3)
        assert error.max() < tolerance, error
    without = batch.token_slot < 0
    assert torch.equal(out[without], base[without])
    touched = (
        ~without
        & (ids >= 0).any(1)
        & torch.tensor([s >= 0 and any(ranks[table_rows[s]]) for s in batch.token_slot.tolist()])
    )
    assert ((out - base)[touched].float().norm(dim=1) > 10 * tolerance * base[touched].float().norm(dim=1)).all()


@pytest.mark.parametrize(
    "case",
    [
        {"tokens": 7, "top_k": 2, "experts": 4, "hidden": 24, "inner": 20, "ranks": MIXED, "popularity": "distinct"},
        {"tokens": 3, "top_k": 3, "experts": 4, "hidden": 40, "inner": 24, "ranks": SMALL, "shared_a": True},
        {"tokens": 5, "top_k": 1, "experts": 3, "hidden": 33, "inner": 17, "ranks": MIXED, "shared_b": True},
        {"tokens": 6, "top_k": 2, "experts": 4, "hidden": 32, "inner": 16, "ranks": SMALL, "dtype": torch.float16},
        {"tokens": 1, "top_k": 2, "experts": 3, "hidden": 24, "inner": 16, "ranks": HUGE, "hint": 16, "foreign": 0.0},
        {"tokens": 18, "top_k": 1, "experts": 2, "hidden": 16, "inner": 16, "ranks": SMALL, "popularity": "identical",
         "one": True, "padding": 3},
    ],
    ids=["mixed", "shared-a", "top1-shared-b", "fp16", "rank512-wrong-hint", "one-expert-padded"],
)  # fmt: skip
def test_small(form, case):
    check(seed=3, **case)


@pytest.mark.slow
@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("ranks", [MIXED, SMALL, HUGE], ids=["mixed", "small", "huge"])
@pytest.mark.parametrize("shared", [(False, False), (True, False), (False, True)], ids=["own", "shared-a", "shared-b"])
def test_sweep(form, popularity, ranks, shared):
    rng = random.Random(f"{form}{popularity}{len(ranks)}{shared}")
    top_k = rng.choice([1, 2, 4])
    check(
        seed=rng.randrange(1000), tokens=rng.choice([1, 9, 14]), top_k=top_k, experts=rng.choice([4, 7, 16]),
        hidden=rng.choice([32, 40, 57]), inner=rng.choice([16, 24, 49]), ranks=ranks, popularity=popularity,
        dtype=rng.choice([torch.float32, torch.float16]), shared_a=shared[0], shared_b=shared[1],
        padding=rng.choice([0, 2]), hint=rng.choice([0, 8]),
        one=rng.random() < 0.2,
    )  # fmt: skip


def test_mixed_shared_and_own_in_one_batch(form):
    """Stride 0 on one adapter's A, on another's B, and neither on a third's."""
    make = {"num_experts": 4, "std": 0.3}
    tables = [
        random_weights([(4, 4, 4)], [24, 24, 16], [16, 16, 24], seed=i, shared_a=i == 0, shared_b=i == 1, **make)
        for i in range(3)
    ]
    w = tables[0]
    sizes = [0, *[len(t.arena) for t in tables]]
    for i, table in enumerate(tables):
        table.host_places[:, :, :2] += sum(sizes[: i + 1])
    joined = type(w)(
        torch.cat([t.arena for t in tables]),
        *(torch.cat([getattr(t, n) for t in tables]) for n in ("places", "ranks", "scales")),
        *(np.concatenate([getattr(t, f"host_{n}") for t in tables]) for n in ("places", "ranks", "scales")),
        w.in_features, w.slices, 4,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(8, 24, generator=generator), torch.rand(8, 2, generator=generator)
    w13, w2 = torch.randn(4, 32, 24, generator=generator) / 5, torch.randn(4, 24, 16, generator=generator) / 4
    ids = expert_ids(8, 2, 4, random.Random(0), foreign=0.0)
    batch = plain_batch([0, 1, 2, -1, 2, 1, 0, 0], [1] * 8, [2, 0, 1])
    out = moe_lora_forward(x, ids, weights, w13, w2, joined, batch)
    torch.testing.assert_close(out, moe_lora_reference(x, ids, weights, w13, w2, joined, batch), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("tail", "top_k", "tokens"), [(False, 1, 70), (True, 3, 24)], ids=["whole", "tail"])
def test_large_tiles(monkeypatch, tail, top_k, tokens):
    """Blocks of several rows, last ones short, several per expert; half tiles for the short ones; expand in windows."""
    monkeypatch.setattr(tiles, "SEPARATE_PAIRS", 0)
    tile = TileConfig(block_m=32, block_n=16, block_k=16)
    monkeypatch.setattr(forward, "_tiles", lambda *_: (tile, tile))
    monkeypatch.setattr("loraplex.kernels.moe.expert_gemm.has_tail", lambda _: tail)
    check(seed=1, tokens=tokens, top_k=top_k, experts=3, hidden=24, inner=20, ranks=MIXED, popularity="zipf")


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "slots", "rows"),
    [
        (3, 2, 3, 2, 16), (1, 1, 4, 0, None), (65, 4, 7, 3, None), (65, 4, 7, 3, 16), (130, 8, 33, 8, 64),
        (2500, 1, 5, 2, None), (2500, 1, 5, 2, 16), (700, 3, 3, 0, None), (273, 8, 33, 8, 64),
    ],
)  # fmt: skip
def test_order(tokens, top_k, experts, slots, rows):
    """Both sorts, exactly; sentinels in no chunk."""
    rng = random.Random(tokens)
    ids = expert_ids(tokens, top_k, experts, rng)
    token_slot = torch.tensor([rng.randrange(-1, slots) for _ in range(tokens)], dtype=torch.int32) if slots else None
    got = order_pairs(ids, token_slot, num_experts=experts, num_slots=slots, chunk_rows=rows)
    want = order_pairs_reference(ids, token_slot, experts, slots, rows)
    for name in ("order_P", "position_P", "starts"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    if rows is None:
        return
    assert got.chunks is not None
    assert want.chunks is not None
    assert listed_chunks(got.chunks) == listed_chunks(want.chunks)
    most = ids.numel() if got.chunks.num is None else max_chunks(ids.numel(), experts, slots, rows)
    assert len(want.chunks.key) <= len(got.chunks.key) == most


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("live", [0, 1, 5])
def test_padding_changes_no_bit_of_the_step_and_comes_out_as_zero(form, live, adapters):
    """Tokens 0 … live − 1 of a bucket of 8, routed with the slots of KV as a graph's replay has them."""
    generator = torch.Generator().manual_seed(live)
    x, logits = torch.randn(8, 24, generator=generator), torch.randn(8, 4, generator=generator)
    w13, w2 = torch.randn(4, 32, 24, generator=generator) / 5, torch.randn(4, 24, 16, generator=generator) / 4
    x[live:], logits[live:] = torch.nan, torch.nan
    w = random_weights(SMALL, [24, 24, 16], [16, 16, 24], num_experts=4, dtype=torch.float32, std=0.3)
    slots = torch.where(torch.arange(8) < live, 7 + torch.arange(8), -1)

    def run(tokens):
        weights, ids = route(logits[:tokens], 2, norm=True, kv_slots_T=slots[:tokens])
        mine = [i % 4 - 1 for i in range(live)]
        batch = plain_batch(mine, [1] * live, [2, 0, 1], padding=tokens - live) if adapters else None
        return moe_lora_forward(x[:tokens], ids, weights, w13, w2, w if adapters else None, batch)

    padded = run(8)
    assert torch.equal(padded[live:], torch.zeros(8 - live, 24))
    if live:
        assert torch.equal(padded[:live], run(live))
        assert padded[:live].isfinite().all()
