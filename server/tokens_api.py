"""POST /tokenize and /detokenize, also under /v1: the tokens a prompt or a conversation has, and back."""

import asyncio
import itertools
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field

from loraplex.server.body import read_json
from loraplex.server.errors import InvalidRequestError
from loraplex.server.front import Front
from loraplex.server.model_choice import choose_adapter
from loraplex.server.openapi import documented
from loraplex.server.prompts import prepare_chat
from loraplex.server.protocol import TemplateFields
from loraplex.server.wire import Wire


class TokenizeRequest(Wire):
    model: str | None = None
    prompt: str | list[str]
    add_special_tokens: bool = True


class TokenizeChatRequest(TemplateFields):
    not_built: ClassVar = {"chat_template": (), "tools": ([],), "continue_final_message": (False,)}

    model: str | None = None


def _token_lists(value: Any) -> list[int] | list[list[int]]:
    lists = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    if not all(isinstance(ids, list) and all(type(token) is int for token in ids) for ids in lists):
        raise ValueError("must be a list of token ids, or a list of such lists")
    return value


class DetokenizeRequest(Wire):
    model: str | None = None
    tokens: Annotated[list[int] | list[list[int]], BeforeValidator(_token_lists)]
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the text")


def router(front: Front) -> APIRouter:
    routes = APIRouter()

    @routes.post("/tokenize", openapi_extra=documented(TokenizeRequest))
    @routes.post("/v1/tokenize", openapi_extra=documented(TokenizeRequest))
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await read_json(request)
        tokens = await (_chat_tokens(front, body) if "messages" in body else _prompt_tokens(front, body))
        several = bool(tokens) and isinstance(tokens[0], list)
        count = [len(ids) for ids in tokens] if several else len(tokens)
        return {"tokens": tokens, "count": count, "max_model_len": front.max_length}

    @routes.post("/detokenize", openapi_extra=documented(DetokenizeRequest))
    @routes.post("/v1/detokenize", openapi_extra=documented(DetokenizeRequest))
    async def detokenize(request: Request) -> dict[str, Any]:
        text = await _text(front, await read_json(request))
        return {"text": text, "prompt": text}

    return routes


def _check_model(front: Front, model: str | None) -> None:
    if model is not None:
        choose_adapter(model, front.served_names, front.engine.adapters)


async def _chat_tokens(front: Front, body: dict[str, Any]) -> list[Any]:
    fields = TokenizeChatRequest.read(body)
    _check_model(front, fields.model)
    return (await prepare_chat(front, fields)).ids


async def _prompt_tokens(front: Front, body: dict[str, Any]) -> list[Any]:
    fields = TokenizeRequest.read(body)
    _check_model(front, fields.model)
    text = front.need_text("Tokenising", "prompt")
    texts = [fields.prompt] if isinstance(fields.prompt, str) else fields.prompt
    prompts = await asyncio.to_thread(text.encode, texts, add_special_tokens=fields.add_special_tokens)
    return prompts[0].ids if isinstance(fields.prompt, str) else [prompt.ids for prompt in prompts]


async def _text(front: Front, body: dict[str, Any]) -> str | list[str]:
    fields = DetokenizeRequest.read(body)
    _check_model(front, fields.model)
    text = front.need_text("Detokenising", "tokens")
    lists = [ids for ids in fields.tokens if isinstance(ids, list)]
    single = [token for token in fields.tokens if isinstance(token, int)]
    for token in itertools.chain(single, *lists):
        if not 0 <= token < front.engine.info.vocab_size:
            message = f"tokens: ids must be from 0 to {front.engine.info.vocab_size - 1}"
            raise InvalidRequestError(message, param="tokens")

    def decode(ids: list[int]) -> str:
        return text.decode(ids, skip_special_tokens=fields.skip_special_tokens)

    if lists:
        return await asyncio.to_thread(lambda: [decode(ids) for ids in lists])
    return await asyncio.to_thread(decode, single)
