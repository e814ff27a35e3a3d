"""The table of a model's geometry (random weights): decode, prefill and first token, LoRA off, on and used, by rank.

Runs `loraplex bench offline` once without adapters and once per rank with eight random ones, each in a fresh engine;
one JSON file each under --out. Further flags go to `loraplex bench offline`.

    python -P tests/bench/bench_table.py --out results [--ranks 16,64] [--layers 48] [--chunked-prefill-size 8192 …]
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from loraplex.server.cli import main as loraplex

sys.path.append(str(Path(__file__).parent))
from geometry import QWEN3_30B_A3B


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", default="16,64")
    parser.add_argument("--layers", type=int, default=QWEN3_30B_A3B["num_hidden_layers"])
    args, flags = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        config = QWEN3_30B_A3B | {"num_hidden_layers": args.layers}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        runs: dict[str, list[str]] = {"off": ["--modes", "none"]}
        for rank in args.ranks.split(","):
            adapters = ["--dummy-adapters", "8", "--dummy-rank", rank]
            runs[f"r{rank}"] = [*adapters, "--modes", "none,lora1,lora8"]
        for name, own in runs.items():
            output = ["--output", str(args.out / f"{name}.json")]
            print(f"== {name}", flush=True)
            command = ["bench", "offline", folder, "--load-format", "dummy", "--served-model-name", "base"]
            failed += loraplex([*command, *own, *output, *flags]) != 0
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
