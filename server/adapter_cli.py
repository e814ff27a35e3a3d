"""`loraplex adapter`: looks at an adapter folder and rewrites it, without a server."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loraplex.engine.lora.report import AdapterReport, ModuleReport

DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 done, 1 the adapter or the model is at fault; argparse exits with 2 for bad usage."""
    args = _parser().parse_args(argv)
    run = {"inspect": _inspect, "verify": _verify, "convert": _convert}[args.command]
    try:
        run(args)
    except (ValueError, OSError) as error:
        print(f"loraplex adapter {args.command}: error: {args.adapter}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loraplex adapter", description="Looks at and rewrites LoRA adapter folders.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    inspect = commands.add_parser("inspect", help="what an adapter holds, and how much of a model it covers")
    convert = commands.add_parser("convert", help="write its routed experts in another layout")
    verify = commands.add_parser("verify", help="compare it here with the same adapter merged into the weights")
    for command in (inspect, verify, convert):
        command.add_argument("adapter", type=Path, metavar="DIR", help="the adapter's folder")
    convert.add_argument("target", type=Path, metavar="OUT", help="the new folder; may not exist")
    convert.add_argument("--layout", choices=("per-expert", "fused"), required=True, help="layout of the new adapter")
    inspect.add_argument(
        "--dtype", choices=DTYPES, help="of the copy on the device (default: the model's, or bfloat16)"
    )
    inspect.add_argument("--json", action="store_true", help="print JSON")
    verify.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute, in fp32")
    verify.add_argument("--tokens", type=int, default=64, metavar="N", help="length of the random prompt (default: 64)")
    verify.add_argument(
        "--tol",
        type=float,
        default=0.01,
        metavar="X",
        help="largest difference, as a share of what the adapter changes (default: 0.01)",
    )
    for command in (inspect, verify, convert):
        required = command is verify
        command.add_argument("--model", type=Path, metavar="DIR", required=required, help="the base model's folder")
        command.add_argument(
            "--lora-b-layout",
            choices=("rank-major", "expert-major"),
            default="rank-major",
            help="order of lora_B's columns in fused expert parameters: PEFT's, or that of Unsloth before 2026-09-17",
        )
    return parser


def _inspect(args: argparse.Namespace) -> None:
    from loraplex.engine.lora.report import inspect_adapter

    report = inspect_adapter(args.adapter, args.model, dtype=args.dtype, b_layout=args.lora_b_layout)
    if args.json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        print("\n".join(_report_lines(report)))


def _verify(args: argparse.Namespace) -> None:
    from loraplex.engine.lora.verify import verify_adapter

    rows = verify_adapter(args.adapter, args.model, device=args.device, tokens=args.tokens, b_layout=args.lora_b_layout)
    wrong = []
    for i, c in enumerate(rows):
        if i == 0:
            print(f"{'':24}{'difference':>12}{'effect':>12}{'largest value':>16}{'site error':>12}")
        is_good = c.within(args.tol)
        site_error = f"{c.site_error:12.3g}  {c.site.removeprefix(c.name + '.')}" if c.site else ""
        line = f"{c.name:24}{c.difference:12.3g}{c.effect:12.3g}{c.size:16.4g}{site_error}"
        print(line + ("" if is_good else "  MISMATCH"), flush=True)
        if not is_good:
            wrong.append(c)
    if wrong:
        first = wrong[0]
        where = (
            "" if first.sites_within(args.tol) else f"; an output of {first.site} by {first.site_error:.3g} of its norm"
        )
        raise ValueError(
            f"{first.name} differs by {first.difference:.3g} from the merged weights{where} "
            f"({len(wrong)} mismatches in all)"
        )
    print("the adapter does here what merging it into the weights does")


def _convert(args: argparse.Namespace) -> None:
    from loraplex.engine.lora.convert import convert_adapter

    result = convert_adapter(args.adapter, args.target, args.layout, model=args.model, b_layout=args.lora_b_layout)
    print(f"{args.target}: {result.layout}, {result.num_tensors} tensors; read back, every ΔW is the same")


def _report_lines(report: "AdapterReport") -> list[str]:
    lines = [
        f"layout   {report.layout}",
        f"rank     {_span(report.rank)}",
        f"scale    {_span(report.scale)}",
        f"tensors  {report.num_tensors}",
    ]
    if report.coverage is not None:
        lines.append(f"covers   {report.coverage:.0%} of the model's sites")
    lines += [
        f"bytes    {_size(report.disk_bytes)} on disk, {_size(report.host_bytes)} in host memory, "
        f"{_size(report.device_bytes)} on the device as {report.device_dtype}",
        f"digest   {report.digest}",
        "",
        *_table([_heading(report), *(_row(module, report) for module in report.modules)]),
    ]
    lines += [f"ignored: {name}" for name in report.ignored]
    if report.ignored:
        lines.append("A server refuses an adapter with such tensors unless it runs with --no-lora-strict-loading.")
    return lines + [f"note: {note}" for note in report.notes]


def _heading(report: "AdapterReport") -> list[str]:
    columns = ["module", "layers", "experts", "rank", "scale"]
    return columns + (["% of sites", "‖ΔW‖/‖W‖"] if report.coverage is not None else [])


def _row(module: "ModuleReport", report: "AdapterReport") -> list[str]:
    experts = "" if module.experts is None else f"{module.experts}/{report.num_experts}"
    if module.shared:
        experts += f" (one {' and '.join(module.shared)})"
    cells = [module.module, _layers(module.layers), experts, _span(module.rank), _span(module.scale)]
    if module.coverage is not None:
        norm = module.relative_norm
        cells += [f"{module.coverage:.0%}", "–" if norm is None else f"{norm:.3g}"]
    return cells


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _layers(layers: list[int]) -> str:
    """[0, 1, 2, 5] → 0-2,5."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _span(values: tuple[float, float]) -> str:
    low, high = (f"{value:.4g}" for value in values)
    return low if low == high else f"{low} to {high}"


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
