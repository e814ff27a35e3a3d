"""The requests of a run: random prompts with lengths, shared prefixes and adapters, all from one seed."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

SKEWED_SHARE = 0.9
"""Share of the first adapter in `skewed`."""


@dataclass(frozen=True)
class BenchRequest:
    body: bytes
    adapter: str | None
    max_tokens: int
    exact: bool
    """The answer must have exactly max_tokens tokens."""


@dataclass(frozen=True)
class Lengths:
    input: int
    output: int
    range_ratio: float = 0.0
    """Both are drawn evenly from ± this share."""

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return self._draw(rng, self.input), self._draw(rng, self.output)

    def _draw(self, rng: random.Random, length: int) -> int:
        return max(1, rng.randint(round(length * (1 - self.range_ratio)), round(length * (1 + self.range_ratio))))


@dataclass(frozen=True)
class Prefixes:
    length: int = 0
    """Tokens before the input."""
    count: int = 1


def random_prompts(
    count: int, lengths: Lengths, prefixes: Prefixes, ids: Sequence[int], seed: int
) -> Iterator[tuple[list[int], list[int], int]]:
    """(shared prefix, input, output tokens) of each request; prefixes take turns."""
    rng = random.Random(seed)
    shared = [rng.choices(ids, k=prefixes.length) for _ in range(prefixes.count)]
    for i in range(count):
        input_len, output_len = lengths.draw(rng)
        yield shared[i % prefixes.count], rng.choices(ids, k=input_len), output_len


def check_popularity(text: str) -> str:
    """Raises ValueError for what `choose_adapters` does not know."""
    name, _, exponent = text.partition(":")
    if text in ("uniform", "zipf", "distinct", "skewed", "identical"):
        return text
    try:
        if name == "zipf" and float(exponent) > 0:
            return text
    except ValueError:
        pass
    raise ValueError(f"{text!r} is none of uniform, zipf, zipf:EXPONENT, distinct, skewed, identical")


def choose_adapters(
    count: int, adapters: Sequence[str], popularity: str, base_share: float, seed: int
) -> list[str | None]:
    """The adapter of each request, None for the base.

    uniform: at random. zipf:s: the k-th with weight 1/k^s. distinct: in turn. skewed: nine of ten the first.
    identical: the first only. base_share: of the requests, at random, ask the base instead.
    """
    rng = random.Random(f"adapters {seed}")
    if not adapters:
        return [None] * count
    weights = _weights(popularity, len(adapters))
    names: list[str | None] = []
    for i in range(count):
        name = adapters[i % len(adapters)] if weights is None else rng.choices(adapters, weights)[0]
        names.append(None if rng.random() < base_share else name)
    return names


def _weights(popularity: str, count: int) -> list[float] | None:
    """None: in turn."""
    name, _, exponent = popularity.partition(":")
    match name:
        case "distinct":
            return None
        case "identical":
            return [1.0] + [0.0] * (count - 1)
        case "skewed":
            return [SKEWED_SHARE] + [(1 - SKEWED_SHARE) / max(1, count - 1)] * (count - 1)
        case "zipf":
            return [float(k) ** -float(exponent or 1) for k in range(1, count + 1)]
    return [1.0] * count


COMMON = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over"
)
WORDS = COMMON.split()
"""Each is one token with a space before it in the usual vocabularies."""


def in_words(ids: list[int]) -> str:
    """Words for servers whose tokenizer is not at hand."""
    return " ".join(WORDS[id % len(WORDS)] for id in ids) + " "


@dataclass(frozen=True)
class BodyMaker:
    """How a request is written for the server."""

    model: str
    chat: bool
    adapter_by: str
    """model: the adapter's name is the model's. lora_path: it is in a field of its own."""
    temperature: float
    ignore_eos: bool
    extra: dict[str, Any]

    def make(self, prompt: list[int] | str | list[Any], max_tokens: int, adapter: str | None) -> BenchRequest:
        """prompt: token ids or text; the messages for chat."""
        fields: dict[str, Any] = {
            "model": self.model,
            "messages" if self.chat else "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if adapter is not None:
            fields["lora_path" if self.adapter_by == "lora_path" else "model"] = adapter
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return BenchRequest(orjson.dumps(fields | self.extra), adapter, max_tokens, self.ignore_eos)


def random_requests(
    maker: BodyMaker,
    prompts: Iterator[tuple[list[int], list[int], int]],
    adapters: Sequence[str | None],
    as_text: Callable[[list[int]], str] | None,
) -> list[BenchRequest]:
    """as_text: None for prompts of token ids."""
    requests = []
    for (prefix, input, output_len), adapter in zip(prompts, adapters):
        prompt: Any = [*prefix, *input] if as_text is None else as_text(prefix) + as_text(input)
        if maker.chat:
            prompt = [{"role": "user", "content": prompt}]
        requests.append(maker.make(prompt, output_len, adapter))
    return requests
