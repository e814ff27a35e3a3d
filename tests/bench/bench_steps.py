"""Steps of Qwen3-30B-A3B geometry (random weights) in this process, without HTTP: ms per decode step, prefill, TTFT.

Decode: N requests of 128 prompt tokens; ms = (T(256 new) − T(32 new)) / 224, of the least of several runs once two
agree; a contradiction is printed in its place (`server/bench/step_time.py`). Prefill: 16 prompts of 2048 tokens, one
new token each. TTFT: one of them alone, median of 5. `host` is what the loop spends per step outside of waiting for
results: it must stay below ms. Without --rank: `none`, a server without adapters. With it: `base` (adapters there, none
used), `lora1` (all requests on one) and `lora8` (request i on adapter i mod 8).

    python -P tests/bench/bench_steps.py [--rank 16] [--batch 1 16 64 256] [--set disable_cuda_graph=true …]
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

_kit = types.ModuleType("kit")
_kit.__path__ = [str(Path(__file__).parents[1] / "kit")]
sys.modules["kit"] = _kit

from kit.engine import TestEngine  # noqa: E402

sys.path.append(str(Path(__file__).parent))
from geometry import QWEN3_30B_A3B  # noqa: E402

from loraplex.engine.launched import LaunchedStep  # noqa: E402
from loraplex.server.bench.step_time import UnsteadyError, measure_step  # noqa: E402


class Waited:
    """Seconds that the loop has waited for results."""

    def __init__(self) -> None:
        self.seconds, self.steps = 0.0, 0
        result = LaunchedStep.result

        def timed(step: LaunchedStep) -> Any:
            began = time.perf_counter()
            out = result(step)
            self.seconds += time.perf_counter() - began
            self.steps += 1
            return out

        LaunchedStep.result = timed  # type: ignore[method-assign]


def run(engine: TestEngine, prompts: list[list[int]], names: list[str | None], new: int) -> float:
    engine.sent.clear()
    began = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.submit(prompt, names[i % len(names)], max_tokens=new, ignore_eos=True)
    while not (engine.loop.inbox.empty() and engine.loop.is_idle):
        assert engine.loop.turn()
    seconds = time.perf_counter() - began
    ended = [out for message in engine.sent for out in getattr(message, "outputs", ()) if out.finish_reason]
    assert [out.finish_reason for out in ended] == ["length"] * len(prompts)
    return seconds


def prompts_of(count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, 151_000) for _ in range(length)] for _ in range(count)]


def report(engine: TestEngine, mode: str, names: list[str | None], batches: list[int], waited: Waited) -> None:
    cells = []
    for n in batches:
        prompts = prompts_of(n, 128, n)

        async def timed(new: int, prompts: list[list[int]] = prompts) -> float:
            waited.seconds, waited.steps = 0.0, 0
            return run(engine, prompts, names, new)

        try:
            took = asyncio.run(measure_step(timed, 32, 256))
        except UnsteadyError as error:
            cells.append(f"N={n}: {error}")
            continue
        host = (asyncio.run(timed(256)) - waited.seconds) / waited.steps
        cells.append(f"N={n}: {took.step * 1000:.2f} ms/step (spread {took.spread * 1000:.2f}, host {host * 1000:.2f})")
    run(engine, prompts_of(16, 2048, 0), names, 1)
    prefill = 16 * 2048 / run(engine, prompts_of(16, 2048, 1), names, 1)
    ttft = statistics.median(run(engine, prompts_of(1, 2048, 2 + i), names, 1) for i in range(5))
    print(f"{mode}: {'; '.join(cells)}; prefill {prefill:,.0f} tok/s; TTFT {ttft * 1000:.1f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, help="of eight adapters")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=JSON", help="settings of the engine")
    args = parser.parse_args()
    settings = {name: json.loads(value) for name, _, value in (item.partition("=") for item in args.set)}
    settings = {
        "device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "max_total_tokens": None, "lora_memory": "auto",
        "max_running_requests": 256, "chunked_prefill_size": args.chunk, "disable_radix_cache": True,
    } | settings  # fmt: skip
    waited = Waited()
    adapters = {f"a{i}": f"dummy:rank={args.rank},seed={i}" for i in range(8 if args.rank else 0)}
    modes: dict[str, list[str | None]] = {"base": [None], "lora1": ["a0"], "lora8": list(adapters)}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN3_30B_A3B | {"num_hidden_layers": args.layers}))
        began = time.monotonic()
        engine = TestEngine(Path(folder), adapters, **(settings | {"enable_lora": bool(adapters)}))
        print(f"ready after {time.monotonic() - began:.0f} s")
        for words, size in engine.loop.runner.memory_table:
            print(f"  {words}: {size / 2**20:,.0f} MiB")
        for mode, names in modes.items() if adapters else [("none", [None])]:
            report(engine, mode, names, args.batch, waited)


if __name__ == "__main__":
    main()
