"""csgmv and triton against the reference, their Triton kernels in the interpreter."""

import random
from itertools import product
from typing import Any

import pytest
import torch
from kit.dense_lora import RANK_MIXES, backend, make_step, max_ranks

from loraplex.kernels.lora import dense
from loraplex.kernels.testing import Popularity, random_weights, request_slots
from loraplex.kernels.tuning import TileConfig

pytestmark = pytest.mark.usefixtures("interpreter")

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3}
SLICES = (40, 17, 32)
SIZES: dict[str, list[int]] = {
    "decode": [1] * 9,
    "one": [1],
    "short": [3, 1, 7, 2, 5],
    "prefill": [50, 1, 17, 33, 2, 9],
    "long": [290, 5, 41],
}
CASES = list(product(["csgmv", "triton"], ["distinct", "uniform", "zipf", "identical", "skewed"], RANK_MIXES, SIZES))
QUICK = set(random.Random(3).sample(range(len(CASES)), 24))


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger tiles than a GPU likes: the interpreter's time goes by the number of programs and iterations."""
    monkeypatch.setattr(dense, "TYPICAL_RANK", 16)
    monkeypatch.setattr(dense, "_rows_shrink_tile", lambda width: TileConfig(block_r=64, block_k=32))


@pytest.mark.parametrize(
    ("name", "popularity", "mix", "size"),
    [pytest.param(*case, marks=() if i in QUICK else pytest.mark.slow) for i, case in enumerate(CASES)],
)
def test_against_the_reference(
    few_programs: None, name: str, popularity: Popularity, mix: str, size: str, request: pytest.FixtureRequest
) -> None:
    seed = sum(map(ord, request.node.name))
    dtype = (torch.float32, torch.float16)[seed % 2]
    w = random_weights(RANK_MIXES[mix], [40] * 3, SLICES, dtype=dtype, seed=seed)
    num_tokens = SIZES[size]
    slots = request_slots(popularity, len(num_tokens), 5, seed=seed)
    step = make_step(slots, num_tokens, [4, 2, 0, 1, 3], w, padding=seed % 3, seed=seed)
    kernels = backend(name)
    y = step.y_TN.clone()
    static = kernels.static(len(y), len(slots), CPU)
    kernels.add_(y, step.x_TD, w, static.fill(slots, num_tokens, step.slot_rows, max_ranks(w)))
    step.check(y, w, TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["csgmv", "triton"])
@pytest.mark.parametrize("num_tokens", [[1, 1, 1], [40, 40, 7]], ids=["rows", "segments"])
def test_default_tiles_aligned_shapes_and_a_plan_without_padding(name: str, num_tokens: list[int]) -> None:
    w = random_weights([(16,), (4,)], [64], [256])
    step = make_step([1, -1, 0], num_tokens, [0, 1], w)
    y = step.y_TN.clone()
    kernels = backend(name)
    kernels.add_(y, step.x_TD, w, kernels.plan(step.slots, step.num_tokens, step.slot_rows, max_ranks(w), CPU))
    step.check(y, w, 2e-6)


@pytest.mark.parametrize("size", ["decode", "prefill"])
@pytest.mark.parametrize("name", ["csgmv", "triton"])
def test_a_batch_of_base_tokens_or_padding_only_is_left_alone(few_programs: None, name: str, size: str) -> None:
    w = random_weights(RANK_MIXES["one"], [40] * 3, SLICES)
    kernels, num_tokens = backend(name), SIZES[size]
    step = make_step([-1] * len(num_tokens), num_tokens, [3], w, padding=4)
    static = kernels.static(len(step.y_TN), len(num_tokens), CPU)
    planned = kernels.plan(step.slots, num_tokens, [3], max_ranks(w), CPU)
    for info in (static.info, static.fill(step.slots, num_tokens, [3], max_ranks(w)), planned):
        tokens = len(info.token_slot)
        y = step.y_TN[:tokens].clone()
        kernels.add_(y, step.x_TD[:tokens], w, info)
        assert torch.equal(y, step.y_TN[:tokens])


@pytest.mark.parametrize("chunk_size", [16, 64, 128])
def test_chunk_sizes(few_programs: None, chunk_size: int) -> None:
    w = random_weights(RANK_MIXES["odd"], [40] * 3, SLICES)
    step = make_step([0, 1, -1, 0, 4], [100, 30, 9, 80, 1], [0, 1, 2, 3, 4], w)
    kernels = backend("csgmv", chunk_size)
    y = step.y_TN.clone()
    kernels.add_(y, step.x_TD, w, kernels.plan(step.slots, step.num_tokens, step.slot_rows, max_ranks(w), CPU))
    step.check(y, w, 2e-6)


def test_a_wide_head_with_few_rows(few_programs: None) -> None:
    """Offsets into y beyond 32 bits are for the GPU; here: one part, a width no tile divides, strided rows."""
    w = random_weights([(33,), (0,), (4,)], [72], [1001])
    step = make_step([2, 0, -1, 1], [1, 1, 1, 1], [0, 1, 2], w)
    wide = torch.full((4, 1500), torch.nan)
    wide[:, 100:1101] = step.y_TN
    kernels = backend("csgmv")
    plan = kernels.plan(step.slots, step.num_tokens, step.slot_rows, max_ranks(w), CPU)
    kernels.add_(wide[:, 100:1101], step.x_TD, w, plan)
    step.check(wide[:, 100:1101].contiguous(), w, 2e-6)
    assert wide[:, :100].isnan().all()
    assert wide[:, 1101:].isnan().all()


class Recorder:
    """Stands in for a kernel: notes what a CUDA graph would keep of a launch."""

    def __init__(self) -> None:
        self.launches: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*tensors: torch.Tensor, **constants: Any) -> None:
            scratch = tensors[1].shape  # new at each launch, of a shape that must not change
            self.launches.append((grid, [t.data_ptr() for t in tensors[2:]], scratch, constants))

        return launch


@pytest.mark.parametrize("tokens", [8, 64, 256, 512])
@pytest.mark.parametrize("name", ["csgmv", "triton"])
def test_a_launch_over_static_buffers_does_not_depend_on_the_step(
    monkeypatch: pytest.MonkeyPatch, name: str, tokens: int
) -> None:
    from loraplex.kernels.lora import _triton_rows, _triton_segments

    recorder = Recorder()
    for module, kernel in product((_triton_rows, _triton_segments), ("shrink", "expand")):
        monkeypatch.setattr(module, f"{kernel}_{module.__name__.rpartition('_')[2]}", recorder)
    w = random_weights([(16,)] * 7 + [(512,)], [64], [128])
    x, y = torch.zeros(tokens, 64), torch.zeros(tokens, 128)
    kernels = backend(name)
    static = kernels.static(tokens, tokens, CPU)
    steps = [([0], [1], [0]), ([i % 8 for i in range(tokens)], [1] * tokens, list(range(8)))]
    for slots, num_tokens, slot_rows in steps:
        kernels.add_(y, x, w, static.fill(slots, num_tokens, slot_rows, max_ranks(w)))
    first, second = recorder.launches[:2], recorder.launches[2:]
    assert len(first) == 2
    assert first == second
