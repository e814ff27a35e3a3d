"""Token id → bytes, and → the name logprobs show.

Working with bytes makes incremental decoding exact and O(1) per token, and gives logprobs the true `bytes` of
a token that is only a part of a character. Known are byte-level BPE (Qwen, Llama 3, …) and byte fallback
(Mixtral, Gemma, …); a token of any other scheme is decoded after an anchor token, which keeps its leading
space.
"""

import functools
import json
import re
from typing import Protocol

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary(Protocol):
    def bytes_of(self, token: int) -> bytes:
        """UTF-8 of the token's text, perhaps a part of a character; empty for an id without text."""
        ...

    def is_special(self, token: int) -> bool: ...

    def name(self, token: int) -> str:
        """Text of a token standing alone; `bytes:\\xf0` for half a character, `token_id:7` for an id without
        text.
        """
        ...


class NoVocabulary:
    """With --skip-tokenizer-init: ids have no text."""

    def bytes_of(self, token: int) -> bytes:
        return b""

    def is_special(self, token: int) -> bool:
        return False

    def name(self, token: int) -> str:
        return f"token_id:{token}"


class TokenizerVocabulary:
    """The vocabulary of a `tokenizers` tokenizer. Ids it does not know (padded model vocabularies) have no
    text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        kinds = set(_decoder_kinds(tokenizer))
        self._byte_of_char = _byte_level_alphabet() if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        self._anchor = None if self._byte_of_char else _find_anchor(tokenizer)
        self.bytes_of = functools.cache(self._bytes_of)
        self.name = functools.cache(self._name)

    @functools.cached_property
    def max_token_bytes(self) -> int:
        return max(len(token.encode()) for token in self._tokenizer.get_vocab())

    def is_special(self, token: int) -> bool:
        return token in self._added and self._added[token].special

    @property
    def special_texts(self) -> list[str]:
        return [added.content for added in self._added.values() if added.special]

    def _bytes_of(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if token in self._added:
            return self._added[token].content.encode()
        if self._byte_of_char is not None:
            return _byte_level_bytes(text, self._byte_of_char)
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        return self._after_anchor(token).encode()

    def _after_anchor(self, token: int) -> str:
        if self._anchor is None:
            return self._tokenizer.decode([token], skip_special_tokens=False)
        anchor = self._tokenizer.decode([self._anchor], skip_special_tokens=False)
        return self._tokenizer.decode([self._anchor, token], skip_special_tokens=False)[len(anchor) :]

    def _name(self, token: int) -> str:
        text = self.bytes_of(token)
        if not text:
            return f"token_id:{token}"
        try:
            return text.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def _decoder_kinds(tokenizer: Tokenizer) -> list[str]:
    if tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]


@functools.cache
def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE: printable Latin-1 stands for itself, the others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level_bytes(text: str, byte_of_char: dict[str, int]) -> bytes:
    try:
        return bytes(byte_of_char[char] for char in text)
    except KeyError:
        return text.encode()


def _find_anchor(tokenizer: Tokenizer) -> int | None:
    """A token that decodes to plain letters, so that what follows it is decoded as in the middle of a
    text.
    """
    words = (i for token, i in sorted(tokenizer.get_vocab().items()) if token.isascii() and token.isalpha())
    return next((i for i in words if tokenizer.decode([i]).isalpha()), None)
