"""Time of a decode step from whole runs, by a difference that prompts and the first token cancel out of.

A run that once compiles, captures or collects garbage would make the difference wrong in either direction, and looks
like a result. So runs are repeated until two agree before any counts, the least of several counts, and the difference
must agree with what the long run says by itself, less the time to its first token.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

ROUNDS, MOST_ROUNDS = 2, 6
"""Runs of each length; more while they contradict each other."""
MOST_WARM_UPS = 8
AGREE = 0.1
"""Of one another: two warm-up runs, and the two ways to a step's time."""


class UnsteadyError(Exception):
    """The runs tell no step's time."""


@dataclass(frozen=True)
class StepTime:
    """Seconds."""

    step: float
    """(least long − least short) / (long − short)."""
    spread: float
    """What the long runs differ by, per step."""
    short: float
    long: float


async def measure_step(timed: Callable[[int], Awaitable[float]], short: int, long: int) -> StepTime:
    """timed(n): seconds of one run with n new tokens a request. Raises UnsteadyError."""
    await _warm_up(timed, short)
    firsts: list[float] = []
    shorts: list[float] = []
    longs: list[float] = []
    for round in range(MOST_ROUNDS):
        firsts.append(await timed(1))
        shorts.append(await timed(short))
        longs.append(await timed(long))
        if round + 1 >= ROUNDS and _agree(*_both_ways(firsts, shorts, longs, short, long)):
            break
    step, alone = _both_ways(firsts, shorts, longs, short, long)
    if not _agree(step, alone):
        raise UnsteadyError(
            f"{long} tokens took {min(longs):.4f} s and {short} took {min(shorts):.4f} s, {1000 * step:.3f} ms a step, "
            f"but the long run alone says {1000 * alone:.3f} ms; give a larger --long"
        )
    return StepTime(step, (max(longs) - min(longs)) / long, min(shorts), min(longs))


async def _warm_up(timed: Callable[[int], Awaitable[float]], new: int) -> None:
    """Until two runs in a row agree, or there is no hope of it."""
    last = await timed(new)
    for _ in range(MOST_WARM_UPS):
        before, last = last, await timed(new)
        if _agree(before, last):
            return


def _both_ways(
    firsts: list[float], shorts: list[float], longs: list[float], short: int, long: int
) -> tuple[float, float]:
    difference = (min(longs) - min(shorts)) / (long - short)
    return difference, (min(longs) - min(firsts)) / (long - 1)


def _agree(a: float, b: float) -> bool:
    return min(a, b) > 0 and abs(a - b) <= AGREE * max(a, b)
