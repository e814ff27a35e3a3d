"""Draws from logits, row by row: counter-based Gumbel noise, top-k / top-p / min-p masks, penalties.

All of it is the torch reference. Every function treats a row by itself, so a row's result does not depend on which
other rows share the batch.
"""

import torch

_MASK32 = 0xFFFFFFFF


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """Bijective 32-bit hash (the low-bias multiply-xorshift constants found by C. Wellons) on int64 lanes."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _MASK32
    x = (x ^ (x >> 15)) * 0x846CA68B & _MASK32
    return x ^ (x >> 16)


def gumbel_noise(seeds_N: torch.Tensor, positions_N: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise [N, V], fp32, a pure function of (seed, position, token).

    argmax(logits + noise) draws from softmax(logits). seeds int64 (63 bits used), positions int64. Works without
    generator state, so preemption, batch order and device do not change a request's draws.
    """
    key = _mix32(seeds_N & _MASK32)
    key = _mix32(key ^ (seeds_N >> 32 & _MASK32))
    key = _mix32(key ^ (positions_N & _MASK32))
    tokens = torch.arange(vocab_size, device=seeds_N.device, dtype=torch.int64)
    bits = _mix32(_mix32(tokens * 0x9E3779B1 & _MASK32)[None, :] ^ key[:, None])
    # w in (0, 1], exact near 0 where the winning draws are: the exponential -log1p(-w) is never 0, so the noise is
    # never +inf (u near 1 in -log(-log u) would round to it once in 2^24 draws).
    w = (bits.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-w))


def apply_penalties(
    logits_NV: torch.Tensor,
    prompt_seen_NV: torch.Tensor,
    output_counts_NV: torch.Tensor,
    repetition_N: torch.Tensor,
    frequency_N: torch.Tensor,
    presence_N: torch.Tensor,
) -> torch.Tensor:
    """Logits after the three penalties. Repetition looks at prompt and output (divides positive, multiplies negative
    logits); frequency and presence, as OpenAI defines them, at the output only."""
    produced = output_counts_NV > 0
    factor = torch.where(prompt_seen_NV | produced, repetition_N[:, None], 1.0)
    logits = torch.where(logits_NV > 0, logits_NV / factor, logits_NV * factor)
    return logits - frequency_N[:, None] * output_counts_NV - presence_N[:, None] * produced


def mask_min_p(logits_NV: torch.Tensor, min_p_N: torch.Tensor) -> torch.Tensor:
    """−inf where a token's probability is under min_p times the likeliest token's. min_p 0 keeps all."""
    floor = logits_NV.amax(-1, keepdim=True) + torch.log(min_p_N)[:, None]
    return logits_NV.masked_fill(logits_NV < floor, -torch.inf)


def mask_top_k_top_p(logits_NV: torch.Tensor, top_k_N: torch.Tensor, top_p_N: torch.Tensor) -> torch.Tensor:
    """−inf outside the k likeliest tokens, then outside the smallest set of them whose probability reaches top_p.

    top_k int64, V keeps all; top_p fp32, 1 keeps all. Ties beyond k fall to the lower token ids (a stable sort); the
    likeliest token always stays.
    """
    values, order = torch.sort(logits_NV, dim=-1, descending=True, stable=True)
    ranks = torch.arange(values.shape[-1], device=values.device)
    values = values.masked_fill(ranks[None, :] >= top_k_N[:, None], -torch.inf)
    probs = torch.softmax(values, dim=-1)
    before = torch.cumsum(probs, dim=-1) - probs
    drop = (before >= top_p_N[:, None]) & (top_p_N[:, None] < 1.0)
    drop[:, 0] = False
    values = values.masked_fill(drop, -torch.inf)
    return torch.empty_like(logits_NV).scatter_(-1, order, values)
