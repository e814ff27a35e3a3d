"""`loraplex bench serve`: sends requests to a server of the OpenAI HTTP API and measures its streams."""

import argparse
import asyncio
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from loraplex.server.bench.dataset import dataset_requests, read_dataset
from loraplex.server.bench.http_client import HTTPClient, ProtocolError
from loraplex.server.bench.load import arrival_times, run_load
from loraplex.server.bench.measure import Outcome, ask
from loraplex.server.bench.report import lines, report
from loraplex.server.bench.serve_flags import parser
from loraplex.server.bench.target import ServedModels, ordinary_ids, served_models, vocabulary_of_folder
from loraplex.server.bench.workload import (
    BenchRequest,
    BodyMaker,
    Lengths,
    Prefixes,
    choose_adapters,
    in_words,
    random_prompts,
    random_requests,
)

DEFAULT_REQUESTS = 100
SECRET = {"api_key"}


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 every request succeeded, 1 not all did, 2 wrong usage; 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    try:
        result = asyncio.run(_run(args))
        print("\n".join(lines(result)))
        if args.output is not None:
            args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except (ValueError, OSError, ProtocolError) as error:
        print(f"loraplex bench serve: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("loraplex bench serve: stopped before the end: no numbers", file=sys.stderr)
        return 130
    return 1 if result["failed"] else 0


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    client = HTTPClient(args.base_url, args.api_key or os.environ.get("OPENAI_API_KEY"))
    try:
        requests, warmup, setup = await _prepare(client, args)
        path = "/v1/chat/completions" if args.endpoint == "chat" else "/v1/completions"
        for request in warmup:
            outcome = await ask(client, path, request, time.perf_counter(), args.timeout)
            if outcome.failure is not None:
                raise ValueError(f"the first request, a warm-up, failed: {outcome.failure}: {outcome.detail}")
        return await _measure(client, path, requests, args, setup)
    finally:
        await client.close()


async def _measure(
    client: HTTPClient, path: str, requests: list[BenchRequest], args: argparse.Namespace, setup: dict[str, Any]
) -> dict[str, Any]:
    gc.collect()
    gc.freeze()  # a collection over all prompts would hold up the streams
    started, cpu = time.perf_counter(), time.process_time()
    with tqdm(total=len(requests), unit="request", dynamic_ncols=True, disable=args.no_progress) as bar:

        def done(outcome: Outcome) -> None:
            bar.update()

        async def send(request: BenchRequest) -> Outcome:
            return await ask(client, path, request, started, args.timeout)

        times = arrival_times(len(requests), args.request_rate, args.seed)
        outcomes = await run_load(requests, send, times, args.concurrency, done)
    duration = time.perf_counter() - started
    return report(outcomes, duration, time.process_time() - cpu, setup)


async def _prepare(
    client: HTTPClient, args: argparse.Namespace
) -> tuple[list[BenchRequest], list[BenchRequest], dict[str, Any]]:
    """(requests, warm-up requests, what the report says of the set-up). Raises ValueError naming the flag."""
    served = await _served(client, args)
    model = args.model or next(iter(served.base), None)
    if model is None:
        raise ValueError("the server lists no base model: give --model")
    adapters = served.adapters if args.adapters_from_server else args.adapters
    if args.adapters_from_server and not adapters:
        raise ValueError("--adapters-from-server: the server lists no adapters")
    chat = args.endpoint == "chat"
    maker = BodyMaker(model, chat, args.adapter_by, args.temperature, args.ignore_eos, args.extra_body)
    if args.dataset is not None:
        items = read_dataset(args.dataset, chat=chat)
        count = args.num_prompts or len(items)
        names = choose_adapters(count, adapters, args.popularity, args.base_share, args.seed)
        requests = dataset_requests(maker, items, names, args.output_len)
        warmup = requests[:1] * args.warmup
    else:
        count = args.num_prompts or DEFAULT_REQUESTS
        names = choose_adapters(count, adapters, args.popularity, args.base_share, args.seed)
        requests = _random(args, maker, served, names, args.seed)
        warmup = _random(args, maker, served, names[: args.warmup], args.seed + 1)
    setup = {name: _plain(value) for name, value in vars(args).items() if name not in SECRET}
    return requests, warmup, setup | {"model": model, "adapters": adapters, "num_prompts": count}


async def _served(client: HTTPClient, args: argparse.Namespace) -> ServedModels:
    """Raises ValueError naming the URL."""
    try:
        async with asyncio.timeout(args.timeout):
            return await served_models(client)
    except TimeoutError:
        problem = f"GET /v1/models: no answer after {args.timeout:g} s (--timeout)"
    except (OSError, ProtocolError, ValueError) as error:
        problem = str(error)
    raise ValueError(f"--base-url {args.base_url}: {problem}")


def _random(
    args: argparse.Namespace, maker: BodyMaker, served: ServedModels, adapters: Sequence[str | None], seed: int
) -> list[BenchRequest]:
    as_text, ids = _prompt_form(args, served)
    lengths = Lengths(args.input_len, args.output_len, args.range_ratio)
    prefixes = Prefixes(args.shared_prefix_len, args.num_prefixes)
    return random_requests(maker, random_prompts(len(adapters), lengths, prefixes, ids, seed), adapters, as_text)


def _prompt_form(
    args: argparse.Namespace, served: ServedModels
) -> tuple[Callable[[list[int]], str] | None, Sequence[int]]:
    """How ids become text (None: they stay ids), and the ids to draw from."""
    in_text = args.prompt_format == "text" or (args.prompt_format is None and args.endpoint == "chat")
    if args.prompt_format == "ids" and args.endpoint == "chat":
        raise ValueError("--prompt-format ids needs --endpoint completions")
    if args.tokenizer is not None:
        decode, ids = _tokenizer(args.tokenizer)
        return decode if in_text else None, ids
    if in_text:
        return in_words, range(2**20)
    size = args.vocab_size or vocabulary_of_folder(served.root)
    if size is None:
        raise ValueError(
            "the size of the vocabulary is not known: give --tokenizer DIR, --vocab-size N, or --prompt-format text"
        )
    return None, ordinary_ids(size)


def _tokenizer(folder: Path) -> tuple[Callable[[list[int]], str], Sequence[int]]:
    """Decoding, and every id that is not a special token."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json" if folder.is_dir() else folder
    if not path.is_file():
        raise ValueError(f"--tokenizer: {path} is not a file")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # it has no class of its own
        raise ValueError(f"--tokenizer: {path}: {error}") from None
    added = tokenizer.get_added_tokens_decoder()
    ids = [id for id in sorted(tokenizer.get_vocab(with_added_tokens=True).values()) if id not in added]
    if not ids:
        raise ValueError(f"--tokenizer: {path}: every token is a special one")
    return lambda chosen: str(tokenizer.decode(chosen)), ids


def _plain(value: Any) -> Any:
    if isinstance(value, float) and math.isinf(value):
        return "inf"  # JSON has no infinity
    return str(value) if isinstance(value, Path) else value
