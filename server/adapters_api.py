"""Loading and unloading adapters at run time, in the words of vLLM's and of SGLang's clients.

Both load through the same function; they differ in the bodies of their answers. Status codes are the true
ones: 400 wrong field, 403 not allowed here, 404 unknown, 409 name taken, 422 not a usable adapter, 507 no
room.
"""

import asyncio
import logging
import time

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, PlainTextResponse, Response

from loraplex.engine.messages import AdapterInfo
from loraplex.server.adapter_paths import resolve
from loraplex.server.body import read_json
from loraplex.server.engine_api import EngineError
from loraplex.server.errors import ApiError, ForbiddenError, InvalidRequestError, from_exception
from loraplex.server.front import Front
from loraplex.server.model_choice import check_adapter_name
from loraplex.server.openapi import documented
from loraplex.server.wire import Wire

log = logging.getLogger(__name__)


class LoadAdapterRequest(Wire):
    lora_name: str
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False
    pinned: bool = False
    """Stays on the device once it is there."""


class UnloadAdapterRequest(Wire):
    lora_name: str


async def _load(front: Front, request: Request) -> AdapterInfo:
    fields = LoadAdapterRequest.read(await read_json(request))
    lora = front.config.lora
    if not (lora.enable_lora or lora.lora_paths):
        raise ForbiddenError("Adapters are off: start the server with --enable-lora")
    try:
        check_adapter_name(fields.lora_name, front.served_names)
    except ValueError as exc:
        raise InvalidRequestError(str(exc), param="lora_name") from None
    path = await asyncio.to_thread(resolve, fields.lora_path, lora.adapter_root)
    started = time.monotonic()
    info = await front.engine.load_adapter(fields.lora_name, path, replace=fields.load_inplace, pinned=fields.pinned)
    seconds = time.monotonic() - started
    log.info("loaded adapter %r, version %d: %d bytes in %.2f s", info.name, info.version, info.bytes, seconds)
    return info


async def _unload(front: Front, request: Request) -> str:
    fields = UnloadAdapterRequest.read(await read_json(request))
    info = front.engine.adapters.get(fields.lora_name)
    started = time.monotonic()
    await front.engine.unload_adapter(fields.lora_name)
    if info is not None:
        seconds = time.monotonic() - started
        log.info("unloaded adapter %r, version %d: %d bytes in %.2f s", info.name, info.version, info.bytes, seconds)
    return fields.lora_name


def router(front: Front) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/load_lora_adapter", openapi_extra=documented(LoadAdapterRequest))
    async def load_vllm(request: Request) -> Response:
        info = await _load(front, request)
        return PlainTextResponse(f"LoRA adapter {info.name!r} is loaded.")

    @routes.post("/v1/unload_lora_adapter", openapi_extra=documented(UnloadAdapterRequest))
    async def unload_vllm(request: Request) -> Response:
        name = await _unload(front, request)
        return PlainTextResponse(f"LoRA adapter {name!r} is unloaded.")

    @routes.post("/load_lora_adapter", openapi_extra=documented(LoadAdapterRequest))
    async def load_sglang(request: Request) -> Response:
        try:
            await _load(front, request)
        except (ApiError, EngineError) as exc:
            return _sglang_failure(from_exception(exc))
        return _sglang_success(front)

    @routes.post("/unload_lora_adapter", openapi_extra=documented(UnloadAdapterRequest))
    async def unload_sglang(request: Request) -> Response:
        try:
            await _unload(front, request)
        except (ApiError, EngineError) as exc:
            return _sglang_failure(from_exception(exc))
        return _sglang_success(front)

    return routes


def _sglang_success(front: Front) -> Response:
    loaded = {name: info.path for name, info in front.engine.adapters.items()}
    return JSONResponse({"success": True, "error_message": None, "loaded_adapters": loaded})


def _sglang_failure(error: ApiError) -> Response:
    """SGLang's fields beside OpenAI's `error`. Without the loaded adapters: errors hold no paths."""
    body = {"success": False, "error_message": error.message, "loaded_adapters": None} | error.body()
    return JSONResponse(body, error.status, headers=error.headers)
