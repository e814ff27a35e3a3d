"""The Triton kernels in the interpreter against a softmax written out."""

import random
from itertools import product

import pytest
import torch
from kit.attention import make_step

from loraplex.kernels.attention import paged
from loraplex.kernels.attention.tiles import DecodeTile, PrefillTile

pytestmark = pytest.mark.usefixtures("interpreter")

TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3}
ROWS = {
    "one": [(1, 1)],
    "decode": [(1, 1), (1, 9), (1, 70), (1, 64), (1, 33)],
    "prefill": [(12, 12), (5, 50), (2, 2), (33, 40)],
    "mixed": [(1, 7), (6, 60), (1, 1), (17, 17), (1, 75), (1, 66)],
}
SINKS = torch.tensor([0.0, -3.0, 5.0, 1.0, 40.0, -90.0, 2.0, 0.5])
DIMS = (8, 64, 96, 128, 192, 256)
GROUPS = ((4, 4), (6, 2), (8, 1))
CASES = list(product(ROWS, DIMS, GROUPS, (1, 3, 16, 64), (None, 1, 20), (False, True)))
QUICK = set(random.Random(5).sample(range(len(CASES)), 40))


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short rows have several splits, and several blocks."""
    monkeypatch.setattr(paged, "decode_tile", lambda *_: DecodeTile(block_n=16, splits=4, min_share=16))
    monkeypatch.setattr(
        paged, "prefill_tile", lambda *_: PrefillTile(block_m=16, block_n=16, num_warps=4, num_stages=2)
    )


def check(step, **options):
    out = step.run(**options)
    expected = step.expected(**options)
    tolerance = TOLERANCE[step.q_THD.dtype]
    torch.testing.assert_close(out[: step.tokens].float(), expected, atol=tolerance, rtol=tolerance)
    assert (out[step.tokens :] == 0).all()


@pytest.mark.parametrize(
    ("rows", "dim", "heads", "page_size", "window", "sinks"),
    [pytest.param(*case, marks=() if i in QUICK else pytest.mark.slow) for i, case in enumerate(CASES)],
)
def test_against_softmax(small_tiles, rows, dim, heads, page_size, window, sinks, request):
    seed = sum(map(ord, request.node.name))
    step = make_step(
        ROWS[rows],
        heads=heads[0],
        kv_heads=heads[1],
        dim=dim,
        page_size=page_size,
        padding_rows=seed % 3,
        padding_tokens=(0, seed % 3, 5)[seed // 3 % 3],
        dtype=(torch.float32, torch.float16)[seed % 2],
        is_mixed=seed % 5 > 0,
        seed=seed,
    )
    check(step, window=window, sinks_H=SINKS[: heads[0]] if sinks else None)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("is_mixed", [False, True])
def test_default_tiles(rows, is_mixed):
    check(make_step(ROWS[rows], heads=8, kv_heads=1, dim=64, page_size=16, is_mixed=is_mixed))


@pytest.mark.parametrize("rows", ["decode", "mixed"])
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_splits_with_sinks_and_padding(monkeypatch, rows, splits):
    monkeypatch.setattr(paged, "decode_tile", lambda *_: DecodeTile(block_n=16, splits=splits, min_share=16))
    step = make_step(ROWS[rows], padding_rows=2, padding_tokens=2)
    check(step, sinks_H=SINKS[:6])
    check(step, sinks_H=SINKS[:6], window=18)


@pytest.mark.parametrize("rows", ["decode", "mixed"])
@pytest.mark.parametrize("group", [9, 13])
def test_splits_of_wide_groups(small_tiles, rows, group):
    check(make_step(ROWS[rows], heads=2 * group, kv_heads=2, padding_rows=1))


@pytest.mark.parametrize("rows", ["decode", "prefill"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16])
def test_a_cache_of_another_dtype(small_tiles, rows, dtype):
    check(make_step(ROWS[rows], cache_dtype=dtype, scales=(0.5, 0.25), coarse=True))


@pytest.mark.parametrize("rows", ["decode", "mixed"])
def test_a_step_of_padding_only(small_tiles, rows):
    """What a graph's buffers hold before their first step."""
    step = make_step(ROWS[rows], padding_tokens=0 if rows == "decode" else 3)
    step.plan.seq_lens_B.zero_()
    if rows == "mixed":
        step.plan.query_start_B1.zero_()
    step.plan.page_table_BP.fill_(1 << 30)
    assert (step.run() == 0).all()


class Recorder:
    """Stands in for a kernel: notes what a CUDA graph would keep of a launch."""

    def __init__(self) -> None:
        self.launches: list[object] = []

    def __getitem__(self, grid):
        def launch(*args, **constants):
            kept = [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in args]
            self.launches.append((grid, kept, constants))

        return launch


@pytest.mark.parametrize("rows", ["decode", "mixed"])
def test_a_launch_does_not_depend_on_what_the_tensors_hold(monkeypatch, rows):
    from loraplex.kernels.attention import _triton_decode, _triton_prefill

    recorder = Recorder()
    for module, kernel in ((_triton_decode, "decode"), (_triton_decode, "join"), (_triton_prefill, "prefill")):
        monkeypatch.setattr(module, kernel, recorder)
    more = [(new, length + 500) for new, length in ROWS[rows]]
    launches = []
    for lengths in (ROWS[rows], more):
        recorder.launches = []
        make_step(lengths, table_width=200, num_pages=900).run()
        launches.append(recorder.launches)
    assert launches[0] == launches[1]
    assert len(launches[0]) == (2 if rows == "decode" else 3)
