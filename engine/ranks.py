"""Rank 0 → follower ranks: one message a step over inherited pipes; every rank then runs the same collectives."""

from multiprocessing.connection import Connection

import msgspec

from loraplex.engine.batch import StepPlan
from loraplex.engine.messages import ErrorInfo


class Install(msgspec.Struct, frozen=True, tag=True):
    """Read the adapter at `path`, check that its content is `digest`, put it into table row `row`; answer Installed."""

    row: int
    path: str
    digest: str


class Remove(msgspec.Struct, frozen=True, tag=True):
    row: int


class Installed(msgspec.Struct, frozen=True, tag=True):
    error: ErrorInfo | None = None


class AllocateKV(msgspec.Struct, frozen=True, tag=True):
    """Size and allocate the KV pool, then warm up: start-up adapters are in."""


FollowerMessage = StepPlan | Install | Remove | AllocateKV

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(FollowerMessage).decode
decode_installed = msgspec.msgpack.Decoder(Installed).decode


class Followers:
    """Rank 0's side of the pipes. With one rank it has nobody to tell."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    def send(self, message: FollowerMessage) -> bool:
        """False when there is nobody to send to."""
        if not self._connections:
            return False
        data = encode(message)
        for connection in self._connections:
            connection.send_bytes(data)
        return True

    def install(self, message: Install) -> ErrorInfo | None:
        """Installs on all followers; the first error, if any rank had one."""
        self.send(message)
        answers = [decode_installed(connection.recv_bytes()) for connection in self._connections]
        return next((a.error for a in answers if a.error is not None), None)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
