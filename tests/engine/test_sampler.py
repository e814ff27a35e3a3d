"""Sampling rows: distributions, masks, penalties, independence from neighbours, logprobs."""

import math

import pytest
import torch

from loraplex.engine.request import SamplingParams
from loraplex.engine.sampler import Sampler
from loraplex.engine.step import SampleRow
from loraplex.kernels import sampling

V = 40


def sampler(mode: str = "raw", rows: int = 64) -> Sampler:
    return Sampler(V, rows, torch.device("cpu"), mode, frozenset([0]))  # type: ignore[arg-type]


def row(i: int = 0, seed: int = 1, position: int = 0, **params) -> SampleRow:
    return SampleRow(i, SamplingParams(max_tokens=99, **params), seed, position)


def draw(logits: torch.Tensor, rows: list[SampleRow], s: Sampler | None = None) -> list[int]:
    return (s or sampler()).sample(logits.clone(), rows).ids_N.tolist()


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(64, V, generator=torch.Generator().manual_seed(3)) * 2


def test_draws_follow_the_softmax() -> None:
    target = torch.tensor([0.5, 0.3, 0.15, 0.05])
    n = 20_000
    for seeds, positions in [(torch.arange(n), torch.zeros(n).long()), (torch.full((n,), 9), torch.arange(n))]:
        ids = (target.log() + sampling.gumbel_noise(seeds, positions, 4)).argmax(-1)
        freq = torch.bincount(ids, minlength=4) / n
        chi2 = (n * (freq - target) ** 2 / target).sum()
        assert chi2 < 16.3, freq  # 0.1 % quantile at 3 degrees of freedom


def test_noise_has_gumbel_moments_and_no_infinity() -> None:
    noise = sampling.gumbel_noise(torch.tensor([0, 1, 2**62]), torch.tensor([0, 7, 123456]), 200_000)
    assert torch.isfinite(noise).all()
    assert (noise.mean(-1) - 0.5772).abs().max() < 0.02
    assert (noise.var(-1) - math.pi**2 / 6).abs().max() < 0.03
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.01


def test_row_is_independent_of_its_neighbours(logits: torch.Tensor) -> None:
    me = row(5, seed=42, position=3, temperature=0.8, top_p=0.9, frequency_penalty=0.5)
    others = [
        row(1, temperature=0.0), row(2, seed=7, top_k=3), row(3, seed=8, min_p=0.2), row(4, seed=9, logprobs=5),
    ]  # fmt: skip
    results = set()
    for batch, at in [([me], 0), ([*others, me], 4), ([me, *others], 0), ([others[0], me, others[1]], 1)]:
        s = sampler()
        for r in batch:
            s.start_row(r.row, r.params, [1, 2], [3, 3])
        mine = logits[:1].expand(len(batch), -1).clone()
        results.add(draw(mine, batch, s)[at])
    assert len(results) == 1


def test_seed_and_position_change_the_draw(logits: torch.Tensor) -> None:
    same = torch.zeros(1, V)
    assert draw(same, [row(seed=1)]) == draw(same, [row(seed=1)])
    assert len({draw(same, [row(seed=s)])[0] for s in range(20)}) > 5
    assert len({draw(same, [row(position=p)])[0] for p in range(20)}) > 5


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-320])
def test_greedy(logits: torch.Tensor, temperature: float) -> None:
    rows = [row(i, seed=i, temperature=temperature) for i in range(len(logits))]
    assert draw(logits, rows) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("k", [1, 2, 5, V, 10**12])
def test_top_k_stays_within_the_k_best(logits: torch.Tensor, k: int) -> None:
    rows = [row(i, seed=i, top_k=k) for i in range(len(logits))]
    best = logits.topk(min(k, V)).indices
    picks = draw(logits, rows)
    assert all(p in best[i].tolist() for i, p in enumerate(picks))
    if k >= V:
        assert picks == draw(logits, [row(i, seed=i) for i in range(len(logits))])


@pytest.mark.parametrize("p", [1e-9, 0.3, 0.9])
def test_top_p_keeps_the_smallest_sufficient_set(logits: torch.Tensor, p: float) -> None:
    masked = sampling.mask_top_k_top_p(logits, torch.full((64,), V), torch.full((64,), p))
    for before, after in zip(logits.softmax(-1), masked):
        kept = before[torch.isfinite(after)].sort(descending=True).values
        assert kept.sum() >= p - 1e-6
        assert len(kept) == 1 or kept[:-1].sum() < p
        assert kept.min() >= before[~torch.isfinite(after)].max()


def test_min_p(logits: torch.Tensor) -> None:
    masked = sampling.mask_min_p(logits, torch.full((64,), 0.1))
    probs = logits.softmax(-1)
    assert torch.equal(torch.isfinite(masked), probs >= 0.1 * probs.amax(-1, keepdim=True))


