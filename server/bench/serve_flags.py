"""The flags of `loraplex bench serve`."""

import argparse
import math
from pathlib import Path
from typing import Any

import orjson

from loraplex.server.bench.output_file import output_file
from loraplex.server.bench.workload import check_popularity


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loraplex bench serve",
        description="Sends streaming requests to a server of the OpenAI HTTP API and measures time to first token "
        "(TTFT), between pieces of text (ITL), per output token (TPOT) and to the end (E2E), and throughput. Tokens "
        "are those the server counts. Exits with 1 when a request failed.",
        allow_abbrev=False,
    )
    _server(parser.add_argument_group("server"))
    _load(parser.add_argument_group("load"))
    _prompts(parser.add_argument_group("requests"))
    _adapters(parser.add_argument_group("adapters"))
    out = parser.add_argument_group("output")
    out.add_argument("--output", type=output_file, metavar="FILE", help="write the report as JSON")
    out.add_argument("--no-progress", action="store_true", help="show no progress bar")
    return parser


def _server(group: Any) -> None:
    group.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="with or without /v1")
    group.add_argument(
        "--model", type=_name, metavar="NAME", help="the base model (default: the first that /v1/models lists)"
    )
    group.add_argument("--api-key", metavar="KEY", help="bearer token (default: OPENAI_API_KEY)")
    group.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    group.add_argument(
        "--timeout", type=_positive, default=600.0, metavar="SECONDS", help="until the end of an answer (default: 600)"
    )


def _load(group: Any) -> None:
    group.add_argument(
        "--request-rate",
        type=_rate,
        default=math.inf,
        metavar="R",
        help="open loop: requests per second at random times (Poisson); inf sends all at once (default: inf)",
    )
    group.add_argument("--concurrency", type=_count, metavar="N", help="closed loop: at most N requests under way")
    group.add_argument(
        "--warmup", type=_from_zero, default=1, metavar="N", help="requests before, not counted (default: 1)"
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of prompts, lengths, times, adapters (default: 0)"
    )


def _prompts(group: Any) -> None:
    group.add_argument("--num-prompts", type=_count, metavar="N", help="default: 100, or the whole dataset")
    group.add_argument("--input-len", type=_count, default=128, metavar="N", help="prompt tokens (default: 128)")
    group.add_argument("--output-len", type=_count, default=256, metavar="N", help="max_tokens (default: 256)")
    group.add_argument(
        "--range-ratio", type=_share, default=0.0, metavar="X", help="draw both lengths evenly from ± this share"
    )
    group.add_argument(
        "--shared-prefix-len",
        type=_from_zero,
        default=0,
        metavar="N",
        help="tokens before the input that prompts share",
    )
    group.add_argument(
        "--num-prefixes", type=_count, default=1, metavar="N", help="different ones of these (default: 1)"
    )
    group.add_argument(
        "--prompt-format",
        choices=("ids", "text"),
        help="random token ids, or text for servers that refuse ids (default: ids; text for chat)",
    )
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="draws ids from this one, and makes text of them; without it text is of common words",
    )
    group.add_argument(
        "--vocab-size",
        type=_count,
        metavar="N",
        help="draw ids below this (default: of the model's config.json, if it can be read)",
    )
    group.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help='JSONL instead of random prompts: {"prompt" | "messages", "max_tokens"?, "adapter"?}',
    )
    group.add_argument("--ignore-eos", action="store_true", help="every answer has its max_tokens, or has failed")
    group.add_argument("--temperature", type=_temperature, default=0.0, metavar="X", help="default: 0, greedy")
    group.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="more fields of each request"
    )


def _adapters(group: Any) -> None:
    which = group.add_mutually_exclusive_group()
    which.add_argument("--adapters", type=_names, default=[], metavar="A,B,C", help="names of adapters to ask")
    which.add_argument("--adapters-from-server", action="store_true", help="all that /v1/models lists")
    group.add_argument(
        "--popularity",
        type=_popularity,
        default="uniform",
        metavar="P",
        help="uniform (at random), zipf or zipf:EXPONENT, distinct (in turn), skewed (nine of ten the first), "
        "identical (the first only); default: uniform",
    )
    group.add_argument(
        "--base-share", type=_share, default=0.0, metavar="X", help="share of requests for the base model"
    )
    group.add_argument(
        "--adapter-by",
        choices=("model", "lora_path"),
        default="model",
        help="name the adapter as the model (vLLM, loraplex) or in the field lora_path (SGLang); default: model",
    )


def _popularity(text: str) -> str:
    try:
        return check_popularity(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _number(text: str, low: float, high: float, words: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not {words}")
    return value


def _rate(text: str) -> float:
    return _number(text, 1e-6, math.inf, "a number of requests per second, or inf")


def _positive(text: str) -> float:
    return _number(text, 1e-3, 1e9, "a positive number")


def _temperature(text: str) -> float:
    return _number(text, 0, 1e3, "a temperature from 0 up")


def _share(text: str) -> float:
    return _number(text, 0, 1, "between 0 and 1")


def _from_zero(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0 up")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 1 up")
    return int(text)


def _name(text: str) -> str:
    if not text or not text.isprintable():  # bytes that are no UTF-8 arrive as surrogates, which are not printable
        raise argparse.ArgumentTypeError(f"{text!r}: a name is empty or not printable")
    return text


def _names(text: str) -> list[str]:
    return [_name(name) for name in text.split(",")]


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("expected a JSON object")
    return value
