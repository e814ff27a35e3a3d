"""One choice of an answer: turns the engine's tokens into text, logprobs and a finish reason, piece by piece.

Whatever the grouping of the tokens into pieces, the pieces joined are the same: streams and whole answers
agree.
"""

from dataclasses import dataclass, field
from typing import Self

from loraplex.engine.messages import TokenLogprobs, TokenOut
from loraplex.server.detokenizer import Detokenizer
from loraplex.server.protocol import GenerationFields
from loraplex.server.stops import StopChecker
from loraplex.server.text import Prompt
from loraplex.server.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """Logprobs of one token of the answer."""

    token: int
    logprob: float | None
    """None for the first token of an echoed prompt."""
    top: list[tuple[int, float]]
    offset: int
    """Characters of the full returned text before this token's character."""


@dataclass(slots=True)
class Piece:
    """What became known of a choice since its last piece."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    """Empty unless logprobs were asked for."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def extend(self, later: "Piece") -> None:
        self.text += later.text
        self.token_ids += later.token_ids
        self.entries += later.entries
        self.finish_reason = later.finish_reason or self.finish_reason
        self.stop_reason = later.stop_reason if later.finish_reason else self.stop_reason


@dataclass(frozen=True, slots=True)
class Shape:
    """How the answer to a request looks; the same for all its choices."""

    stops: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    min_tokens: int = 0
    """Stop strings are looked for after this many tokens."""
    skip_special_tokens: bool = True
    logprobs: bool = False
    echo: bool = False
    only_echo: bool = False
    """max_tokens 0: what the engine generates is dropped."""

    @classmethod
    def of(cls, fields: GenerationFields, *, logprobs: bool, echo: bool = False, only_echo: bool = False) -> Self:
        return cls(
            stops=fields.stop,
            stop_token_ids=frozenset(fields.stop_token_ids),
            include_stop=fields.include_stop_str_in_output,
            min_tokens=fields.min_tokens,
            skip_special_tokens=fields.skip_special_tokens,
            logprobs=logprobs,
            echo=echo,
            only_echo=only_echo,
        )


class Choice:
    def __init__(self, index: int, prompt: Prompt, shape: Shape, vocabulary: Vocabulary) -> None:
        self.index = index
        self.num_tokens = 0
        """Tokens generated and counted, up to the one that completed a stop."""
        self.finished = False
        self._shape = shape
        self._prompt = prompt
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(vocabulary, skip_special_tokens=shape.skip_special_tokens)
        self._stops = StopChecker(shape.stops, include_stop=shape.include_stop)
        self._opened = False

    def push(self, out: TokenOut) -> Piece:
        """Nothing may be pushed once `finished`."""
        assert not self.finished
        piece = Piece(self.index)
        if not self._opened:
            self.open(piece, out.prompt_logprobs)
        if not self._shape.only_echo:
            self._push_tokens(piece, out)
        if out.finish_reason is not None and not self.finished:
            self._finish(piece, out)
        return piece

    def open(self, piece: Piece, logprobs: list[TokenLogprobs | None] | None) -> None:
        """Adds the prompt to the choice's first piece when it is to be echoed."""
        self._opened = True
        if not self._shape.echo:
            return
        for i, token in enumerate(self._prompt.ids):
            if self._shape.logprobs and logprobs is not None:
                piece.entries.append(self._entry(token, logprobs[i]))
            piece.text += self._echo_text(i, token)
        if self._shape.only_echo:
            piece.text += self._detokenizer.flush()

    def _echo_text(self, position: int, token: int) -> str:
        """A prompt given as text comes back whole; BOS and the like are no part of it."""
        if position in self._prompt.added:
            return ""
        return self._detokenizer.push(token, keep_special=self._prompt.from_text)

    def _push_tokens(self, piece: Piece, out: TokenOut) -> None:
        for i, token in enumerate(out.tokens):
            self.num_tokens += 1
            piece.token_ids.append(token)
            if self._shape.logprobs:
                piece.entries.append(self._entry(token, out.logprobs[i]))
            is_stop = token == out.stop_token and i == len(out.tokens) - 1
            if not is_stop or self._shape.include_stop:
                piece.text += self._checked(self._detokenizer.push(token))
            if self._stops.found is not None:
                return self._end(piece, "stop", self._stops.found)
        return None

    def _checked(self, text: str) -> str:
        if self.num_tokens <= self._shape.min_tokens:
            return text
        return self._stops.push(text)

    def _entry(self, token: int, logprobs: TokenLogprobs | None) -> TokenEntry:
        offset = self._detokenizer.length
        if logprobs is None:
            return TokenEntry(token, None, [], offset)
        return TokenEntry(token, logprobs.logprob, logprobs.top, offset)

    def _finish(self, piece: Piece, out: TokenOut) -> None:
        """The engine ended the choice: what was held back is text now."""
        assert out.finish_reason is not None
        if self._shape.only_echo:
            return self._end(piece, "length", None)
        piece.text += self._checked(self._detokenizer.flush())
        if self._stops.found is not None:
            return self._end(piece, "stop", self._stops.found)
        piece.text += self._stops.flush()
        named = out.stop_token in self._shape.stop_token_ids
        return self._end(piece, out.finish_reason, out.stop_token if named else None)

    def _end(self, piece: Piece, finish_reason: str, stop_reason: str | int | None) -> None:
        self.finished = True
        piece.finish_reason = finish_reason
        piece.stop_reason = stop_reason