def test_penalties_by_their_definition() -> None:
    logits = torch.tensor([[1.0, -1.0, 2.0, 3.0, 0.5]])
    seen = torch.tensor([[True, True, False, False, False]])
    counts = torch.tensor([[0, 2, 1, 0, 0]])
    out = sampling.apply_penalties(logits, seen, counts, torch.tensor([2.0]), torch.tensor([0.25]), torch.tensor([0.5]))
    assert torch.allclose(out, torch.tensor([[0.5, -2.0 - 0.5 - 0.5, 1.0 - 0.25 - 0.5, 3.0, 0.5]]))


def test_counts_grow_with_the_tokens_drawn_and_reset_with_the_row() -> None:
    s = sampler()
    flat = torch.zeros(1, V)
    flat[0, 7] = 1.0
    r = row(3, temperature=0.0, frequency_penalty=2.0)
    s.start_row(3, r.params, [7], [])
    assert draw(flat, [r], s) == [7]
    assert draw(flat, [r], s) != [7]
    s.start_row(3, r.params, [7], [])
    assert draw(flat, [r], s) == [7]
    s.start_row(3, r.params, [], [7])
    assert draw(flat, [r], s) != [7], "outputs of a resumed sequence count"


def test_logit_bias_and_min_tokens(logits: torch.Tensor) -> None:
    assert draw(logits, [row(i, temperature=0.0, logit_bias={9: 100.0}) for i in range(64)]) == [9] * 64
    eos_best = torch.zeros(1, V)
    eos_best[0, 0], eos_best[0, 4] = 9.0, 8.0
    assert draw(eos_best, [row(temperature=0.0, min_tokens=2, position=1)]) == [4]
    assert draw(eos_best, [row(temperature=0.0, min_tokens=2, position=2)]) == [0]
    assert draw(eos_best, [row(temperature=0.0, min_tokens=2, position=1, stop_token_ids=(4,))]) not in ([0], [4])


def test_logprobs_are_of_the_raw_logits_unless_processed(logits: torch.Tensor) -> None:
    r = row(temperature=0.0, logprobs=3, logit_bias={5: 100.0})
    raw = sampler().sample(logits[:1].clone(), [r])
    assert raw.ids_N.tolist() == [5]
    assert raw.top is not None
    (lp,) = raw.top.to_host([5], [3])
    expected = logits[0].log_softmax(-1)
    assert lp.logprob == pytest.approx(expected[5].item(), abs=1e-6)
    assert [t for t, _ in lp.top] == expected.topk(3).indices.tolist()
    processed = sampler("processed").sample(logits[:1].clone(), [r])
    assert processed.top is not None
    assert processed.top.to_host([5], [1])[0].logprob == pytest.approx(0.0, abs=1e-6)


def test_minus_infinity_is_reported_as_a_finite_floor() -> None:
    logits = torch.full((1, V), -torch.inf)
    logits[0, 2] = 1.0
    out = sampler().sample(logits, [row(temperature=1.0, logprobs=3)])
    assert out.top is not None
    (lp,) = out.top.to_host(out.ids_N.tolist(), [3])
    assert (lp.token, lp.logprob) == (2, 0.0)
    assert [v for _, v in lp.top[1:]] == [-9999.0, -9999.0]
    assert not out.broken_N.any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_logits_are_flagged_for_their_row_only(logits: torch.Tensor, value: float) -> None:
    logits[1, 3] = value
    out = sampler().sample(logits[:3].clone(), [row(0), row(1), row(2)])
    assert out.broken_N.tolist() == [False, True, False]


def test_all_tokens_banned_by_bias_is_still_a_draw(logits: torch.Tensor) -> None:
    bias = dict.fromkeys(range(V), -100.0)
    assert 0 <= draw(logits[:1], [row(logit_bias=bias)])[0] < V


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("edited", [{}, {"logit_bias": {3: 0.01}}, {"repetition_penalty": 1.3}, {"min_tokens": 5}])
def test_bf16_logits_give_what_their_values_in_fp32_give(logits: torch.Tensor, mode: str, edited: dict) -> None:
    """A bias too small for bf16 counts; the logits stay as they are."""
    narrow = logits.to(torch.bfloat16)
    before = narrow.clone()
    rows = [row(i, seed=i, top_k=i % 7, logprobs=4, **(edited if i % 2 else {})) for i in range(64)]
    results = []
    for x in (narrow, narrow.float()):
        s = sampler(mode)
        for r in rows:
            s.start_row(r.row, r.params, [1, 2], [3, 3])
        results.append(s.sample(x, rows))
    assert torch.equal(narrow, before)
    got, expected = results
    assert torch.equal(got.ids_N, expected.ids_N)
    assert torch.equal(got.broken_N, expected.broken_N)
    assert got.top is not None
    assert expected.top is not None
    for name in ("chosen_N", "ids_NK", "values_NK"):
        assert torch.equal(getattr(got.top, name), getattr(expected.top, name)), name
        assert getattr(got.top, name).dtype == getattr(expected.top, name).dtype
