"""Dense LoRA kernels at the attention shapes of Qwen3-30B-A3B: µs of qkv (2048 → 4096 + 512 + 512), o (4096 → 2048)
and both after one another, cold L2, CUDA graph replay.

Token i has adapter i mod n up to 256 tokens (over static buffers, as decode graphs run them); from 4096 tokens on each
adapter has a prompt of equal length. A result that differs from the fp32 reference ends the run: no number for it.

    python -P tests/bench/bench_dense_lora.py [--short] [--backend csgmv] [--tokens 1 64] [--ranks 16]
    python -P tests/bench/bench_dense_lora.py --tune     # writes configs/kernels/<device>/dense_*.json
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent))
from cold_timer import ColdTimer

from loraplex.engine.config import LoRAConfig
from loraplex.engine.lora.backend import make_backend
from loraplex.engine.lora.planning import PlannedBackend
from loraplex.kernels import tuning
from loraplex.kernels.lora import dense
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.reference import lora_add_
from loraplex.kernels.lora.weights import LoRAWeights
from loraplex.kernels.testing import random_weights
from loraplex.kernels.tuning import TileConfig

SITES = {"qkv": (2048, (4096, 512, 512)), "o": (4096, (2048,))}
TOKENS = (1, 16, 64, 256, 4096, 16384)
PEERS = {1: 24, 16: 29, 64: 32, 256: 48, 4096: 322, 16384: 1224}
FLOOR = {1: 1, 16: 1, 64: 1, 256: 3, 4096: 35, 16384: 140}
"""µs of qkv + o at rank 16: the best peer measured on an H200, and bytes at 4.5 TB/s."""
TOLERANCE = 0.008
CALLS = 8


@dataclass(frozen=True)
class Case:
    """One site's inputs; y is the output that calls keep adding to."""

    kernels: PlannedBackend
    w: LoRAWeights
    plan: LoRABatchInfo
    x: torch.Tensor
    y: torch.Tensor

    def run(self) -> None:
        self.kernels.add_(self.y, self.x, self.w, self.plan)

    def check(self) -> None:
        upcast = LoRAWeights(**{**vars(self.w), "arena": self.w.arena.float()})
        before = self.y.normal_().mul_(0.1).clone()
        expected = before.float()
        lora_add_(expected, self.x.float(), upcast, self.plan)
        self.run()
        error = float((self.y.float() - expected).norm() / expected.norm())
        if not error < TOLERANCE:
            raise SystemExit(f"wrong result (relative error {error:.4f}): no numbers")


