"""The loader refuses whatever does not fit, by name."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.engine.model_config import read_model_spec
from loraplex.engine.models import build_model
from loraplex.engine.parallel import Parallel
from loraplex.engine.weights import init_dummy, owned_tensors

GATE = "model.layers.0.mlp.experts.3.gate_proj.weight"


@pytest.fixture
def folder(harness, checkpoints, tmp_path):
    hf, _ = checkpoints("Qwen3MoeForCausalLM")
    return harness.save(hf, tmp_path)


@pytest.fixture
def sharded(harness, checkpoints, tmp_path):
    hf, _ = checkpoints("Qwen3MoeForCausalLM")
    return harness.save(hf, tmp_path, max_shard_size="100KB")


def edit(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def refused(harness, folder, *words):
    with pytest.raises(ValueError, match=re.escape(str(folder))) as caught:
        harness.load(folder)
    for word in words:
        assert word in str(caught.value)


def test_missing_tensor(harness, folder):
    edit(folder, lambda t: t.pop(GATE))
    refused(harness, folder, GATE)


def test_missing_fused_tensor_is_not_covered_by_its_neighbour(harness, checkpoints, tmp_path):
    harness.save(checkpoints("Qwen3MoeForCausalLM")[0], tmp_path, save_original_format=False)
    edit(tmp_path, lambda t: t.pop("model.layers.2.mlp.experts.down_proj"))
    refused(harness, tmp_path, "model.layers.2.mlp.experts.0.down_proj.weight", "more")


def test_surplus_tensor(harness, folder):
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    refused(harness, folder, "model.layers.0.self_attn.q_proj.bias", "no place")


def test_layer_beyond_the_config(harness, folder):
    edit(folder, lambda t: t.update({"model.layers.3.input_layernorm.weight": torch.zeros(64)}))
    refused(harness, folder, "model.layers.3.input_layernorm.weight")


def test_old_rotary_buffers_are_ignored(harness, folder):
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    harness.load(folder)


@pytest.mark.parametrize("shape", [(64, 32), (32, 65), (33, 64), (32 * 64,)])
def test_wrong_shape(harness, folder, shape):
    edit(folder, lambda t: t.update({GATE: torch.zeros(shape)}))
    refused(harness, folder, GATE, str(list(shape)), "[32, 64]", "model.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [GATE, "model.norm.weight", "lm_head.weight"])
def test_not_finite(harness, folder, name, value):
    edit(folder, lambda t: t[name].view(-1)[-1:].fill_(value))
    refused(harness, folder, name, "NaN or Inf")


def test_overflow_of_the_served_dtype(harness, folder):
    edit(folder, lambda t: t[GATE].view(-1)[5:6].fill_(1e30))
    spec = read_model_spec(folder)
    model = build_model(spec, Parallel(), torch.float16, harness.CPU)
    with pytest.raises(ValueError, match=re.escape(GATE)):
        harness.load_weights(model, folder, Parallel(), progress=False)


def test_integer_weights(harness, folder):
    edit(folder, lambda t: t.update({GATE: torch.zeros(32, 64, dtype=torch.int8)}))
    refused(harness, folder, GATE, "I8")


def test_same_experts_in_both_forms(harness, folder):
    edit(folder, lambda t: t.update({"model.layers.0.mlp.experts.down_proj": torch.zeros(8, 64, 32)}))
    refused(harness, folder, "twice", "model.layers.0.mlp.experts")


PUBLISHED = "model.layers.0.block_sparse_moe.experts.3"


@pytest.mark.parametrize("name", [f"{PUBLISHED}.w1.weight", "model.layers.2.block_sparse_moe.gate.weight"])
def test_published_names_of_mixtral_are_strict_too(harness, checkpoints, tmp_path, name):
    hf, _ = checkpoints("MixtralForCausalLM")
    folder = harness.save(hf, tmp_path)
    ours = name.replace("block_sparse_moe", "mlp").replace("w1", "gate_proj")
    edit(folder, lambda t: t.update({ours: t[name].clone()}))
    refused(harness, folder, "twice", name, ours)
    edit(folder, lambda t: (t.pop(ours), t.pop(name)))
    refused(harness, folder, "missing", ours)


def test_published_names_of_mixtral_are_mixtral_s_only(harness, folder):
    edit(folder, lambda t: t.update({f"{PUBLISHED}.w1.weight": t.pop(GATE)}))
    refused(harness, folder, f"{PUBLISHED}.w1.weight", "no place")


def test_missing_shard_file(harness, sharded):
    path = sorted(sharded.glob("model-*.safetensors"))[1]
    path.unlink()
    refused(harness, sharded, path.name)


def test_index_and_file_disagree(harness, sharded):
    index = sharded / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"].pop(GATE)
    index.write_text(json.dumps(raw))
    refused(harness, sharded, GATE, "file only")
    raw["weight_map"][GATE] = sorted(set(raw["weight_map"].values()))[0]
    raw["weight_map"]["nonsense"] = raw["weight_map"][GATE]
    index.write_text(json.dumps(raw))
    refused(harness, sharded, "disagree")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": "../b"}}'])
def test_broken_index(harness, folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    refused(harness, folder, "model.safetensors.index.json")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_truncated_file(harness, folder, share):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    refused(harness, folder, "model.safetensors", "cannot be read")


def test_pickles_only(harness, folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(harness, folder, "pytorch_model.bin", "safetensors")


def test_no_weights_at_all(harness, folder):
    (folder / "model.safetensors").unlink()
    refused(harness, folder, "no safetensors")


def test_tied_but_different_head(harness, tmp_path):
    hf = harness.hf_model("Qwen3MoeForCausalLM")
    harness.save(hf, tmp_path)
    harness.edit_config(tmp_path, tie_word_embeddings=True)
    refused(harness, tmp_path, "lm_head.weight", "tie_word_embeddings")


def test_untied_without_head(harness, folder):
    edit(folder, lambda t: t.pop("lm_head.weight"))
    refused(harness, folder, "lm_head.weight")


def test_progress_goes_to_stderr_of_rank_0_only(harness, folder, capfd):
    spec = read_model_spec(folder)
    model = build_model(spec, Parallel(), torch.float32, harness.CPU)
    harness.load_weights(model, folder, Parallel(), progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "loading weights" in err


@pytest.mark.parametrize("tied", [False, True])
def test_dummy_weights_are_deterministic_complete_and_sane(harness, checkpoints, folder, tied):
    harness.edit_config(folder, tie_word_embeddings=tied)
    spec = read_model_spec(folder)
    models = [build_model(spec, Parallel(), torch.float32, harness.CPU) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        init_dummy(model, seed)
    same, again, other = (dict(m.named_parameters()) for m in models)
    assert all(torch.isfinite(p).all() for p in same.values())
    assert all(torch.equal(p, again[name]) for name, p in same.items())
    assert not torch.equal(same["model.layers.0.mlp.experts.w13"], other["model.layers.0.mlp.experts.w13"])
    logprobs = harness.Driver(models[0]).run([list(range(40))], [[40]])[0]
    assert 0.3 < logprobs.std() < 10


def test_parameters_are_poisoned_until_filled(harness, folder):
    """And every element of every parameter has an owner."""
    model = build_model(read_model_spec(folder), Parallel(), torch.float32, harness.CPU)
    assert all(p.isnan().all() for p in model.parameters())
    for owned in owned_tensors(model).values():
        for piece in owned.pieces:
            piece.dest.fill_(1.0)
    assert not any(p.isnan().any() for p in model.parameters())
