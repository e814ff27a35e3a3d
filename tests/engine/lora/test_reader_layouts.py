"""Every file layout gives the ΔW of an independent merge."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from kit.adapters import (
    Factors,
    block_gate_up,
    embedding_pair,
    fused_pair,
    fused_tensors,
    make_a,
    make_adapter,
    make_factors,
    pair,
    per_expert_tensors,
    share_outer,
    site_shapes,
    write_adapter,
)
from kit.deltas import weight_deltas
from kit.models import make_t1
from kit.oracle import moe_sizes
from kit.sites import Site, assert_deltas_equal, make_sites, merged_deltas
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
    experts = [f"experts.{p}_proj" for p in ("gate", "up", "down")]
    assert adapter.modules == dict.fromkeys(["q_proj", "v_proj", "o_proj", *experts], 3)
    assert adapter.ignored == ()


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("num_experts", [8, 64])
@pytest.mark.parametrize("kind", ["ATT", "EXP", "FUSED", "MIXTRAL", "STACK", "OUTER", "GATE_UP", "ROUTER", "ALL"])
def test_kinds(kind: str, num_experts: int, rslora: bool) -> None:
    model = make_t1(num_experts=num_experts)
    folder = make_adapter(model, kind, r=3, alpha=7, use_rslora=rslora)
    adapter = load(model, folder)
    assert_deltas_equal(merged_deltas(adapter.sites), weight_deltas(folder, **moe_sizes(model)))


STACKS = {"STACK": "stacked experts", "GATE_UP": "stacked experts", "OUTER": "stacked experts (shared outer)"}


@pytest.mark.parametrize("kind", STACKS)
def test_stacks_are_the_factors_they_were_made_of(t1: Path, kind: str) -> None:
    adapter = load(t1, make_adapter(t1, kind, r=4, alpha=8, seed=5))
    factors = make_factors(t1, EXPERTS, r=4, seed=5)
    if kind == "OUTER":
        factors = share_outer(factors)
        leads = {path: (d.a.shape[0], d.b.shape[0]) for path, d in adapter.sites.items()}
        assert leads == {path: (8, 1) if "down" in path else (1, 8) for path in factors}
    assert_deltas_equal(merged_deltas(adapter.sites), from_factors(factors, 2.0))
    assert adapter.layout == STACKS[kind]
    assert adapter.nbytes == sum(t.nbytes for pair in factors.values() for t in pair)


def test_stacked_gate_up_with_one_a(t1: Path, tmp_path: Path) -> None:
    """A [E, r, H] for gate and up both, B [E, 2I, r]."""
    a, b = torch.randn(8, 3, 64), torch.randn(8, 64, 3)
    adapter = load(t1, write_adapter(tmp_path, pair("model.layers.0.mlp.experts.gate_up_proj", a, b), lora_alpha=6))
    assert_deltas_equal(merged_deltas(adapter.sites), {"model.layers.0.mlp.experts.gate_up_proj": 2 * b @ a})
    gate, up = adapter.sites.values()
    assert gate.a.data_ptr() == up.a.data_ptr()


def with_sites(model: Path, old: str, new: str) -> dict[str, Site]:
    """The model's sites under other names."""
    renamed = [dataclasses.replace(site, path=path.replace(old, new)) for path, site in make_sites(model).items()]
    return {site.path: site for site in renamed}


@pytest.mark.parametrize("kind", ["ALL", "MIXTRAL", "FUSED", "STACK", "OUTER"])
def test_adapters_of_either_generation_fit_a_mixtral_tree(t1: Path, kind: str) -> None:
    """The checkpoint says block_sparse_moe, transformers 5 says mlp."""
    folder = make_adapter(t1, kind)
    adapter = read_adapter(folder, with_sites(t1, ".mlp.", ".block_sparse_moe."), max_rank=64)
    usual = {path.replace(".block_sparse_moe.", ".mlp."): delta for path, delta in adapter.sites.items()}
    assert len(usual) == len(load(t1, folder).sites)
    assert_deltas_equal(merged_deltas(usual), weight_deltas(folder, **moe_sizes(t1)))


def test_a_tree_with_both_names_is_taken_by_the_letter(t1: Path, tmp_path: Path) -> None:
    sites = make_sites(t1) | with_sites(t1, ".mlp.", ".block_sparse_moe.")
    factors = make_factors(t1, ["mlp.gate"], r=4, seed=2, layers=[1])
    adapter = read_adapter(write_adapter(tmp_path, per_expert_tensors(factors)), sites, max_rank=64)
    assert list(adapter.sites) == ["model.layers.1.mlp.gate"]