def make_case(kernels: PlannedBackend, site: str, tokens: int, rank: int, adapters: int) -> Case:
    width, slices = SITES[site]
    device = torch.device("cuda")
    w = random_weights(
        [[rank] * len(slices)] * adapters, [width] * len(slices), slices, dtype=torch.bfloat16, device=device, std=0.05
    )
    rows, ranks = list(range(adapters)), dict.fromkeys(range(adapters), rank)
    if tokens <= 256:
        slots, num_tokens = [i % adapters for i in range(tokens)], [1] * tokens
        plan = kernels.static(tokens, tokens, device, max_rank=rank).fill(slots, num_tokens, rows, ranks)
    else:
        plan = kernels.plan(rows, [tokens // adapters] * adapters, rows, ranks, device)
    x = torch.randn(tokens, width, device=device).bfloat16()
    y = torch.zeros(tokens, sum(slices), device=device, dtype=torch.bfloat16)
    return Case(kernels, w, plan, x, y)


def run_all(cases: Sequence[Case]) -> None:
    for case in cases:
        case.run()


def report(args: argparse.Namespace, kernels: PlannedBackend, timer: ColdTimer) -> None:
    print("tokens rank adapters |    qkv      o   both | r16: floor  best peer")
    counts = [8] if args.short else [1, 8]
    for tokens, rank, adapters in itertools.product(args.tokens, args.ranks, counts):
        cases = {site: make_case(kernels, site, tokens, rank, adapters) for site in SITES}
        for case in cases.values():
            case.check()
        alone = [] if args.short else [timer(case.run) for case in cases.values()]
        both = timer(partial(run_all, list(cases.values())))
        shown = " ".join(f"{us:6.1f}" for us in alone) or " " * 13
        known = f"{FLOOR[tokens]:10} {PEERS[tokens]:10}" if tokens in PEERS and rank == 16 else ""
        print(f"{tokens:6} {rank:4} {adapters:8} | {shown} {both:6.1f} | {known}", flush=True)


def candidates(op: str) -> Iterator[TileConfig]:
    if op == "dense_rows_shrink":
        for r, k, warps in itertools.product((2, 4, 8), (512, 1024, 2048), (2, 4)):
            yield TileConfig(block_r=r, block_k=k, num_warps=warps)
    elif op == "dense_rows_expand":
        for n, warps in ((64, 1), (128, 1), (256, 1), (256, 2), (512, 2), (512, 4)):
            yield TileConfig(block_n=n, num_warps=warps)
    elif op == "dense_segments_shrink":
        for r, k, split in itertools.product((16, 32, 64), (64, 128, 256), (1, 2, 4)):
            yield TileConfig(block_r=r, block_k=k, split_k=split, num_stages=3 if r * k < 16384 else 2)
    else:
        for n, r, warps in itertools.product((64, 128, 256), (16, 32, 64), (2, 4)):
            yield TileConfig(block_n=n, block_r=r, num_warps=warps)


def tune(args: argparse.Namespace, kernels: PlannedBackend, timer: ColdTimer) -> None:
    """One kernel's tile after the other (expand, then shrink), the other kernel's best so far kept."""
    chosen: dict[str, TileConfig] = {}

    def choose(op: str, device: torch.device, default: TileConfig, tokens: int, **shape: int) -> TileConfig:
        return chosen.setdefault(op, default)

    vars(dense)["choose_tile"] = choose
    tables: dict[str, list[dict[str, Any]]] = {}
    for tokens, rank, site in itertools.product(args.tokens, args.ranks, SITES):
        case = make_case(kernels, site, tokens, rank, min(8, tokens))
        chosen.clear()
        case.check()
        width, slices = SITES[site]
        for op in sorted(chosen):
            best = (timer(case.run), chosen[op])
            for tile in candidates(op):
                chosen[op] = tile
                try:
                    case.check()
                    best = min(best, (timer(case.run), tile), key=lambda timed: timed[0])
                except Exception as error:  # a tile may need more shared memory than there is
                    print(f"{op} {tile}: {type(error).__name__}", flush=True)
            chosen[op] = best[1]
            shape = {"inner": width, "outer": sum(slices), "rank": rank, "tokens": tokens}
            tables.setdefault(op, []).append({**shape, "us": round(best[0], 1), "tile": asdict(best[1])})
            print(f"{site} {tokens} r{rank} {op}: {best[0]:.1f} us {best[1]}", flush=True)
    folder = Path(args.out) / tuning.device_folder(torch.cuda.get_device_name())
    folder.mkdir(parents=True, exist_ok=True)
    for op, entries in tables.items():
        lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
        (folder / f"{op}.json").write_text(f"[\n{lines}\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="csgmv", choices=["csgmv", "triton"])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--short", action="store_true", help="eight adapters, qkv and o together only")
    parser.add_argument("--tune", action="store_true", help="search tiles instead and write the tables")
    parser.add_argument("--out", default=Path(__file__).parents[2] / "configs" / "kernels", help="where --tune writes")
    args = parser.parse_args()
    backend = make_backend(LoRAConfig(lora_backend=args.backend), torch.device("cuda"))
    assert isinstance(backend, PlannedBackend)
    (tune if args.tune else report)(args, backend, ColdTimer(CALLS))


if __name__ == "__main__":
    main()
