"""Reads a JSON body: bounded in size and time, strict JSON, an object. Every fault is a 4xx in OpenAI's
shape.
"""

import asyncio
import json
import math
import sys
from typing import Any

import orjson
from fastapi import Request
from starlette.requests import ClientDisconnect

from loraplex.server.errors import ClientGoneError, InvalidRequestError, with_status

MAX_BODY_BYTES = 32 * 2**20
BODY_TIMEOUT_S = 30.0
MAX_NUMBER = int(sys.float_info.max)
MAX_DIAGNOSED_BYTES = 2**20
"""Larger bodies that are not JSON get an error without the field's name, to spend no time on them."""


async def read_json(request: Request) -> dict[str, Any]:
    """The body's fields.

    Raises ApiError: 415 no JSON content type, 413 too large, 408 too slow, 400 no strict JSON object (NaN,
    Infinity, numbers beyond double, lone surrogates, NUL characters and deep nesting are no strict JSON
    here).
    """
    _check_content_type(request)
    raw = await _read(request)
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        reason, param = _diagnosis(raw)
        raise InvalidRequestError(f"The body is not valid JSON: {reason or exc.msg}", param=param) from None
    if not isinstance(fields, dict):
        raise InvalidRequestError("The body must be a JSON object")
    if b"\\u0000" in raw and (name := _first_bad_field(fields)) is not None:
        raise InvalidRequestError(f"{name}: NUL characters are not accepted", param=name)
    return fields


def _check_content_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise with_status(415, "Send the body as 'Content-Type: application/json'")


async def _read(request: Request) -> bytes:
    too_large = with_status(413, f"The body is larger than {MAX_BODY_BYTES} bytes")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
    except TimeoutError:
        raise with_status(408, f"The body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise ClientGoneError from None
    return bytes(body)


def _diagnosis(raw: bytes) -> tuple[str | None, str | None]:
    """What keeps `raw` from being strict JSON and the top-level field it is in, as far as Python's laxer reader can
    tell."""
    if len(raw) > MAX_DIAGNOSED_BYTES:
        return None, None
    constants: list[str] = []

    def constant(name: str) -> float:
        constants.append(name)
        return math.nan

    try:
        fields = json.loads(raw, parse_constant=constant)
    except (ValueError, RecursionError):
        return None, None
    reason = "NaN and Infinity are not JSON" if constants else None
    return reason, _first_bad_field(fields) if isinstance(fields, dict) else None


def _first_bad_field(fields: dict[str, Any]) -> str | None:
    bad = (name for name, value in fields.items() if _holds_bad_value(value))
    return next(bad, None)


def _holds_bad_value(value: Any) -> bool:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            waiting += item
        elif _is_bad(item):
            return True
    return False


def _is_bad(scalar: Any) -> bool:
    if isinstance(scalar, str):
        return "\0" in scalar or not _encodable(scalar)
    if isinstance(scalar, float):
        return not math.isfinite(scalar)
    return isinstance(scalar, int) and abs(scalar) > MAX_NUMBER


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
