"""One streaming request, timed."""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import orjson

from loraplex.server.bench.http_client import HTTPClient, ProtocolError
from loraplex.server.bench.workload import BenchRequest

LONGEST_DETAIL = 300


@dataclass
class Outcome:
    """Times in seconds."""

    adapter: str | None
    started: float
    """Since the start of the run."""
    ttft: float | None = None
    gaps: list[float] = field(default_factory=list)
    """Between one piece of text and the next, as they arrived."""
    e2e: float = 0.0
    """Until the end of the answer."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Both as the server counts them (`usage`)."""
    failure: str | None = None
    """HTTP status, or connection, timeout, stream, cut, usage, length."""
    detail: str = ""

    @property
    def time_per_token(self) -> float | None:
        """Mean time of the tokens after the first."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return sum(self.gaps) / (self.output_tokens - 1)


class _FailedError(Exception):
    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class _Stream:
    """Reads server-sent events out of a body, noting when text arrived."""

    def __init__(self, outcome: Outcome, started: float) -> None:
        self.finished = False
        """Saw `[DONE]`."""
        self.has_usage = False
        self._outcome = outcome
        self._last = self._started = started
        self._rest = b""

    def feed(self, data: bytes) -> None:
        now = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self.finished = True
            return
        event = orjson.loads(payload)
        if "error" in event:
            raise _FailedError("stream", _message(event))
        if usage := event.get("usage"):
            self.has_usage = True
            self._outcome.prompt_tokens = _token_count(usage, "prompt_tokens")
            self._outcome.output_tokens = _token_count(usage, "completion_tokens")
        choices = event.get("choices", ())
        is_first = self._outcome.ttft is None
        if any(_has_token(choice) or (is_first and choice.get("finish_reason")) for choice in choices):
            if is_first:
                self._outcome.ttft = now - self._started
            else:
                self._outcome.gaps.append(now - self._last)
            self._last = now


def _token_count(usage: dict[str, Any], name: str) -> int:
    if type(count := usage[name]) is not int or count < 0:
        raise ValueError(f"usage.{name} is {count!r}")
    return count


def _has_token(choice: dict[str, Any]) -> bool:
    """A token may have no text yet. What has none for certain: a chat's opening, and an end by itself."""
    delta = choice.get("delta", choice)
    if delta.get("text") or delta.get("content") or delta.get("reasoning_content") or choice.get("token_ids"):
        return True
    return not choice.get("finish_reason") and "role" not in delta


async def ask(client: HTTPClient, path: str, request: BenchRequest, run_started: float, timeout: float) -> Outcome:
    """Never raises for what the server or the network does: the outcome says it."""
    started = time.perf_counter()
    outcome = Outcome(request.adapter, started - run_started)
    try:
        async with asyncio.timeout(timeout):
            await _ask(client, path, request, outcome, started)
    except _FailedError as failed:
        outcome.failure, outcome.detail = failed.kind, str(failed)[:LONGEST_DETAIL]
    except TimeoutError:
        outcome.failure, outcome.detail = "timeout", f"no end after {timeout:g} s"
    except ProtocolError as error:
        outcome.failure, outcome.detail = "cut", str(error)
    except OSError as error:
        outcome.failure, outcome.detail = "connection", str(error)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        outcome.failure, outcome.detail = "stream", f"not an event of the OpenAI API: {error!r}"[:LONGEST_DETAIL]
    outcome.e2e = time.perf_counter() - started
    return outcome


async def _ask(client: HTTPClient, path: str, request: BenchRequest, outcome: Outcome, started: float) -> None:
    response = await client.post(path, request.body)
    if response.status != 200:
        raise _FailedError(str(response.status), _error_text(await response.body()))
    stream = _Stream(outcome, started)
    async with contextlib.aclosing(response.pieces()) as pieces:
        async for piece in pieces:
            stream.feed(piece)
    if not stream.finished:
        raise _FailedError("cut", "the stream ended without [DONE]")
    if not stream.has_usage:
        raise _FailedError("usage", "the server sent no usage, so its tokens are not known")
    if request.exact and outcome.output_tokens != request.max_tokens:
        raise _FailedError(
            "length", f"{outcome.output_tokens} tokens instead of {request.max_tokens}, despite ignore_eos"
        )


def _error_text(body: bytes) -> str:
    try:
        return _message(orjson.loads(body))
    except (ValueError, TypeError, AttributeError):
        return body.decode(errors="replace")


def _message(body: dict[str, Any]) -> str:
    error = body.get("error", body)
    return str(error.get("message", error) if isinstance(error, dict) else error)
