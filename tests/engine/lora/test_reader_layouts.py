"""Every file layout gives the ΔW of an independent merge."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from kit.adapters import (
    Factors,
    block_gate_up,
    fused_pair,
    fused_tensors,
    make_a,
    make_adapter,
    make_factors,
    pair,
    per_expert_tensors,
    site_shapes,
    write_adapter,
)
from kit.deltas import weight_deltas
from kit.models import make_t1
from kit.oracle import moe_sizes
from kit.sites import assert_deltas_equal, make_sites, merged_deltas
from torch import Tensor

from loraplex.engine.lora.adapter import HostAdapter, SiteDelta
from loraplex.engine.lora.errors import AdapterError
from loraplex.engine.lora.reader import read_adapter

EXPERTS = ("mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj")
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def load(model: Path, adapter: Path, **options: object) -> HostAdapter:
    return read_adapter(adapter, make_sites(model), **({"max_rank": 512} | options))


def from_factors(factors: Factors, scale: float) -> dict[str, Tensor]:
    """ΔW of plain factors that all have the same scale."""
    return merged_deltas({path: SiteDelta(a, b, scale) for path, (a, b) in factors.items()})


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6, 7])
def test_a_recipe(t1: Path, number: int) -> None:
    folder = make_a(number, t1)
    adapter = load(t1, folder)
    assert_deltas_equal(merged_deltas(adapter.sites), weight_deltas(folder, **moe_sizes(t1)))
    assert adapter.layout == "dense + fused experts"
    assert adapter.modules == {
        m: 3 for m in ("q_proj", "v_proj", "o_proj", *(f"experts.{p}_proj" for p in ("gate", "up", "down")))
    }
    assert adapter.ignored == ()


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("kind", ["ATT", "EXP", "FUSED", "ROUTER", "ALL"])
def test_kinds(t1: Path, kind: str, rslora: bool) -> None:
    folder = make_adapter(t1, kind, r=3, alpha=7, use_rslora=rslora)
    adapter = load(t1, folder)
    assert_deltas_equal(merged_deltas(adapter.sites), weight_deltas(folder, **moe_sizes(t1)))


@pytest.mark.parametrize(
    ("arch", "kind"), [("qwen2_moe", "SHARED"), ("qwen2_moe", "ALL"), ("qwen3", "MLP"), ("llama", "ATT")]
)
def test_other_models(arch: str, kind: str) -> None:
    model = make_t1(arch)
    folder = make_adapter(model, kind)
    assert_deltas_equal(merged_deltas(load(model, folder).sites), weight_deltas(folder, **moe_sizes(model)))


@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_fused_experts_of_both_eras(t1: Path, tmp_path: Path, rank: int, exchanged: bool) -> None:
    """r != E and r == E: the layout of B cannot be guessed from the shape."""
    factors = make_factors(t1, EXPERTS, r=rank, seed=3)
    tensors = fused_tensors(factors, exchanged=exchanged)
    folder = write_adapter(
        tmp_path,
        tensors,
        r=rank,
        lora_alpha=2 * rank,
        target_parameters=BOTH,
        rank_pattern={"gate_up_proj": 2 * rank},
        alpha_pattern={"gate_up_proj": 4 * rank},
    )
    adapter = load(t1, folder)
    assert_deltas_equal(merged_deltas(adapter.sites), from_factors(factors, 2.0))
    assert adapter.layout == ("fused experts (exchanged)" if exchanged else "fused experts")
    assert (adapter.rank_min, adapter.rank_max) == (rank, 2 * rank)
    gate, up = (adapter.sites[f"model.layers.0.mlp.experts.{p}_proj"] for p in ("gate", "up"))
    assert gate.a.data_ptr() == up.a.data_ptr()
    assert adapter.nbytes == sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize("targets", [["mlp.experts.{}"], ["experts.{}"], None, ["mlp.gate.weight", "mlp.experts.{}"]])
@pytest.mark.parametrize("parameter", ["gate_up_proj", "down_proj"])
def test_one_fused_parameter(tmp_path: Path, parameter: str, targets: list[str] | None, exchanged: bool) -> None:
    """A single target is saved under `experts.lora_*`, the name that otherwise means down. Shapes outweigh the PEFT version."""
    model = make_t1(moe_intermediate_size=24)
    factors = make_factors(model, EXPERTS if parameter == "gate_up_proj" else EXPERTS[2:], r=3, seed=4, layers=[1])
    if parameter == "gate_up_proj":
        del factors["model.layers.1.mlp.experts.down_proj"]
        a, b = block_gate_up(*factors.values())
    else:
        ((a, b),) = factors.values()
    folder = write_adapter(
        tmp_path,
        fused_pair("model.layers.1.mlp.experts", a, b, exchanged=exchanged),
        r=a.shape[1],
        lora_alpha=a.shape[1],
        target_parameters=targets and [t.format(parameter) for t in targets],
    )
    assert_deltas_equal(merged_deltas(load(model, folder).sites), from_factors(factors, 1.0))


def test_fused_targets_that_contradict_the_shapes(t1: Path, tmp_path: Path) -> None:
    factors = make_factors(t1, EXPERTS[2:], r=3, seed=4, layers=[1])
    folder = write_adapter(tmp_path, per_layer_fused(factors), target_parameters=BOTH[:1])
    with pytest.raises(AdapterError, match="target_parameters"):
        load(t1, folder)


def per_layer_fused(factors: Factors) -> dict[str, Tensor]:
    ((path, (a, b)),) = factors.items()
    return fused_pair(path.rpartition(".")[0], a, b)


@pytest.mark.parametrize(
    ("with_sibling", "version", "exchanged"),
    [
        (True, None, False),
        (True, None, True),
        (True, "0.21.2", True),  # the sibling's shape outweighs the version
        (False, "0.18.1", True),
        (False, "0.19.0", True),
        (False, "0.19.1", False),
        (False, "0.21.2.dev0", False),
        (False, "1.0", False),
    ],
)
def test_square_parameter(tmp_path: Path, with_sibling: bool, version: str | None, exchanged: bool) -> None:
    """down [H, I] with H == I has the same shape in both eras."""
    model = make_t1(moe_intermediate_size=64, num_hidden_layers=1)
    factors = make_factors(model, EXPERTS, r=3, seed=5)
    a, b = factors["model.layers.0.mlp.experts.down_proj"]
    if with_sibling:
        tensors = fused_tensors(factors, exchanged=exchanged)
        config = {"rank_pattern": {"gate_up_proj": 6}, "alpha_pattern": {"gate_up_proj": 6}}
    else:
        factors = {"model.layers.0.mlp.experts.down_proj": (a, b)}
        tensors, config = fused_pair("model.layers.0.mlp.experts", a, b, exchanged=exchanged), {}
    folder = write_adapter(
        tmp_path,
        tensors,
        r=3,
        lora_alpha=3,
        peft_version=version,
        target_parameters=BOTH if with_sibling else BOTH[1:],
        **config,
    )
    assert_deltas_equal(merged_deltas(load(model, folder).sites), from_factors(factors, 1.0))


@pytest.mark.parametrize("version", [None, "nightly"])
def test_square_parameter_without_a_version_is_refused(tmp_path: Path, version: str | None) -> None:
    model = make_t1(moe_intermediate_size=64, num_hidden_layers=1)
    folder = write_adapter(
        tmp_path,
        per_layer_fused(make_factors(model, EXPERTS[2:], r=3, seed=5)),
        peft_version=version,
        target_parameters=BOTH[1:],
    )
    with pytest.raises(AdapterError, match="peft_version"):
        load(model, folder)


def test_square_gate_up_alone(t1: Path, tmp_path: Path) -> None:
    """T1 has 2I == H."""
    factors = make_factors(t1, EXPERTS[:2], r=3, seed=5, layers=[1])
    tensors = fused_pair("model.layers.1.mlp.experts", *block_gate_up(*factors.values()), exchanged=True)
    folder = write_adapter(tmp_path, tensors, r=6, lora_alpha=6, peft_version="0.18.1", target_parameters=BOTH[:1])
    assert_deltas_equal(merged_deltas(load(t1, folder).sites), from_factors(factors, 1.0))


def test_missing_experts_are_zero(t1: Path, tmp_path: Path) -> None:
    factors = make_factors(t1, EXPERTS, r=3, seed=6, layers=[0, 2])
    folder = write_adapter(tmp_path, per_expert_tensors(factors, experts=[1, 6]), r=3, lora_alpha=6)
    adapter = load(t1, folder)
    for _, b in factors.values():
        b[[0, 2, 3, 4, 5, 7]] = 0
    assert_deltas_equal(merged_deltas(adapter.sites), from_factors(factors, 2.0))
    assert adapter.modules["experts.up_proj"] == 2


def test_gate_without_up(t1: Path, tmp_path: Path) -> None:
    factors = make_factors(t1, EXPERTS[:1], r=3, seed=6)
    adapter = load(t1, write_adapter(tmp_path, per_expert_tensors(factors), r=3, lora_alpha=3))
    assert_deltas_equal(merged_deltas(adapter.sites), from_factors(factors, 1.0))


def test_experts_of_one_site_with_other_ranks_and_scales(t1: Path, tmp_path: Path) -> None:
    small = make_factors(t1, EXPERTS, r=2, seed=7, layers=[1])
    large = make_factors(t1, EXPERTS, r=5, seed=8, layers=[1])
    tensors = per_expert_tensors(large) | per_expert_tensors(small, experts=[0, 3])
    tensors = {name: t.bfloat16() for name, t in tensors.items()}
    folder = write_adapter(
        tmp_path,
        tensors,
        r=5,
        lora_alpha=10,
        use_rslora=True,
        rank_pattern={r"experts\.(0|3)\..*": 2},
        alpha_pattern={"experts.3.up_proj": 30},
    )
    adapter = load(t1, folder)
    assert adapter.notes == ()
    assert_deltas_equal(merged_deltas(adapter.sites), weight_deltas(folder, **moe_sizes(t1)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_stored_types(t1: Path, dtype: str) -> None:
    folder = make_adapter(t1, "ALL", dtype=dtype)
    adapter = load(t1, folder)
    kept = torch.float32 if dtype == "float64" else getattr(torch, dtype)
    assert {t.dtype for d in adapter.sites.values() for t in (d.a, d.b)} == {kept}
    assert_deltas_equal(merged_deltas(adapter.sites), weight_deltas(folder, **moe_sizes(t1)))


PARTS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def fused_dense(model: Path, module: str, *, extra_rows: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of an adapter on a fused projection, and the ΔW of its parts by a split of the product."""
    shapes = site_shapes(model)
    rows = [shapes[p][0] for p in PARTS[module]]
    a, b = torch.randn(4, shapes[PARTS[module][0]][1]), torch.randn(sum(rows) + extra_rows, 4)
    deltas = (2 * b @ a).tensor_split([sum(rows[:i]) for i in range(1, len(rows))])
    return (
        pair(f"model.layers.2.{module}", a, b),
        {f"model.layers.2.{part}.weight": delta for part, delta in zip(PARTS[module], deltas)},
    )


