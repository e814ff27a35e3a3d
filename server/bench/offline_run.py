"""The measurements of `loraplex bench offline`, each with the check that what was timed is what was asked for."""

import asyncio
import random
import statistics
import time
from typing import Any

from tqdm import tqdm

from loraplex.engine.messages import TokenOut
from loraplex.engine.request import Request, SamplingParams
from loraplex.server.bench.offline_flags import Plan, adapters_of
from loraplex.server.bench.step_time import UnsteadyError, measure_step
from loraplex.server.bench.target import ordinary_ids
from loraplex.server.client import EngineClient
from loraplex.server.engine_api import EngineError

PROBE_TOKENS = 8


class CheckError(Exception):
    """What ran was not what was asked for: no number may be printed."""


class Engine:
    """Greedy generation of random prompts, timed by the caller's clock."""

    def __init__(self, client: EngineClient, seed: int) -> None:
        self.client = client
        self._rng = random.Random(seed)
        self._ids = ordinary_ids(client.info.vocab_size)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Never the same twice, so that nothing is answered from a cache."""
        return [self._rng.choices(self._ids, k=length) for _ in range(count)]

    async def seconds(self, prompts: list[list[int]], new: int, adapters: list[str | None]) -> float:
        """Until every prompt has exactly `new` tokens. Raises CheckError, EngineError."""
        room, context = self.client.info.max_total_tokens, self.client.info.context_length
        longest = max(len(prompt) for prompt in prompts) + new
        if longest > context:
            raise CheckError(f"prompt and answer have {longest} tokens, the model's context {context}")
        needed = sum(len(prompt) + new for prompt in prompts)
        if needed > room:
            raise CheckError(f"{len(prompts)} prompts need {needed} tokens of KV, there are {room}: --max-total-tokens")
        started = time.perf_counter()
        counts = await asyncio.gather(*(self._count(p, new, a) for p, a in zip(prompts, adapters)))
        elapsed = time.perf_counter() - started
        if set(counts) != {new}:
            raise CheckError(f"asked for {new} tokens of each prompt, got {sorted(set(counts))}")
        return elapsed

    async def _count(self, prompt: list[int], new: int, adapter: str | None) -> int:
        return sum(len(out.tokens) for out in await self.outputs(prompt, new, adapter))

    async def outputs(
        self, prompt: list[int], new: int, adapter: str | None, logprobs: int | None = None
    ) -> list[TokenOut]:
        sampling = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, logprobs=logprobs)
        request = Request(id=self.client.new_id(), prompt_ids=prompt, sampling=sampling, adapter=adapter)
        found: list[TokenOut] = []
        async for outputs in self.client.submit(request):
            for out in outputs:
                if out.error is not None:
                    raise EngineError(out.error)
                found.append(out)
        return found


async def run_plan(engine: Engine, plan: Plan, bar: "tqdm[Any]") -> list[dict[str, Any]]:
    """One entry per mode and test, in the units its keys name."""
    results = []
    for mode in plan.modes:
        names = list(plan.adapters[: adapters_of(mode)])
        await _check_adapters(engine, names)
        if "decode" in plan.tests:
            for batch in plan.batches:
                results.append({"mode": mode, **await _decode(engine, plan, names, batch)})
                bar.update()
        if "prefill" in plan.tests:
            results.append({"mode": mode, **await _prefill(engine, plan, names)})
            bar.update()
        if "ttft" in plan.tests:
            results.append({"mode": mode, **await _first_token(engine, plan, names)})
            bar.update()
    return results


async def _check_adapters(engine: Engine, names: list[str]) -> None:
    """An adapter that is not applied would be fast."""
    [prompt] = engine.prompts(1, PROBE_TOKENS)
    base = await _logprobs(engine, prompt, None)
    for name in names:
        if await _logprobs(engine, prompt, name) == base:
            raise CheckError(f"adapter {name} changes nothing: its logprobs are the base model's")


async def _logprobs(engine: Engine, prompt: list[int], adapter: str | None) -> list[float]:
    outputs = await engine.outputs(prompt, PROBE_TOKENS, adapter, logprobs=0)
    return [entry.logprob for out in outputs for entry in out.logprobs]


def _in_turn(names: list[str], count: int) -> list[str | None]:
    return [names[i % len(names)] if names else None for i in range(count)]


async def _decode(engine: Engine, plan: Plan, names: list[str], batch: int) -> dict[str, Any]:
    adapters = _in_turn(names, batch)

    async def timed(new: int) -> float:
        return await engine.seconds(engine.prompts(batch, plan.prompt_len), new, adapters)

    try:
        took = await measure_step(timed, plan.short, plan.long)
    except UnsteadyError as error:
        raise CheckError(f"batch {batch}: {error}") from error
    return {
        "test": "decode",
        "batch": batch,
        "short_s": took.short,
        "long_s": took.long,
        "ms_per_step": 1000 * took.step,
        "spread_ms_per_step": 1000 * took.spread,
        "decode_tokens_per_s": batch / took.step,
        "tokens_per_s": batch * plan.long / took.long,
    }


async def _prefill(engine: Engine, plan: Plan, names: list[str]) -> dict[str, Any]:
    count = plan.prefill_prompts
    times = await _repeated(engine, count, plan.prefill_len, _in_turn(names, count), 3)
    median = statistics.median(times)
    return {
        "test": "prefill",
        "batch": count,
        "prompt_len": plan.prefill_len,
        "all_s": times,
        "tokens_per_s": count * plan.prefill_len / median,
    }


async def _first_token(engine: Engine, plan: Plan, names: list[str]) -> dict[str, Any]:
    times = await _repeated(engine, 1, plan.prefill_len, _in_turn(names, 1), 5)
    return {
        "test": "ttft",
        "batch": 1,
        "prompt_len": plan.prefill_len,
        "all_s": times,
        "ms": 1000 * statistics.median(times),
    }


async def _repeated(engine: Engine, count: int, length: int, adapters: list[str | None], rounds: int) -> list[float]:
    """Seconds to one new token of each of `count` prompts, after one round to warm up."""
    times = [await engine.seconds(engine.prompts(count, length), 1, adapters) for _ in range(rounds + 1)]
    return times[1:]
