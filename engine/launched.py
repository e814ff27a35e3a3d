"""A step that runs: what the runner hands back at once, and what becomes of it when its ids arrive on the host."""

from dataclasses import dataclass, field

import torch

from loraplex.engine.messages import TokenLogprobs
from loraplex.engine.sampler import Sampled, TopLogprobs
from loraplex.engine.step import StepResult


@dataclass(frozen=True)
class PromptLogprobs:
    """Of some consecutive prompt positions of one row of the plan, on their way to the host."""

    row: int
    tokens: list[int]
    """The prompt token after each position."""
    count: int
    """Alternatives of each."""
    top: TopLogprobs


@dataclass(frozen=True)
class SampledRows:
    """Draws on their way to the host."""

    at: list[int]
    """Row of the plan behind each draw."""
    drawn: Sampled
    logprobs: list[int | None]
    """Alternatives asked for by each; None: no logprobs."""


@dataclass
class LaunchedStep:
    """Everything about a step on rank 0 that its requests wait for."""

    num_rows: int
    sampled: SampledRows | None = None
    prompts: list[PromptLogprobs] = field(default_factory=list)
    done: torch.cuda.Event | None = None
    """Passed when all values are on the host; None: they are there."""

    def result(self) -> StepResult:
        """Waits for the device to finish the step."""
        if self.done is not None:
            self.done.synchronize()
        result = StepResult(
            tokens=[-1] * self.num_rows,
            broken=[False] * self.num_rows,
            logprobs=[None] * self.num_rows,
            prompt_logprobs=[[] for _ in range(self.num_rows)],
        )
        for part in self.prompts:
            result.prompt_logprobs[part.row] += part.top.to_host(part.tokens, [part.count] * len(part.tokens))
        if self.sampled is not None:
            _fill(result, self.sampled)
        return result


def _fill(result: StepResult, sampled: SampledRows) -> None:
    tokens = sampled.drawn.ids_N.tolist()
    broken = sampled.drawn.broken_N.tolist()
    logprobs: list[TokenLogprobs] | None = None
    if sampled.drawn.top is not None:
        logprobs = sampled.drawn.top.to_host(tokens, [k or 0 for k in sampled.logprobs])
    for n, i in enumerate(sampled.at):
        result.tokens[i] = tokens[n]
        result.broken[i] = broken[n]
        if logprobs is not None and sampled.logprobs[n] is not None:
            result.logprobs[i] = logprobs[n]
