"""When requests are sent: at random times (open loop), so many at once (closed loop), or both."""

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from loraplex.server.bench.measure import Outcome
from loraplex.server.bench.workload import BenchRequest


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start, with exponential gaps of mean 1/rate (a Poisson process); all 0 for an infinite rate."""
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(f"arrivals {seed}")
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


async def run_load(
    requests: Sequence[BenchRequest],
    send: Callable[[BenchRequest], Awaitable[Outcome]],
    times: Sequence[float],
    concurrency: int | None,
    on_done: Callable[[Outcome], None],
) -> list[Outcome]:
    """Outcomes in the order of the requests. A request whose time has come while `concurrency` are under way waits, and
    its own times count from when it is sent."""
    start = time.perf_counter()
    room: contextlib.AbstractAsyncContextManager[object] = (
        contextlib.nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
    )

    async def one(request: BenchRequest, due: float) -> Outcome:
        if (wait := start + due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        async with room:
            outcome = await send(request)
        on_done(outcome)
        return outcome

    return await asyncio.gather(*(one(request, due) for request, due in zip(requests, times)))
