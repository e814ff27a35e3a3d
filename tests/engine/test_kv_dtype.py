"""--kv-cache-dtype and --attention-backend in a whole engine."""

import statistics
from pathlib import Path

import pytest
import torch
from kit.engine import DEVICE, TestEngine
from kit.oracle import Oracle

PROMPTS = [[5, 9, 200, 31, 77] * 5, [1, 2, 3], [250, 4, 4, 90, 17, 62, 8]]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("auto", 1e-5), ("bfloat16", 0.02), ("float16", 1e-3), ("fp8_e4m3", 0.1)]
)
def test_logprobs(t1: Path, t1_oracle: Oracle, dtype: str, tolerance: float) -> None:
    """In chunks, so that most keys and values are read from the cache; a narrower cache is seen, and near."""
    engine = TestEngine(t1, kv_cache_dtype=dtype, chunked_prefill_size=4, page_size=4)
    ids = [engine.submit(prompt, prompt_logprobs=0, max_tokens=3) for prompt in PROMPTS]
    engine.run()
    errors = []
    for id, prompt in zip(ids, PROMPTS, strict=True):
        exact = t1_oracle.logprobs(prompt, None)
        table = engine.outputs(id)[0].prompt_logprobs
        errors += [abs(lp.logprob - exact[i, lp.token].item()) for i, lp in enumerate(table[1:])]
    typical = statistics.median(errors)  # the largest are of routers whose experts nearly tie
    assert typical < tolerance
    assert dtype == "auto" or typical > 1e-5
    k, v = engine.loop.runner.kv[0]
    assert (
        k.dtype
        == v.dtype
        == {"auto": torch.float32, "fp8_e4m3": torch.float8_e4m3fn}.get(dtype, getattr(torch, dtype, None))
    )


def test_a_narrower_cache_holds_more(t1: Path) -> None:
    sizes = {d: TestEngine(t1, kv_cache_dtype=d).loop.runner.memory_table[-1] for d in ("auto", "fp8_e4m3")}
    assert sizes["auto"][0] == "KV pool"
    assert sizes["auto"][1] == 4 * sizes["fp8_e4m3"][1]


@pytest.mark.skipif(DEVICE != "cpu", reason="about CPU")
def test_triton_needs_a_device(t1: Path) -> None:
    with pytest.raises(ValueError, match="--attention-backend triton needs CUDA; on CPU use auto or torch"):
        TestEngine(t1, attention_backend="triton")


@pytest.mark.gpu
def test_backends_agree_on_the_device(t1: Path, t1_oracle: Oracle) -> None:
    for backend in ("triton", "torch"):
        engine = TestEngine(t1, device="cuda", attention_backend=backend, chunked_prefill_size=4, page_size=4)
        id = engine.submit(PROMPTS[0], prompt_logprobs=0, max_tokens=1)
        engine.run()
        exact = t1_oracle.logprobs(PROMPTS[0], None)
        for i, lp in enumerate(engine.outputs(id)[0].prompt_logprobs[1:]):
            assert abs(lp.logprob - exact[i, lp.token].item()) < 1e-3