MLA = {
    "q_a_proj": (32, 64),
    "q_b_proj": (96, 32),
    "kv_a_proj_with_mqa": (24, 64),
    "kv_b_proj": (128, 16),
    "o_proj": (64, 64),
}


@pytest.mark.parametrize("router", ["gate", "router"])
def test_mla_and_router_names(tmp_path: Path, router: str) -> None:
    """DeepSeek's attention, and the two names of a router."""
    shapes = {f"model.layers.0.self_attn.{name}": shape for name, shape in MLA.items()}
    shapes[f"model.layers.0.mlp.{router}"] = (8, 64)
    sites = {path: Site(path, "dense", d_in, d_out) for path, (d_out, d_in) in shapes.items()}
    factors = {path: (torch.randn(3, d_in), torch.randn(d_out, 3)) for path, (d_out, d_in) in shapes.items()}
    folder = write_adapter(tmp_path, per_expert_tensors(factors), r=3, lora_alpha=3)
    assert_deltas_equal(merged_deltas(read_adapter(folder, sites, max_rank=8).sites), from_factors(factors, 1.0))
    with pytest.raises(AdapterError, match="no place"):
        read_adapter(folder, {p: s for p, s in sites.items() if not p.endswith(router)}, max_rank=8)


@pytest.mark.parametrize("module", ["unembed_tokens", "model.unembed_tokens", "language_model.lm_head"])
def test_other_names_of_the_head(t1: Path, tmp_path: Path, module: str) -> None:
    a, b = torch.randn(4, 64), torch.randn(320, 4)
    adapter = load(t1, write_adapter(tmp_path, pair(module, a, b)))
    assert_deltas_equal(merged_deltas(adapter.sites), {"lm_head.weight": 2 * b @ a})


@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize("rank", [3, 8])
def test_expert_major_b_of_old_unsloth_files(t1: Path, tmp_path: Path, rank: int, exchanged: bool) -> None:
    """The same shapes as PEFT's, so only the option tells; without it the deltas differ."""
    factors = make_factors(t1, EXPERTS, r=rank, seed=3)
    tensors = fused_tensors(factors, exchanged=exchanged)
    for name, t in tensors.items():
        if ".lora_B." in name:
            tensors[name] = t.view(t.shape[0], -1, 8).mT.reshape(t.shape)
    config = {"rank_pattern": {"gate_up_proj": 2 * rank}, "alpha_pattern": {"gate_up_proj": 2 * rank}}
    folder = write_adapter(
        tmp_path, tensors, r=rank, lora_alpha=rank, target_parameters=BOTH, metadata={"by": "unsloth"}, **config
    )
    chosen = load(t1, folder, moe_lora_b_layout="expert-major")
    expected = from_factors(factors, 1.0)
    assert_deltas_equal(merged_deltas(chosen.sites), expected)
    assert chosen.notes == ()
    usual = load(t1, folder)
    assert "--lora-b-layout expert-major" in usual.notes[0]
    assert usual.digest != chosen.digest
    with pytest.raises(AssertionError, match="relative error"):
        assert_deltas_equal(merged_deltas(usual.sites), expected)


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
@pytest.mark.parametrize("targets", [["mlp.experts.{}"], ["experts.{}"], None, ["mlp.gate.weight", "experts.{}"]])
@pytest.mark.parametrize("parameter", ["gate_up_proj", "down_proj"])
def test_one_fused_parameter(tmp_path: Path, parameter: str, targets: list[str] | None, exchanged: bool) -> None:
    """A single target is saved under `experts.lora_*`, the name that means down otherwise; shapes decide."""
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
def test_fused_dense_projections_with_an_a_for_each_part(tmp_path: Path, module: str) -> None:
    """A's on top of each other, as SGLang keeps them: [3r, in] for qkv, [2r, in] for gate_up."""
    model = make_t1("llama")
    factors = make_factors(model, PARTS[module], r=4, seed=3, layers=[2])
    a, b = (torch.cat(tensors) for tensors in zip(*factors.values()))
    folder = write_adapter(tmp_path, pair(f"model.layers.2.{module}", a, b), r=4, lora_alpha=4)
    adapter = load(model, folder)
    assert_deltas_equal(merged_deltas(adapter.sites), from_factors(factors, 1.0))
    assert (adapter.rank_max, adapter.notes) == (4, ())


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


