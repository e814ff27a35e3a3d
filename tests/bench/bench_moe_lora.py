"""µs of one MoE layer with and without adapters on the present device, in all and per launch.

python tests/bench/bench_moe_lora.py [--tokens 1 64] [--ranks 16] [--adapters 8] [--parts] [--tune]
       [--layer qwen3-30b-a3b]

CUDA graph replay; before each call the L2 cache is flushed by zeroing 192 MB, whose time is subtracted. Every
configuration is first compared with the fp32 reference, and no number is printed when it disagrees. `--tune` times tile
candidates of the base GEMMs and writes them into `configs/kernels/<device>/expert_{gate_up,down}.json`, beside what is
there for other layers. Peers' numbers are shown for Qwen3-30B-A3B.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent))
from cold_timer import ColdTimer

from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.experts_ops import AdapterStep, expand_activate, expand_down, shrink_down, shrink_gate_up
from loraplex.kernels.lora.weights import LoRAWeights
from loraplex.kernels.moe import tiles
from loraplex.kernels.moe.expert_gemm import FusedDelta, combine_pairs, down, gate_up
from loraplex.kernels.moe.forward import moe_lora_forward
from loraplex.kernels.moe.pairs import order_pairs
from loraplex.kernels.moe.reference import moe_lora_reference
from loraplex.kernels.testing import plain_batch
from loraplex.kernels.tuning import TileConfig, device_folder

SLOTS = 8
BANDWIDTH, FLOPS = 4.5e12, 704e12
TOKENS = (1, 16, 64, 256, 4096, 16384)
CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "kernels"

PEER_BASE = dict(zip(TOKENS, (39.7, 204, 300, 327, 818, 2817)))
PEER_LORA = {16: dict(zip(TOKENS, (23, 56, 103, 224, 409, 1089))), 64: dict(zip(TOKENS, (26, 80, 202, 405, 623, 1425)))}
"""Best of SGLang 0.5.15 and vLLM 0.24 on an H200, 8 adapters, the same method."""


@dataclasses.dataclass(frozen=True)
class Layer:
    hidden: int
    inner: int
    experts: int
    top_k: int


LAYERS = {
    "qwen3-30b-a3b": Layer(2048, 768, 128, 8),
    "gpt-oss-20b": Layer(2880, 2880, 32, 4),
    "mixtral-8x7b": Layer(4096, 14336, 8, 2),
}
layer = LAYERS["qwen3-30b-a3b"]


@dataclasses.dataclass
class Case:
    tokens: int
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.ids, self.weights, self.w13, self.w2


def experts() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).mul_(shape[-1] ** -0.5)

    return normal(layer.experts, 2 * layer.inner, layer.hidden), normal(layer.experts, layer.hidden, layer.inner)


def make_case(tokens: int, w13: torch.Tensor, w2: torch.Tensor) -> Case:
    """Uniform router."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    weights, ids = torch.topk(
        torch.rand(tokens, layer.experts, generator=generator, device="cuda"), layer.top_k, dim=-1
    )
    x = torch.randn(tokens, layer.hidden, generator=generator, device="cuda").bfloat16()
    return Case(tokens, x, ids, weights / weights.sum(-1, keepdim=True), w13, w2)


def make_adapters(rank: int) -> LoRAWeights:
    """Eight adapters, each in one chunk of the arena."""
    parts = ((layer.hidden, layer.inner), (layer.hidden, layer.inner), (layer.inner, layer.hidden))
    places = torch.empty(SLOTS, 3, 4, dtype=torch.int64)
    end = 0
    for row in range(SLOTS):
        for part, (d_in, d_out) in enumerate(parts):
            places[row, part] = torch.tensor([end, end + layer.experts * rank * d_in, rank * d_in, rank * d_out])
            end += layer.experts * rank * (d_in + d_out)
    ranks, scales = torch.full((SLOTS, 3), rank, dtype=torch.int32), torch.full((SLOTS, 3), 2.0)
    generator = torch.Generator("cuda").manual_seed(rank)
    return LoRAWeights(
        arena=torch.randn(end, generator=generator, device="cuda", dtype=torch.bfloat16).mul_(0.02),
        places=places.cuda(), ranks=ranks.cuda(), scales=scales.cuda(),
        host_places=places.numpy(), host_ranks=ranks.numpy(), host_scales=scales.numpy(),
        in_features=tuple(p[0] for p in parts), slices=tuple(p[1] for p in parts), num_experts=layer.experts,
    )  # fmt: skip


