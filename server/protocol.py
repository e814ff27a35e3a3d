"""Bodies of `/v1/completions` and `/v1/chat/completions`: every field, its bounds and its default."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from loraplex.server.errors import InvalidRequestError, clip
from loraplex.server.wire import Wire

MAX_PROMPTS = 1024
MAX_CHOICES = 4096
"""Prompts × n of one HTTP request."""
MAX_MESSAGES = 10_000
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
INT32_MAX = 2**31 - 1

Prompts = list[str] | list[list[int]]


def _prompts(value: Any) -> Prompts:
    """str | [str] | [id] | [[id]] as a list of texts or a list of id lists. Raises ValueError."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
    if all(type(item) is int for item in value):
        return [_ids(value, "")]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"holds {len(value)} prompts, at most {MAX_PROMPTS} are accepted")
    if all(isinstance(item, str) for item in value):
        return value
    if all(isinstance(item, list) for item in value):
        return [_ids(item, f"item {i}: ") for i, item in enumerate(value)]
    raise ValueError("its items must all be strings, all token ids, or all lists of token ids")


def _ids(value: list[Any], where: str) -> list[int]:
    if not value:
        raise ValueError(f"{where}an empty prompt")
    if not all(type(item) is int and 0 <= item <= INT32_MAX for item in value):
        raise ValueError(f"{where}token ids must be integers from 0 up")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} strings are accepted")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"each string must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("must be an object of token id → bias")
    return {_token_key(key): _bias(bias) for key, bias in value.items()}


def _token_key(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key):
        raise ValueError(f"{clip(key)} is not a token id")
    return int(key)


def _bias(value: Any) -> float:
    if type(value) not in (int, float) or not -100 <= value <= 100:
        raise ValueError("a bias must be a number from -100 to 100")
    return float(value)


def _lora_path(value: Any) -> str | list[str | None]:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str | None) for name in names):
        raise ValueError("must be an adapter's name, or a list with a name or null per prompt")
    return value


class StreamOptions(Wire):
    not_built: ClassVar = {"continuous_usage_stats": (False,)}
    include_usage: bool = False


def _stream_options(value: Any) -> StreamOptions:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    try:
        return StreamOptions.read(value)
    except InvalidRequestError as exc:
        raise ValueError(exc.message) from None


class GenerationFields(Wire):
    """Fields of both endpoints. `null` is the default everywhere."""

    not_built: ClassVar = {
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "allowed_token_ids": (),
        "bad_words": ([],),
        "prompt_logprobs": (),
        "logprob_token_ids": (),
        "truncate_prompt_tokens": (),
        "prompt_embeds": (),
        "structured_outputs": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "json_schema": (),
        "regex": (),
        "ebnf": (),
        "structural_tag": (),
        "stop_regex": (),
        "priority": (0,),
        "response_format": ({"type": "text"},),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "kv_transfer_params": (),
        "vllm_xargs": ({},),
        "return_tokens_as_token_ids": (False,),
        "thinking_token_budget": (),
        "session_params": (),
        "custom_logit_processor": (),
        "return_hidden_states": (False,),
    }

    model: str
    lora_path: Annotated[str | list[str | None] | None, BeforeValidator(_lora_path)] = None
    max_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX, description="-1 and 0 switch it off")
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    n: int = Field(1, ge=1, le=128)
    best_of: int | None = Field(None, ge=1, description="only equal to n")
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = Field(
        (), json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    )
    stop_token_ids: list[Annotated[int, Field(ge=0, le=INT32_MAX)]] = Field([], max_length=1024)
    min_tokens: int = Field(0, ge=0, le=INT32_MAX)
    ignore_eos: bool = False
    logit_bias: Annotated[dict[int, float], BeforeValidator(_logit_bias)] = Field({})
    stream: bool = False
    stream_options: Annotated[StreamOptions | None, BeforeValidator(_stream_options)] = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    cache_salt: str = Field("", max_length=128)

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream: true", param="stream_options")
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidRequestError("best_of is supported only when it equals n", param="best_of")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationFields):
    not_built: ClassVar = GenerationFields.not_built | {"suffix": ("",)}

    prompt: Annotated[Prompts, BeforeValidator(_prompts)]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    add_special_tokens: bool = True

    def check(self) -> None:
        super().check()
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise InvalidRequestError(f"prompts × n is more than {MAX_CHOICES}", param="n")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens: 0 is accepted only with echo: true", param="max_tokens")


def _content(value: Any) -> str:
    """A message's text; several text parts are joined by line breaks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of text parts")
    return "\n".join(_part_text(part) for part in value)


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise ValueError(f"only parts of type 'text' are supported, not {clip(kind)}")
    if not isinstance(part.get("text"), str):
        raise ValueError("a text part needs a string in 'text'")
    return part["text"]


def _arguments(value: Any) -> dict[str, Any]:
    """Arguments of an earlier tool call, which clients send as JSON text and templates read as an object."""
    try:
        arguments = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError("must be a JSON object")
    return arguments


class CalledFunction(Wire):
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments)]


class ToolCall(Wire):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | None, BeforeValidator(lambda value: None if value is None else _content(value))
    ] = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None

    def complaint(self) -> str | None:
        """What is wrong between the fields, if anything."""
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            return "content is required"
        if self.role == "tool" and self.tool_call_id is None:
            return "a tool message needs tool_call_id"
        return None

    def for_template(self) -> dict[str, Any]:
        fields = self.model_dump(exclude_none=True)
        return {"content": ""} | fields


TEMPLATE_KWARGS = frozenset(
    {"enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "preserve_thinking"}
)
"""What `chat_template_kwargs` may hold: switches that only a template reads."""


def _template_kwargs(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    for name, setting in value.items():
        if name not in TEMPLATE_KWARGS:
            raise ValueError(f"{clip(name)} is not accepted; known are {', '.join(sorted(TEMPLATE_KWARGS))}")
        if not isinstance(setting, str | int | float | None):
            raise ValueError(f"{name} must be a string, a number or a boolean")
    return value


class TemplateFields(Wire):
    """What the chat template sees."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_template_kwargs)] = Field({})
    add_generation_prompt: bool = True

    def check(self) -> None:
        super().check()
        for i, message in enumerate(self.messages):
            if (complaint := message.complaint()) is not None:
                raise InvalidRequestError(f"messages.{i}: {complaint}", param="messages")


class ChatRequest(TemplateFields, GenerationFields):
    not_built: ClassVar = GenerationFields.not_built | {
        "chat_template": (),
        "documents": ([],),
        "continue_final_message": (False,),
        "echo": (False,),
        "audio": (),
        "modalities": (["text"],),
        "prediction": (),
        "web_search_options": (),
    }

    max_completion_tokens: int | None = Field(None, ge=1, le=INT32_MAX, description="wins over max_tokens")
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.max_tokens == 0:
            raise InvalidRequestError("max_tokens must be at least 1", param="max_tokens")
