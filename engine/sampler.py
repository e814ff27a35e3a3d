"""Tokens and logprobs from logits, on the device, batched. Rank 0 only; other ranks receive the ids.

Nothing here waits for the device: what comes from the host is pinned, what goes there is fetched later.

A request's draws depend on its seed and on how many tokens it has, never on its neighbours (field case G10).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from loraplex.engine.device import aligned, fetch, upload
from loraplex.engine.messages import TokenLogprobs
from loraplex.engine.request import SamplingParams
from loraplex.engine.step import SampleRow
from loraplex.kernels import sampling
from loraplex.kernels.sampling import DrawParams

LOGPROB_FLOOR = -9999.0
"""How −inf is reported: JSON has no infinity."""
GREEDY_BELOW = 1e-5
"""Temperatures under it would overflow fp32 logits; they mean greedy."""
MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class Sampled:
    """One step's draws, still on the device."""

    ids_N: torch.Tensor
    """int64 [N]."""
    broken_N: torch.Tensor
    """bool [N]: the row's logits held NaN or +inf, before or after its bias and penalties."""
    top: "TopLogprobs | None"

    def fetch(self) -> "Sampled":
        """The same on the host, on its way: `engine.device.fetch`."""
        return Sampled(fetch(self.ids_N), fetch(self.broken_N), self.top.fetch() if self.top is not None else None)


@dataclass(frozen=True)
class TopLogprobs:
    """Logprob of one token per row and of the K likeliest."""

    chosen_N: torch.Tensor
    ids_NK: torch.Tensor
    values_NK: torch.Tensor

    def fetch(self) -> "TopLogprobs":
        """The same on the host, on its way."""
        return TopLogprobs(fetch(self.chosen_N), fetch(self.ids_NK), fetch(self.values_NK))

    def to_host(self, tokens: list[int], counts: list[int]) -> list[TokenLogprobs]:
        """Per row the token's logprob and its `counts[i]` best alternatives. Waits for values on the device."""
        chosen = self.chosen_N.clamp(min=LOGPROB_FLOOR).tolist()
        ids = self.ids_NK.tolist()
        values = self.values_NK.clamp(min=LOGPROB_FLOOR).tolist()
        return [
            TokenLogprobs(token, chosen[i], list(zip(ids[i][:k], values[i][:k])))
            for i, (token, k) in enumerate(zip(tokens, counts))
        ]


def top_logprobs(logits_NV: torch.Tensor, tokens_N: torch.Tensor, k: int) -> TopLogprobs:
    """log-softmax, in fp32, of the logits at `tokens_N` and at the k largest, descending."""
    logits_NV = logits_NV.float()
    normaliser_N1 = sampling.log_normaliser(logits_NV)[:, None]
    values, ids = torch.topk(logits_NV, min(k, logits_NV.shape[-1]), dim=-1)
    chosen_N1 = logits_NV.gather(-1, tokens_N[:, None])
    return TopLogprobs((chosen_N1 - normaliser_N1)[:, 0], ids, values - normaliser_N1)


def pack_draws(rows: list[SampleRow], device: torch.device) -> DrawParams:
    """What `sampling.draw` needs of the rows, in one copy."""
    params = [r.params for r in rows]
    drawing = [p for p in params if p.temperature >= GREEDY_BELOW]
    n = len(rows)
    words = np.zeros((7, aligned(n)), dtype=np.int32)
    floats = words.view(np.float32)
    words[:2].reshape(-1).view(np.int64)[:n] = [r.seed for r in rows]
    words[2, :n] = [r.position for r in rows]
    words[3, :n] = [min(max(p.top_k, 0), MAX_INT32) for p in params]
    floats[4, :n] = [p.temperature if p.temperature >= GREEDY_BELOW else 0.0 for p in params]
    floats[5, :n] = [p.top_p for p in params]
    floats[6, :n] = [p.min_p for p in params]
    packed = upload(words, device)
    temperature_N, top_p_N, min_p_N = packed[4:7, :n].view(torch.float32)
    return DrawParams(
        temperature_N=temperature_N,
        top_k_N=packed[3, :n],
        top_p_N=top_p_N,
        min_p_N=min_p_N,
        seeds_N=packed[:2].view(-1).view(torch.int64)[:n],
        positions_N=packed[2, :n],
        noisy=bool(drawing),
        cut=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in drawing),
    )


