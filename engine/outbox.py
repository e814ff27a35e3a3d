"""Messages to the front leave through a thread: a pipe holds 64 KiB and then blocks its writer, and the step loop must
not wait for a busy front (step p99 rose to 45–96 ms when it did)."""

import queue
import threading
from multiprocessing.connection import Connection

from loraplex.engine.messages import EngineMessage, encode


class Outbox:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[EngineMessage | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def send(self, message: EngineMessage) -> None:
        self._queue.put(message)

    def close(self, timeout: float = 5.0) -> None:
        """Sends what is queued, then stops."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self._connection.send_bytes(encode(message))
            except OSError:  # the front is gone; the inbox sees it too and ends the process
                return