@pytest.mark.parametrize("module", PARTS)
def test_fused_dense_projections(tmp_path: Path, module: str) -> None:
    model = make_t1("llama")
    tensors, expected = fused_dense(model, module)
    adapter = load(model, write_adapter(tmp_path, tensors))
    assert_deltas_equal(merged_deltas(adapter.sites), expected)
    assert len({d.a.data_ptr() for d in adapter.sites.values()}) == 1


@pytest.mark.parametrize("module", PARTS)
@pytest.mark.parametrize("extra_rows", [-1, 1, 64])
def test_fused_dense_projection_with_wrong_rows(tmp_path: Path, module: str, extra_rows: int) -> None:
    model = make_t1("llama")
    tensors, _ = fused_dense(model, module, extra_rows=extra_rows)
    with pytest.raises(AdapterError, match=r"qkv_proj\.lora_B|gate_up_proj\.lora_B"):
        load(model, write_adapter(tmp_path, tensors))


def test_head(t1: Path, tmp_path: Path) -> None:
    """LoRA on lm_head, with the copy of the base head that PEFT adds."""
    a, b = torch.randn(4, 64), torch.randn(320, 4)
    tensors = pair("lm_head", a, b) | {"base_model.model.lm_head.base_layer.weight": torch.randn(320, 64)}
    adapter = load(t1, write_adapter(tmp_path, tensors))
    assert_deltas_equal(merged_deltas(adapter.sites), {"lm_head.weight": 2 * b @ a})
    assert "lm_head.base_layer.weight" in adapter.notes[0]
    tensors["base_model.model.lm_head.base_layer.weight"] = torch.randn(322, 64)
    with pytest.raises(AdapterError, match="vocabulary"):
        load(t1, write_adapter(tmp_path, tensors))


