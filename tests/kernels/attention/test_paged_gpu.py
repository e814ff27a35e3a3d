"""The attention kernels compiled: against a softmax written out in fp32, and replayed in CUDA graphs."""

import dataclasses
import random

import pytest
import torch
from kit.attention import Step, make_step

from loraplex.kernels.attention.paged import paged_attention, triton_attention
from loraplex.kernels.attention.reference import Masking
from loraplex.kernels.attention.tiles import DecodeTile

pytestmark = pytest.mark.gpu

ROWS = {
    "one": [(1, 3000)],
    "decode": [(1, 1), (1, 17), (1, 4000), (1, 512), (1, 513), (1, 1000)],
    "many": [(1, 1 + 37 * i % 700) for i in range(90)],
    "prefill": [(1000, 1000)],
    "ragged": [(300, 300), (77, 1500), (2, 2), (513, 513), (5, 900)],
    "mixed": [(1, 900), (200, 1234), (1, 1), (17, 17), (1, 2500), (64, 64)],
    "more rows than one search": [(1 + i % 3, 5 + i % 40) for i in range(300)],
}
TOLERANCE = {torch.bfloat16: 0.012, torch.float16: 0.002, torch.float32: 2e-5}


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Each head of each token, relative to the size of its output."""
    error = (got.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-2)
    assert error.max() < tolerance, (error.max(), error.argmax())


def check(step: Step, tolerance: float | None = None, **options) -> None:
    out = step.run(**options)
    assert_near(out[: step.tokens], step.expected(**options), tolerance or TOLERANCE[step.q_THD.dtype])
    assert (out[step.tokens :] == 0).all()
    assert torch.equal(out, step.run(**options))


def gpu_step(rows: list[tuple[int, int]], **options) -> Step:
    options = {"heads": 32, "kv_heads": 4, "dim": 128, "page_size": 16, "dtype": torch.bfloat16} | options
    return make_step(rows, device="cuda", **options)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_head_dims(rows, dim, is_mixed):
    check(gpu_step(ROWS[rows], dim=dim, is_mixed=is_mixed, padding_rows=2, padding_tokens=2))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("heads", [(8, 8), (28, 4), (64, 1), (71, 1)])
def test_groups(rows, heads):
    check(gpu_step(ROWS[rows], heads=heads[0], kv_heads=heads[1], padding_tokens=33))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_pages_and_dtypes(rows, page_size, dtype):
    check(gpu_step(ROWS[rows], page_size=page_size, dtype=dtype))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [None, 1, 128, 1000])
@pytest.mark.parametrize("sinks", [False, True])
def test_windows_and_sinks(rows, window, sinks):
    """gpt-oss: 64 heads of 64, window 128 in every second layer."""
    step = gpu_step(ROWS[rows], heads=64, kv_heads=8, dim=64, padding_rows=1, padding_tokens=1)
    check(step, window=window, sinks_H=torch.randn(64, device="cuda") * 3 if sinks else None)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_8_bit_cache(rows, dim):
    check(gpu_step(ROWS[rows], dim=dim, cache_dtype=torch.float8_e4m3fn, scales=(0.03, 0.02)))


def captured(run):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("bucket", "tokens"), [(1, 1), (8, 8), (64, 64), (256, 256), (8, 600), (16, 2000)])
def test_graph_replay_with_other_lengths_and_pages(bucket, tokens, sinks):
    """Captured over padding alone, or over short rows; replayed with rows up to a hundred times as long."""
    heads, kv_heads, dim, page_size, width, num_pages = 16, 4, 128, 16, 320, 20000
    is_decode = bucket == tokens
    rng = random.Random(bucket + tokens)
    options = {"sinks_H": torch.randn(heads, device="cuda")} if sinks else {}
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "page_size": page_size}
    first = gpu_step([(1, 1)], **shape, num_pages=num_pages, table_width=width)
    plan = dataclasses.replace(
        first.plan,
        page_table_BP=torch.zeros(bucket, width, dtype=torch.int32, device="cuda"),
        query_start_B1=torch.zeros(bucket + 1, dtype=torch.int32, device="cuda"),
        seq_lens_B=torch.zeros(bucket, dtype=torch.int32, device="cuda"),
        query_lens=[],
        seq_lens=[],
        is_decode=is_decode,
    )
    q = torch.zeros(tokens, heads, dim, dtype=torch.bfloat16, device="cuda")
    graph, out = captured(lambda: paged_attention(q, first.k_cache, first.v_cache, plan, scale=dim**-0.5, **options))
    for trial, longest in enumerate((40, 4000, 700)):
        rows = random_rows(rng, bucket if trial == 1 else rng.randint(1, bucket), tokens, longest, is_decode)
        step = gpu_step(rows, **shape, num_pages=num_pages, table_width=width, seed=trial)
        for static, new in (
            (first.k_cache, step.k_cache),
            (first.v_cache, step.v_cache),
            (plan.page_table_BP[: len(rows)], step.plan.page_table_BP),
            (plan.seq_lens_B[: len(rows)], step.plan.seq_lens_B),
            (plan.query_start_B1[: len(rows) + 1], step.plan.query_start_B1),
            (q[: step.tokens], step.q_THD),
        ):
            static.copy_(new)
        plan.page_table_BP[len(rows) :] = 1 << 30
        plan.seq_lens_B[len(rows) :] = 0
        plan.query_start_B1[len(rows) :] = step.tokens
        graph.replay()
        assert_near(out[: step.tokens], step.expected(**options), TOLERANCE[torch.bfloat16])
        assert (out[step.tokens :] == 0).all()


@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 4, 128), (8, 8, 64), (71, 1, 96)])
def test_replays_join_many_or_few_splits(heads, kv_heads, dim, padding):
    """Rows of 1 … 64 programs at work, other lengths at each replay. With padding, in a mixed step's decode part."""
    rows, page_size, splits, share = 64, 16, 64, 64
    rng = random.Random(heads)
    step = gpu_step([(1, i * share + 1 + i % share) for i in range(rows)], heads=heads, kv_heads=kv_heads, dim=dim,
                    page_size=page_size, padding_tokens=padding)  # fmt: skip
    longest = torch.tensor(step.plan.seq_lens)
    tiles = DecodeTile(block_n=32, splits=splits, min_share=share), None
    masking = Masking(dim**-0.5)

    def run() -> torch.Tensor:
        return triton_attention(step.q_THD, step.k_cache, step.v_cache, step.plan, masking, tiles)

    graph, out = captured(lambda: [run() for _ in range(4)])  # as layers follow each other
    choices = [longest, *(torch.tensor([rng.randint(1, int(n)) for n in longest]) for _ in range(4))]
    seen: dict[int, torch.Tensor] = {}
    for trial in range(50):
        choice = trial * 3 % len(choices)
        step.plan.seq_lens_B.copy_(choices[choice])
        graph.replay()
        first = seen.setdefault(choice, out[0].clone())
        assert all(torch.equal(layer, first) for layer in out)
    assert_near(seen[0][: step.tokens], step.expected(), TOLERANCE[torch.bfloat16])
    for choice, lengths in enumerate(choices):
        one = DecodeTile(block_n=32, splits=1, min_share=share), None
        step.plan.seq_lens_B.copy_(lengths)
        alone = triton_attention(step.q_THD, step.k_cache, step.v_cache, step.plan, masking, one)
        assert_near(seen[choice][: step.tokens], alone[: step.tokens].float(), TOLERANCE[torch.bfloat16])


def random_rows(rng: random.Random, count: int, tokens: int, longest: int, is_decode: bool) -> list[tuple[int, int]]:
    """Half the rows of a step that is no decode have one token."""
    new = [1 if is_decode or i % 2 else rng.randint(2, tokens // count) for i in range(count)]
    limit = max(1, min(longest, 250_000 // count))
    return [(n, n + rng.randint(0, limit)) for n in new]
