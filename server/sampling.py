"""From a request's fields and the model's defaults to the engine's SamplingParams, within the context
limit.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from loraplex.engine.config import ModelConfig
from loraplex.engine.messages import Ready
from loraplex.engine.request import SamplingParams
from loraplex.server.errors import ContextTooLongError, InvalidRequestError
from loraplex.server.protocol import GenerationFields

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing logits by them gains nothing and overflows."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling of requests that name none: the model's (generation_config.json) or OpenAI's (these
    values).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def of_model(cls, config: ModelConfig) -> Self:
        """What --sampling-defaults asks for. Raises ValueError naming the file for values no request could
        have.
        """
        path = Path(config.model_path) / "generation_config.json"
        if config.sampling_defaults == "openai" or not path.is_file():
            return cls()
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            found = cls(
                temperature=_or_default(stored.get("temperature"), 1.0),
                top_p=_or_default(stored.get("top_p"), 1.0),
                top_k=int(_or_default(stored.get("top_k"), 0)),
            )
        except (ValueError, TypeError, AttributeError) as exc:
            raise ValueError(f"{path}: {exc} (--sampling-defaults openai does without this file)") from exc
        if not (0 <= found.temperature <= 2 and 0 < found.top_p <= 1 and found.top_k >= -1):
            raise ValueError(f"{path}: out of range: {found} (--sampling-defaults openai does without this file)")
        return found


def _or_default(value: float | None, default: float) -> float:
    return default if value is None else float(value)


@dataclass(frozen=True)
class TokenBudget:
    """How many tokens a completion may have."""

    asked: int | None
    """None: `default`, shrunk to what is left."""
    default: int | None
    """None: all that is left."""
    asked_in: str
    """Name of the field that asked."""
    prompt_in: str
    """Name of the field that holds the prompt."""


def fit(budget: TokenBudget, prompt_tokens: int, info: Ready) -> int:
    """max_tokens of a prompt. Raises ContextTooLongError when it does not fit."""
    limit = min(info.context_length, info.max_total_tokens)
    what = "the KV pool" if info.max_total_tokens < info.context_length else "the model's context"
    room = limit - prompt_tokens
    if budget.asked is None and room >= 1:
        return room if budget.default is None else min(budget.default, room)
    if budget.asked is None:
        message = f"{what} holds {limit} tokens: the prompt's {prompt_tokens} leave no room for an answer"
    elif budget.asked > room:
        message = f"{what} holds {limit} tokens, but the prompt has {prompt_tokens}, and {budget.asked} were requested"
    else:
        return budget.asked
    param = budget.prompt_in if room < 1 else budget.asked_in
    raise ContextTooLongError(message[0].upper() + message[1:], param=param)


def check_ids(fields: GenerationFields, info: Ready) -> None:
    """Raises InvalidRequestError for token ids the model does not have."""
    for name, ids in (("logit_bias", fields.logit_bias), ("stop_token_ids", fields.stop_token_ids)):
        if any(token >= info.vocab_size for token in ids):
            raise InvalidRequestError(f"{name}: token ids must be below {info.vocab_size}", param=name)


def sampling_params(
    fields: GenerationFields,
    defaults: GenerationDefaults,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Raises InvalidRequestError when min_tokens is more than max_tokens."""
    if fields.min_tokens > max_tokens:
        message = f"min_tokens ({fields.min_tokens}) is more than max_tokens ({max_tokens})"
        raise InvalidRequestError(message, param="min_tokens")
    temperature = defaults.temperature if fields.temperature is None else fields.temperature
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=defaults.top_p if fields.top_p is None else fields.top_p,
        top_k=max(0, defaults.top_k if fields.top_k is None else fields.top_k),
        min_p=fields.min_p,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=fields.repetition_penalty,
        seed=fields.seed,
        logit_bias=fields.logit_bias,
        stop_token_ids=tuple(fields.stop_token_ids),
        min_tokens=fields.min_tokens,
        ignore_eos=fields.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
