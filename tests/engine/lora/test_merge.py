"""The second reading of adapter files, which `verify` trusts: the same ΔW as the kit's own merge."""

import json
from pathlib import Path

import pytest
import torch
from kit.adapters import fused_pair, fused_tensors, make_adapter, make_factors, pair, per_expert_tensors, write_adapter
from kit.deltas import weight_deltas
from kit.models import make_t1
from kit.oracle import moe_sizes
from kit.sites import assert_deltas_equal, make_sites
from torch import Tensor

from loraplex.engine.lora.merge import AdapterMerge

EXPERTS = ("mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj")
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def weight_shapes(model: Path, moe: str = "mlp") -> dict[str, tuple[int, ...]]:
    """Of the checkpoint, experts one by one."""
    shapes: dict[str, tuple[int, ...]] = {}
    for site in make_sites(model).values():
        shape = (site.out_features, site.in_features)
        parent, _, projection = site.path.rpartition(".")
        for e in range(site.num_experts):
            shapes[f"{parent}.{e}.{projection}.weight"] = shape
        if not site.num_experts:
            shapes[f"{site.path}.weight"] = shape
    return {name.replace(".mlp.", f".{moe}."): shape for name, shape in shapes.items()}


def merged(model: Path, folder: Path, *, moe: str = "mlp", expert_major_b: bool = False) -> dict[str, Tensor]:
    """ΔW by transformers 5 parameter name, as the kit gives it."""
    sizes = moe_sizes(model)
    inner = sizes["intermediate"]
    deltas: dict[str, Tensor] = {}
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    with AdapterMerge(folder, weight_shapes(model, moe), expert_major_b=expert_major_b) as merge:
        for prefix in (*(f"model.layers.{i}" for i in range(layers)), "lm_head"):
            for name, delta in merge.deltas(prefix):
                assert name.startswith(prefix)
                name = name.replace(f".{moe}.", ".mlp.")
                parts = name.split(".")
                if "experts" not in parts:
                    assert name not in deltas
                    deltas[name] = delta
                    continue
                e, projection = int(parts[-3]), parts[-2]
                down = projection == "down_proj"
                rows, columns = (sizes["hidden"], inner) if down else (2 * inner, sizes["hidden"])
                parameter = ".".join([*parts[:-3], "down_proj" if down else "gate_up_proj"])
                whole = deltas.setdefault(parameter, torch.zeros(sizes["num_experts"], rows, columns))
                start = inner if projection == "up_proj" else 0
                whole[e, start : start + len(delta)] += delta
    return deltas


@pytest.mark.parametrize("moe", ["mlp", "block_sparse_moe"])
@pytest.mark.parametrize("kind", ["A1", "ATT", "EXP", "FUSED", "MIXTRAL", "STACK", "OUTER", "GATE_UP", "ROUTER", "ALL"])
def test_kinds(t1: Path, kind: str, moe: str) -> None:
    folder = make_adapter(t1, kind, r=3, alpha=7, use_rslora=True)
    assert_deltas_equal(merged(t1, folder, moe=moe), weight_deltas(folder, **moe_sizes(t1)))


@pytest.mark.parametrize(("arch", "kind"), [("qwen2_moe", "SHARED"), ("llama", "MLP"), ("qwen3", "ATT")])
def test_other_models(arch: str, kind: str) -> None:
    model = make_t1(arch)
    folder = make_adapter(model, kind, alpha_pattern={"q_proj": 3, ".*up_proj": 5})
    assert_deltas_equal(merged(model, folder), weight_deltas(folder, **moe_sizes(model)))


