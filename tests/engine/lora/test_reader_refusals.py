"""What must not load, and that the error says why without showing where the folder is."""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.adapters import make_adapter, make_factors, pair, per_expert_tensors, write_adapter
from kit.models import make_t1
from kit.sites import make_sites
from safetensors.torch import save_file
from torch import Tensor

from loraplex.engine.lora.adapter import HostAdapter
from loraplex.engine.lora.errors import AdapterError
from loraplex.engine.lora.reader import read_adapter

Q0 = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(t1: Path, tmp_path: Path) -> Path:
    """A good adapter to spoil: attention, router and experts."""
    return Path(shutil.copytree(make_adapter(t1, "ALL"), tmp_path / "adapter"))


def load(model: Path, folder: Path, **options: Any) -> HostAdapter:
    return read_adapter(folder, make_sites(model), **({"max_rank": 64} | options))


def refusal(model: Path, folder: Path, *words: str, status: int = 422, **options: Any) -> str:
    """The error text, checked to hold the words and not the path."""
    with pytest.raises(AdapterError) as caught:
        load(model, folder, **options)
    text = str(caught.value)
    assert caught.value.status == status, text
    assert str(folder.parent) not in text
    for word in words:
        assert word in text
    return text


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias"),
        ({"bias": "lora_only"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"peft_type": None}, "peft_type"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"init_lora_weights": "corda"}, "init_lora_weights"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights"),
        ({"init_lora_weights": "unheard of"}, "init_lora_weights"),
        ({"init_lora_weights": ["pissa"]}, "init_lora_weights"),
        ({"trainable_token_indices": [3, 7]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"use_qalora": True}, "use_qalora"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
        ({"megatron_config": {"x": 1}}, "megatron_config"),
        ({"kasa_config": {"beta": 1}}, "kasa_config"),
        ({"arrow_config": {"top_k": 2}}, "arrow_config"),
        ({"monteclora_config": {}, "arrow_config": {"x": 1}}, "arrow_config"),
        ({"use_next_years_lora": True}, "use_next_years_lora"),
        ({"next_config": {"x": 1}}, "next_config"),
        ({"r": None}, "r must"),
        ({"r": 0}, "r must"),
        ({"r": "4"}, "r must"),
        ({"r": True}, "r must"),
        ({"r": 10**400}, "r must"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern['q_proj']"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern['q_proj']"),
        ({"alpha_pattern": {"(q_proj": 4}}, "alpha_pattern"),
        ({"alpha_pattern": {"(a+)+b": 4}}, "alpha_pattern"),
        ({"alpha_pattern": {".*.*.*.*.*q": 4}}, "alpha_pattern"),
        ({"rank_pattern": {f"q{i}|.*": 4 for i in range(100)}}, "rank_pattern"),
        ({"target_parameters": "experts"}, "target_parameters"),
        ({"peft_version": 3}, "peft_version"),
    ],
    ids=str,
)
def test_config_fields(t1: Path, folder: Path, fields: dict[str, Any], word: str) -> None:
    edit_config(folder, **fields)
    refusal(t1, folder, word)


@pytest.mark.parametrize(
    "fields",
    [
        {"init_lora_weights": False},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"target_modules": None, "rank_pattern": None, "alpha_pattern": None, "modules_to_save": []},
        {"bias": None, "lora_dropout": 0.1, "layers_to_transform": [0]},
        {"use_next_years_lora": False, "next_config": None},
        {"velora_config": {"num_groups": 2}},
    ],
    ids=str,
)
def test_harmless_config_fields(t1: Path, folder: Path, fields: dict[str, Any]) -> None:
    expected = load(t1, folder)
    edit_config(folder, **fields)
    assert load(t1, folder).digest == expected.digest


