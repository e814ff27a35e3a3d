"""rank_pattern and alpha_pattern: values for the modules that a regular expression matches.

PEFT's rule: key K fits module name M when `(.*\\.)?(K)$` matches M from its start; the first fitting key wins.
Keys come from strangers and Python's `re` has no time limit, so an expression that could run long is refused, and the
matching of one adapter has a time budget. Keys that are plain names, of which a file may hold thousands, are looked up.
"""

import re
import time
from collections.abc import Mapping

from loraplex.engine.lora.errors import AdapterError

_MAX_EXPRESSIONS = 64
_MAX_LENGTH = 256
_MAX_REPEATS = 4
"""Unbounded repeats in one expression: each multiplies the matching time by the length of a module name."""
_TIME_BUDGET = 5.0
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
_REPEATED_GROUP = re.compile(r"\)[*+{]")


class PatternTable:
    """Ordered patterns of one config field. Plain keys match whole dotted names; their "." is only a dot."""

    def __init__(self, field: str, values: Mapping[str, float]) -> None:
        self._field = field
        self._values = list(values.values())
        self._plain: dict[str, int] = {}
        self._expressions: list[tuple[int, re.Pattern[str]]] = []
        self._seconds_left = _TIME_BUDGET
        for index, key in enumerate(values):
            if _PLAIN.fullmatch(key):
                self._plain[key] = index
            else:
                self._expressions.append((index, self._compile(key)))
        if len(self._expressions) > _MAX_EXPRESSIONS:
            raise AdapterError(
                f"{field} has {len(self._expressions)} regular expressions, more than {_MAX_EXPRESSIONS}"
            )

    def find(self, module: str) -> float | None:
        """Value of the first key that fits the module name."""
        parts = module.split(".")
        suffixes = (".".join(parts[i:]) for i in range(len(parts)))
        best = min((self._plain[s] for s in suffixes if s in self._plain), default=len(self._values))
        started = time.monotonic()
        for index, expression in self._expressions:
            if index < best and expression.match(module):
                best = index
        self._seconds_left -= time.monotonic() - started
        if self._seconds_left < 0:
            raise AdapterError(f"{self._field}: its regular expressions take too long to match")
        return self._values[best] if best < len(self._values) else None

    def _compile(self, key: str) -> re.Pattern[str]:
        text = key if len(key) <= 80 else key[:80] + "…"
        if len(key) > _MAX_LENGTH or _REPEATED_GROUP.search(key) or _repeats(key) > _MAX_REPEATS:
            raise AdapterError(
                f"{self._field}: expression {text!r} could take very long to match; use at most {_MAX_REPEATS} "
                f"repeats (*, +), none of them after a group"
            )
        try:
            return re.compile(rf"(.*\.)?({key})$")
        except (re.error, RecursionError, OverflowError) as error:
            raise AdapterError(f"{self._field}: {text!r} is no regular expression ({error})") from None


def _repeats(key: str) -> int:
    unescaped = re.sub(r"\\.", "", key)
    return sum(unescaped.count(c) for c in "*+{")
