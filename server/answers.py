"""The JSON of answers and stream chunks, for each of the two endpoints."""

import time
import uuid
from typing import Any, Protocol

from loraplex.server.choice import Piece, TokenEntry
from loraplex.server.vocabulary import Vocabulary

Json = dict[str, Any]


class AnswerFormat(Protocol):
    """What differs between the endpoints."""

    def opening(self, num_choices: int) -> list[Json]:
        """Choices of the chunks before any text."""
        ...

    def chunk(self, piece: Piece) -> Json:
        """A choice of a stream chunk."""
        ...

    def choice(self, piece: Piece) -> Json:
        """A choice of a whole answer."""
        ...

    def envelope(self, choices: list[Json], *, chunk: bool) -> Json: ...

    @property
    def token_ids(self) -> bool:
        """Whether choices carry token_ids."""
        ...


class CompletionFormat:
    def __init__(self, model: str, vocabulary: Vocabulary, *, logprobs: int | None, token_ids: bool) -> None:
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._model = model
        self._created = int(time.time())
        self._vocabulary = vocabulary
        self._logprobs = logprobs
        self.token_ids = token_ids

    def opening(self, num_choices: int) -> list[Json]:
        return []

    def chunk(self, piece: Piece) -> Json:
        return self.choice(piece)

    def choice(self, piece: Piece) -> Json:
        fields = {
            "index": piece.index,
            "text": piece.text,
            "logprobs": None if self._logprobs is None else self._lists(piece.entries),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        return fields | ({"token_ids": piece.token_ids} if self.token_ids else {})

    def _lists(self, entries: list[TokenEntry]) -> Json:
        return {
            "tokens": [self._vocabulary.name(entry.token) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [self._alternatives(entry) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _alternatives(self, entry: TokenEntry) -> dict[str, float] | None:
        """The most likely tokens, and the chosen one even when it is none of them."""
        if entry.logprob is None:
            return None
        pairs = [*entry.top, (entry.token, entry.logprob)]
        return {self._vocabulary.name(token): logprob for token, logprob in pairs}

    def envelope(self, choices: list[Json], *, chunk: bool) -> Json:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


class ChatFormat:
    def __init__(self, model: str, vocabulary: Vocabulary, *, logprobs: bool, token_ids: bool) -> None:
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._model = model
        self._created = int(time.time())
        self._vocabulary = vocabulary
        self._logprobs = logprobs
        self.token_ids = token_ids

    def opening(self, num_choices: int) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(num_choices)]

    def chunk(self, piece: Piece) -> Json:
        return self._fields(piece, "delta", {"content": piece.text} if piece.text else {})

    def choice(self, piece: Piece) -> Json:
        return self._fields(piece, "message", {"role": "assistant", "content": piece.text, "refusal": None})

    def _fields(self, piece: Piece, name: str, message: Json) -> Json:
        fields = {
            "index": piece.index,
            name: message,
            "logprobs": {"content": [self._entry(e) for e in piece.entries]} if self._logprobs else None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        return fields | ({"token_ids": piece.token_ids} if self.token_ids else {})

    def _entry(self, entry: TokenEntry) -> Json:
        top = [self._token(token, logprob) for token, logprob in entry.top]
        return self._token(entry.token, entry.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float | None) -> Json:
        data = self._vocabulary.bytes_of(token)
        return {"token": self._vocabulary.name(token), "logprob": logprob, "bytes": list(data)}

    def envelope(self, choices: list[Json], *, chunk: bool) -> Json:
        return {
            "id": self._id,
            "object": "chat.completion.chunk" if chunk else "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