def make_batch(tokens: int, adapters: int, rank: int) -> LoRABatchInfo:
    batch = plain_batch([i % adapters for i in range(tokens)], [1] * tokens, list(range(SLOTS)), device="cuda")
    return dataclasses.replace(batch, max_rank_in_batch=rank)


def disagreement(case: Case, lora: LoRAWeights | None, batch: LoRABatchInfo | None) -> float:
    """Largest relative error of a row, over the first tokens when there are many."""
    few = min(case.tokens, 256)
    out = moe_lora_forward(*case.inputs, lora, batch)[:few]
    if lora is not None and batch is not None:
        slots = batch.token_slot[:few].tolist()
        batch = plain_batch(slots, [1] * few, list(range(SLOTS)), device="cuda")
        lora = dataclasses.replace(lora, arena=lora.arena.float())
    exact = moe_lora_reference(
        case.x[:few].float(), case.ids[:few], case.weights[:few], case.w13.float(), case.w2.float(), lora, batch
    )
    return float(((out.float() - exact).norm(dim=1) / exact.norm(dim=1)).max())


def base_floor(case: Case) -> float:
    touched = len(torch.unique(case.ids))
    seconds = touched * 3 * layer.hidden * layer.inner * 2 / BANDWIDTH
    return 1e6 * max(seconds, case.tokens * layer.top_k * 6 * layer.hidden * layer.inner / FLOPS)


def lora_floor(case: Case, batch: LoRABatchInfo, rank: int) -> float:
    virtual = torch.unique(case.ids + batch.token_slot[:, None] * layer.experts)
    return 1e6 * len(virtual) * rank * 3 * (layer.hidden + layer.inner) * 2 / BANDWIDTH


