"""µs of paged attention on the present device: 32 query and 4 key/value heads of 128, as Qwen3-30B-A3B's, pages of 16.

python tests/bench/bench_attention.py [--decode 1 64] [--contexts 512] [--prefill 2048] [--fp8] [--tune]

CUDA graph replay; before each call the L2 cache is flushed by zeroing 192 MB, whose time is subtracted. Every
configuration is first compared with torch in fp32, and no number is printed when it disagrees. The floor is the bytes
of the cache at 4.5 TB/s or the products at 704 TFLOP/s, whichever is more. `--tune` times tile candidates and prints
the best; the defaults live in `kernels/attention/tiles.py`.
"""

import argparse
import dataclasses
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).parent))
from cold_timer import ColdTimer

from loraplex.kernels.attention import paged
from loraplex.kernels.attention.plan import AttentionPlan
from loraplex.kernels.attention.reference import Masking
from loraplex.kernels.attention.tiles import MAX_SPLITS, DecodeTile, PrefillTile, decode_tile, prefill_tile

HEADS, KV_HEADS, DIM, PAGE = 32, 4, 128, 16
BANDWIDTH, FLOPS = 4.5e12, 704e12
MASKING = Masking(DIM**-0.5)
Tiles = tuple[DecodeTile | None, PrefillTile | None]
DEFAULT: Tiles = (None, None)


