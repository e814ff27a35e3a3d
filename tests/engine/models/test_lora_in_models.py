"""Hand-made deltas on every site, several adapters in a batch, against merged weights in transformers."""

import copy

import pytest
import torch

from loraplex.engine.models import build_model
from loraplex.engine.models.sites import lora_sites
from loraplex.engine.parallel import Parallel

ARCHITECTURES = [
    "Qwen3MoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "MixtralForCausalLM",
    "Qwen3ForCausalLM",
    "LlamaForCausalLM",
]
PROMPTS = [[(i * p + 7) % 320 for i in range(n)] for p, n in ((37, 11), (91, 9), (37, 11), (53, 1), (29, 6))]
CHUNKS = [[8, 3], [1, 8], [11], [1], [5, 1]]
SLOTS = [1, -1, 0, 2, 0]
SLOT_ROWS = [2, 0, 3]


def adapters(harness, model):
    """Table rows: experts with shared outer matrices; never used; everything; attention and one dense projection."""
    return [
        harness.random_adapter(model, 1, 5, keep=lambda p: ".experts." in p or "up_proj" in p, shared_outer=True),
        harness.random_adapter(model, 4, 3),
        harness.random_adapter(model, 2, 3),
        harness.random_adapter(model, 3, 1, keep=lambda p: p.endswith(("v_proj", "o_proj", "experts.down_proj"))),
    ]


