"""Fields that cannot be served are refused by name; both spellings of those that can are read."""

import json

import pytest
import torch

from loraplex.engine.model_config import read_eos_token_ids, read_model_spec


@pytest.fixture
def folder(harness, checkpoints, tmp_path):
    checkpoints("Qwen3MoeForCausalLM")[0].config.save_pretrained(tmp_path)
    harness.edit_config(tmp_path, architectures=["Qwen3MoeForCausalLM"])
    return tmp_path


def refused(folder, *words, file="config.json", read=read_model_spec):
    with pytest.raises(ValueError) as caught:
        read(folder)
    for word in (str(folder / file), *words):
        assert word in str(caught.value)


def test_mixtral(harness, checkpoints, tmp_path):
    checkpoints("MixtralForCausalLM")[0].config.save_pretrained(tmp_path)
    harness.edit_config(tmp_path, architectures=["MixtralForCausalLM"])
    moe = read_model_spec(tmp_path).moe
    assert (moe.num_experts, moe.top_k, moe.intermediate_size, moe.norm_topk_prob) == (8, 2, 32, True)
    assert moe.sparse_layers == {0, 1, 2}
    harness.edit_config(tmp_path, sliding_window=4096)
    refused(tmp_path, "sliding_window", "4096")


def test_spec(folder):
    spec = read_model_spec(folder)
    assert (spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (64, 4, 2, 16)
    assert spec.moe.sparse_layers == {0, 2}
    assert (spec.moe.num_experts, spec.moe.top_k, spec.moe.intermediate_size) == (8, 2, 32)
    assert spec.context_length == 512


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "Qwen3MoeForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": []}, ["architectures"]),
        ({"architectures": None}, ["architectures"]),
        ({"model_type": "llama"}, ["model_type", "qwen3_moe"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"layer_types": ["sliding_attention", "full_attention"]}, ["layer_types", "sliding_attention"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        ({"hidden_size": "64"}, ["hidden_size"]),
        ({"hidden_size": 0}, ["hidden_size"]),
        ({"num_hidden_layers": -1}, ["num_hidden_layers"]),
        ({"head_dim": 0}, ["head_dim"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads"]),
        ({"rms_norm_eps": -1.0}, ["rms_norm_eps"]),
        ({"max_position_embeddings": 0}, ["max_position_embeddings"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok"]),
        ({"num_experts": 16}, ["num_experts", "num_local_experts"]),
        ({"decoder_sparse_step": 0}, ["decoder_sparse_step"]),
        ({"dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn"]),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, ["torch_dtype"]),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, ["dynamic", "yarn"]),
        ({"rope_parameters": None, "rope_scaling": {"type": "mrope"}}, ["mrope"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters", "layer type"]),
        ({"rope_parameters": [1]}, ["rope_parameters"]),
        ({"rope_theta": 5.0}, ["rope_theta"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1}}, ["rope_theta"]),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, ["rope_parameters"]),
        (
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "partial_rotary_factor": 0.5,
                }
            },
            ["partial_rotary_factor"],
        ),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_refused(harness, folder, changes, words):
    harness.edit_config(folder, **changes)
    refused(folder, *words)


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_attention_heads", "intermediate_size"])
def test_a_size_is_never_guessed(harness, folder, field):
    harness.edit_config(folder, remove=(field,))
    refused(folder, field)


def test_missing_number_of_experts(harness, folder):
    harness.edit_config(folder, remove=("num_local_experts", "num_experts"))
    refused(folder, "num_experts")


def test_remote_code_is_never_imported(harness, folder):
    (folder / "canary.py").write_text("raise SystemExit('remote code ran')")
    harness.edit_config(folder, auto_map={"AutoConfig": "canary.Config", "AutoModelForCausalLM": "canary.Model"})
    assert read_model_spec(folder).hidden_size == 64


@pytest.mark.parametrize("text", ["", "[]", "{", "nonsense"])
def test_broken_json(folder, text):
    (folder / "config.json").write_text(text)
    refused(folder)


def test_no_config(tmp_path):
    refused(tmp_path, "--model-path")


def test_yarn_stretches_the_context(harness, folder):
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    harness.edit_config(folder, remove=("rope_parameters",), rope_scaling=yarn, rope_theta=1e4)
    assert read_model_spec(folder).context_length == 1024


@pytest.mark.parametrize("spelling", ["dtype", "torch_dtype"])
def test_dtype(harness, folder, spelling):
    harness.edit_config(folder, remove=("dtype", "torch_dtype"), **{spelling: "bfloat16"})
    assert read_model_spec(folder).dtype == torch.bfloat16


def test_eos_of_generation_config_wins(harness, folder):
    harness.edit_config(folder, eos_token_id=7)
    assert read_eos_token_ids(folder, 320) == (7,)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.6}))
    assert read_eos_token_ids(folder, 320) == (7,)
    path.write_text(json.dumps({"eos_token_id": [256, 258]}))
    assert read_eos_token_ids(folder, 320) == (256, 258)


@pytest.mark.parametrize("value", [["a"], -1, True, {"id": 1}, [256, 320]])
def test_bad_eos(folder, value):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    refused(folder, "eos_token_id", file="generation_config.json", read=lambda f: read_eos_token_ids(f, 320))
