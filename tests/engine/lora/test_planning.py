"""Batch descriptions of the dense backends, and their results on CPU, where they run the reference operation."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from kit.dense_lora import RANK_MIXES, backend, make_step, max_ranks

from loraplex.engine.config import LoRAConfig
from loraplex.engine.lora.backend import BACKENDS, make_backend
from loraplex.engine.lora.csgmv import ChunkedSGMV, chunks_by_slot
from loraplex.engine.lora.plain import Plain
from loraplex.engine.lora.planning import PlannedBackend, Segments
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.testing import random_weights, request_slots

CPU = torch.device("cpu")


def test_chunks_by_slot() -> None:
    found = chunks_by_slot([1, -1, 0], [3, 1, 2], 2)
    assert found.permutation.tolist() == [4, 5, 0, 1, 2, 3]
    assert found.indptr.tolist() == [0, 2, 4, 5]
    assert found.slots.tolist() == [0, 1, 1]


def covered(segments: Segments, slots: Sequence[int], num_tokens: Sequence[int]) -> None:
    """Every token with an adapter lies in exactly one segment, of its slot."""
    of_token = np.full(sum(num_tokens), -1)
    assert sorted(segments.permutation.tolist()) == list(range(sum(num_tokens)))
    for i, slot in enumerate(segments.slots):
        tokens = segments.permutation[segments.indptr[i] : segments.indptr[i + 1]]
        assert (of_token[tokens] == -1).all()
        of_token[tokens] = slot
    assert of_token.tolist() == np.repeat(slots, num_tokens).tolist()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("seed", range(20))
def test_any_step_is_covered_and_fits_its_static_buffers(name: str, seed: int) -> None:
    rng = random.Random(seed)
    requests = rng.randint(1, 40)
    num_tokens = [rng.choice([1, 1, 2, 15, 16, 17, 200]) for _ in range(requests)]
    slots = request_slots(rng.choice(["distinct", "uniform", "zipf", "skewed"]), requests, 8, seed=seed)
    bucket = sum(num_tokens) + rng.choice([0, 0, 5])
    kernels = backend(name)
    segments = kernels.cut(slots, num_tokens, bucket)
    covered(segments, slots, num_tokens)
    assert len(segments.slots) <= kernels.max_segments(bucket, requests)
    if isinstance(kernels, ChunkedSGMV):
        assert np.diff(segments.indptr).max() <= kernels.chunk_size(bucket)


@pytest.mark.parametrize("name", BACKENDS)
def test_fields(name: str) -> None:
    kernels = backend(name)
    slots, num_tokens, slot_rows, ranks = [1, -1, 0], [3, 1, 2], [7, 4], {7: 8, 4: 64, 9: 512}
    plan = kernels.plan(slots, num_tokens, slot_rows, ranks, CPU)
    assert plan.token_slot.tolist() == [1, 1, 1, -1, 0, 0]
    assert plan.req_seg_indptr.tolist() == [0, 3, 4, 6]
    assert plan.req_weight_indices.tolist() == slots
    assert plan.slot_row.tolist() == [*slot_rows, *[-1] * (kernels.options.max_slots - 2)]
    assert plan.permutation.dtype == torch.int64
    assert plan.max_rank_in_batch == 64
    assert plan.num_segments.tolist() == [len(plan.weight_indices)]
    assert [row for row, _, _ in plan.segments_host] == ([4, 7] if name == "triton" else [7, 4])


@pytest.mark.parametrize("name", BACKENDS)
def test_static_buffers_keep_their_addresses_and_have_neutral_tails(name: str) -> None:
    kernels = backend(name)
    static = kernels.static(300, 20, CPU, max_rank=64)
    tensors = {k: v for k, v in vars(static.info).items() if isinstance(v, torch.Tensor)}
    addresses = {k: v.data_ptr() for k, v in tensors.items()}
    for slots, num_tokens, slot_rows in (
        ([i % 8 for i in range(20)], [15] * 20, list(range(8))),
        ([0, -1], [3, 2], [5]),
    ):
        info = static.fill(slots, num_tokens, slot_rows, dict.fromkeys(range(8), 16))
        # Both cut alike: first at the same token count, then runs shorter than any chunk.
        fresh = kernels.plan(slots, num_tokens, slot_rows, dict.fromkeys(range(8), 16), CPU)
        assert {k: getattr(info, k).data_ptr() for k in tensors} == addresses
        for field in tensors:
            live, tail = getattr(fresh, field), getattr(info, field)[len(getattr(fresh, field)) :]
            assert torch.equal(getattr(info, field)[: len(live)], live), field
            neutral = {"permutation": 0, "req_seg_indptr": sum(num_tokens), "seg_indptr": int(info.seg_indptr.max())}
            assert (tail == neutral.get(field, -1)).all(), field
        assert info.max_rank_in_batch == 64
    assert (static.info.token_slot == torch.tensor([0] * 3 + [-1] * 297)).all()


def test_a_rank_above_what_the_buffers_were_made_for_is_a_fault() -> None:
    static = backend("csgmv").static(8, 8, CPU, max_rank=16)
    with pytest.raises(AssertionError):
        static.fill([0], [1], [3], {3: 17})


@pytest.mark.parametrize("name", BACKENDS)
def test_on_cpu_every_backend_adds_what_its_plan_says(name: str) -> None:
    w = random_weights(RANK_MIXES["wide"], [40] * 3, (40, 17, 32))
    num_tokens = [5, 1, 40, 3, 33, 1]
    step = make_step([0, -1, 3, 4, 0, 1], num_tokens, [4, 2, 0, 1, 3], w, padding=7)
    kernels: PlannedBackend = backend(name)
    static = kernels.static(len(step.y_TN), len(num_tokens), CPU)
    plans: list[LoRABatchInfo] = [
        kernels.plan(step.slots, num_tokens, step.slot_rows, max_ranks(w), CPU),
        static.fill(step.slots, num_tokens, step.slot_rows, max_ranks(w)),
    ]
    for plan in plans:
        y = step.y_TN.clone()
        kernels.add_(y, step.x_TD, w, plan)
        step.check(y, w, 1e-6)


def test_the_default_goes_by_the_device() -> None:
    assert isinstance(make_backend(LoRAConfig(), CPU), Plain)
    assert isinstance(make_backend(LoRAConfig(), torch.device("cuda")), ChunkedSGMV)