def test_unknown_fields_are_noted(t1: Path, folder: Path) -> None:
    edit_config(folder, trained_with="love")
    assert "trained_with" in load(t1, folder).notes[0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"r": NaN}',
        "[" * 100_000,
        '{"r": ' + "9" * 5000 + "}",
        "\udcff",
        "x" * 1_000_001,
    ],
)
def test_damaged_config(t1: Path, folder: Path, text: str) -> None:
    (folder / "adapter_config.json").write_bytes(text.encode(errors="surrogateescape"))
    refusal(t1, folder, "adapter_config.json")


TENSOR_CASES: list[tuple[dict[str, Tensor], str]] = [
    ({f"base_model.model.{Q0}.lora_magnitude_vector": torch.ones(64)}, "DoRA"),
    ({f"base_model.model.{Q0}.lora_B.bias": torch.ones(64)}, "lora_bias"),
    ({f"base_model.model.{Q0}.base_layer.bias": torch.ones(64)}, "bias"),
    ({"base_model.model.model.layers.0.self_attn.k_proj.bias": torch.ones(32)}, "bias"),
    ({"base_model.model.model.layers.0.mlp.gate.e_score_correction_bias": torch.ones(8)}, "e_score_correction_bias"),
    ({"base_model.model.lm_head.weight": torch.ones(320, 64)}, "modules_to_save"),
    ({"base_model.model.model.embed_tokens.weight": torch.ones(320, 64)}, "embed_tokens"),
    ({"base_model.model.model.embed_tokens.base_layer.weight": torch.ones(321, 64)}, "vocabulary"),
    ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 320)}, "no lora_B"),
    ({"base_model.model.model.embed_tokens.lora_A.weight": torch.ones(4, 320)}, "lora_embedding_A"),
    (
        {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(2, 64)},
        "embed_tokens",
    ),
    ({"base_model.model.model.layers.0.mlp.gate.weight": torch.ones(8, 64)}, "modules_to_save"),
]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("extra", "word"), TENSOR_CASES, ids=[next(iter(t)) for t, _ in TENSOR_CASES])
def test_tensors_that_are_no_lora_factors(
    t1: Path, folder: Path, extra: dict[str, Tensor], word: str, strict: bool
) -> None:
    """Leaving these out would change the adapter, so loose loading refuses them too."""
    edit_tensors(folder, lambda tensors: tensors.update(extra))
    refusal(t1, folder, word, next(iter(extra)), strict=strict)


HOMELESS = [
    "base_model.model.language_model.layers.0.self_attn.q_proj",
    "base_model.model.model.model.layers.0.self_attn.q_proj",
    "base_model.model.language_model.language_model.model.layers.0.self_attn.q_proj",
    "base_model.model.vision_model.model.layers.0.self_attn.q_proj",
    "base_model.layers.0.self_attn.q_proj",
    "foo.layers.0.self_attn.q_proj",
    "layers.0.self_attn.q_proj",
    "base_model.model.base_model.model.base_model.model.model.layers.0.self_attn.q_proj",
    "base_model.model.model.layers.0.self_attn.q_proj.base_layer",
    "base_model.model.model.layers.3.self_attn.q_proj",
    "base_model.model.model.layers.00.self_attn.q_proj",
    "base_model.model.model.layers.0.self_attn.q_proj_2",
    "base_model.model.model.layers.0.xself_attn.q_proj",
    "base_model.model.model.layers.0.mlp.q_proj",
    "base_model.model.model.layers.0.mlp.gate_proj",
    "base_model.model.model.layers.0.mlp.shared_expert.up_proj",
    "base_model.model.model.layers.0.mlp.experts.8.up_proj",
    "base_model.model.model.layers.0.mlp.experts.03.up_proj",
    "base_model.model.model.layers.0.mlp.experts.-1.up_proj",
    "base_model.model.model.layers.0.mlp.experts.3.w4",
    "base_model.model.model.layers.0.mlp.experts.8.w1",
    "base_model.model.model.layers.0.mlp.w1",
    "base_model.model.model.layers.0.mlp.experts.w1_proj",
    "base_model.model.model.layers.0.mlp.experts.0.gate_up_proj",
    "base_model.model.model.layers.0.block_sparse_moe.experts.8.w1",
    "base_model.model.model.layers.0.block_sparse_moe.q_proj",
    "base_model.model.model.embed_out",
    "base_model.model.model.layers.0.mlp.experts.base_layer.base_layer",
]


