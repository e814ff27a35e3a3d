"""Body of `/v1/chat/completions`: messages, what their template sees, and the generation fields."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from loraplex.server.errors import InvalidRequestError, clip
from loraplex.server.protocol import INT32_MAX, GenerationFields
from loraplex.server.wire import Wire

MAX_MESSAGES = 10_000


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
    content: Annotated[str | None, BeforeValidator(lambda value: None if value is None else _content(value))] = None
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


TEMPLATE_KWARGS = frozenset({"enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "preserve_thinking"})
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
