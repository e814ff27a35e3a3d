"""Serves Qwen3-30B-A3B geometry (random weights) with random adapters and sends 64 requests at once, over HTTP.

Prints the server's start-up memory table, then for each adapter mode the seconds of two rounds and tokens per second
of the second one. A mode whose answers are not
whole (every request exactly n tokens, adapters change the output, nothing held afterwards) prints no number.

    python -P tests/bench/bench_eager_serving.py [--requests 64] [--new 16] [--layers 48]
"""

import argparse
import json
import random
import sys
import tempfile
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_kit = types.ModuleType("kit")
_kit.__path__ = [str(Path(__file__).parents[1] / "kit")]
sys.modules["kit"] = _kit

import httpx  # noqa: E402
from kit.server import Server, assert_idle, serve  # noqa: E402

sys.path.append(str(Path(__file__).parent))
from geometry import QWEN3_30B_A3B  # noqa: E402


def ask(server: Server, model: str, prompt: list[int], new: int) -> list[int]:
    body = {
        "model": model, "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    answer = httpx.post(f"{server}/v1/completions", json=body, timeout=600, trust_env=False)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()
    config = QWEN3_30B_A3B | {"num_hidden_layers": args.layers}
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 151_000) for _ in range(args.prompt)] for _ in range(args.requests)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        adapters = [f"a{i}=dummy:rank={args.rank},seed={i}" for i in range(8)]
        flags = ["--load-format", "dummy", "--skip-tokenizer-init", "--served-model-name", "base"]
        flags += ["--disable-radix-cache"]
        started = time.monotonic()
        with serve(Path(folder), *flags, "--lora-paths", *adapters) as server:
            print(f"ready after {time.monotonic() - started:.0f} s\n{server.log}", flush=True)
            first: dict[str, list[list[int]]] = {}
            for mode, names in (("none", ["base"]), ("lora1", ["a0"]), ("lora8", [f"a{i}" for i in range(8)])):
                seconds = []
                for _ in range(2):  # the first round may compile a kernel's last variant
                    with ThreadPoolExecutor(args.requests) as pool:
                        begin = time.monotonic()
                        jobs = [
                            pool.submit(ask, server, names[i % len(names)], p, args.new) for i, p in enumerate(prompts)
                        ]
                        answers = [job.result() for job in jobs]
                        seconds.append(time.monotonic() - begin)
                assert all(len(tokens) == args.new for tokens in answers)
                assert mode == "none" or answers != first["none"], "adapters change nothing"
                first[mode] = answers
                assert_idle(server)
                rate = args.requests * args.new / seconds[1]
                print(
                    f"{mode}: {args.requests} requests x {args.new} tokens: {seconds[0]:.2f} s, "
                    f"again {seconds[1]:.2f} s, {rate:.0f} tok/s"
                )
                sys.stdout.flush()


if __name__ == "__main__":
    main()