@pytest.mark.parametrize(
    "targets", [r".*layers\.1\.self_attn\.(q|v)_proj", "all-linear", ["q_proj", "v_proj"], [], None]
)
def test_target_modules_do_not_matter(t1: Path, tmp_path: Path, targets: str | list[str] | None) -> None:
    factors = make_factors(t1, ["self_attn.q_proj", "self_attn.v_proj"], r=4, seed=9, layers=[1])
    folder = write_adapter(
        tmp_path,
        per_expert_tensors(factors),
        target_modules=targets,
        layers_to_transform=[1],
        exclude_modules="k_proj",
    )
    adapter = load(t1, folder)
    assert_deltas_equal(merged_deltas(adapter.sites), from_factors(factors, 2.0))
    assert adapter.notes == ()


@pytest.mark.parametrize("rank", [1, 3, 5, 8, 16, 33, 64])
def test_ranks(t1: Path, rank: int) -> None:
    folder = make_adapter(t1, "ATT", r=rank)
    adapter = load(t1, folder, max_rank=64)
    assert (adapter.rank_min, adapter.rank_max) == (rank, rank)
    assert_deltas_equal(merged_deltas(adapter.sites), weight_deltas(folder))


def test_rank_over_the_limit_names_both(t1: Path) -> None:
    with pytest.raises(AdapterError, match=r"rank 65, above the limit of 64"):
        load(t1, make_adapter(t1, "ALL", r=65), max_rank=64)


