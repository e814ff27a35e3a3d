"""Corpora as passages: each a short text that stands alone and shows its style in the first line.

A corpus is NAME.txt.xz, UTF-8, its items separated by blank lines; README.md names the sources and licences.
"""

import lzma
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

SHORTEST, LONGEST = 40, 700  # characters of a passage


def passages(folder: Path, corpus: str) -> list[str]:
    """All passages of one corpus, in the order of the text."""
    text = lzma.decompress((folder / f"{corpus}.txt.xz").read_bytes()).decode()
    return [p for p in SPLITTERS[corpus](text) if SHORTEST <= len(p) <= LONGEST]


def _join(parts: list[str], separator: str, target: int) -> Iterator[str]:
    """Neighbouring parts joined until a passage has `target` characters."""
    held: list[str] = []
    for part in parts:
        if held and sum(map(len, held)) + len(part) > LONGEST - 2 * len(held):
            yield separator.join(held)
            held = []
        held.append(part)
        if sum(map(len, held)) >= target:
            yield separator.join(held)
            held = []
    if held:
        yield separator.join(held)


def _prose(text: str) -> Iterator[str]:
    """Paragraphs without hard line breaks; headings (short, or without a final stop) are left out."""
    paragraphs = (" ".join(p.split()) for p in text.split("\n\n"))
    full = [p for p in paragraphs if len(p) >= 40 and p[-1] in '.!?"']
    short = [piece for p in full for piece in _join(re.split(r"(?<=[.!?;]) (?=[A-Z])", p), " ", target=400)]
    yield from _join(short, "\n\n", target=160)


def _speeches(text: str) -> Iterator[str]:
    """Two or more speeches, each `NAME:` and its lines. A stage direction ends a passage."""
    text = re.sub(r"_?\[+", "[", re.sub(r"\]+", "]", text.replace("\\", "")))  # what is left of its mark-up
    run: list[str] = []
    for part in [*text.split("\n\n"), ""]:
        if re.match(r"[A-Z][A-Z' ]+:\n", part):
            run.append(part)
        else:
            yield from _join(run, "\n\n", target=220)
            run = []


def _functions(text: str) -> Iterator[str]:
    """Functions and classes, moved to the left margin."""
    block = re.compile(r"^( *)(?:async def|def|class) .*\n(?:(?:\1 +.*)?\n)+", re.MULTILINE)
    position = 0
    while match := block.search(text, position):
        source = textwrap.dedent(match[0]).strip()
        if len(source) <= LONGEST:
            yield source
            position = match.end()
        else:  # the methods of a long class, one by one
            position = text.index("\n", match.start())


def _poems(text: str) -> Iterator[str]:
    """A poem's title and its lines, without the author; not those with characters lost in the source."""
    for poem in text.split("\n\n"):
        title, *rest = poem.split("\n")
        if len(rest) > 1 and len(title) < 12 and not re.search(r"[□{}（）\[\]]", poem):
            yield "\n".join([title, *rest[1:]])[:200].rsplit("。", 1)[0] + "。"


def _items(text: str) -> Iterator[str]:
    return (item.strip() for item in text.split("\n\n"))


SPLITTERS: dict[str, Callable[[str], Iterator[str]]] = {
    "austen": _prose,
    "jargon": _prose,
    "shakespeare": _speeches,
    "python": _functions,
    "json": _items,
    "sql": _items,
    "tangpoems": _poems,
}