@pytest.mark.parametrize("module", HOMELESS)
def test_names_without_a_place(t1: Path, folder: Path, tmp_path: Path, module: str) -> None:
    homeless = pair(module, torch.ones(4, 64), torch.ones(64, 4), prefix="")
    edit_tensors(folder, lambda tensors: tensors.update(homeless))
    text = refusal(t1, folder, "no place in this model", "(and 1 more)")
    assert any(name in text for name in homeless)
    loose = load(t1, folder, strict=False)
    assert sorted(loose.ignored) == sorted(homeless)
    assert loose.digest == load(t1, make_adapter(t1, "ALL")).digest

    only = write_adapter(tmp_path / "only", homeless)
    for strict in (True, False):
        refusal(t1, only, "no tensor", module, strict=strict)


ELSEWHERE = {
    "self_attn.q_a_proj": "latent attention",
    "self_attn.q_b_proj": "latent attention",
    "self_attn.kv_a_proj_with_mqa": "latent attention",
    "self_attn.kv_b_proj": "latent attention",
    "self_attn.fused_qkv_a_proj_with_mqa": "latent attention",
    "mlp.router": "router",
    "mlp.shared_experts.up_proj": "shared expert",
    "mlp.shared_expert_gate": "shared expert",
    "mlp.experts.8.up_proj": "routed experts",
}


@pytest.mark.parametrize("module", ELSEWHERE)
def test_modules_of_other_architectures_are_called_by_their_kind(t1: Path, folder: Path, module: str) -> None:
    extra = pair(f"model.layers.0.{module}", torch.ones(4, 64), torch.ones(64, 4))
    edit_tensors(folder, lambda tensors: tensors.update(extra))
    refusal(t1, folder, f"'{next(iter(extra))}'", ELSEWHERE[module], "which this model does not have")


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_router_or_experts_for_a_dense_model(t1: Path, arch: str) -> None:
    model = make_t1(arch)
    refusal(model, make_adapter(t1, "ROUTER"), "mlp.gate.lora_A", "router")
    for kind in ("EXP", "FUSED", "MIXTRAL", "STACK"):
        refusal(model, make_adapter(t1, kind), ".experts.", "routed experts")


@pytest.mark.parametrize(
    "suffix", ["lora_A", "lora_C.weight", "lora_A.other.weight", "lora_A.weight2", "lora_A.weight\n"]
)
def test_suffixes_outside_the_grammar(t1: Path, folder: Path, suffix: str) -> None:
    name = f"base_model.model.{Q0}.{suffix}"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(4, 64)}))
    refusal(t1, folder, "no place in this model")


def test_no_tensors(t1: Path, tmp_path: Path) -> None:
    for strict in (True, False):
        refusal(t1, write_adapter(tmp_path / "empty", {}), "no tensor", strict=strict)


@pytest.mark.parametrize("factor", ["A", "B"])
def test_half_a_pair(t1: Path, folder: Path, factor: str) -> None:
    name = f"base_model.model.{Q0}.lora_{factor}.weight"
    edit_tensors(folder, lambda tensors: tensors.__delitem__(name))
    refusal(t1, folder, f"lora_{'B' if factor == 'A' else 'A'}.weight' has no lora_{factor}")


def test_the_same_place_twice(t1: Path, folder: Path) -> None:
    extra = pair(Q0, torch.ones(4, 64), torch.ones(64, 4), prefix="")
    edit_tensors(folder, lambda tensors: tensors.update(extra))
    refusal(t1, folder, "same place", f"'{Q0}.lora_A.weight'")


