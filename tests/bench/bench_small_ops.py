"""Fused small ops at Qwen3-30B-A3B's sizes: µs per call (CUDA graph replay), bytes, and the floor of those bytes.

    python -P tests/bench/bench_small_ops.py [--tokens 1 64] [--only draw]

Calls follow each other on different copies of their inputs, 192 MB of them or more, so that those come from memory; a
copy is written by none. A result that differs from its reference ends the run: no number for it. Floor: bytes at 4.5
TB/s.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from loraplex.kernels import elementwise, rotary, sampling
from loraplex.kernels.lora.embedding import embedding_lora_add_
from loraplex.kernels.moe.routing import route, route_reference
from loraplex.kernels.sampling import DrawParams
from loraplex.kernels.testing import plain_batch, random_weights

TOKENS = (1, 16, 64, 256, 4096)
HIDDEN, HEADS, KV_HEADS, DIM, EXPERTS, TOP_K, INNER, VOCABULARY = 2048, 32, 4, 128, 128, 8, 6144, 151_936
EPS = 1e-6
COLD_BYTES, BANDWIDTH = 192 << 20, 4.5e6
"""Bandwidth in bytes per µs."""
BF16 = torch.bfloat16

Call = Callable[[int], object]


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    bytes: int
    """Read and written."""
    copies: int
    call: Call
    """call(i): on the i-th copy of the inputs."""
    check: Callable[[], bool]


def copies_for(num_bytes: int) -> int:
    """At least 4 and at most 64 calls in a graph."""
    return max(4, min(64, -(-COLD_BYTES // num_bytes)))


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def near(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got.float() - expected.float()).norm() <= 0.006 * expected.float().norm())


def norm_case(rows: int) -> Case:
    size = rows * HIDDEN * 2
    copies = copies_for(4 * size)
    x, residual, weight = normal(copies, rows, HIDDEN), normal(copies, rows, HIDDEN), normal(HIDDEN)

    def check() -> bool:
        normed, summed = elementwise.add_rms_norm(x[0], residual[0], weight, EPS)
        expected = elementwise.rms_norm_reference(summed.float(), weight.float(), EPS)
        return torch.equal(summed, x[0] + residual[0]) and near(normed, expected)

    return Case(
        "add + norm", rows, 4 * size, copies, lambda i: elementwise.add_rms_norm(x[i], residual[i], weight, EPS), check
    )


def silu_case(rows: int) -> Case:
    size = 3 * rows * INNER * 2
    copies = copies_for(size)
    g = normal(copies, rows, 2 * INNER)

    def check() -> bool:
        return near(elementwise.silu_mul(g[0]), elementwise.silu_mul_reference(g[0].float()))

    return Case("silu · mul", rows, size, copies, lambda i: elementwise.silu_mul(g[i]), check)


def rotate_case(rows: int) -> Case:
    width = (HEADS + 2 * KV_HEADS) * DIM
    size = 2 * rows * width * 2 + rows * DIM * 4
    copies = copies_for(size)
    qkv, caches = normal(copies, rows, width), normal(copies, 2, rows, KV_HEADS, DIM)
    slots = torch.randperm(rows, device="cuda")
    positions = torch.randint(4096, (rows,), device="cuda")
    angles = rotary.rope_angles(positions, 1e6 ** (-torch.arange(DIM // 2, device="cuda") / (DIM // 2)), 1.0)
    weights = normal(DIM), normal(DIM)

    def call(i: int) -> torch.Tensor:
        k, v = caches[i]
        return rotary.norm_rotate_store(
            qkv[i], *angles, k, v, slots, q_weight_D=weights[0], k_weight_D=weights[1], eps=EPS
        )

    def check() -> bool:
        k, v = torch.zeros_like(caches[0], dtype=torch.float32)
        expected = rotary.norm_rotate_store_reference(
            qkv[0].float(), *angles, k, v, slots, weights[0].float(), weights[1].float(), EPS
        )
        return near(call(0), expected) and near(caches[0, 0], k) and near(caches[0, 1], v)

    return Case("norm + rotate + store", rows, size, copies, call, check)


def angles_case(rows: int) -> Case:
    size = rows * (8 + DIM * 4)
    copies = copies_for(size)
    positions = torch.randint(40_000, (copies, rows), device="cuda")
    freq = 1e6 ** (-torch.arange(DIM // 2, device="cuda") / (DIM // 2))

    def check() -> bool:
        got, expected = (f(positions[0], freq, 1.0) for f in (rotary.rope_angles, rotary.rope_angles_reference))
        return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected))

    return Case(
        "angles (once a step)", rows, size, copies, lambda i: rotary.rope_angles(positions[i], freq, 1.0), check
    )


def route_case(rows: int) -> Case:
    size = rows * (EXPERTS * 2 + TOP_K * 12)
    copies = copies_for(size)
    logits = normal(copies, rows, EXPERTS)

    def check() -> bool:
        (weights, ids), (exact, exact_ids) = (f(logits[0], TOP_K, norm=True) for f in (route, route_reference))
        return torch.equal(ids, exact_ids) and torch.allclose(weights, exact, atol=1e-6)

    return Case("route", rows, size, copies, lambda i: route(logits[i], TOP_K, norm=True), check)


def embedding_case(rows: int) -> Case:
    rank, adapters = 16, min(8, rows)
    w = random_weights([(rank,)] * adapters, [VOCABULARY], [HIDDEN], dtype=BF16, device="cuda")
    size = 2 * rows * HIDDEN * 2 + adapters * rank * HIDDEN * 2 + rows * rank * 32
    copies = copies_for(size)
    x, ids = normal(copies, rows, HIDDEN), torch.randint(VOCABULARY, (rows,), device="cuda")
    batch = plain_batch([i % adapters for i in range(rows)], [1] * rows, list(range(adapters)), device="cuda")

    def check() -> bool:
        y, expected = x[0].clone(), x[0].float()
        embedding_lora_add_(y, ids, w, batch)
        for t in range(rows):
            delta = w.part(t % adapters, 0)
            assert delta is not None
            expected[t] += delta.scale * delta.a_ERD[0, :, ids[t]].float() @ delta.b_ERN[0].float()
        return near(y, expected)

    return Case("embedding LoRA r16", rows, size, copies, lambda i: embedding_lora_add_(x[i], ids, w, batch), check)


DRAWS = {
    "draw greedy": (0.0, 0, 1.0, 0.0),
    "draw temperature": (1.0, 0, 1.0, 0.0),
    "draw top-k 50": (1.0, 50, 1.0, 0.0),
    "draw top-p 0.9": (1.0, 0, 0.9, 0.0),
    "draw top-k 50, top-p 0.9": (1.0, 50, 0.9, 0.0),
    "draw min-p 0.1": (1.0, 0, 1.0, 0.1),
}


def draw_cases(rows: int) -> Iterator[Case]:
    """Logits as a bf16 head gives them, and fp32 ones, which have no ties and take longer to cut."""
    size = rows * VOCABULARY * 4
    copies = copies_for(size)
    exact = torch.randn(copies, rows, VOCABULARY, device="cuda") * 2
    for kind, logits in (("bf16 values", exact.bfloat16().float()), ("fp32", exact)):
        for name, (t, k, p, m) in DRAWS.items():
            params = DrawParams(
                temperature_N=torch.full((rows,), t, device="cuda"),
                top_k_N=torch.full((rows,), k, dtype=torch.int32, device="cuda"),
                top_p_N=torch.full((rows,), p, device="cuda"),
                min_p_N=torch.full((rows,), m, device="cuda"),
                seeds_N=torch.randint(2**62, (rows,), device="cuda"),
                positions_N=torch.arange(rows, device="cuda"),
                noisy=t > 0,
                cut=k > 0 or p < 1 or m > 0,
            )

            def call(i: int, logits: torch.Tensor = logits, params: DrawParams = params) -> object:
                return sampling.draw(logits[i], params)

            def check(logits: torch.Tensor = logits, params: DrawParams = params) -> bool:
                same = sampling.draw(logits[0], params)[0] == sampling.draw_reference(logits[0], params)[0]
                return int((~same).sum()) <= rows // 100 + 1

            yield Case(f"{name} ({kind})", rows, size, copies, call, check)
        yield Case(
            f"log normaliser ({kind})",
            rows,
            size,
            copies,
            lambda i, logits=logits: sampling.log_normaliser(logits[i]),
            lambda logits=logits: torch.allclose(sampling.log_normaliser(logits[0]), logits[0].logsumexp(-1)),
        )


def cases(rows: int) -> Iterator[Case]:
    for make in (norm_case, silu_case, angles_case, rotate_case, route_case, embedding_case):
        yield make(rows)
    if rows <= 256:
        yield from draw_cases(rows)


def microseconds(case: Case) -> tuple[float, float]:
    """Median and worst of 9 replays of a graph that calls each copy once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        case.call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(case.copies):
            case.call(i)
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / case.copies)
    return statistics.median(times[1:]), max(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{'':42} {'rows':>6} {'us':>8} {'worst':>8} {'floor':>7} {'MB':>8}")
    for rows in args.tokens:
        for case in cases(rows):
            if args.only not in case.name:
                continue
            if not case.check():
                raise SystemExit(f"{case.name}, {rows} rows: wrong result, no number")
            median, worst = microseconds(case)
            floor = case.bytes / BANDWIDTH
            line = f"{case.name:42} {rows:6} {median:8.1f} {worst:8.1f} {floor:7.1f} {case.bytes / 1e6:8.1f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
