"""A small HTTP/1.1 client that gives a response's body as it arrives.

General clients spend more on each piece of a stream than a fast server does; here a piece is one read from the socket.
Connections are kept and used again. No redirects, proxies or compression.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

READ_BYTES = 65536
LONGEST_HEAD = 65536


class ProtocolError(Exception):
    """The other side does not speak HTTP/1.1, or stopped in the middle."""


class Dechunker:
    """Takes the framing off a chunked body, however it is cut."""

    def __init__(self) -> None:
        self.done = False
        self._buffer = bytearray()
        self._left = 0
        """Bytes of the current chunk still to come, its CRLF included."""

    def feed(self, data: bytes) -> bytes:
        """The payload in `data`. Raises ProtocolError."""
        buffer = self._buffer
        buffer += data
        payload = bytearray()
        while buffer and not self.done:
            if self._left > 2:
                taken = min(self._left - 2, len(buffer))
            elif self._left:
                taken = min(self._left, len(buffer))
            elif not self._read_size():
                break
            else:
                continue
            if self._left > 2:
                payload += buffer[:taken]
            del buffer[:taken]
            self._left -= taken
        return bytes(payload)

    def _read_size(self) -> bool:
        """Whether the buffer held a whole line with the next chunk's size."""
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return False
        line = self._buffer[:end]
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError:
            raise ProtocolError(f"bad chunk size {bytes(line[:20])!r}") from None
        if size == 0:
            self.done = self._buffer.endswith(b"\r\n\r\n")  # after trailers, if any
            return self.done
        del self._buffer[: end + 2]
        self._left = size + 2
        return True


@dataclass(frozen=True)
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Response:
    def __init__(self, client: "HTTPClient", connection: Connection, head: bytes) -> None:
        self._client = client
        self._connection = connection
        self.status, self._headers = _parse_head(head)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body as it arrives; after its end the connection serves the next request. Raises ProtocolError.

        Whoever stops before the end must close the iterator, which closes the connection.
        """
        complete = False
        try:
            async for piece in self._payload():
                yield piece
            complete = True
        finally:
            if complete and self._headers.get("connection", "").lower() != "close":
                self._client.keep(self._connection)
            else:
                self._connection.writer.close()

    async def _payload(self) -> AsyncGenerator[bytes, None]:
        if "chunked" in self._headers.get("transfer-encoding", "").lower():
            chunked = Dechunker()
            while not chunked.done:
                if payload := chunked.feed(await self._read(READ_BYTES)):
                    yield payload
            return
        if "content-length" not in self._headers:
            raise ProtocolError("the answer has neither Content-Length nor chunks")
        if not (length := self._headers["content-length"]).isdecimal():
            raise ProtocolError(f"bad Content-Length {length[:20]!r}")
        left = int(length)
        while left:
            data = await self._read(min(left, READ_BYTES))
            left -= len(data)
            yield data

    async def _read(self, most: int) -> bytes:
        if not (data := await self._connection.reader.read(most)):
            raise ProtocolError("the connection was closed in the middle of the answer")
        return data

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if not version.startswith("HTTP/1.") or not status.isdecimal():
        raise ProtocolError(f"not an HTTP answer: {first[:40]!r}")
    pairs = (line.partition(":") for line in lines if line)
    return int(status), {name.strip().lower(): value.strip() for name, _, value in pairs}


class HTTPClient:
    def __init__(self, base_url: str, api_key: str | None) -> None:
        """base_url: with or without `/v1`. Raises ValueError."""
        try:
            url = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
            port = url.port
        except ValueError as error:
            raise ValueError(f"--base-url {base_url}: {error}") from None
        usable = url.scheme in ("http", "https") and url.hostname and not url.query and not url.fragment
        if not usable or any(character.isspace() for character in base_url):
            raise ValueError(f"--base-url {base_url}: expected something like http://127.0.0.1:8000")
        if api_key is not None and (not api_key.isascii() or not api_key.isprintable()):
            raise ValueError("--api-key (or OPENAI_API_KEY): printable ASCII characters are expected")
        assert url.hostname is not None
        self._host = url.hostname
        self._port = port or (443 if url.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._prefix = url.path.rstrip("/").removesuffix("/v1")
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"Host: {url.netloc.rpartition('@')[2]}\r\nAccept: */*\r\n{authorization}"
        self._idle: list[Connection] = []

    async def get(self, path: str) -> Any:
        """JSON of an answer with status 200. Raises ProtocolError, OSError, or UnicodeError for a host's name."""
        response = await self._send(f"GET {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\n".encode())
        body = await response.body()
        if response.status != 200:
            raise ProtocolError(f"GET {path} answered {response.status}: {body[:200].decode(errors='replace')}")
        try:
            return orjson.loads(body)
        except ValueError as error:
            raise ProtocolError(f"GET {path} answered no JSON: {error}") from None

    async def post(self, path: str, body: bytes) -> Response:
        """Returns with the answer's head. Raises ProtocolError or OSError."""
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return await self._send(head.encode() + body)

    async def _send(self, message: bytes) -> Response:
        while self._idle:  # the server may have closed them meanwhile
            connection = self._idle.pop()
            if (response := await self._exchange(connection, message)) is not None:
                return response
        response = await self._exchange(await self._connect(), message)
        if response is None:
            raise ProtocolError("the connection was closed without an answer")
        return response

    async def _connect(self) -> Connection:
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=LONGEST_HEAD)
        return Connection(reader, writer)

    async def _exchange(self, connection: Connection, message: bytes) -> Response | None:
        """None when the connection turns out to be closed."""
        try:
            connection.writer.write(message)
            await connection.writer.drain()
            head = await connection.reader.readuntil(b"\r\n\r\n")
        except (ConnectionError, asyncio.IncompleteReadError):
            connection.writer.close()
            return None
        except asyncio.LimitOverrunError:
            connection.writer.close()
            raise ProtocolError("not an HTTP answer: its head has no end") from None
        except asyncio.CancelledError:
            connection.writer.close()
            raise
        return Response(self, connection, head)

    def keep(self, connection: Connection) -> None:
        self._idle.append(connection)

    async def close(self) -> None:
        for connection in self._idle:
            connection.writer.close()
        for connection in self._idle:
            await connection.writer.wait_closed()
        self._idle.clear()