def parts(case: Case, lora: LoRAWeights, batch: LoRABatchInfo, rank: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each launch alone, as the layer makes it."""
    pairs = case.ids.numel()
    separate = pairs <= tiles.SEPARATE_PAIRS
    rows = None if pairs <= tiles.ROW_FORM_PAIRS else tiles.DECODE_CHUNK_ROWS if separate else tiles.PREFILL_CHUNK_ROWS

    def route():
        return order_pairs(case.ids, batch.token_slot, num_experts=layer.experts, num_slots=SLOTS, chunk_rows=rows)

    order = route()
    step = AdapterStep(lora, batch, case.ids, order, max(16, rank))
    shape = (case.x.device, pairs, layer.experts, layer.inner, layer.hidden)
    first, second = tiles.gate_up_tile(*shape), tiles.down_tile(*shape)
    yield "route", route
    yield "shrink gate_up", lambda: shrink_gate_up(case.x, step)
    t = shrink_gate_up(case.x, step)
    h = gate_up(case.x, case.w13, order, first, top_k=layer.top_k)
    yield "gemm gate_up", lambda: gate_up(case.x, case.w13, order, first, top_k=layer.top_k)
    if separate:
        yield "gemm gate_up fp32", lambda: gate_up(case.x, case.w13, order, first, top_k=layer.top_k, activate=False)
        g = gate_up(case.x, case.w13, order, first, top_k=layer.top_k, activate=False)
        yield "expand + act", lambda: expand_activate(g, t, step, case.x.dtype)
    else:
        fused = FusedDelta(t, step.capacity, lora, batch)
        yield "gemm gate_up + expand", lambda: gate_up(case.x, case.w13, order, first, top_k=layer.top_k, fused=fused)
    yield "shrink down", lambda: shrink_down(h, step)
    z = shrink_down(h, step)
    yield "gemm down", lambda: down(h, case.w2, order, second, top_k=layer.top_k)
    y = down(h, case.w2, order, second, top_k=layer.top_k)
    if separate:
        yield "expand down", lambda: expand_down(z, layer.hidden, step)
    else:
        fused_down = FusedDelta(z, step.capacity, lora, batch)
        yield "gemm down + expand", lambda: down(h, case.w2, order, second, top_k=layer.top_k, fused=fused_down)
    yield "combine", lambda: combine_pairs(y, None, case.ids, case.weights, None, None)


def candidates(op: str, pairs: int) -> Iterator[TileConfig]:
    rows = pairs / layer.experts
    if rows <= 32:
        for m in (16, 32):
            for n, k, stages in ((64, 128, 4), (64, 256, 3), (128, 128, 4), (128, 64, 4), (64, 128, 3), (64, 64, 4)):
                yield TileConfig(block_m=m, block_n=n, block_k=k, num_warps=4, num_stages=stages)
        return
    for m in (64, 128):
        for n, warps, stages in ((128, 8, 4), (128, 8, 3), (128, 4, 3), (64, 4, 4), (256, 8, 3)):
            if op == "expert_down" or n < 256:
                yield TileConfig(block_m=m, block_n=n, block_k=64, num_warps=warps, num_stages=stages)


def tune(timer: ColdTimer, tokens: list[int], w13: torch.Tensor, w2: torch.Tensor) -> None:
    """One base GEMM at a time; a candidate counts when it equals the default tile's result."""
    folder = CONFIGS / device_folder(torch.cuda.get_device_name())
    folder.mkdir(parents=True, exist_ok=True)
    for op in ("expert_gate_up", "expert_down"):
        path, own = folder / f"{op}.json", dataclasses.asdict(layer)
        del own["top_k"]
        old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        entries = [entry for entry in old if any(entry[name] != value for name, value in own.items())]
        for count in tokens:
            case, shape = (
                make_case(count, w13, w2),
                (w13.device, count * layer.top_k, layer.experts, layer.inner, layer.hidden),
            )
            order = order_pairs(case.ids, None, num_experts=layer.experts)
            h = gate_up(case.x, w13, order, tiles.gate_up_tile(*shape), top_k=layer.top_k)

            def run(tile: TileConfig, op=op, case=case, order=order, h=h) -> torch.Tensor:
                if op == "expert_gate_up":
                    return gate_up(case.x, w13, order, tile, top_k=layer.top_k)
                return down(h, w2, order, tile, top_k=layer.top_k)

            default = tiles.gate_up_tile(*shape) if op == "expert_gate_up" else tiles.down_tile(*shape)
            expected, times = run(default), {}
            for tile in {default, *candidates(op, count * layer.top_k)}:
                try:
                    error = (run(tile).float() - expected.float()).norm() / expected.float().norm()
                except Exception as e:  # a tile that does not fit this device
                    print(f"{op} T={count} {tile}: {type(e).__name__}")
                    continue
                if error < 5e-3:
                    times[tile] = timer(lambda tile=tile: run(tile), calls=4)
            best = min(times, key=lambda tile: times[tile])
            print(f"{op} T={count}: {times[best]:.1f} µs (default {times[default]:.1f}) {best}")
            entries.append(
                own | {"tokens": count * layer.top_k} | {"tile": dataclasses.asdict(best), "us": round(times[best], 1)}
            )
        path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--parts", action="store_true", help="time each launch, too")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--layer", choices=LAYERS, default="qwen3-30b-a3b")
    args = parser.parse_args()
    global layer
    layer = LAYERS[args.layer]
    timer = ColdTimer()
    w13, w2 = experts()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, µs, L2 flushed by zeroing")
    if args.tune:
        tune(timer, args.tokens, w13, w2)
        return
    adapters = {rank: make_adapters(rank) for rank in args.ranks}
    for tokens in args.tokens:
        case = make_case(tokens, w13, w2)
        error = disagreement(case, None, None)
        if error > 0.02:
            print(f"T={tokens:5d} base: relative error {error:.4f}, no number")
            continue
        base = timer(lambda case=case: moe_lora_forward(*case.inputs))
        known = args.layer == "qwen3-30b-a3b"
        peer = PEER_BASE.get(tokens, float("nan")) if known else float("nan")
        print(f"T={tokens:5d} base {base:7.1f}  floor {base_floor(case):6.0f}  peer {peer:6.0f}  error {error:.4f}")
        for rank, lora in adapters.items():
            for count in args.adapters:
                batch = make_batch(tokens, count, rank)
                error = disagreement(case, lora, batch)
                if error > 0.02:
                    print(f"   r={rank} adapters={count}: relative error {error:.4f}, no number")
                    continue
                whole = timer(lambda case=case, lora=lora, batch=batch: moe_lora_forward(*case.inputs, lora, batch))
                peer = PEER_LORA.get(rank, {}).get(tokens, float("nan")) if known and count == 8 else float("nan")
                print(
                    f"   r={rank:3d} adapters={count}: {whole:7.1f}, extra {whole - base:6.1f}  "
                    f"floor {lora_floor(case, batch, rank):5.0f}  peer {peer:5.0f}  error {error:.4f}"
                )
                if args.parts:
                    shown = [f"{name} {timer(call):.1f}" for name, call in parts(case, lora, batch, rank)]
                    print("      " + ", ".join(shown))


if __name__ == "__main__":
    main()