@pytest.mark.parametrize("inner", [24, 32, 64])
@pytest.mark.parametrize("parameters", [BOTH, BOTH[:1], BOTH[1:]])
@pytest.mark.parametrize("version", ["0.18.1", "0.21.2"])
def test_fused_experts_of_both_eras(tmp_path: Path, inner: int, parameters: list[str], version: str) -> None:
    """Square gate_up at 32, square down at 64."""
    model = make_t1(moe_intermediate_size=inner, num_hidden_layers=1)
    factors = make_factors(model, EXPERTS, r=3, seed=4)
    usual = fused_tensors(factors)
    tensors = fused_tensors(factors, exchanged=version < "0.19")
    keep = {BOTH[0]: "base_layer.lora", BOTH[1]: "experts.lora"}
    for target in set(BOTH) - set(parameters):
        for group in (usual, tensors):
            for name in [n for n in group if keep[target] in n]:
                del group[name]
    if parameters == BOTH[:1]:
        usual, tensors = ({n.replace(".base_layer", ""): t for n, t in g.items()} for g in (usual, tensors))
    config = {"target_parameters": parameters, "alpha_pattern": {"gate_up_proj": 5, "down_proj": 3}}
    expected = merged(model, write_adapter(tmp_path / "now", usual, **config))
    got = merged(model, write_adapter(tmp_path / "then", tensors, peft_version=version, **config))
    assert_deltas_equal(got, expected)
    gate, up, down = factors.values()
    if BOTH[1] in parameters:
        assert_deltas_equal({"x": expected["model.layers.0.mlp.experts.down_proj"]}, {"x": down[1] @ down[0]})
    if BOTH[0] in parameters:
        both = torch.cat([gate[1] @ gate[0], up[1] @ up[0]], 1) * (5 / 6)
        assert_deltas_equal({"x": expected["model.layers.0.mlp.experts.gate_up_proj"]}, {"x": both})


def test_expert_major_b(t1: Path, tmp_path: Path) -> None:
    a, b = make_factors(t1, EXPERTS[2:], r=3, seed=4, layers=[0]).popitem()[1]
    tensors = fused_pair("model.layers.0.mlp.experts", a, b)
    for name in tensors:
        if ".lora_B." in name:
            tensors[name] = b.permute(1, 0, 2).reshape(64, -1)
    folder = write_adapter(tmp_path, tensors, target_parameters=BOTH[1:], lora_alpha=3)
    got = merged(t1, folder, expert_major_b=True)
    assert_deltas_equal(got, {"model.layers.0.mlp.experts.down_proj": b @ a})


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("module", ["self_attn.qkv_proj", "mlp.gate_up_proj"])
def test_fused_dense_projections(tmp_path: Path, module: str, stacked: bool) -> None:
    model = make_t1("llama")
    kind, _, name = module.partition(".")
    parts = [f"{kind}.{p}_proj" for p in (("q", "k", "v") if name == "qkv_proj" else ("gate", "up"))]
    factors = make_factors(model, parts, r=4, seed=3, layers=[2])
    a, b = (torch.cat(tensors) for tensors in zip(*factors.values()))
    if not stacked:
        a = a[:4]
        factors = {path: (a, own_b) for path, (_, own_b) in factors.items()}
    folder = write_adapter(tmp_path, pair(f"model.layers.2.{module}", a, b), lora_alpha=4)
    expected = {f"{path}.weight": own_b @ own_a for path, (own_a, own_b) in factors.items()}
    assert_deltas_equal(merged(model, folder), expected)


@pytest.mark.parametrize("prefix", ["", "language_model.", "base_model.model.base_model.model.", "base_model.model."])
def test_names(t1: Path, tmp_path: Path, prefix: str) -> None:
    factors = make_factors(t1, ["self_attn.q_proj"], r=4, seed=1)
    tensors = {n.replace("base_model.model.", prefix, 1): t for n, t in per_expert_tensors(factors).items()}
    tensors |= pair("model.unembed_tokens", torch.ones(4, 64), torch.ones(320, 4))
    expected = {f"{path}.weight": 2 * b @ a for path, (a, b) in factors.items()} | {
        "lm_head.weight": torch.full((320, 64), 8.0)
    }
    assert_deltas_equal(merged(t1, write_adapter(tmp_path, tensors)), expected)
