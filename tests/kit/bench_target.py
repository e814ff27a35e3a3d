"""A server of the OpenAI HTTP API without a model, for tests of the load generator: streams tokens at a set pace.

`python bench_target.py PORT SECONDS_PER_TOKEN`, or `Target` in the test's own process, which can misbehave.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

CARDS = [
    {"id": "base", "parent": None, "root": "/not/here"},
    {"id": "a", "parent": "base", "root": "/a"},
    {"id": "b", "parent": "base", "root": "/b"},
]


@dataclass
class Target:
    pace: float = 0.0
    """Seconds between tokens."""
    fault: Callable[[dict[str, Any], int], str | None] = lambda body, number: None
    """(body, number of the request) → status, `event`, `cut`, `no_usage`, `short`, `close`; None: all is well."""
    models: bytes | None = json.dumps({"data": CARDS}).encode()
    """Answer to GET; None: none at all."""
    usage: Any = ...
    """What `usage` says instead of the counts."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    connections: int = 0
    most_at_once: int = 0
    _now: int = 0

    @contextlib.asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while await self._exchange(reader, writer):
                    pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET"):
            if self.models is None:
                await asyncio.Event().wait()
            return _plain(writer, "200", self.models)
        [length] = [int(line[15:]) for line in head.splitlines() if line.lower().startswith("content-length:")]
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            return await self._stream(writer, body, self.fault(body, len(self.bodies) - 1))
        finally:
            self._now -= 1

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any], fault: str | None) -> bool:
        if fault is not None and fault.isdecimal():
            return _plain(writer, fault, json.dumps({"error": {"message": f"no, {fault}", "code": None}}).encode())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        chat, count = "messages" in body, body["max_tokens"] - (fault == "short")
        if chat:
            _event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for i in range(count):
            await asyncio.sleep(self.pace)
            end = "length" if i == count - 1 else None
            choice: dict[str, Any] = {"index": 0, "finish_reason": end}
            choice |= {"delta": {"content": "x"}} if chat else {"text": "x"}
            _event(writer, {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice]})
            if fault == "cut":
                return False
            if fault == "event":
                _event(writer, {"error": {"message": "the engine has stopped", "code": "engine_dead"}})
        if fault != "no_usage":
            size = len(body["messages"][0]["content"].split()) if chat else len(body["prompt"])
            usage = {"prompt_tokens": size, "completion_tokens": count}
            if self.usage is not ...:
                usage = dict.fromkeys(usage, self.usage)
            _event(writer, {"choices": [], "usage": usage})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return fault != "close"


def _event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    _chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _plain(writer: asyncio.StreamWriter, status: str, data: bytes) -> bool:
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return True


async def main(port: int, pace: float) -> None:
    async with Target(pace).running(port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
