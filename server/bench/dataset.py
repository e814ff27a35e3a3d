"""Requests from a JSONL file: one object a line, `{"prompt" | "messages", "max_tokens"?, "adapter"?}`."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from loraplex.server.bench.workload import BenchRequest, BodyMaker

KEYS = {"prompt", "messages", "max_tokens", "adapter"}


@dataclass(frozen=True)
class Item:
    prompt: str | list[Any]
    """Messages for chat."""
    max_tokens: int | None
    adapter: str | None
    names_adapter: bool
    """The line itself says who answers; null is the base."""


def read_dataset(path: Path, *, chat: bool) -> list[Item]:
    """Raises ValueError naming file and line."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"--dataset {path}: {error.strerror}") from None
    items = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            items.append(_item(orjson.loads(line), chat))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    if not items:
        raise ValueError(f"{path}: no requests in it")
    return items


def _item(line: Any, chat: bool) -> Item:
    if not isinstance(line, dict):
        raise ValueError("expected a JSON object")
    if unknown := line.keys() - KEYS:
        raise ValueError(f"unknown key {sorted(unknown)[0]!r}; known are {', '.join(sorted(KEYS))}")
    if ("prompt" in line) == ("messages" in line):
        raise ValueError("expected either 'prompt' or 'messages'")
    max_tokens, adapter = line.get("max_tokens"), line.get("adapter")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ValueError("'max_tokens' must be an integer from 1 up")
    if not isinstance(adapter, str | None):
        raise ValueError("'adapter' must be a name, or null for the base model")
    return Item(_prompt(line, chat), max_tokens, adapter, "adapter" in line)


def _prompt(line: dict[str, Any], chat: bool) -> str | list[Any]:
    if "messages" in line:
        messages = line["messages"]
        if not chat:
            raise ValueError("'messages' need --endpoint chat")
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise ValueError("'messages' must be a list of objects with a 'role'")
        return messages
    prompt = line["prompt"]
    is_ids = isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
    if not isinstance(prompt, str) and (chat or not is_ids):
        raise ValueError("'prompt' must be text" + ("" if chat else " or a list of token ids"))
    return [{"role": "user", "content": prompt}] if chat else prompt


def dataset_requests(
    maker: BodyMaker, items: list[Item], adapters: Sequence[str | None], max_tokens: int
) -> list[BenchRequest]:
    """One request for each of `adapters`, the items from the start again when they run out. `adapters` and
    `max_tokens` are for items that do not say theirs."""
    return [
        maker.make(
            item.prompt, max_tokens if item.max_tokens is None else item.max_tokens,
            item.adapter if item.names_adapter else adapter,
        )
        for item, adapter in zip(itertools.cycle(items), adapters)
    ]  # fmt: skip
