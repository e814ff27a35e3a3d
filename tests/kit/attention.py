"""Ragged steps of attention over a paged cache that is NaN wherever nothing was stored."""

from dataclasses import dataclass

import torch

from loraplex.kernels.attention.paged import paged_attention
from loraplex.kernels.attention.plan import AttentionBackend, AttentionPlan
from loraplex.kernels.attention.reference import FP8, store_kv_reference


@dataclass
class Step:
    """`rows`: (new tokens, all tokens) of each row. The queries of every row, and its keys and values by position."""

    rows: list[tuple[int, int]]
    q_THD: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    plan: AttentionPlan
    scales: tuple[float, float]

    @property
    def tokens(self) -> int:
        return sum(new for new, _ in self.rows)

    def run(self, **options) -> torch.Tensor:
        k_scale, v_scale = self.scales
        return paged_attention(
            self.q_THD,
            self.k_cache,
            self.v_cache,
            self.plan,
            scale=self.q_THD.shape[2] ** -0.5,
            k_scale=k_scale,
            v_scale=v_scale,
            **options,
        )

    def expected(self, window: int | None = None, sinks_H: torch.Tensor | None = None) -> torch.Tensor:
        """Softmax written out, in fp32: [tokens, H, D]."""
        out, start = [], 0
        for (new, length), k_LGD, v_LGD in zip(self.rows, self.keys, self.values, strict=True):
            q_NHD = self.q_THD[start : start + new].float()
            start += new
            repeats = q_NHD.shape[1] // k_LGD.shape[1]
            k_LHD, v_LHD = (x.float().repeat_interleave(repeats, dim=1) for x in (k_LGD, v_LGD))
            weights_HNL = torch.einsum("nhd,lhd->hnl", q_NHD, k_LHD).mul(q_NHD.shape[2] ** -0.5)
            at_N1 = torch.arange(length - new, length, device=q_NHD.device)[:, None]
            at_L = torch.arange(length, device=q_NHD.device)
            sees_NL = at_L <= at_N1
            if window is not None:
                sees_NL &= at_N1 - at_L < window
            highest = weights_HNL.amax(-1, keepdim=True)
            weights_HNL = (weights_HNL - highest).exp() * sees_NL
            total = weights_HNL.sum(-1, keepdim=True)
            if sinks_H is not None:
                total = total + (sinks_H[:, None, None] - highest).exp()
            out.append(torch.einsum("hnl,lhd->nhd", weights_HNL / total, v_LHD))
        return torch.cat(out)


def make_step(
    rows: list[tuple[int, int]],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 8,
    page_size: int = 4,
    padding_rows: int = 0,
    padding_tokens: int = 0,
    table_width: int = 0,
    num_pages: int | None = None,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    backend: AttentionBackend = "auto",
    is_mixed: bool = True,
    coarse: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> Step:
    """Stores the keys and values of all rows, in shuffled pages: the cached part of a row first, then the new tokens as
    the step would, padding tokens among them.

    coarse: keys and values that e4m3 holds exactly, for the interpreter, whose rounding of small ones is not torch's.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    counts = [-(-length // page_size) for _, length in rows]
    num_pages = num_pages or sum(counts) + 3
    shuffled = torch.randperm(num_pages, generator=generator, dtype=torch.int32).split(
        [*counts, num_pages - sum(counts)]
    )
    width = max(*counts, table_width)
    table = torch.full((len(rows) + padding_rows, width), 1 << 30, dtype=torch.int32)  # reading there is an error
    for row, pages in enumerate(shuffled[:-1]):
        table[row, : len(pages)] = pages
    slots = [
        torch.tensor([int(pages[p // page_size]) * page_size + p % page_size for p in range(length)])
        for (_, length), pages in zip(rows, shuffled, strict=False)
    ]
    query_lens = [new for new, _ in rows] + [0] * padding_rows
    seq_lens = [length for _, length in rows] + [0] * padding_rows
    is_decode = all(new == 1 for new, _ in rows) and padding_tokens == padding_rows
    cache_dtype = cache_dtype or dtype
    cache_shape = (num_pages * page_size, kv_heads, dim)
    k_cache, v_cache = (torch.full(cache_shape, torch.nan, device=device).to(cache_dtype) for _ in range(2))
    keys, values, new_slots, new_keys, new_values = [], [], [], [], []
    for (new, length), at in zip(rows, slots, strict=True):
        k, v = normal(length, kv_heads, dim), normal(length, kv_heads, dim)
        if coarse:
            k, v = (x.mul(4).round().div(4).clamp(-3.75, 3.75) for x in (k, v))
        keys.append(_rounded(k, cache_dtype, scales[0]))
        values.append(_rounded(v, cache_dtype, scales[1]))
        cached = length - new
        for x, cache, scale in ((k, k_cache, scales[0]), (v, v_cache, scales[1])):
            _bits(cache)[at[:cached].to(device)] = _bits((x[:cached].float() / scale).to(cache_dtype))
        new_slots.append(at[cached:])
        new_keys.append(k[cached:])
        new_values.append(v[cached:])
    new_slots.append(torch.full((padding_tokens,), -1))
    bounds = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    plan = AttentionPlan(
        slot_mapping_T=torch.cat(new_slots).to(device),
        page_table_BP=table.to(device),
        query_start_B1=bounds.to(device),
        seq_lens_B=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        query_lens=query_lens,
        seq_lens=seq_lens,
        page_size=page_size,
        is_decode=is_decode,
        is_mixed=is_mixed,
        backend=backend,
    )
    junk = torch.full((padding_tokens, kv_heads, dim), torch.nan, dtype=dtype, device=device)
    # As in a fused projection: rows of q, k and v lie side by side.
    k_THD, v_THD = torch.stack((torch.cat([*new_keys, junk]), torch.cat([*new_values, junk])), dim=1).unbind(1)
    store_kv_reference(k_THD, v_THD, k_cache, v_cache, plan.slot_mapping_T, *scales)
    q_THD = normal(sum(query_lens) + padding_tokens, 3, heads, dim)[:, 1]
    return Step(rows, q_THD, keys, values, k_cache, v_cache, plan, scales)


def _rounded(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    return (x.float() / scale).to(dtype).float() * scale


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype == FP8 else x
