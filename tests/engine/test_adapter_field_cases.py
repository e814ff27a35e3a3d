"""Reports from the field about adapters, as they were made, through the whole engine.

Others are held elsewhere: tests/e2e/test_random_model.py (G20, G24, G25, G26), tests/e2e/test_adapter_files.py (G23,
G29, G31), tests/engine/test_lora_matrix.py (G26, G31), tests/engine/test_oracle.py (G25, G33, G35),
tests/engine/lora/test_reader_*.py (the reader's side of G20 to G32).
"""

import os
import random
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import models
from kit.adapters import Factors, make_a, make_adapter, make_factors, pair, per_expert_tensors, write_adapter
from kit.engine import TestEngine
from kit.oracle import Oracle
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

TOL = 1e-4


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(length)]


def check(engine: TestEngine, id: int, oracle: Oracle, prompt: list[int], adapter: Path | None) -> None:
    """Greedy tokens are the oracle's, and the logprob of each is near."""
    tokens = engine.tokens(id)
    assert tokens
    table = oracle.logprobs(prompt + tokens, adapter)[len(prompt) - 1 :]
    assert tokens == table[: len(tokens)].argmax(-1).tolist()
    got = [lp.logprob for out in engine.outputs(id) for lp in out.logprobs]
    assert got == pytest.approx([float(table[i, t]) for i, t in enumerate(tokens)], abs=TOL)


def answers_as(engine: TestEngine, oracle: Oracle, name: str | None, adapter: Path | None, length: int = 11) -> None:
    prompt = prompt_of(length)
    id = engine.submit(prompt, name, logprobs=0, ignore_eos=True)
    engine.run()
    check(engine, id, oracle, prompt, adapter)


@pytest.mark.parametrize(
    ("prefix", "good"),
    [
        ("base_model.model.model.", True),
        ("model.", True),
        ("base_model.model.base_model.model.model.", True),
        ("base_model.model.language_model.model.", True),
        ("base_model.", False),
        ("foo.", False),
    ],
)
def test_g21_prefixes_answer_rightly_or_are_refused(
    t1: Path, t1_oracle: Oracle, tmp_path: Path, prefix: str, good: bool
) -> None:
    source = make_adapter(t1, "ATT", std=0.2)
    tensors = load_file(source / "adapter_model.safetensors")
    renamed = {name.replace("base_model.model.model.", prefix, 1): t for name, t in tensors.items()}
    engine = TestEngine(t1, {})
    reply = engine.load("x", write_adapter(tmp_path, renamed))
    assert (reply.error is None) == good
    if good:
        answers_as(engine, t1_oracle, "x", source)
    else:
        assert reply.error is not None
        assert next(iter(renamed)) in reply.error.message
        assert not engine.loop.manager.registry.infos()


def by_peft(model: Path, folder: Path, **config: Any) -> Path:
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        wrapped = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], **config))
        with torch.no_grad():
            for name, weight in wrapped.named_parameters():
                if weight.requires_grad and "magnitude" not in name:
                    weight.add_(torch.randn_like(weight) * 0.1)
        wrapped.save_pretrained(str(folder))
    return folder


REFUSED_KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "G22 head and embedding": ({"modules_to_save": ["lm_head", "embed_tokens"]}, "modules_to_save"),
    "G22 router": ({"modules_to_save": ["gate"]}, "modules_to_save"),
    "G30 DoRA": ({"use_dora": True}, "DoRA"),
    "lora_bias": ({"lora_bias": True}, "lora_bias"),
    "trained tokens": ({"trainable_token_indices": [3, 7]}, "trainable_token_indices"),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", REFUSED_KINDS)
def test_g22_g30_what_peft_writes_and_is_not_served(
    t1: Path, t1_oracle: Oracle, tmp_path: Path, kind: str, strict: bool
) -> None:
    """By the config's field, and by the tensors alone when the field has gone."""
    config, word = REFUSED_KINDS[kind]
    folder = by_peft(t1, tmp_path / "as-written", **config)
    plain = write_adapter(tmp_path / "tensors-only", load_file(folder / "adapter_model.safetensors"))
    engine = TestEngine(t1, {}, lora_strict_loading=strict)
    for path in (folder, plain):
        reply = engine.load("x", path)
        assert reply.error is not None
        assert reply.error.status == 422
        assert word in reply.error.message or path is plain
    answers_as(engine, t1_oracle, None, None)


