"""Results of `loraplex bench offline` for a person: a row per adapter mode."""

from typing import Any


def lines(result: dict[str, Any]) -> list[str]:
    modes = list(dict.fromkeys(entry["mode"] for entry in result["results"]))
    columns: dict[str, dict[str, str]] = {}
    for entry in result["results"]:
        head, cell = _cell(entry)
        columns.setdefault(head, {})[entry["mode"]] = cell
    rows = [["", *columns], *([mode, *(cells.get(mode, "–") for cells in columns.values())] for mode in modes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    plan = result["workload"]
    prefill_len = plan["prefill_len"]
    return [
        f"{result['model']}: {result['model_type']} in {result['dtype']} on {result['device']}, "
        f"{len(result['adapters'])} adapters, loraplex {result['loraplex']}",
        f"decode: {plan['prompt_len']} prompt tokens, ms per step from {plan['short']} and {plan['long']} new ones; "
        f"prefill: {plan['prefill_prompts']} x {prefill_len}; ttft: 1 x {prefill_len}",
        "",
        *table,
    ]


def _cell(entry: dict[str, Any]) -> tuple[str, str]:
    match entry["test"]:
        case "decode":
            return f"N={entry['batch']} ms", f"{entry['ms_per_step']:.2f}"
        case "prefill":
            return "prefill tok/s", f"{entry['tokens_per_s']:,.0f}"
    return "ttft ms", f"{entry['ms']:.1f}"
