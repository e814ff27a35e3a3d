"""The flags of `loraplex bench offline`: its own, and those of `loraplex serve` that concern the engine."""

import argparse
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from loraplex.engine.config import Config
from loraplex.server.bench.output_file import output_file
from loraplex.server.flags import parse as parse_engine
from loraplex.server.setting_sources import FlagError

TESTS = ("decode", "prefill", "ttft")
DUMMY_RANK = 16
MOST_ADAPTERS = 9999
"""Of a mode loraK."""


@dataclass(frozen=True)
class Plan:
    """What is measured, in numbers of prompts and tokens."""

    modes: tuple[str, ...]
    tests: tuple[str, ...]
    batches: tuple[int, ...]
    prompt_len: int
    short: int
    long: int
    prefill_prompts: int
    prefill_len: int
    adapters: tuple[str, ...]
    seed: int
    output: Path | None
    no_progress: bool

    @property
    def num_measurements(self) -> int:
        decode = len(self.batches) if "decode" in self.tests else 0
        return len(self.modes) * (decode + len({"prefill", "ttft"} & set(self.tests)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(message)


def parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="loraplex bench offline",
        usage="loraplex bench offline MODEL_DIR [flags] [flags of loraplex serve]",
        description="Measures the engine alone: milliseconds per decode step by batch size, prefill throughput, time "
        "to first token, without adapters and with one or several. The prefix cache is off. Nothing is printed when an "
        "answer does not have the tokens asked for, or an adapter changes nothing. The flags of `loraplex serve` that "
        "concern the engine are taken too.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--modes",
        type=_modes,
        metavar="M,…",
        help="none: the base; loraK: K adapters in turn (default: none, and with adapters lora1 and all of them)",
    )
    parser.add_argument("--tests", type=_tests, default=TESTS, metavar="T,…", help="default: decode,prefill,ttft")
    parser.add_argument("--batches", type=_counts, default=(1, 16, 64, 256), metavar="N,…", help="default: 1,16,64,256")
    parser.add_argument("--prompt-len", type=_count, default=128, metavar="N", help="of decode (default: 128)")
    parser.add_argument("--short", type=_count, default=32, metavar="N", help="new tokens (default: 32)")
    parser.add_argument("--long", type=_count, default=256, metavar="N", help="new tokens (default: 256)")
    parser.add_argument("--prefill-prompts", type=_count, default=16, metavar="N", help="default: 16")
    parser.add_argument("--prefill-len", type=_count, default=2048, metavar="N", help="also of ttft (default: 2048)")
    parser.add_argument("--dummy-adapters", type=_count, metavar="N", help="random adapters d0, d1, … on every site")
    parser.add_argument("--dummy-rank", type=_count, metavar="R", help="their rank (default: 16)")
    parser.add_argument("--prompt-seed", type=int, default=0, metavar="N", help="of the random prompts (default: 0)")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")
    return parser


def parse(argv: Sequence[str]) -> tuple[Config, Plan]:
    """Raises FlagError; `--help` prints and exits."""
    args, rest = parser().parse_known_args(argv)
    if args.dummy_adapters is not None:
        if args.dummy_adapters > MOST_ADAPTERS:
            raise FlagError(
                f"--dummy-adapters {args.dummy_adapters} is more than {MOST_ADAPTERS}, the most a mode asks"
            )
        rank = args.dummy_rank or DUMMY_RANK
        specs = [f"d{i}=dummy:rank={rank},seed={i}" for i in range(args.dummy_adapters)]
        rest = [*rest, "--lora-paths", *specs]
    elif args.dummy_rank is not None:
        raise FlagError("--dummy-rank needs --dummy-adapters")
    config = parse_engine(rest, prog="loraplex bench offline")
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, disable_radix_cache=True))
    adapters = tuple(name for name, _ in config.lora.adapters)
    plan = Plan(
        modes=args.modes or _default_modes(len(adapters)),
        tests=args.tests,
        batches=args.batches,
        prompt_len=args.prompt_len,
        short=args.short,
        long=args.long,
        prefill_prompts=args.prefill_prompts,
        prefill_len=args.prefill_len,
        adapters=adapters,
        seed=args.prompt_seed,
        output=args.output,
        no_progress=args.no_progress,
    )
    _check(plan, config)
    return config, plan


def _check(plan: Plan, config: Config) -> None:
    if plan.short >= plan.long:
        raise FlagError(f"--short {plan.short} must be below --long {plan.long}")
    for mode in plan.modes:
        if adapters_of(mode) > len(plan.adapters):
            raise FlagError(f"--modes {mode} needs {adapters_of(mode)} adapters, there are {len(plan.adapters)}")
        if adapters_of(mode) > config.lora.max_loras_per_batch:
            raise FlagError(f"--modes {mode} needs --max-loras-per-batch {adapters_of(mode)}")
    if "decode" in plan.tests and max(plan.batches) > config.scheduler.max_running_requests:
        raise FlagError(f"--batches {max(plan.batches)} needs --max-running-requests {max(plan.batches)}")


def adapters_of(mode: str) -> int:
    """How many adapters a mode asks: none 0, lora8 8."""
    return 0 if mode == "none" else int(mode.removeprefix("lora"))


def _default_modes(num_adapters: int) -> tuple[str, ...]:
    return ("none", *(f"lora{count}" for count in sorted({min(1, num_adapters), num_adapters} - {0})))


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(text.split(","))
    for mode in modes:
        if not re.fullmatch(r"none|lora[1-9][0-9]{0,3}", mode):
            raise argparse.ArgumentTypeError(f"{mode!r} is neither none nor lora with a number")
    return modes


def _tests(text: str) -> tuple[str, ...]:
    tests = tuple(text.split(","))
    for test in tests:
        if test not in TESTS:
            raise argparse.ArgumentTypeError(f"{test!r} is none of {', '.join(TESTS)}")
    return tests


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(item) for item in text.split(","))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 1 up")
    return int(text)
