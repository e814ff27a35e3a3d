"""A step's time: one slow run must not become a number."""

import asyncio
from collections.abc import Callable

import pytest

from loraplex.server.bench.step_time import StepTime, UnsteadyError, measure_step


def measured(seconds: Callable[[int, int], float], short: int = 32, long: int = 256) -> tuple[StepTime, list[int]]:
    """seconds(i, n): what run i, of n tokens, takes. Also returns the runs' n."""
    runs: list[int] = []

    async def timed(new: int) -> float:
        runs.append(new)
        return seconds(len(runs) - 1, new)

    return asyncio.run(measure_step(timed, short, long)), runs


def test_steady_runs() -> None:
    took, runs = measured(lambda i, n: 0.05 + 0.004 * (n - 1))
    assert took.step == pytest.approx(0.004)
    assert took.spread == pytest.approx(0)
    assert runs == [32, 32, 1, 32, 256, 1, 32, 256]


@pytest.mark.parametrize("slow", range(8))
def test_one_slow_run_of_any_kind_changes_nothing(slow: int) -> None:
    took, runs = measured(lambda i, n: 0.05 + 0.004 * (n - 1) + (0.2 if i == slow else 0))
    assert took.step == pytest.approx(0.004)
    assert len(runs) <= 14
    assert (took.spread > 0) == (slow >= 2 and runs[slow] == 256)


def test_warm_up_goes_on_until_two_runs_agree() -> None:
    took, runs = measured(lambda i, n: 0.05 + 0.004 * (n - 1) + max(0, 3 - i))
    assert took.step == pytest.approx(0.004)
    assert runs[:6] == [32, 32, 32, 32, 32, 1]


@pytest.mark.parametrize("extra", [0.2, -0.1])
def test_a_short_run_that_is_always_wrong_is_refused(extra: float) -> None:
    """0.2 s in each short run made 3.96 ms a step look like 3.08."""
    with pytest.raises(UnsteadyError, match=r"the long run alone says 3\.960 ms"):
        measured(lambda i, n: 0.05 + 0.00396 * (n - 1) + (extra if n == 32 else 0))


def test_a_long_run_shorter_than_the_short_one_is_refused() -> None:
    with pytest.raises(UnsteadyError):
        measured(lambda i, n: 1.0 if n == 32 else 0.5)
