"""Tokens and logprobs from logits, on the device, batched. Rank 0 only; other ranks receive the ids.

Nothing here waits for the device: what comes from the host is pinned, what goes there is fetched later.

A request's draws depend on its seed and on how many tokens it has, never on its neighbours (field case G10).
"""

from dataclasses import dataclass
from typing import Literal

import torch

from loraplex.engine.device import fetch, send
from loraplex.engine.messages import TokenLogprobs
from loraplex.engine.request import SamplingParams
from loraplex.engine.step import SampleRow
from loraplex.kernels import sampling

LOGPROB_FLOOR = -9999.0
"""How −inf is reported: JSON has no infinity."""
GREEDY_BELOW = 1e-5
"""Temperatures under it would overflow fp32 logits; they mean greedy."""


@dataclass(frozen=True)
class Sampled:
    """One step's draws, still on the device."""

    ids_N: torch.Tensor
    """int64 [N]."""
    broken_N: torch.Tensor
    """bool [N]: the row's logits held NaN or +inf."""
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
    """log-softmax of the logits at `tokens_N` and at the k largest, descending."""
    logprobs = torch.log_softmax(logits_NV, dim=-1)
    values, ids = torch.topk(logprobs, min(k, logits_NV.shape[-1]), dim=-1)
    return TopLogprobs(logprobs.gather(-1, tokens_N[:, None])[:, 0], ids, values)


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
        counts, seen = self._output_counts[row], self._prompt_seen[row]
        counts.zero_()
        if output_ids:
            outputs = self._index(output_ids)
            counts.index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))
        seen.zero_()
        seen.index_fill_(0, self._index(prompt_ids), True)

    def sample(self, logits_NV: torch.Tensor, rows: list[SampleRow]) -> Sampled:
        """Draws one token per row. logits fp32 [N, V]; they are not kept unchanged."""
        broken = torch.isnan(logits_NV).any(-1) | torch.isposinf(logits_NV).any(-1)
        params = [r.params for r in rows]
        wanted = max((p.logprobs for p in params if p.logprobs is not None), default=None)
        raw = logits_NV.clone() if wanted is not None and self.mode == "raw" else None
        logits = self._bias_and_mask(logits_NV, rows)
        logits = self._penalise(logits, rows)
        logits = self._reshape(logits, params)
        ids = self._draw(logits, rows)
        self._count(ids, rows)
        top = None
        if wanted is not None:
            top = top_logprobs(logits if raw is None else raw, ids, wanted)
        return Sampled(ids, broken, top)

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

    def _reshape(self, logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        """Temperature and the truncations, on the rows that draw."""
        drawing = [i for i, p in enumerate(params) if p.temperature >= GREEDY_BELOW]
        if drawing:
            at = self._index(drawing)
            logits[at] = logits[at] / self._floats([params[i].temperature for i in drawing])[:, None]
        floored = [i for i in drawing if params[i].min_p > 0]
        if floored:
            at = self._index(floored)
            logits[at] = sampling.mask_min_p(logits[at], self._floats([params[i].min_p for i in floored]))
        cut = [i for i in drawing if 0 < params[i].top_k < self.vocab_size or params[i].top_p < 1]
        if cut:
            at = self._index(cut)
            top_k = self._index([min(params[i].top_k, self.vocab_size) or self.vocab_size for i in cut])
            logits[at] = sampling.mask_top_k_top_p(logits[at], top_k, self._floats([params[i].top_p for i in cut]))
        return logits

    def _draw(self, logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
        drawing = [i for i, r in enumerate(rows) if r.params.temperature >= GREEDY_BELOW]
        if not drawing:
            return logits.argmax(-1)
        noise = sampling.gumbel_noise(
            self._index([rows[i].seed for i in drawing]),
            self._index([rows[i].position for i in drawing]),
            self.vocab_size,
        )
        if len(drawing) == len(rows):
            return (logits + noise).argmax(-1)
        noisy = logits.clone()
        noisy[self._index(drawing)] += noise
        return noisy.argmax(-1)

    def _count(self, ids: torch.Tensor, rows: list[SampleRow]) -> None:
        some = [i for i, r in enumerate(rows) if _has_penalties(r.params)]
        if some and self._output_counts is not None:
            self._output_counts[self._index([rows[i].row for i in some]), ids[self._index(some)]] += 1

    def _index(self, values: "list[int] | tuple[int, ...]") -> torch.Tensor:
        return send(values, torch.int64, self.device)

    def _floats(self, values: "list[float] | tuple[float, ...]") -> torch.Tensor:
        return send(values, torch.float32, self.device)


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
