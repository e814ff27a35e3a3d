"""Incremental detokenisation: O(1) per token, never half a character."""

import codecs

from loraplex.server.vocabulary import Vocabulary


class Detokenizer:
    """Text of a growing list of tokens. The pieces joined are the text of the whole list.

    Bytes of an unfinished character wait for the next token; what is still unfinished at the end is one
    U+FFFD.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.length = 0
        """Characters given out so far."""

    def push(self, token: int, *, keep_special: bool = False) -> str:
        if self._skip and not keep_special and self._vocabulary.is_special(token):
            return ""
        return self._decode(self._vocabulary.bytes_of(token))

    def flush(self) -> str:
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        self.length += len(text)
        return text


def decode(vocabulary: Vocabulary, tokens: list[int], *, skip_special_tokens: bool) -> str:
    detokenizer = Detokenizer(vocabulary, skip_special_tokens=skip_special_tokens)
    return "".join([detokenizer.push(token) for token in tokens]) + detokenizer.flush()
