"""What a run of requests says: percentiles, rates, one row per adapter; as a table and as JSON."""

from collections.abc import Iterable, Sequence
from typing import Any

from loraplex.server.bench.measure import Outcome

BUSY_CLIENT = 0.8
"""Share of one core from which the load generator may be what limits."""
BASE = "(base)"


def percentile(sorted_values: Sequence[float], share: float) -> float:
    """By linear interpolation, as numpy's default."""
    position = share * (len(sorted_values) - 1)
    low = int(position)
    high = min(low + 1, len(sorted_values) - 1)
    return sorted_values[low] + (sorted_values[high] - sorted_values[low]) * (position - low)


def spread_ms(seconds: Iterable[float]) -> dict[str, float] | None:
    """None without values."""
    values = sorted(1000 * value for value in seconds)
    if not values:
        return None
    return {
        "mean": sum(values) / len(values),
        "p50": percentile(values, 0.5),
        "p90": percentile(values, 0.9),
        "p99": percentile(values, 0.99),
        "max": values[-1],
    }


def summary(outcomes: Sequence[Outcome], duration: float) -> dict[str, Any]:
    """Of requests that succeeded, but for the counts of failures. Rates are per second of the whole run."""
    good = [o for o in outcomes if o.failure is None]
    prompt, output = sum(o.prompt_tokens for o in good), sum(o.output_tokens for o in good)
    return {
        "requests": len(outcomes),
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": len(good) / duration,
        "prompt_tokens_per_s": prompt / duration,
        "output_tokens_per_s": output / duration,
        "ttft_ms": spread_ms(o.ttft for o in good if o.ttft is not None),
        "itl_ms": spread_ms(gap for o in good for gap in o.gaps),
        "tpot_ms": spread_ms(o.time_per_token for o in good if o.time_per_token is not None),
        "e2e_ms": spread_ms(o.e2e for o in good),
    }


def failures(outcomes: Iterable[Outcome]) -> dict[str, dict[str, Any]]:
    """Kind → how often, and what the first one said."""
    found: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        if outcome.failure is not None:
            found.setdefault(outcome.failure, {"count": 0, "first": outcome.detail})["count"] += 1
    return found


def report(outcomes: Sequence[Outcome], duration: float, cpu_seconds: float, setup: dict[str, Any]) -> dict[str, Any]:
    """Everything `--output` writes. cpu_seconds: what the load generator itself used."""
    names = sorted({o.adapter or BASE for o in outcomes})
    return {
        "setup": setup,
        "duration_s": duration,
        "client_cpu_share": cpu_seconds / duration,
        **summary(outcomes, duration),
        "failures": failures(outcomes),
        "adapters": {
            name: summary([o for o in outcomes if (o.adapter or BASE) == name], duration) for name in names
        },
    }  # fmt: skip


def lines(result: dict[str, Any]) -> list[str]:
    """The report for a person."""
    text = [
        f"{result['completed']} of {result['requests']} requests in {result['duration_s']:.2f} s: "
        f"{result['requests_per_s']:.2f}/s",
        f"tokens: prompt {result['prompt_tokens']} ({result['prompt_tokens_per_s']:.0f}/s), "
        f"output {result['output_tokens']} ({result['output_tokens_per_s']:.0f}/s)",
        "",
        *_table([["ms", "mean", "p50", "p90", "p99", "max"], *_latency_rows(result)]),
    ]
    if len(result["adapters"]) > 1 or BASE not in result["adapters"]:
        text += ["", *_table([_ADAPTER_HEAD, *(_adapter_row(*item) for item in result["adapters"].items())])]
    if result["client_cpu_share"] > BUSY_CLIENT:
        text += ["", f"the load generator used {result['client_cpu_share']:.0%} of a core: it may be what limited"]
    if result["failed"]:
        text += ["", f"{result['failed']} requests FAILED; the numbers above are of the others:"]
        text += [f"  {kind} x {f['count']}, the first: {f['first']}" for kind, f in result["failures"].items()]
    return text


def _latency_rows(result: dict[str, Any]) -> list[list[str]]:
    rows = []
    for key, name in (("ttft_ms", "TTFT"), ("itl_ms", "ITL"), ("tpot_ms", "TPOT"), ("e2e_ms", "E2E")):
        values = result[key]
        if values is not None:
            rows.append([name, *(f"{values[column]:.2f}" for column in ("mean", "p50", "p90", "p99", "max"))])
    return rows


_ADAPTER_HEAD = [
    "adapter", "requests", "failed", "output tok", "tok/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "E2E p50"
]  # fmt: skip


def _adapter_row(name: str, one: dict[str, Any]) -> list[str]:
    cells = [name, str(one["requests"]), str(one["failed"]), str(one["output_tokens"])]
    cells.append(f"{one['output_tokens_per_s']:.1f}")
    for key, column in (
        ("ttft_ms", "p50"),
        ("ttft_ms", "p99"),
        ("itl_ms", "p50"),
        ("itl_ms", "p99"),
        ("e2e_ms", "p50"),
    ):
        cells.append("–" if one[key] is None else f"{one[key][column]:.2f}")
    return cells


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths)))
        for row in rows
    ]
