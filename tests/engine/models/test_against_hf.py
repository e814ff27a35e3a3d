"""Every architecture against transformers in fp32: log-probabilities at every position."""

import pytest
import torch

ARCHITECTURES = [
    "Qwen3MoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "MixtralForCausalLM",
    "Qwen3ForCausalLM",
    "LlamaForCausalLM",
]
TOLERANCE = 2e-5
PROMPTS = [[(i * 37 + 5) % 320 for i in range(23)], [(i * 91 + 11) % 320 for i in range(17)]]


def distance(ours, theirs):
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([[23], [17]], id="whole"),
        pytest.param([[7, 7, 7, 2], [1, 5, 1, 10]], id="chunks beside single tokens"),
        pytest.param([[1] * 23, [1] * 17], id="token by token"),
    ],
)
def test_logprobs(harness, checkpoints, architecture, page_size, chunks):
    hf, folder = checkpoints(architecture)
    driver = harness.Driver(harness.load(folder), page_size)
    ours = driver.run(PROMPTS, chunks)
    assert distance(ours, [harness.hf_logprobs(hf, p) for p in PROMPTS]) < TOLERANCE


@pytest.mark.parametrize("architecture", ARCHITECTURES[:3])
def test_fused_experts_on_disk(harness, checkpoints, tmp_path, architecture):
    hf, _ = checkpoints(architecture)
    harness.save(hf, tmp_path, save_original_format=False)
    ours = harness.Driver(harness.load(tmp_path)).run(PROMPTS, [[23], [17]])
    assert distance(ours, [harness.hf_logprobs(hf, p) for p in PROMPTS]) < TOLERANCE


def test_sharded_files(harness, checkpoints, tmp_path):
    hf, _ = checkpoints("Qwen3MoeForCausalLM")
    harness.save(hf, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    ours = harness.Driver(harness.load(tmp_path)).run(PROMPTS, [[23], [17]])
    assert distance(ours, [harness.hf_logprobs(hf, p) for p in PROMPTS]) < TOLERANCE


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES[:2])
def test_router_weights_with_and_without_renormalisation(harness, tmp_path, architecture, norm):
    hf = harness.hf_model(architecture, norm_topk_prob=norm)
    ours = harness.Driver(harness.load(harness.save(hf, tmp_path))).run(PROMPTS, [[23], [17]])
    assert distance(ours, [harness.hf_logprobs(hf, p) for p in PROMPTS]) < TOLERANCE


def test_sparse_step(harness, tmp_path):
    hf = harness.hf_model("Qwen3MoeForCausalLM", decoder_sparse_step=2, mlp_only_layers=[])
    model = harness.load(harness.save(hf, tmp_path))
    assert model.spec.moe.sparse_layers == {1}
    ours = harness.Driver(model).run(PROMPTS, [[23], [17]])
    assert distance(ours, [harness.hf_logprobs(hf, p) for p in PROMPTS]) < TOLERANCE


ROPES = {
    "theta": {"rope_theta": 1e6, "rope_type": "default"},
    "linear": {"rope_theta": 5e4, "rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_theta": 5e5,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("generation", [4, 5])
def test_rope_in_both_spellings(harness, tmp_path, name, generation):
    hf = harness.hf_model("Qwen3MoeForCausalLM", rope_parameters=ROPES[name])
    harness.save(hf, tmp_path)
    if generation == 4:
        scaling = {k: v for k, v in ROPES[name].items() if k != "rope_theta"}
        harness.edit_config(
            tmp_path,
            remove=("rope_parameters", "dtype", "num_local_experts"),
            rope_theta=ROPES[name]["rope_theta"],
            rope_scaling=None if name == "theta" else scaling,
            torch_dtype="float32",
            num_experts=8,
        )
    model = harness.load(tmp_path)
    ours = harness.Driver(model).run(PROMPTS, [[23], [17]])
    assert distance(ours, [harness.hf_logprobs(hf, p) for p in PROMPTS]) < TOLERANCE


@pytest.mark.parametrize("extra_copy", [False, True])
def test_tied_head(harness, tmp_path, extra_copy):
    from safetensors.torch import load_file, save_file

    hf = harness.hf_model("Qwen3MoeForCausalLM", tie_word_embeddings=True)
    harness.save(hf, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("lm_head.weight", None)
    if extra_copy:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    ours = harness.Driver(harness.load(tmp_path)).run(PROMPTS, [[23], [17]])
    assert distance(ours, [harness.hf_logprobs(hf, p) for p in PROMPTS]) < TOLERANCE


def test_bfloat16_stays_near_fp32(harness, checkpoints):
    """Not an oracle, a guard: nothing in the forward depends on fp32 inputs."""
    from loraplex.engine.models import build_model
    from loraplex.engine.parallel import Parallel
    from loraplex.engine.weights import load_weights

    hf, folder = checkpoints("Qwen2MoeForCausalLM")
    spec = harness.load(folder).spec
    model = build_model(spec, Parallel(), torch.bfloat16, harness.CPU)
    load_weights(model, folder, Parallel(), progress=False)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    driver = harness.Driver(model)
    driver.kv = [(k.bfloat16(), v.bfloat16()) for k, v in driver.kv]
    ours = driver.run(PROMPTS[:1], [[23]])
    assert ours[0].dtype == torch.bfloat16
    ours = [logits.float() for logits in ours]
    assert (ours[0] - harness.hf_logprobs(hf, PROMPTS[0])).abs().mean() < 0.3