def test_a_site_adapted_in_two_ways(t1: Path, folder: Path) -> None:
    extra = pair("model.layers.0.self_attn.qkv_proj", torch.ones(4, 64), torch.ones(128, 4))
    edit_tensors(folder, lambda tensors: tensors.update(extra))
    refusal(t1, folder, "both adapt", "qkv_proj")


def test_experts_adapted_in_two_ways(t1: Path, folder: Path) -> None:
    extra = pair("model.layers.0.mlp.experts", torch.ones(32, 32), torch.ones(64, 32))
    edit_tensors(folder, lambda tensors: tensors.update(extra))
    refusal(t1, folder, "both adapt", "experts")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{Q0}.lora_A.weight", (4, 63)),
        (f"{Q0}.lora_A.weight", (0, 64)),
        (f"{Q0}.lora_A.weight", (64,)),
        (f"{Q0}.lora_A.weight", (1, 4, 64)),
        (f"{Q0}.lora_A.weight", ()),
        (f"{Q0}.lora_A.weight", (64, 4)),
        (f"{Q0}.lora_B.weight", (64, 5)),
        (f"{Q0}.lora_B.weight", (65, 4)),
        ("model.layers.1.mlp.experts.5.down_proj.lora_A.weight", (4, 64)),
        ("model.layers.1.mlp.experts.5.up_proj.lora_B.weight", (64, 4)),
    ],
)
def test_wrong_shapes(t1: Path, folder: Path, name: str, shape: tuple[int, ...]) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({f"base_model.model.{name}": torch.ones(shape)}))
    refusal(t1, folder, f"{name}' is {list(shape)}")


@pytest.mark.parametrize(
    ("a_shape", "b_shape", "word"),
    [
        ((25, 32), (64, 25), "not a multiple of the model's 8 experts"),
        ((24, 32), (64, 32), "32 columns"),
        ((24, 33), (64, 24), "do not fit"),
        ((24, 32), (63, 24), "do not fit"),
        ((24,), (64, 24), "matrix"),
        ((0, 32), (64, 0), "not a multiple"),
        ((65 * 8, 32), (64, 65 * 8), "65"),
    ],
)
def test_wrong_shapes_of_fused_experts(
    t1: Path, tmp_path: Path, a_shape: tuple[int, ...], b_shape: tuple[int, ...], word: str
) -> None:
    tensors = pair("model.layers.1.mlp.experts", torch.ones(a_shape), torch.ones(b_shape))
    refusal(t1, write_adapter(tmp_path / "x", tensors, target_parameters=["mlp.experts.down_proj"]), word)


@pytest.mark.parametrize(
    ("a_shape", "b_shape", "word"),
    [
        ((4, 64), (32, 4), "three dimensions"),
        ((7, 4, 64), (8, 32, 4), "the first 8"),
        ((8, 4, 64), (9, 32, 4), "the first 8"),
        ((8, 4, 63), (8, 32, 4), "[8 or 1, rank, 64]"),
        ((8, 0, 64), (8, 32, 0), "[8 or 1, rank, 64]"),
        ((8, 4, 64), (8, 33, 4), "[8 or 1, 32, 4]"),
        ((8, 4, 64), (8, 4, 32), "[8 or 1, 32, 4]"),
        ((8, 64, 4), (8, 4, 32), "[8 or 1, rank, 64]"),
        ((8, 4, 64), (8, 32, 2), "[8 or 1, 32, 4]"),
        ((8, 65, 64), (8, 32, 65), "65"),
    ],
)
@pytest.mark.parametrize("projection", ["gate_proj", "w1"])
def test_wrong_shapes_of_stacked_experts(
    t1: Path, tmp_path: Path, projection: str, a_shape: tuple[int, ...], b_shape: tuple[int, ...], word: str
) -> None:
    module = f"model.layers.1.mlp.experts.{projection}"
    tensors = pair(module, torch.ones(a_shape), torch.ones(b_shape))
    refusal(t1, write_adapter(tmp_path / "x", tensors), word, module)


