"""What a kernel is given begins on 16 bytes whatever a step's size: Triton compiles it anew for a pointer that does
not, which takes half a second in the middle of serving."""

from dataclasses import fields

import pytest
import torch

from loraplex.engine.batch import StepPlan
from loraplex.engine.config import LoRAConfig
from loraplex.engine.inputs import PageTable, StaticInputs, StepInputs, StepShape, build_inputs
from loraplex.engine.lora.backend import make_backend
from loraplex.engine.request import SamplingParams
from loraplex.engine.sampler import pack_draws
from loraplex.engine.step import SampleRow

CPU = torch.device("cpu")


def unaligned(holder: object, base: torch.Tensor) -> list[str]:
    """Fields that do not begin a multiple of 16 bytes into `base`'s memory (the host's may begin anywhere)."""
    start = base.untyped_storage().data_ptr()
    tensors = ((f.name, getattr(holder, f.name)) for f in fields(holder))  # type: ignore[arg-type]
    return [name for name, t in tensors if isinstance(t, torch.Tensor) and (t.data_ptr() - start) % 16]


def decode_plan(rows: int) -> StepPlan:
    return StepPlan(
        is_decode=True, rows=list(range(rows)), num_new=[1] * rows, seq_lens=[3] * rows, ids=[5] * rows,
        first_page=[0] * rows, new_pages=[[i] for i in range(rows)], slots=[-1] * rows, slot_rows=[],
        sample=[True] * rows, prompt_logprobs=[-1] * rows,
    )  # fmt: skip


@pytest.mark.parametrize("rows", range(1, 10))
def test_inputs(rows: int) -> None:
    pages = PageTable(16, 4, 16)
    plan = decode_plan(rows)
    pages.update(plan)
    static = StaticInputs(64, 16, 4, CPU)
    shape = StepShape(rows + 1, rows + 1, True)
    for inputs in (build_inputs(plan, pages, CPU), static.views(shape, pages), static.fill(plan, pages, shape)):
        assert unaligned(inputs, inputs.ids_T) == []
        attn = inputs.attn
        own = attn.page_table_BP.untyped_storage().data_ptr() == inputs.ids_T.untyped_storage().data_ptr()
        assert [n for n in unaligned(attn, inputs.ids_T) if own or n != "page_table_BP"] == []
        check_values(inputs, rows)


def check_values(inputs: StepInputs, rows: int) -> None:
    if inputs.attn.seq_lens:
        assert inputs.ids_T[:rows].tolist() == [5] * rows
        assert inputs.attn.seq_lens_B[:rows].tolist() == [3] * rows
        assert inputs.attn.page_table_BP[:rows, 0].tolist() == list(range(rows))


@pytest.mark.parametrize("backend", ["csgmv", "triton"])
@pytest.mark.parametrize("tokens", [*range(1, 10), 77, 301])
def test_adapters_of_a_step(backend: str, tokens: int) -> None:
    made = make_backend(LoRAConfig(enable_lora=True, lora_backend=backend, max_loras_per_batch=3), CPU)  # type: ignore[arg-type]
    fresh = made.plan([0, -1], [tokens, 2], [4], {4: 16}, CPU)
    static = made.static(tokens + 2, 2, CPU, 16)
    for info in (fresh, static.info, static.fill([0, -1], [tokens, 2], [4], {4: 16})):
        assert unaligned(info, info.permutation) == []


@pytest.mark.parametrize("rows", range(1, 10))
def test_draws(rows: int) -> None:
    asked = [
        SampleRow(
            i, SamplingParams(max_tokens=9, temperature=0.5 + i, top_k=i + 1, top_p=0.9, min_p=0.25), 2**62 + i, i
        )
        for i in range(rows)
    ]
    draws = pack_draws(asked, CPU)
    assert unaligned(draws, draws.seeds_N) == []
    assert draws.seeds_N.tolist() == [r.seed for r in asked]
    assert draws.positions_N.tolist() == list(range(rows))
    assert draws.top_k_N.tolist() == [i + 1 for i in range(rows)]
    assert draws.temperature_N.tolist() == [0.5 + i for i in range(rows)]
    assert draws.min_p_N.tolist() == [0.25] * rows
    assert draws.top_p_N.tolist() == pytest.approx([0.9] * rows)
