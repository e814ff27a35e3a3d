"""Rank 0 → follower ranks: one message a step over inherited pipes; every rank then runs the same collectives."""

from multiprocessing.connection import Connection

import msgspec

from loraplex.engine.batch import StepPlan
from loraplex.engine.messages import ErrorInfo


class AllocateArena(msgspec.Struct, frozen=True, tag=True):
    """Size and allocate the adapter arena for start-up adapters of these sizes (bytes on one rank)."""

    startup: list[int]


class Store(msgspec.Struct, frozen=True, tag=True):
    """Read the adapter at `path`, check that its content is `digest`, keep it packed as `version`; answer Stored."""

    version: int
    path: str
    digest: str


class Stored(msgspec.Struct, frozen=True, tag=True):
    error: ErrorInfo | None = None


class Place(msgspec.Struct, frozen=True, tag=True):
    """Copy a stored adapter into the arena and fill table row `row`."""

    version: int
    row: int


class Evict(msgspec.Struct, frozen=True, tag=True):
    """Out of the arena; the packed copy stays."""

    version: int


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Free an adapter everywhere."""

    version: int


class AllocateKV(msgspec.Struct, frozen=True, tag=True):
    """Size and allocate the KV pool, then warm up: start-up adapters are in."""


FollowerMessage = StepPlan | AllocateArena | Store | Place | Evict | Drop | AllocateKV

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(FollowerMessage).decode
decode_stored = msgspec.msgpack.Decoder(Stored).decode


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

    def store(self, message: Store) -> ErrorInfo | None:
        """Stores on all followers; the first error, if any rank had one."""
        self.send(message)
        answers = [decode_stored(connection.recv_bytes()) for connection in self._connections]
        return next((a.error for a in answers if a.error is not None), None)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
