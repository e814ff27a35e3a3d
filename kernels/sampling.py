"""Draws from logits, row by row: counter-based Gumbel noise, top-k / top-p / min-p, penalties, normalisers.

Every function treats a row by itself, so a row's result does not depend on which other rows share the batch. `draw` on
a GPU never sorts: a row's winner is the best of its chunks (two launches), and where a row is truncated, the second
launch first searches the logit at which its kept set ends.
"""

from dataclasses import dataclass

import torch

from loraplex.kernels.devices import dependent_launch, use_triton
from loraplex.kernels.tuning import power_of_two

BLOCK = 2048
LONG_CHUNK, SHORT_CHUNK, FEW_ROWS = 8192, 2048, 16
"""Tokens of a program of the first launch; short chunks give few rows enough programs."""
SEARCH_WARPS, SEARCH_STAGES, SEARCH_REGISTERS = 8, 4, 128
"""Two programs on an SM: 256 rows are under way at once on an H200."""
LISTED = 2048
"""Tokens of a truncated row that are sorted out apart from the rest."""

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


@dataclass(frozen=True)
class DrawParams:
    """How each of N rows draws, on the device."""

    temperature_N: torch.Tensor
    """fp32; 0: greedy, the rest of the row is not looked at."""
    top_k_N: torch.Tensor
    """int32; 0 and from V on: all."""
    top_p_N: torch.Tensor
    """fp32; 1: all."""
    min_p_N: torch.Tensor
    """fp32; 0: all."""
    seeds_N: torch.Tensor
    """int64."""
    positions_N: torch.Tensor
    """int32 or int64."""
    noisy: bool
    """Some row is not greedy. Known on the host, as `cut`: False spares work."""
    cut: bool
    """Some row that is not greedy has a top-k, top-p or min-p."""


def shape_logits(logits_NV: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Logits over temperature, −inf outside of what a row keeps: min-p first, then top-k, then top-p. logits fp32."""
    if not params.noisy:
        return logits_NV
    greedy_N = params.temperature_N == 0
    scaled_NV = logits_NV / torch.where(greedy_N, 1.0, params.temperature_N)[:, None]
    if not params.cut:
        return scaled_NV
    size = logits_NV.shape[-1]
    top_k_N = torch.where(greedy_N | (params.top_k_N <= 0), size, params.top_k_N)
    kept_NV = mask_min_p(scaled_NV, torch.where(greedy_N, 0.0, params.min_p_N))
    return mask_top_k_top_p(kept_NV, top_k_N, torch.where(greedy_N, 1.0, params.top_p_N))


def draw_reference(logits_NV: torch.Tensor, params: DrawParams) -> tuple[torch.Tensor, torch.Tensor]:
    logits_NV = logits_NV.float()
    broken_N = torch.isnan(logits_NV).any(-1) | torch.isposinf(logits_NV).any(-1)
    scores_NV = shape_logits(logits_NV, params)
    if params.noisy:
        noise_NV = gumbel_noise(params.seeds_N, params.positions_N.long(), logits_NV.shape[-1])
        scores_NV = torch.where(params.temperature_N[:, None] == 0, scores_NV, scores_NV + noise_NV)
    return scores_NV.argmax(-1), broken_N


def draw(logits_NV: torch.Tensor, params: DrawParams) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row: argmax(shape_logits(logits) + gumbel_noise), of greedy rows argmax(logits).

    logits: [N, V] in any float type, not changed; all is computed in fp32, so that bf16 logits give the draws of
    the same numbers in fp32. Returns ids int64 [N] and broken bool [N]: the row holds NaN or +inf, and its id is any
    token. The kernels round in another order than the reference: the draws differ where two scores,
    or a kept set's end, are equal but for fp32 rounding. Equal scores go to the lower id.
    """
    if not use_triton(logits_NV) or logits_NV.shape[0] == 0:
        return draw_reference(logits_NV, params)
    from loraplex.kernels import _triton_sampling as kernels

    assert logits_NV.stride(1) == 1, "rows must be contiguous"
    rows, size = logits_NV.shape
    chunk = SHORT_CHUNK if rows <= FEW_ROWS else LONG_CHUNK
    parts = -(-size // chunk)
    values = logits_NV.new_empty(rows, parts, dtype=torch.float32)
    indices = torch.empty(rows, parts, dtype=torch.int32, device=logits_NV.device)
    ids_N = torch.empty(rows, dtype=torch.int64, device=logits_NV.device)
    broken_N = torch.empty(rows, dtype=torch.uint8, device=logits_NV.device)
    totals = (
        (torch.empty_like(indices), torch.empty_like(values), torch.empty_like(values)) if params.cut else (None,) * 3
    )
    pdl, fast = dependent_launch(logits_NV.device), logits_NV.is_cuda
    rules = (params.temperature_N, params.top_k_N, params.top_p_N, params.min_p_N, params.seeds_N, params.positions_N)
    layout = {"ROW": logits_NV.stride(0), "SIZE": size, "PARTS": parts, "BLOCK": BLOCK, "FAST": fast}
    kernels.race_parts[(rows, parts)](
        logits_NV,
        *rules,
        values,
        indices,
        *totals,
        CHUNK=chunk,
        NOISY=params.noisy,
        CUT=params.cut,
        num_warps=4,
        **layout,
        **pdl,
    )
    block_p = power_of_two(parts)
    if params.cut:
        kernels.finish_cut[(rows,)](
            logits_NV,
            *rules,
            values,
            indices,
            *totals,
            values.new_empty(rows, LISTED),
            torch.empty(rows, LISTED, dtype=torch.int32, device=logits_NV.device),
            ids_N,
            broken_N,
            CAPACITY=LISTED,
            BLOCK_P=block_p,
            STAGES=SEARCH_STAGES,
            num_warps=SEARCH_WARPS,
            maxnreg=SEARCH_REGISTERS,
            **layout,
            **pdl,
        )
    else:
        kernels.finish[(rows,)](values, indices, ids_N, broken_N, PARTS=parts, BLOCK_P=block_p, num_warps=1, **pdl)
    return ids_N, broken_N.view(torch.bool)


def log_normaliser(logits_NV: torch.Tensor) -> torch.Tensor:
    """log Σ exp(logits) over the vocabulary, fp32 [N]: what a logprob is below its logit. logits in any float
    type."""
    if not use_triton(logits_NV) or logits_NV.shape[0] == 0:
        return torch.logsumexp(logits_NV.float(), dim=-1)
    from loraplex.kernels import _triton_sampling as kernels

    assert logits_NV.stride(1) == 1, "rows must be contiguous"
    rows, size = logits_NV.shape
    chunk = SHORT_CHUNK if rows <= FEW_ROWS else LONG_CHUNK
    parts = logits_NV.new_empty(rows, -(-size // chunk), dtype=torch.float32)
    kernels.normaliser_parts[tuple(parts.shape)](
        logits_NV,
        parts,
        ROW=logits_NV.stride(0),
        SIZE=size,
        PARTS=parts.shape[1],
        CHUNK=chunk,
        BLOCK=BLOCK,
        num_warps=4,
        **dependent_launch(logits_NV.device),
    )
    return torch.logsumexp(parts, dim=-1)