@pytest.mark.parametrize("prefix", ["base_model.model.", "", "base_model.model.model.language_model."])
def test_embedding(t1: Path, tmp_path: Path, prefix: str) -> None:
    """With the copy of the base embedding that PEFT adds; alpha_pattern and use_rslora give the scale."""
    a, b = torch.randn(5, 320), torch.randn(64, 5)
    tensors = embedding_pair(a, b) | {"base_model.model.model.embed_tokens.base_layer.weight": torch.randn(320, 64)}
    old = "base_model.model.model." if "language" in prefix else "base_model.model."
    tensors = {name.replace(old, prefix): t for name, t in tensors.items()}
    config = {"alpha_pattern": {"embed_tokens": 3}, "rank_pattern": {"embed_tokens": 5}, "use_rslora": True}
    adapter = load(t1, write_adapter(tmp_path, tensors, **config))
    assert_deltas_equal(merged_deltas(adapter.sites), {"model.embed_tokens.weight": 3 / 5**0.5 * (b @ a).T})
    assert (adapter.layout, adapter.num_tensors, len(adapter.notes)) == ("embedding", 2, 1)
    assert "embed_tokens.base_layer.weight" in adapter.notes[0]


@pytest.mark.parametrize("rslora", [False, True])
def test_a_tied_head_has_the_scale_of_its_own_name(t1: Path, tmp_path: Path, rslora: bool) -> None:
    """PEFT's ensure_weight_tying: the head takes the embedding's matrices, not its alpha and stated r."""
    a, b = torch.randn(5, 320), torch.randn(64, 5)
    tensors = embedding_pair(a, b) | pair("lm_head", b.T, a.T)
    config = {"rank_pattern": {"embed_tokens": 5}, "alpha_pattern": {"embed_tokens": 3}, "use_rslora": rslora}
    folder = write_adapter(tmp_path, tensors, r=4, lora_alpha=12, ensure_weight_tying=True, **config)
    adapter = load(t1, folder)
    scales = (3 / 5**0.5, 12 / 4**0.5) if rslora else (3 / 5, 12 / 4)
    both = {"model.embed_tokens.weight": scales[0] * (b @ a).T, "lm_head.weight": scales[1] * (b @ a).T}
    assert_deltas_equal(merged_deltas(adapter.sites), both)
    (note,) = adapter.notes
    assert "'lm_head' has rank 5" in note
    config = {"ensure_weight_tying": "yes"}
    with pytest.raises(AdapterError, match="ensure_weight_tying"):
        load(t1, write_adapter(tmp_path, tensors, **config))


@pytest.mark.parametrize(("vocabulary", "hidden"), [(321, 64), (319, 64), (320, 65)])
def test_embedding_of_another_size(t1: Path, tmp_path: Path, vocabulary: int, hidden: int) -> None:
    tensors = embedding_pair(torch.randn(4, vocabulary), torch.randn(hidden, 4))
    with pytest.raises(AdapterError, match=r"lora_embedding_[AB]"):
        load(t1, write_adapter(tmp_path, tensors))


def test_a_projection_is_no_embedding(t1: Path, tmp_path: Path) -> None:
    names = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_embedding_{f}" for f in "AB")
    with pytest.raises(AdapterError, match="no tensor of"):
        load(t1, write_adapter(tmp_path, dict(zip(names, (torch.randn(4, 64), torch.randn(64, 4)), strict=True))))


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


@pytest.mark.parametrize("inner", ["model.", "language_model.model.", "model.language_model."])
@pytest.mark.parametrize("prefix", ["", "base_model.model.", "base_model.model.base_model.model."])
def test_good_prefixes(t1: Path, tmp_path: Path, prefix: str, inner: str) -> None:
    factors = make_factors(t1, ["self_attn.q_proj", "mlp.experts.up_proj"], r=4, seed=9)
    tensors = renamed(per_expert_tensors(factors), prefix)
    tensors = {name.replace("model.layers.", f"{inner}layers."): t for name, t in tensors.items()}
    folder = write_adapter(tmp_path, tensors)
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


def test_an_adapter_that_does_nothing_is_noted(t1: Path, tmp_path: Path) -> None:
    factors = make_factors(t1, ["self_attn.q_proj"], r=4, seed=9)
    untrained = {path: (a, torch.zeros_like(b)) for path, (a, b) in factors.items()}
    adapter = load(t1, write_adapter(tmp_path, per_expert_tensors(untrained)))
    assert "changes nothing" in adapter.notes[0]