@dataclasses.dataclass
class Case:
    name: str
    rows: list[tuple[int, int]]
    """(new tokens, all tokens) of each."""
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    plan: AttentionPlan

    def run(self, tiles: Tiles = DEFAULT) -> torch.Tensor:
        return paged.triton_attention(self.q, self.k, self.v, self.plan, MASKING, tiles)

    def error(self, tiles: Tiles = DEFAULT) -> float:
        """Largest relative error of a head, over some tokens of the first and the last row."""
        out, worst = self.run(tiles), 0.0
        for row in {0, len(self.rows) - 1}:
            new, length = self.rows[row]
            start = sum(n for n, _ in self.rows[:row])
            some = torch.tensor(sorted({0, new // 3, new - 1}), device="cuda")
            at = torch.arange(length, device="cuda")
            slots = self.plan.page_table_BP[row, at // PAGE].long() * PAGE + at % PAGE
            k, v = (x[slots].float().transpose(0, 1) for x in (self.k, self.v))
            sees = at <= (length - new + some)[:, None]
            q = self.q[start + some].float().transpose(0, 1)
            exact = F.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=sees, scale=MASKING.scale, enable_gqa=True
            )[0].transpose(0, 1)
            error = (out[start + some].float() - exact).norm(dim=-1) / exact.norm(dim=-1)
            worst = max(worst, float(error.max()))
        return worst

    def floor(self) -> float:
        read = sum(length for _, length in self.rows) * 2 * KV_HEADS * DIM * self.k.element_size()
        seen = sum(new * (length - new) + new * (new + 1) / 2 for new, length in self.rows)
        return 1e6 * max(read / BANDWIDTH, 4 * HEADS * DIM * seen / FLOPS)


def make_case(name: str, rows: list[tuple[int, int]], cache: torch.dtype) -> Case:
    """Random keys and values in shuffled pages."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    counts = [-(-length // PAGE) for _, length in rows]
    pages = list(range(sum(counts)))
    random.Random(0).shuffle(pages)
    table = torch.zeros(len(rows), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor(pages[:count])
        pages = pages[count:]
    query_lens, seq_lens = [new for new, _ in rows], [length for _, length in rows]
    tokens, decode = sum(query_lens), all(new == 1 for new in query_lens)
    plan = AttentionPlan(
        slot_mapping_T=torch.arange(tokens, device="cuda"),
        page_table_BP=table.cuda(),
        query_start_B1=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32, device="cuda"),
        seq_lens_B=torch.tensor(seq_lens, dtype=torch.int32, device="cuda"),
        query_lens=query_lens, seq_lens=seq_lens, page_size=PAGE, is_decode=decode,
        is_mixed=not decode and 1 in query_lens,
    )  # fmt: skip
    k, v = (normal(sum(counts) * PAGE, KV_HEADS, DIM).to(cache) for _ in range(2))
    return Case(name, rows, normal(tokens, HEADS, DIM), k, v, plan)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    cache = torch.float8_e4m3fn if args.fp8 else torch.bfloat16
    for context in args.contexts:
        for rows in args.decode:
            yield make_case(f"decode {rows} x {context}", [(1, context)] * rows, cache)
    if not args.tune:
        skewed = [(1, 512)] * 63 + [(1, 32768)]
        yield make_case("decode 63 x 512 + 1 x 32768", skewed, cache)
    for tokens in args.prefill:
        yield make_case(f"prefill {tokens}", [(tokens, tokens)], cache)
        yield make_case(f"prefill 4 x {tokens // 4}", [(tokens // 4, tokens // 4)] * 4, cache)
    if not args.tune:
        yield make_case("prefill 64 after 8192", [(64, 8256)], cache)
        for context in args.contexts:
            rows = [(1, context)] * 63 + [(2048, 2048)]
            yield make_case(f"mixed 63 x {context} + prefill 2048", rows, cache)
            case = make_case(f"  the same in one kernel, {context}", rows, cache)
            case.plan = dataclasses.replace(case.plan, is_mixed=False)
            yield case


def candidates(case: Case) -> Iterator[Tiles]:
    if case.plan.is_decode:
        default = decode_tile(len(case.rows), KV_HEADS, HEADS // KV_HEADS, DIM, 2)
        for splits, share in itertools.product((1, 2, 4, 8, 16, 32, 64), (64, 128, 256, 512)):
            if splits in (default.splits // 2, default.splits, default.splits * 2) and splits <= MAX_SPLITS:
                for n, warps, stages in (
                    (64, 4, 3),
                    (64, 4, 4),
                    (64, 4, 5),
                    (32, 2, 3),
                    (32, 2, 4),
                    (128, 4, 3),
                    (128, 8, 3),
                ):
                    if share % n == 0:
                        yield (
                            DecodeTile(block_n=n, splits=splits, min_share=share, num_warps=warps, num_stages=stages),
                            None,
                        )
    else:
        for m, n, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
            if m == 64 or warps == 8:
                yield None, PrefillTile(block_m=m, block_n=n, num_warps=warps, num_stages=stages)


def default_tile(case: Case) -> DecodeTile | PrefillTile:
    group = HEADS // KV_HEADS
    if case.plan.is_decode:
        return decode_tile(len(case.rows), KV_HEADS, group, DIM, 2)
    return prefill_tile(len(case.q), group, DIM, 2)


def tune(timer: ColdTimer, case: Case) -> None:
    times: dict[Tiles, float] = {DEFAULT: timer(case.run)}
    for tiles in candidates(case):
        try:
            if case.error(tiles) < 0.01:
                times[tiles] = timer(lambda tiles=tiles: case.run(tiles))
        except Exception as e:  # a tile that does not fit this device
            print(f"{case.name} {tiles}: {type(e).__name__}")
    print(f"{case.name}: default {times[DEFAULT]:.1f} µs {default_tile(case)}, floor {case.floor():.1f}")
    for tiles in sorted(times, key=lambda tiles: times[tiles])[:4]:
        print(f"   {times[tiles]:8.1f} µs {next((tile for tile in tiles if tile), 'default')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 16, 64, 256], help="batch sizes")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--prefill", type=int, nargs="*", default=[2048, 8192], help="new tokens")
    parser.add_argument("--fp8", action="store_true", help="8-bit cache")
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    timer = ColdTimer()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, µs, L2 flushed by zeroing")
    for case in cases(args):
        error = case.error()
        if error > 0.01:
            print(f"{case.name:40s} relative error {error:.4f}, no number")
        elif args.tune:
            tune(timer, case)
        else:
            print(f"{case.name:40s} {timer(case.run):8.1f}  floor {case.floor():7.1f}  error {error:.4f}")


if __name__ == "__main__":
    main()
