"""Adapters that touch next to nothing, beside one that touches all at rank 512, in an arena without a byte to spare."""

from pathlib import Path

import pytest
import torch
from kit.adapters import make_adapter, pair, write_adapter
from kit.engine import TestEngine
from kit.oracle import Oracle

PROMPT = [(5 * i * i + 1) % 256 for i in range(17)]


@pytest.fixture(scope="module")
def folders(t1: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    def one(name: str, module: str, d_in: int, d_out: int, r: int) -> Path:
        generator = torch.Generator().manual_seed(r)
        a, b = torch.randn(r, d_in, generator=generator) * 0.3, torch.randn(d_out, r, generator=generator) * 0.3
        return write_adapter(tmp_path_factory.mktemp(name), pair(module, a, b), r=r)

    return {
        "head": one("head", "lm_head", 64, 320, 2),
        "router": one("router", "model.layers.1.mlp.gate", 64, 8, 3),
        "expert": one("expert", "model.layers.2.mlp.experts.3.up_proj", 64, 32, 1),
        "value": one("value", "model.layers.1.self_attn.v_proj", 64, 32, 5),
        "wide": make_adapter(t1, "ALL", r=512, alpha=64, std=0.02),
        "layer": make_adapter(t1, "EXP", r=1, alpha=4, std=0.3, layers=[2]),
    }


@pytest.mark.parametrize("virtual", [True, False])
@pytest.mark.parametrize("backend", ["torch", "csgmv", "triton"])
def test_all_in_one_batch(t1: Path, t1_oracle: Oracle, folders: dict[str, Path], backend: str, virtual: bool) -> None:
    sizes = [i.bytes for i in TestEngine(t1, folders).loop.manager.registry.infos()]
    settings = {"lora_backend": backend, "lora_use_virtual_experts": virtual, "page_size": 4}
    with pytest.raises(ValueError, match=f"works is {sum(sizes)}"):
        TestEngine(t1, folders, lora_memory=str(sum(sizes) - 1), **settings)
    engine = TestEngine(t1, folders, lora_memory=str(sum(sizes)), **settings)
    names = [None, *folders]
    ids = [engine.submit(PROMPT, n, logprobs=0, max_tokens=3, ignore_eos=True) for n in names]
    engine.run()
    answers = set()
    for name, id in zip(names, ids, strict=True):
        expected = t1_oracle.logprobs(PROMPT + engine.tokens(id), folders.get(name or ""))[len(PROMPT) - 1 :]
        for step, out in enumerate(engine.outputs(id)):
            (lp,) = out.logprobs
            assert abs(lp.logprob - expected[step, lp.token].item()) <= 1e-4, (name, step)
        answers.add(round(engine.outputs(id)[0].logprobs[0].logprob, 3))
    assert len(answers) >= 6, answers
    arena = engine.loop.runner.adapters.arena
    assert arena.free == 0
    arena.check()