@pytest.mark.parametrize("virtual", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mixed_batch_equals_merged_weights(harness, checkpoints, architecture, virtual):
    hf, folder = checkpoints(architecture)
    model = harness.load(folder)
    rows = adapters(harness, model)
    harness.install(model, rows)
    harness.use_virtual_experts(model, virtual)
    ours = harness.Driver(model).run(PROMPTS, CHUNKS, SLOTS, SLOT_ROWS)
    for prompt, slot, logprobs in zip(PROMPTS, SLOTS, ours, strict=True):
        merged = copy.deepcopy(hf)
        base = harness.hf_logprobs(hf, prompt)
        if slot >= 0:
            harness.merge(merged, rows[SLOT_ROWS[slot]])
            assert (harness.hf_logprobs(merged, prompt) - base).abs().max() > 0.1
        assert (logprobs - harness.hf_logprobs(merged, prompt)).abs().max() < 5e-5


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_alone(harness, checkpoints, tmp_path, tied):
    """Ranks 1 and 5; the tied head stays; base rows and those of another adapter do not move by a bit."""
    hf = harness.hf_model("Qwen3MoeForCausalLM", tie_word_embeddings=tied)
    model = harness.load(harness.save(hf, tmp_path))
    rows = [harness.random_adapter(model, i, r, keep=lambda p: p == "model.embed_tokens") for i, r in ((1, 1), (2, 5))]
    rows.append(harness.random_adapter(model, 3, 3, keep=lambda p: p.endswith("v_proj")))
    slots, slot_rows = [1, -1, 0, 2, 0], [1, 0, 2]
    ids = torch.tensor([i for prompt in PROMPTS for i in prompt])
    plain = model.model.embed_tokens(ids)
    harness.install(model, rows)
    mixed = model.model.embed_tokens(ids, harness.lora_batch([len(p) for p in PROMPTS], slots, slot_rows))
    moved = (mixed - plain).abs().amax(1).split([len(p) for p in PROMPTS])
    assert [bool(m.min() > 1e-3) for m in moved] == [slot in (0, 1) for slot in slots]
    assert [bool(m.max() == 0) for m in moved] == [slot not in (0, 1) for slot in slots]
    ours = harness.Driver(model).run(PROMPTS, CHUNKS, slots, slot_rows)
    for prompt, slot, logprobs in zip(PROMPTS, slots, ours, strict=True):
        merged = copy.deepcopy(hf)
        if slot >= 0:
            harness.merge(merged, rows[slot_rows[slot]])
            assert (harness.hf_logprobs(merged, prompt) - harness.hf_logprobs(hf, prompt)).abs().max() > 0.1
        assert (logprobs - harness.hf_logprobs(merged, prompt)).abs().max() < 5e-5


@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_one_expert_projection_alone(harness, checkpoints, part):
    """Gate and up have their own A; a missing part adds nothing."""
    hf, folder = checkpoints("Qwen3MoeForCausalLM")
    model = harness.load(folder)
    adapter = harness.random_adapter(model, 5, 4, keep=lambda p: p.endswith(f"experts.{part}"))
    assert len(adapter) == 2
    harness.install(model, [adapter])
    ours = harness.Driver(model).run(PROMPTS[:2], CHUNKS[:2], [0, -1], [0])
    merged = copy.deepcopy(hf)
    harness.merge(merged, adapter)
    assert (ours[0] - harness.hf_logprobs(merged, PROMPTS[0])).abs().max() < 5e-5
    assert (ours[1] - harness.hf_logprobs(hf, PROMPTS[1])).abs().max() < 5e-5


def test_no_lora_in_the_step_is_the_base_model(harness, checkpoints):
    _, folder = checkpoints("Qwen3MoeForCausalLM")
    model = harness.load(folder)
    before = harness.Driver(model).run(PROMPTS, CHUNKS)
    harness.install(model, adapters(harness, model))
    after = harness.Driver(model).run(PROMPTS, CHUNKS)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_base_rows_of_a_layer_are_bit_identical(harness, checkpoints):
    """Same input, same expert choice: rows without an adapter do not move by a bit, the others do."""
    _, folder = checkpoints("Qwen3MoeForCausalLM")
    model = harness.load(folder)
    mlp = model.model.layers[0].mlp
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(12, 64, generator=generator)
    weights_TK, ids_TK = torch.rand(12, 2, generator=generator), torch.randint(8, (12, 2), generator=generator)
    batch = harness.lora_batch([5, 4, 3], [1, -1, 0], SLOT_ROWS)
    ctx = harness.ForwardContext(None, None, [], batch)
    linear = model.model.layers[0].self_attn.qkv_proj
    plain = mlp.experts(x_TD, ids_TK, weights_TK, ctx), linear(x_TD, ctx)
    harness.install(model, adapters(harness, model))
    mixed = mlp.experts(x_TD, ids_TK, weights_TK, ctx), linear(x_TD, ctx)
    for before, after in zip(plain, mixed, strict=True):
        assert torch.equal(before[5:9], after[5:9])
    assert (plain[0] - mixed[0])[[0, 4, 9, 11]].abs().amax(1).min() > 1e-3
    assert torch.equal(plain[1][:5], mixed[1][:5])  # row 0 of the table adapts experts only
    assert (plain[1] - mixed[1])[9:].abs().amax(1).min() > 1e-3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sites_name_the_checkpoint_modules(harness, checkpoints, architecture):
    hf, folder = checkpoints(architecture)
    spec = harness.load(folder).spec
    model = build_model(spec, Parallel(1, 2), torch.bfloat16, torch.device("meta"))
    sites = lora_sites(model)
    shapes = {name.removesuffix(".weight"): tuple(p.shape) for name, p in hf.named_parameters()}
    expected = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    expected["model.embed_tokens"] = expected["model.embed_tokens"][::-1]  # its input is the vocabulary
    for name, (experts, rows, columns) in ((n, s) for n, s in shapes.items() if len(s) == 3):
        if name.endswith("gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            expected |= {f"{base}{part}": (experts, rows // 2, columns) for part in ("gate_proj", "up_proj")}
        else:
            expected[name] = (experts, rows, columns)
    found = {
        path: (s.num_experts, s.out_features, s.in_features) if s.kind == "experts" else (s.out_features, s.in_features)
        for path, s in sites.items()
    }
    assert found == expected
    assert all(site.path == path for path, site in sites.items())