class Sampler:
    """Keeps per-row penalty counts; everything else comes with each call."""

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        device: torch.device,
        mode: Literal["raw", "processed"],
        eos: frozenset[int],
    ) -> None:
        self.vocab_size = vocab_size
        self.max_rows = max_rows
        self.device = device
        self.mode = mode
        self.eos = eos
        self._output_counts: torch.Tensor | None = None
        self._prompt_seen: torch.Tensor | None = None

    def start_row(self, row: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]) -> None:
        """A sequence begins (or resumes) in `row`: sets its penalty counts. Costs nothing without penalties."""
        if not _has_penalties(params):
            return
        if self._output_counts is None or self._prompt_seen is None:
            shape = (self.max_rows, self.vocab_size)
            self._output_counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self._prompt_seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
        counts = np.bincount(np.asarray(output_ids, dtype=np.int64), minlength=self.vocab_size)
        self._output_counts[row] = upload(counts.astype(np.int32), self.device)
        self._prompt_seen[row] = False
        self._prompt_seen[row, self._index(prompt_ids)] = True

    def sample(self, logits_NV: torch.Tensor, rows: list[SampleRow]) -> Sampled:
        """Draws one token per row without waiting for the device. logits: [N, V] in the model's dtype, not changed.

        Bias and penalties are added in fp32; a step without them is drawn from the logits as they are."""
        wanted = max((r.params.logprobs for r in rows if r.params.logprobs is not None), default=None)
        logits = logits_NV
        edited = any(self._edits(r) for r in rows)
        if edited:
            logits = logits_NV.to(torch.float32, copy=True)
            logits = self._penalise(self._bias_and_mask(logits, rows), rows)
        draws = pack_draws(rows, self.device)
        ids, broken = sampling.draw(logits, draws)
        if edited:
            self._count(ids, rows)
        top = None
        if wanted is not None:
            top = top_logprobs(
                logits_NV if self.mode == "raw" else sampling.shape_logits(logits.float(), draws), ids, wanted
            )
        return Sampled(ids, broken, top)

    def _edits(self, row: SampleRow) -> bool:
        """Whether the row's logits are written to."""
        return bool(row.params.logit_bias) or bool(self._stops_too_early(row)) or _has_penalties(row.params)

    def _bias_and_mask(self, logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
        bias = [(i, t, b) for i, r in enumerate(rows) for t, b in r.params.logit_bias.items()]
        if bias:
            at, tokens, values = zip(*bias)
            logits[self._index(at), self._index(tokens)] += self._floats(values)
        masked = [(i, t) for i, r in enumerate(rows) for t in self._stops_too_early(r)]
        if masked:
            at, tokens = zip(*masked)
            logits[self._index(at), self._index(tokens)] = -torch.inf
        return logits

    def _stops_too_early(self, row: SampleRow) -> list[int]:
        """Ids that would end the request before its min_tokens."""
        if row.position >= row.params.min_tokens:
            return []
        return [*row.params.stop_token_ids, *(() if row.params.ignore_eos else self.eos)]

    def _penalise(self, logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
        some = [i for i, r in enumerate(rows) if _has_penalties(r.params)]
        if not some:
            return logits
        assert self._prompt_seen is not None, "start_row was not called"
        assert self._output_counts is not None
        at, state = self._index(some), self._index([rows[i].row for i in some])
        logits[at] = sampling.apply_penalties(
            logits[at],
            self._prompt_seen[state],
            self._output_counts[state],
            self._floats([rows[i].params.repetition_penalty for i in some]),
            self._floats([rows[i].params.frequency_penalty for i in some]),
            self._floats([rows[i].params.presence_penalty for i in some]),
        )
        return logits

    def _count(self, ids: torch.Tensor, rows: list[SampleRow]) -> None:
        some = [i for i, r in enumerate(rows) if _has_penalties(r.params)]
        if some and self._output_counts is not None:
            self._output_counts[self._index([rows[i].row for i in some]), ids[self._index(some)]] += 1

    def _index(self, values: "list[int] | tuple[int, ...]") -> torch.Tensor:
        return upload(np.asarray(values, dtype=np.int64), self.device)

    def _floats(self, values: "list[float] | tuple[float, ...]") -> torch.Tensor:
        return upload(np.asarray(values, dtype=np.float32), self.device)


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