@pytest.mark.parametrize("rows", [4, 5, 12])
def test_stacked_a_of_gate_up_has_one_or_two_times_the_rank(t1: Path, tmp_path: Path, rows: int) -> None:
    tensors = pair("model.layers.1.mlp.experts.gate_up_proj", torch.ones(8, rows, 64), torch.ones(8, 64, 3))
    refusal(t1, write_adapter(tmp_path / "x", tensors), "gate_up_proj.lora_B")


def test_a_site_adapted_under_two_spellings(t1: Path, folder: Path) -> None:
    extra = pair("model.language_model.layers.0.self_attn.q_proj", torch.ones(4, 64), torch.ones(64, 4))
    edit_tensors(folder, lambda tensors: tensors.update(extra))
    refusal(t1, folder, "both adapt", "language_model")


def test_another_hidden_size(t1: Path) -> None:
    other = make_t1(hidden_size=32, num_hidden_layers=1)
    refusal(t1, make_adapter(other, "ATT"), "lora_A", "64", "32")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values_that_are_no_numbers(t1: Path, folder: Path, value: float, dtype: torch.dtype) -> None:
    name = "base_model.model.model.layers.2.mlp.experts.7.down_proj.lora_B.weight"

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].to(dtype)
        tensors[name][-1, -1] = value

    edit_tensors(folder, spoil)
    refusal(t1, folder, name, "NaN")


def test_float64_beyond_float32(t1: Path, tmp_path: Path) -> None:
    tensors = pair(Q0, torch.full((4, 64), 1e300, dtype=torch.float64), torch.ones(64, 4))
    refusal(t1, write_adapter(tmp_path / "x", tensors), "lora_A", "infinite")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_types_that_are_no_floats(t1: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = pair(Q0, torch.ones(4, 64).to(dtype), torch.ones(64, 4))
    refusal(t1, write_adapter(tmp_path / "x", tensors), f"{Q0}.lora_A.weight", "type")


# files


@pytest.mark.parametrize("share", [0.0, 0.001, 0.08, 0.5, 0.9, 0.99, 0.99999])
def test_truncated_file(t1: Path, folder: Path, share: float) -> None:
    path = folder / "adapter_model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    refusal(t1, folder, "adapter_model.safetensors", "truncated")


def test_truncation_to_the_first_bytes(t1: Path, folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    data = path.read_bytes()
    for length in (1, 7, 8, 9, 100):
        path.write_bytes(data[:length])
        refusal(t1, folder, "truncated")


def test_bytes_outside_the_tensors_and_tensors_in_the_same_bytes(t1: Path, folder: Path) -> None:
    """As safetensors itself refuses them."""
    path = folder / "adapter_model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data + b"x")
    refusal(t1, folder, "1 bytes after the last tensor")
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    tensors = sorted((t["data_offsets"], name) for name, t in header.items() if name != "__metadata__")
    (_, first_end), _ = tensors[0]
    for shift in (-4, 4):
        moved = {name: dict(fields) for name, fields in header.items()}
        for (start, end), name in tensors:
            if start >= first_end:
                moved[name]["data_offsets"] = [start + shift, end + shift]
        header_file(path, json.dumps(moved).encode(), data[8 + length :] + b"xxxx")
        refusal(t1, folder, "overlap or leave gaps")


def header_file(path: Path, header: bytes, data: bytes = b"") -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


A0 = f"base_model.model.{Q0}.lora_A.weight"


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b"[" * 50_000,
        b"\xff\xfe",
        b'{"a": 1, "a": 2}',
        b'{"a": 1}',
        b'{"a": {}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": 7, "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 9999999999999999999999]}}',
        b'{"a": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}}',
    ],
)
def test_damaged_header(t1: Path, folder: Path, header: bytes) -> None:
    header_file(folder / "adapter_model.safetensors", header, bytes(8))
    refusal(t1, folder, "adapter_model.safetensors")


