"""Stop strings in a stream of text, wherever it is cut.

Each stop string is matched by its Knuth–Morris–Pratt automaton, one state per string, so the work is O(1) per
character and string, and the state says how much of the text's end could still become a stop.
"""


class _Matcher:
    def __init__(self, stop: str) -> None:
        self.stop = stop
        self._fallback = _fallbacks(stop)
        self.matched = 0
        """Length of the longest prefix of `stop` the text ends with."""

    def push(self, char: str) -> bool:
        """True when `stop` is complete."""
        while self.matched and self.stop[self.matched] != char:
            self.matched = self._fallback[self.matched - 1]
        if self.stop[self.matched] == char:
            self.matched += 1
        return self.matched == len(self.stop)


def _fallbacks(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper border: "abab" → [0, 0, 1, 2]."""
    borders = [0]
    for char in stop[1:]:
        border = borders[-1]
        while border and stop[border] != char:
            border = borders[border - 1]
        borders.append(border + (stop[border] == char))
    return borders


class StopChecker:
    """Passes text on, but holds back an end that could begin a stop string until it is decided.

    The stop that is complete first wins; of several complete at the same character, the longest. The result
    does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._matchers = [_Matcher(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text; nothing may be pushed after it."""

    def push(self, text: str) -> str:
        """The text that may be shown now."""
        assert self.found is None, "text pushed after a stop"
        if not self._matchers:
            return text
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            complete = [matcher.stop for matcher in self._matchers if matcher.push(char)]
            if complete:
                return self._end(buffer[:end], max(complete, key=len))
        held = max(matcher.matched for matcher in self._matchers)
        self._held = buffer[len(buffer) - held :]
        return buffer[: len(buffer) - held]

    def flush(self) -> str:
        """What is still held, when the text has ended without a stop."""
        held, self._held = self._held, ""
        return held

    def _end(self, text: str, stop: str) -> str:
        self.found = stop
        self._held = ""
        return text if self._include_stop else text[: -len(stop)]