def test_tensor_rank_counts_when_the_config_states_another(t1: Path, tmp_path: Path) -> None:
    factors = make_factors(t1, ["self_attn.q_proj"], r=2, seed=9)
    adapter = load(t1, write_adapter(tmp_path, per_expert_tensors(factors), r=4, lora_alpha=8))
    assert_deltas_equal(merged_deltas(adapter.sites), from_factors(factors, 4.0))
    assert "another rank" in adapter.notes[0]


def renamed(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name.removeprefix("base_model.model."): t for name, t in tensors.items()}


@pytest.mark.parametrize("prefix", ["", "base_model.model.", "base_model.model.base_model.model."])
def test_good_prefixes(t1: Path, tmp_path: Path, prefix: str) -> None:
    factors = make_factors(t1, ["self_attn.q_proj", "mlp.experts.up_proj"], r=4, seed=9)
    folder = write_adapter(tmp_path, renamed(per_expert_tensors(factors), prefix))
    assert_deltas_equal(merged_deltas(load(t1, folder).sites), from_factors(factors, 2.0))


def test_patterns_match_names_without_the_prefix(t1: Path, tmp_path: Path) -> None:
    factors = make_factors(t1, ["self_attn.q_proj"], r=4, seed=9)
    folder = write_adapter(tmp_path, per_expert_tensors(factors), lora_alpha=1, alpha_pattern={"^model.*q_proj": 8})
    assert_deltas_equal(merged_deltas(load(t1, folder).sites), from_factors(factors, 2.0))


def test_unsloth_is_noted_for_fused_experts_only(t1: Path, tmp_path: Path) -> None:
    fused = fused_tensors(make_factors(t1, EXPERTS, r=4, seed=9))
    plain = per_expert_tensors(make_factors(t1, EXPERTS, r=4, seed=9))
    by_metadata = write_adapter(
        tmp_path / "a",
        fused,
        metadata={"creator": "Unsloth 2026.1"},
        r=8,
        lora_alpha=8,
        rank_pattern={"down_proj": 4},
    )
    by_config = write_adapter(
        tmp_path / "b", fused, auto_mapping={"unsloth_fixed": True}, r=8, rank_pattern={"down_proj": 4}
    )
    for folder in (by_metadata, by_config):
        assert any("Unsloth" in note for note in load(t1, folder).notes)
    assert load(t1, write_adapter(tmp_path / "c", plain, metadata={"creator": "Unsloth"})).notes == ()
    assert load(t1, write_adapter(tmp_path / "d", fused, r=8, rank_pattern={"down_proj": 4})).notes == ()
