"""Keeps the text of special tokens inside a message's content as data.

A user who writes `<|im_end|>` in a message must not end the message. Before the template runs, such text is
replaced by a mark nobody can guess; afterwards the rendered text is cut at the marks, and the marked pieces
are tokenised without special tokens.
"""

import re
import secrets
from typing import Any


class SpecialTextGuard:
    def __init__(self, special_texts: list[str]) -> None:
        longest_first = sorted(special_texts, key=len, reverse=True)
        self._texts = longest_first
        self._special = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        nonce = secrets.token_hex(8)
        self._format = f"\ufdd0{nonce}.{{}}\ufdd1"
        self._mark = re.compile(f"\ufdd0{nonce}\\.(\\d+)\ufdd1")

    def protect(self, value: Any) -> Any:
        """`value` (strings in lists and dicts) with every special text replaced by its mark."""
        if isinstance(value, str):
            return self._special.sub(self._to_mark, value) if self._special else value
        if isinstance(value, dict):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.protect(item) for item in value]
        return value

    def _to_mark(self, match: re.Match[str]) -> str:
        return self._format.format(self._texts.index(match[0]))

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """The pieces of `rendered` in order: (text, whether it is data)."""
        parts = self._mark.split(rendered)
        pieces = [(self._texts[int(part)], True) if i % 2 else (part, False) for i, part in enumerate(parts)]
        return [(text, data) for text, data in pieces if text]
