"""Rows that draw in every way, and a check of `sampling.draw` that allows for rounding."""

import torch

from loraplex.kernels import sampling
from loraplex.kernels.sampling import DrawParams

WAYS: list[tuple[float, int, float, float]] = [
    (0.0, 0, 1.0, 0.0),
    (0.0, 3, 0.5, 0.2),
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.3, 5, 1.0, 0.0),
    (1.0, 40, 1.0, 0.0),
    (1.0, 10**9, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.8, 0, 0.5, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (1.0, 0, 0.999, 0.0),
    (1.5, 20, 0.8, 0.0),
    (1.0, 300, 0.3, 0.0),
    (1.0, 0, 1.0, 0.1),
    (2.0, 50, 0.95, 0.05),
    (1.0, 2, 0.99, 0.9),
]
"""(temperature, top_k, top_p, min_p)."""


def draw_params(ways: list[tuple[float, int, float, float]], device: str, seed: int = 0) -> DrawParams:
    temperature, top_k, top_p, min_p = zip(*ways, strict=True)
    generator = torch.Generator().manual_seed(seed)
    drawing = [w for w in ways if w[0] > 0]
    return DrawParams(
        temperature_N=torch.tensor(temperature, dtype=torch.float32, device=device),
        top_k_N=torch.tensor(top_k, dtype=torch.int32, device=device),
        top_p_N=torch.tensor(top_p, dtype=torch.float32, device=device),
        min_p_N=torch.tensor(min_p, dtype=torch.float32, device=device),
        seeds_N=torch.randint(2**62, (len(ways),), generator=generator).to(device),
        positions_N=torch.randint(10**6, (len(ways),), generator=generator, dtype=torch.int32).to(device),
        noisy=bool(drawing),
        cut=any(k > 0 or p < 1 or m > 0 for _, k, p, m in drawing),
    )


def check_draws(logits: torch.Tensor, params: DrawParams) -> int:
    """Ids must be the reference's, or as good up to rounding. Returns how many differ."""
    before = logits.clone()
    ids, broken = sampling.draw(logits, params)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    expected, expected_broken = sampling.draw_reference(logits, params)
    assert torch.equal(broken, expected_broken)
    assert ((ids >= 0) & (ids < logits.shape[1])).all()
    differ = ((ids != expected) & ~broken).nonzero()[:, 0]
    scores = sampling.shape_logits(logits.float(), params)
    if params.noisy:
        noise = sampling.gumbel_noise(params.seeds_N, params.positions_N.long(), logits.shape[1])
        scores = torch.where(params.temperature_N[:, None] == 0, scores, scores + noise)
    for row in differ.tolist():
        got, best = scores[row, ids[row]], scores[row, expected[row]]
        assert best == got or best - got < 1e-4, (row, ids[row], expected[row], got, best)
    return len(differ)
