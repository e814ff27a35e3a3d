"""What `LLM.generate` and `LLM.chat` return, with the names that users of vLLM know."""

from dataclasses import dataclass

from loraplex.engine.messages import TokenLogprobs
from loraplex.server.vocabulary import Vocabulary


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int | None
    """1 for the likeliest token; None when the token is none of the likeliest ones asked for."""
    decoded_token: str


Logprobs = dict[int, Logprob]
"""Token id → its logprob: the likeliest ones asked for, and the chosen one."""


@dataclass(frozen=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    """Every token counted, with the one that ended the text."""
    cumulative_logprob: float | None
    logprobs: list[Logprobs] | None
    """One per token, when asked for."""
    finish_reason: str
    """stop or length."""
    stop_reason: str | int | None
    """The stop string or stop token id, None for the model's own end."""


@dataclass(frozen=True)
class RequestOutput:
    prompt: str | None
    """None for a prompt of token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    """One per prompt token, the first None, when asked for."""
    outputs: list[CompletionOutput]
    adapter: str | None
    """None: the base model answered."""
    num_cached_tokens: int
    """Prompt tokens taken from the prefix cache."""


def named(vocabulary: Vocabulary, token: int, logprob: float, top: list[tuple[int, float]]) -> Logprobs:
    table = {id: Logprob(value, rank, vocabulary.name(id)) for rank, (id, value) in enumerate(top, 1)}
    table.setdefault(token, Logprob(logprob, None, vocabulary.name(token)))
    return table


def of_prompt(vocabulary: Vocabulary, entries: list[TokenLogprobs | None]) -> list[Logprobs | None]:
    return [None if e is None else named(vocabulary, e.token, e.logprob, e.top) for e in entries]
