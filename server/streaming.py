"""Sends a generation: whole, or as server-sent events.

A stream's status is decided by the first output of the engine: errors up to then are HTTP errors, later ones
an `error` frame that ends the stream without [DONE].
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import orjson
from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loraplex.server.answers import AnswerFormat, Json
from loraplex.server.choice import Piece
from loraplex.server.engine_api import EngineError
from loraplex.server.errors import ApiError, ClientGoneError, from_exception
from loraplex.server.generation import Generation

_log = logging.getLogger(__name__)
_DONE = b"data: [DONE]\n\n"


async def whole(request: Request, generation: Generation, form: AnswerFormat) -> Response:
    """The answer as one JSON body. Raises what `Generation.turns` raises."""
    answers = [Piece(choice.index) for choice in generation.choices]
    async with aclosing(generation.turns(request.receive)) as turns:
        async for pieces in turns:
            for piece in pieces:
                answers[piece.index].extend(piece)
    body = form.envelope([form.choice(answer) for answer in answers], chunk=False)
    return Response(orjson.dumps(body | {"usage": generation.usage()}), media_type="application/json")


async def stream(request: Request, generation: Generation, form: AnswerFormat, *, include_usage: bool) -> Response:
    """The answer as events. Raises what comes before the first output as `whole` does."""
    turns = generation.turns(request.receive)
    try:
        first = await anext(turns)
    except BaseException:
        await turns.aclose()
        raise
    return _EventStream(_Events(generation, form, include_usage).frames(first, turns))


class _Events:
    """Frames of one stream."""

    def __init__(self, generation: Generation, form: AnswerFormat, include_usage: bool) -> None:
        self._generation = generation
        self._form = form
        self._include_usage = include_usage

    async def frames(self, first: list[Piece], turns: AsyncGenerator[list[Piece], None]) -> AsyncGenerator[bytes, None]:
        """Bytes to send together. Raises ClientGoneError."""
        try:
            yield self._opening() + self._turn(first)
            async for pieces in turns:
                yield self._turn(pieces)
        except ClientGoneError:
            raise
        except Exception as exc:
            if not isinstance(exc, ApiError | EngineError):
                _log.exception("error in a stream")
            yield _frame(from_exception(exc).body())
            return
        finally:
            await turns.aclose()
        yield self._closing()

    def _opening(self) -> bytes:
        choices = self._form.opening(len(self._generation.choices))
        return b"".join(self._chunk([choice]) for choice in choices)

    def _turn(self, pieces: list[Piece]) -> bytes:
        return b"".join(self._chunk([self._form.chunk(piece)]) for piece in pieces if self._says_something(piece))

    def _says_something(self, piece: Piece) -> bool:
        """Not so for half a character, or a part of what may become a stop string."""
        return bool(piece.text or piece.entries or piece.finish_reason or (self._form.token_ids and piece.token_ids))

    def _closing(self) -> bytes:
        if not self._include_usage:
            return _DONE
        return _frame(self._form.envelope([], chunk=True) | {"usage": self._generation.usage()}) + _DONE

    def _chunk(self, choices: list[Json]) -> bytes:
        body = self._form.envelope(choices, chunk=True)
        return _frame(body | {"usage": None} if self._include_usage else body)


def _frame(body: Json) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


class _EventStream(Response):
    """Sends frames as they come. The generation itself watches for the client's end, so nothing else reads
    here.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    if frame:
                        await send({"type": "http.response.body", "body": frame, "more_body": True})
        except (ClientGoneError, OSError):
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})
