"""The engine as the HTTP handlers see it. `client.EngineClient` is it over a pipe; tests use a scripted one."""

from collections.abc import AsyncIterator
from typing import Protocol

from loraplex.engine.messages import AdapterInfo, EngineState, ErrorInfo, Heartbeat, Ready, TokenOut
from loraplex.engine.request import Request


class EngineError(Exception):
    """The engine refused or failed an operation; `info` says how, in words for the client."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


class RequestStream(Protocol):
    """Outputs of one submitted request, until each of its n choices has a finish_reason."""

    def __aiter__(self) -> AsyncIterator[list[TokenOut]]:
        """Yields all outputs waiting since the last turn (one list may hold several steps and choices).

        A dead engine ends it with `EngineError` (status 503). Errors of the request itself arrive as
        `TokenOut.error`.
        """
        ...

    def abort(self) -> None:
        """Tells the engine to stop all choices and forgets the request. Harmless twice, and after the end."""
        ...


class Engine(Protocol):
    info: Ready
    adapters: dict[str, AdapterInfo]
    """Names that answer requests now."""
    last_heartbeat: Heartbeat | None

    @property
    def healthy(self) -> bool:
        """Process alive and its step loop turning (heartbeat younger than the watchdog)."""
        ...

    def new_id(self) -> int: ...

    def submit(self, request: Request) -> RequestStream:
        """Raises EngineError 503 when the engine is dead or the queue is full."""
        ...

    async def load_adapter(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        """Raises EngineError: 400 invalid, 404 no files, 409 name taken, 422 invalid adapter, 507 no room."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Raises EngineError 404. Requests in flight finish; new ones get 404 at once."""
        ...

    async def state(self) -> EngineState: ...
