"""What a server says of itself in `GET /v1/models`: the base model, its adapters, its vocabulary."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.server.bench.http_client import HTTPClient


@dataclass(frozen=True)
class ServedModels:
    base: list[str]
    adapters: list[str]
    root: str | None
    """Where the first base model's files are, on the server's machine."""


async def served_models(client: HTTPClient) -> ServedModels:
    """Raises ProtocolError or OSError; ValueError when the answer is of another API."""
    answer = await client.get("/v1/models")
    try:
        cards: list[dict[str, Any]] = answer["data"]
        base = [card for card in cards if not card.get("parent")]
        adapters = [card["id"] for card in cards if card.get("parent")]
        return ServedModels([card["id"] for card in base], adapters, base[0].get("root") if base else None)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"GET /v1/models: not the OpenAI API: {error!r}") from None


def vocabulary_of_folder(folder: str | None) -> int | None:
    """vocab_size of a model's config.json, when it can be read from here."""
    if folder is None:
        return None
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        size = config.get("vocab_size") or config["text_config"]["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return size if type(size) is int else None


def ordinary_ids(vocab_size: int) -> Sequence[int]:
    """Ids that are text in most vocabularies: neither the first hundred nor the last hundredth, where special tokens
    are."""
    return range(100 if vocab_size > 1000 else 0, vocab_size - vocab_size // 100)
