"""`loraplex bench offline`: the engine alone, without HTTP and text, on the workload that peers are measured with.

Decode: N prompts at once; ms per step = (T(long) - T(short)) / (long - short), so that prefill and start cancel out.
Prefill: P prompts to one new token. First token: one prompt to one new token. Adapter modes: `none` asks the base,
`loraK` gives request i adapter i mod K.
"""

import asyncio
import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from loraplex.engine.config import Config
from loraplex.server.bench.offline_flags import Plan, parse
from loraplex.server.bench.offline_run import CheckError, Engine, run_plan
from loraplex.server.bench.offline_table import lines
from loraplex.server.client import EngineClient, EngineStartError
from loraplex.server.engine_api import EngineError
from loraplex.server.model_files import StartError, check_files
from loraplex.server.setting_sources import FlagError
from loraplex.server.version import version

STOP_SECONDS = 5.0


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 measured, 1 no numbers, 2 wrong usage; 130 after Ctrl-C."""
    try:
        config, plan = parse(argv)
    except FlagError as error:
        print(f"loraplex bench offline: error: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=config.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        result = asyncio.run(_run(config, plan))
    except (StartError, EngineStartError, EngineError, CheckError, OSError) as error:
        print(f"loraplex bench offline: error: {str(error).strip()}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("loraplex bench offline: stopped before the end", file=sys.stderr)
        return 130
    print("\n".join(lines(result)))
    try:
        if plan.output is not None:
            plan.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"loraplex bench offline: error: --output: {error}", file=sys.stderr)
        return 1
    return 0


async def _run(config: Config, plan: Plan) -> dict[str, Any]:
    check_files(config)
    client = await EngineClient.start(config, _say)
    try:
        with tqdm(total=plan.num_measurements, unit="run", dynamic_ncols=True, disable=plan.no_progress) as bar:
            results = await run_plan(Engine(client, plan.seed), plan, bar)
    finally:
        await client.shutdown(STOP_SECONDS)
    info = client.info
    return {
        "loraplex": version(),
        "model": config.model.model_path,
        "model_type": info.model_type,
        "dtype": info.dtype,
        "device": info.device,
        "adapters": dict(config.lora.adapters),
        "config": {key: value for key, value in dataclasses.asdict(config).items() if key != "server"},
        "workload": {key: _plain(value) for key, value in dataclasses.asdict(plan).items()},
        "memory": dict(info.memory_table),
        "results": results,
    }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _say(words: str) -> None:
    print(f"loraplex: {words}", file=sys.stderr, flush=True)
