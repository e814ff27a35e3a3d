"""What operators and orchestrators ask: /health, /ready, /ping, /metrics, /version, /debug/state."""

import ipaddress
import os

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from loraplex.server.errors import NotFoundError, UnavailableError
from loraplex.server.front import Front
from loraplex.server.version import version

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def open_router(front: Front) -> APIRouter:
    """The routes that need no API key."""
    routes = APIRouter()

    @routes.get("/health")
    @routes.get("/ready")
    @routes.get("/ping")
    async def health() -> Response:
        if not front.engine.healthy:
            raise UnavailableError("The engine does not answer")
        return JSONResponse({"status": "ok"})

    return routes


def router(front: Front) -> APIRouter:
    routes = APIRouter()

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(front.metrics.render(), headers={"Content-Type": _PROMETHEUS})

    @routes.get("/version")
    async def show_version() -> Response:
        return JSONResponse({"version": version()})

    @routes.get("/debug/state", include_in_schema=False)
    async def state(request: Request) -> Response:
        if not _is_test_from_here(request):
            raise NotFoundError("Not Found")
        return JSONResponse(msgspec.to_builtins(await front.engine.state()))

    return routes


def _is_test_from_here(request: Request) -> bool:
    if os.environ.get("LORAPLEX_TEST_HOOKS") != "1" or request.client is None:
        return False
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