def test_header_length_beyond_the_file(t1: Path, folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes((2**63).to_bytes(8, "little") + b"{}")
    refusal(t1, folder, "truncated")


def test_unaligned_tensors_are_read(t1: Path, folder: Path) -> None:
    """A header of odd length is legal."""
    path = folder / "adapter_model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    expected = load(t1, folder).digest
    header_file(path, data[8 : 8 + length] + b" " * (3 - length % 2), data[8 + length :])
    assert load(t1, folder).digest == expected


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_missing_file(t1: Path, folder: Path, name: str) -> None:
    (folder / name).unlink()
    refusal(t1, folder, name, "not found", status=404)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "folder"])
def test_file_of_another_kind(t1: Path, folder: Path, name: str, make: Callable[[Path], None]) -> None:
    (folder / name).unlink()
    make(folder / name)
    refusal(t1, folder, name)


def test_missing_folder(t1: Path, tmp_path: Path) -> None:
    refusal(t1, tmp_path / "nothing", "folder", status=404)
    (tmp_path / "file").write_text("x")
    refusal(t1, tmp_path / "file", "folder", status=404)


def test_pickle_is_not_touched(t1: Path, folder: Path) -> None:
    class Canary:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(folder / "canary"),)

    torch.save({"x": Canary()}, folder / "adapter_model.bin")
    load(t1, folder)
    (folder / "adapter_model.safetensors").unlink()
    refusal(t1, folder, "adapter_model.bin", "adapter_model.safetensors")
    assert not (folder / "canary").exists()


def test_links_are_followed(t1: Path, folder: Path) -> None:
    """A hub cache holds links to the files."""
    moved = folder.parent / "blob"
    (folder / "adapter_model.safetensors").rename(moved)
    (folder / "adapter_model.safetensors").symlink_to(moved)
    assert load(t1, folder).num_tensors > 0


# identity


def test_digest_is_of_the_content(t1: Path, folder: Path, tmp_path: Path) -> None:
    digest = load(t1, folder).digest
    assert len(digest) == 64
    copy = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    (copy / "README.md").write_text("another file")
    edit_config(copy, base_model_name_or_path="x/y", inference_mode=False, target_modules=["v_proj", "q_proj"])
    assert load(t1, copy).digest == digest


def test_digest_changes_with_what_matters(t1: Path, tmp_path: Path) -> None:
    tensors = per_expert_tensors(make_factors(t1, ["self_attn.q_proj", "self_attn.v_proj"], r=4, seed=1))
    q, v = (f"base_model.model.model.layers.0.self_attn.{p}_proj.lora_A.weight" for p in "qv")
    k = {name.replace("v_proj", "k_proj"): t for name, t in tensors.items() if "v_proj" in name}
    one_value = {name: t.clone() for name, t in tensors.items()}
    one_value[q][3, 63] += 1e-6
    variants = [
        write_adapter(tmp_path / "0", tensors),
        write_adapter(tmp_path / "1", tensors, lora_alpha=9),
        write_adapter(tmp_path / "2", tensors, use_rslora=True),
        write_adapter(tmp_path / "3", tensors, alpha_pattern={"q_proj": 9}),
        write_adapter(tmp_path / "4", one_value),
        write_adapter(tmp_path / "5", tensors | {q: tensors[v], v: tensors[q]}),
        write_adapter(tmp_path / "6", {name: t for name, t in tensors.items() if "v_proj" not in name} | k),
        write_adapter(tmp_path / "7", {name: t.bfloat16() for name, t in tensors.items()}),
        write_adapter(tmp_path / "8", {name: t for name, t in tensors.items() if "layers.0" in name}),
    ]
    digests = [load(t1, v).digest for v in variants]
    assert len(set(digests)) == len(variants)
