"""Runs the engine requests of one HTTP request and gives their outputs as pieces of choices.

An HTTP request has one engine request per prompt and n choices per prompt; choice i·n + j is the j-th of
prompt i. The first error ends them all; so does a client that goes away.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive

from loraplex.engine.messages import ErrorInfo, TokenOut
from loraplex.engine.request import Request
from loraplex.server.choice import Choice, Piece, Shape
from loraplex.server.engine_api import EngineError, RequestStream
from loraplex.server.errors import ClientGoneError, InternalError, UnavailableError
from loraplex.server.front import Front
from loraplex.server.text import Prompt


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, with the engine request that answers it; None when nothing has to be computed."""

    prompt: Prompt
    request: Request | None


class Run:
    """One engine request under way."""

    def __init__(self, stream: RequestStream, choices: list[Choice], *, fails: bool = False) -> None:
        self.stream = stream
        self._fails = fails
        self._outputs = aiter(stream)
        self._choices = choices
        self.cached_tokens = 0

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self._choices)

    async def next(self) -> list[TokenOut]:
        """Raises InternalError when the engine ends the stream too early."""
        try:
            return await anext(self._outputs)
        except StopAsyncIteration:
            raise InternalError from None

    def advance(self, outputs: list[TokenOut]) -> list[Piece]:
        """At most one piece per choice. Raises EngineError when an output carries one."""
        if self._fails:
            raise RuntimeError("injected failure of the detokeniser")
        pieces: dict[int, Piece] = {}
        for out in outputs:
            _check(out)
            self.cached_tokens = max(self.cached_tokens, out.cached_tokens)
            choice = self._choices[out.index]
            if choice.finished:
                continue
            piece = choice.push(out)
            if out.index in pieces:
                pieces[out.index].extend(piece)
            else:
                pieces[out.index] = piece
        return list(pieces.values())


def _check(out: TokenOut) -> None:
    if out.error is not None:
        raise EngineError(out.error)
    if out.finish_reason == "abort":
        raise UnavailableError("The server ended this request")
    if out.finish_reason == "error":
        raise EngineError(ErrorInfo(status=500, message="The engine failed this request", type="server_error"))


class Generation:
    """The answer to one HTTP request while it is made."""

    def __init__(self, front: Front, jobs: list[Job], shape: Shape, n: int) -> None:
        self._front = front
        self._jobs = jobs
        self.n = n
        self.choices = [
            Choice(i * n + j, job.prompt, shape, front.vocabulary) for i, job in enumerate(jobs) for j in range(n)
        ]
        self._runs: list[Run] = []
        self._started = time.monotonic()
        self._last_output: dict[int, float] = {}
        """Choice → time of its last output."""

    async def turns(self, receive: Receive) -> AsyncGenerator[list[Piece], None]:
        """New pieces, at most one per choice and turn, until every choice is finished.

        Raises ClientGoneError, EngineError or ApiError. However it ends, no engine request is left running.
        """
        gone = asyncio.create_task(_wait_gone(receive))
        try:
            self._submit()
            if echoed := self._without_engine():
                yield echoed
            async with aclosing(self._engine_turns(gone)) as turns:
                async for pieces in turns:
                    self._observe(pieces)
                    yield pieces
            self._front.metrics.end_to_end.observe(time.monotonic() - self._started)
        finally:
            gone.cancel()
            for run in self._runs:
                run.stream.abort()
            self._count()

    def _submit(self) -> None:
        for i, job in enumerate(self._jobs):
            if job.request is not None:
                choices = self.choices[i * self.n : (i + 1) * self.n]
                fails = job.request.id == self._front.hooks.detok_fail
                self._runs.append(Run(self._front.engine.submit(job.request), choices, fails=fails))

    def _without_engine(self) -> list[Piece]:
        """Choices of prompts that are only echoed."""
        pieces = []
        for i, choice in enumerate(self.choices):
            if self._jobs[i // self.n].request is None:
                pieces.append(choice.push(TokenOut(id=0, finish_reason="length")))
        return pieces

    async def _engine_turns(self, gone: asyncio.Task[None]) -> AsyncGenerator[list[Piece], None]:
        waiting = {asyncio.create_task(run.next()): run for run in self._runs}
        try:
            while waiting:
                done, _ = await asyncio.wait({*waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
                if gone in done:
                    raise ClientGoneError
                pieces = []
                for task in [task for task in waiting if task in done]:
                    run = waiting.pop(task)
                    pieces += run.advance(task.result())
                    if run.finished:
                        run.stream.abort()
                    else:
                        waiting[asyncio.create_task(run.next())] = run
                yield pieces
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    def _observe(self, pieces: list[Piece]) -> None:
        now = time.monotonic()
        if not self._last_output:
            self._front.metrics.first_token.observe(now - self._started)
        for piece in pieces:
            if (last := self._last_output.get(piece.index)) is not None:
                for _ in piece.token_ids:
                    self._front.metrics.inter_token.observe((now - last) / len(piece.token_ids))
            self._last_output[piece.index] = now

    def _count(self) -> None:
        usage = self.usage()
        self._front.metrics.prompt_tokens.inc(usage["prompt_tokens"])
        self._front.metrics.generation_tokens.inc(usage["completion_tokens"])
        self._front.metrics.cached_tokens.inc(usage["prompt_tokens_details"]["cached_tokens"])

    def usage(self) -> dict[str, Any]:
        """Tokens so far: each prompt once, all completions."""
        prompt = sum(len(job.prompt.ids) for job in self._jobs)
        completion = sum(choice.num_tokens for choice in self.choices)
        cached = sum(run.cached_tokens for run in self._runs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


async def _wait_gone(receive: Receive) -> None:
    """Ends when the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