def test_g23_bad_loads_among_running_requests(t1: Path, t1_oracle: Oracle, tmp_path: Path) -> None:
    good = make_adapter(t1, "ALL", r=3, std=0.15)
    data = (good / "adapter_model.safetensors").read_bytes()
    bad: list[Path] = []
    for share in (0, 8, 50, 90, 99):
        bad.append(Path(shutil.copytree(good, tmp_path / f"{share}")))
        (bad[-1] / "adapter_model.safetensors").write_bytes(data[: len(data) * share // 100])
    bad.append(Path(shutil.copytree(good, tmp_path / "no-config")))
    (bad[-1] / "adapter_config.json").unlink()
    bad.append(make_adapter(models.make_t1(hidden_size=32), "ATT"))
    bad.append(Path(shutil.copytree(good, tmp_path / "pickle")))
    (bad[-1] / "adapter_model.safetensors").unlink()
    canary = tmp_path / "canary"
    torch.save({"x": _Canary(canary)}, bad[-1] / "adapter_model.bin")

    engine = TestEngine(t1, {"a": good}, chunked_prefill_size=5)
    jobs = []
    for i, folder in enumerate(bad):
        prompt, name = prompt_of(6 + i, seed=i), "a" if i % 2 else None
        jobs.append((engine.submit(prompt, name, logprobs=0, max_tokens=24, ignore_eos=True), prompt, name))
        engine.turn()
        assert engine.loop.scheduler.running
        reply = engine.load("x", folder)
        assert reply.error is not None, folder
        assert reply.error.status in (404, 422)
        assert engine.load(f"good{i}", good).error is None
        assert engine.unload(f"good{i}").error is None
    assert [info.name for info in engine.loop.manager.registry.infos()] == ["a"]
    engine.run()
    for id, prompt, name in jobs:
        check(engine, id, t1_oracle, prompt, good if name else None)
    assert not canary.exists()


class _Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("seed", [0, 1])
def test_g27_more_adapters_than_slots_and_cancelled_requests(t1: Path, t1_oracle: Oracle, seed: int) -> None:
    rng = random.Random(seed)
    folders = {f"A{i}": make_a(i, t1) for i in range(1, 7)}
    engine = TestEngine(
        t1,
        folders,
        max_loras_per_batch=2,
        max_total_tokens=256,
        page_size=4,
        context_length=64,
        chunked_prefill_size=16,
        max_running_requests=12,
    )
    kept = []
    for i in range(60):
        prompt, name = prompt_of(rng.randrange(1, 24), seed=i), rng.choice([None, *folders])
        id = engine.submit(prompt, name, logprobs=0, max_tokens=rng.randrange(1, 12), ignore_eos=True)
        for _ in range(rng.randrange(3)):
            engine.turn()
            assert len({seq.adapter for seq in engine.loop.scheduler.running if seq.adapter}) <= 2
        if rng.random() < 0.3:
            engine.abort(id)
        else:
            kept.append((id, prompt, name))
    engine.run()
    for id, prompt, name in kept:
        check(engine, id, t1_oracle, prompt, folders.get(name or ""))


def fused_dense(factors: Factors, module: str) -> dict[str, Tensor]:
    """One A for all parts of a fused projection."""
    by_layer: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for path, factor in factors.items():
        by_layer.setdefault(path.rpartition(".")[0], []).append(factor)
    return {
        name: tensor
        for parent, parts in by_layer.items()
        for name, tensor in pair(f"{parent}.{module}", parts[0][0], torch.cat([b for _, b in parts])).items()
    }


@pytest.mark.parametrize("module", ["self_attn.qkv_proj", "mlp.gate_up_proj"])
def test_g28_fused_projections_under_grouped_query_attention(tmp_path: Path, module: str) -> None:
    model = models.make_t1("llama")
    parent, _, name = module.partition(".")
    parts = [f"{parent}.{p}_proj" for p in (("q", "k", "v") if name == "qkv_proj" else ("gate", "up"))]
    factors = make_factors(model, parts, r=4, seed=1, std=0.15)
    shared = {
        p: (factors[f"{p.rpartition('.')[0]}.{parts[0].rpartition('.')[2]}"][0], b) for p, (_, b) in factors.items()
    }
    split = write_adapter(tmp_path / "split", per_expert_tensors(shared))
    fused = write_adapter(tmp_path / "fused", fused_dense(shared, name))
    engine, oracle = TestEngine(model, {"x": fused}), Oracle(model)
    answers_as(engine, oracle, "x", split)
    wrong = {n: t[:-1] if "lora_B" in n else t for n, t in fused_dense(shared, name).items()}
    reply = engine.load("wrong", write_adapter(tmp_path / "wrong", wrong))
    assert reply.error is not None
    assert f"{name}.lora_B" in reply.error.message


def test_g34_the_size_of_the_batch_changes_nothing(t1: Path, t1_oracle: Oracle) -> None:
    """Up and down, so that what an earlier and larger step left behind would show."""
    folder = make_adapter(t1, "ALL", r=3, std=0.15)
    engine = TestEngine(t1, {"x": folder, "y": make_a(2, t1)}, max_running_requests=17)
    prompt = prompt_of(9)
    for size in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 3, 16, 1):
        names = [("x", None, "y")[i % 3] for i in range(size)]
        ids = [engine.submit(prompt, name, logprobs=0, max_tokens=4, ignore_eos=True) for name in names]
        engine.run()
        for i in {0, min(1, size - 1), size - 1}:
            adapter = {"x": folder, None: None, "y": make_a(2, t1)}[names[i]]
            check(engine, ids[i], t1_oracle, prompt, adapter)


@pytest.fixture(scope="module")
def wide() -> Path:
    return models.make_t1(num_experts=64)


@pytest.mark.parametrize("virtual", [True, False])
@pytest.mark.parametrize("backend", ["torch", "csgmv", "triton"])
def test_g36_most_experts_get_no_token(wide: Path, backend: str, virtual: bool) -> None:
    oracle = Oracle(wide)
    folders: Mapping[str, Path] = {kind: make_adapter(wide, kind, r=3, std=0.15) for kind in ("A1", "EXP")}
    engine = TestEngine(wide, folders, lora_backend=backend, lora_use_virtual_experts=virtual)
    for name, folder in folders.items():
        for length in (1, 2, 3):
            answers_as(engine, oracle, name, folder, length)


@pytest.mark.parametrize("virtual", [True, False])
def test_g36_all_rows_on_one_expert(virtual: bool) -> None:
    model = models.make_t1(num_experts=64, num_experts_per_tok=1)
    oracle, folder = Oracle(model), make_adapter(models.make_t1(num_experts=64), "EXP", r=3, std=0.15)
    engine = TestEngine(model, {"x": folder}, lora_use_virtual_experts=virtual)
    prompt = prompt_of(1)
    ids = [engine.submit(prompt, "x", logprobs=0, ignore_eos=True) for _ in range(7)]
    engine.run()
    for id in ids:
        check(engine, id, oracle, prompt, folder)


def test_g36_an_adapter_of_experts_that_are_not_chosen(wide: Path, tmp_path: Path) -> None:
    oracle, prompt = Oracle(wide), prompt_of(3)
    engine = TestEngine(wide, {})
    base = engine.submit(prompt, logprobs=5, prompt_logprobs=2)
    engine.run()
    chosen = _experts_of(oracle, prompt + engine.tokens(base))
    idle = [e for e in range(64) if e not in chosen]
    factors = make_factors(wide, [f"mlp.experts.{p}_proj" for p in ("gate", "up", "down")], r=3, seed=1, std=0.3)
    for name, experts in (("idle", idle), ("busy", sorted(chosen))):
        folder = write_adapter(tmp_path / name, per_expert_tensors(factors, experts=experts))
        assert engine.load(name, folder).error is None
        id = engine.submit(prompt, name, logprobs=5, prompt_logprobs=2)
        engine.run()
        got, expected = ([out.logprobs for out in engine.outputs(i)] for i in (id, base))
        assert (got == expected) == (name == "idle")


def _experts_of(oracle: Oracle, ids: list[int]) -> set[int]:
    """Experts that any layer chooses for these tokens."""
    chosen: set[int] = set()

    def listen(_: Any, __: Any, output: Any) -> None:
        chosen.update(output[2].flatten().tolist())

    hooks = [layer.mlp.gate.register_forward_hook(listen) for layer in oracle.base.model.layers]
    oracle.logprobs(ids)
    for hook in hooks:
        hook.remove()
    return chosen
