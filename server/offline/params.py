"""Sampling parameters as users of `LLM` write them, read by the rules of the HTTP API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from pydantic import Field

from loraplex.server.protocol import INT32_MAX, GenerationFields


@dataclass(kw_only=True)
class SamplingParams:
    """How the tokens of a prompt are chosen and when they end. Names and bounds are those of the HTTP API.

    Without any SamplingParams the model's defaults (generation_config.json) hold; with one, these.
    """

    n: int = 1
    max_tokens: int | None = 16
    """None: all that the context leaves."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 keep every token."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    """k: the logprob of each token and of the k likeliest ones."""
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


class OfflineFields(GenerationFields):
    """The fields of a request without HTTP."""

    not_built: ClassVar = {k: v for k, v in GenerationFields.not_built.items() if k != "prompt_logprobs"}

    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    logprobs: int | None = Field(None, ge=0, le=20)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)


def read_params(params: SamplingParams | None) -> OfflineFields:
    """Raises InvalidRequestError naming the wrong parameter, ValueError for another class."""
    if params is None:
        return OfflineFields.read({"model": "", "max_tokens": SamplingParams.max_tokens})
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling_params must be a loraplex.SamplingParams, not {type(params).__name__}")
    given = {field.name: _json(getattr(params, field.name)) for field in fields(params)}
    return OfflineFields.read({"model": "", **given})


def _json(value: Any) -> Any:
    """As the same value arrives over HTTP: sequences are lists, keys are text."""
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    return value
