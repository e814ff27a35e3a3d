"""API keys. Every route needs one, unknown routes included, except the open ones: closed by default.

The open routes are recognised by the router's own matching, so no spelling of a URL can look open to this
check and be routed elsewhere.
"""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.server.errors import UnauthorizedError, error_response


class RequireKey:
    """ASGI middleware: 401 unless the request brings a key as a bearer token or is for an open route."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open_routes = open_routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_open(scope) or self._has_key(scope):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        return await error_response(_refusal(scope))(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is Match.FULL for route in self._open_routes)

    def _has_key(self, scope: Scope) -> bool:
        headers = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(headers) != 1:
            return False
        scheme, _, token = headers[0].partition(b" ")
        given = _digest(token.strip())
        # Digests have one length, and all are compared: the time tells nothing about a key.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def _refusal(scope: Scope) -> UnauthorizedError:
    if any(name == b"authorization" for name, _ in scope["headers"]):
        return UnauthorizedError("The Authorization header holds no 'Bearer KEY' with a key of this server")
    return UnauthorizedError()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
