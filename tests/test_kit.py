"""The kit itself: scripted models follow their scripts, the hand merge equals PEFT."""

import json
from pathlib import Path

import pytest
import torch
from kit.adapters import block_gate_up, make_a, make_adapter, make_factors
from kit.deltas import weight_deltas
from kit.models import EOS, make_chain, make_t1, make_tokenizer, tokenizer_dir
from kit.oracle import Oracle, assert_logprobs_close, moe_sizes
from transformers import AutoTokenizer

IDS = [104, 101, 108, 108, 111, 32, 240, 159, 140, 182, 7, 300]


def test_token_ids_are_bytes(tok_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tok_dir)
    every_byte = bytes(range(128)).decode() + "🌶é漢"
    assert tokenizer.encode(every_byte) == list(every_byte.encode())
    assert tokenizer.decode(list("c 🌶x".encode())) == "c 🌶x"
    assert tokenizer.encode("<|im_start|>a<|im_end|>\n") == [257, 97, 258, 10]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_bos_variant() -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir(add_bos=True))
    assert tokenizer.encode("a") == [257, 97]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat.startswith("<|im_start|><|im_start|>user")


def test_words_are_single_tokens() -> None:
    assert make_tokenizer(words=("<tool_call>\n", "}}")).encode("a<tool_call>\n}}") == [97, 259, 260]


def test_ch0_follows_its_script(ch0: Path) -> None:
    oracle = Oracle(ch0)
    assert oracle.greedy([97], 20, stop=(EOS,)) == [98, 99, 32, 240, 159, 140, 182, 120, 121, 122, 256]
    assert oracle.logprobs([97])[0].max().exp() >= 0.999995


def test_scripts_with_words_and_loops() -> None:
    oracle = Oracle(make_chain(["a", "}}", 258], "xy", words=("}}",), succ={122: 122}))
    assert oracle.greedy([97], 9, stop=(EOS,)) == [259, 258, EOS]
    assert oracle.greedy([122], 3) == [122, 122, 122]


def test_greedy_matches_generate(t1: Path, t1_oracle: Oracle) -> None:
    expected = t1_oracle.base.generate(
        torch.tensor([IDS]), max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=EOS
    )
    assert t1_oracle.greedy(IDS, 8) == expected[0, len(IDS) :].tolist()


@pytest.mark.parametrize("number", [1, 4, 6])
def test_hand_merge_equals_peft_for_a(t1: Path, t1_oracle: Oracle, number: int) -> None:
    adapter = make_a(number, t1)
    merged = t1_oracle.logprobs(IDS, adapter)
    assert_logprobs_close(merged, t1_oracle.peft_logprobs(IDS, adapter), tol=2e-5)
    assert (merged - t1_oracle.logprobs(IDS)).abs().max() > 0.1


def test_hand_merge_equals_peft_for_attention(t1: Path, t1_oracle: Oracle) -> None:
    adapter = make_adapter(t1, "ATT", r=16, use_rslora=True)
    assert_logprobs_close(t1_oracle.logprobs(IDS, adapter), t1_oracle.peft_logprobs(IDS, adapter), tol=2e-5)


@pytest.mark.parametrize(("tied", "tying"), [(False, False), (True, False), (True, True)])
def test_hand_merge_equals_peft_for_the_embedding(tied: bool, tying: bool) -> None:
    """PEFT leaves the head of a tied model as it is, unless told otherwise."""
    model = make_t1(tie_word_embeddings=tied)
    config = {"ensure_weight_tying": True, "rank_pattern": {}, "alpha_pattern": {}} if tying else {}
    oracle, adapter = Oracle(model), make_adapter(model, "EMB", r=3, use_rslora=True, **config)
    merged = oracle.logprobs(IDS, adapter)
    assert_logprobs_close(merged, oracle.peft_logprobs(IDS, adapter), tol=2e-5)
    assert (merged - oracle.logprobs(IDS)).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["FUSED", "EXP"])
def test_hand_merge_equals_peft_for_experts(t1: Path, t1_oracle: Oracle, kind: str) -> None:
    adapter = make_adapter(
        t1,
        kind,
        r=3,
        alpha=9,
        std=0.2,
        rank_pattern={"gate_up_proj": 6} if kind == "FUSED" else None,
        target_modules=[] if kind == "FUSED" else ["gate_proj", "up_proj", "down_proj"],
        alpha_pattern={"gate_up_proj": 18} if kind == "FUSED" else None,
    )
    merged = t1_oracle.logprobs(IDS, adapter)
    assert_logprobs_close(merged, t1_oracle.peft_logprobs(IDS, adapter), tol=2e-5)
    assert (merged - t1_oracle.logprobs(IDS)).abs().max() > 0.1


def test_deltas_are_the_factors_product(t1: Path) -> None:
    factors = make_factors(t1, [f"mlp.experts.{p}_proj" for p in ("gate", "up", "down")], r=3, seed=1)
    deltas = weight_deltas(make_adapter(t1, "EXP", r=3, alpha=6), **moe_sizes(t1))
    a, b = block_gate_up(factors["model.layers.1.mlp.experts.gate_proj"], factors["model.layers.1.mlp.experts.up_proj"])
    assert torch.allclose(deltas["model.layers.1.mlp.experts.gate_up_proj"], 2 * (b @ a), atol=1e-6)


@pytest.mark.parametrize(
    ("arch", "kind"), [("qwen2_moe", "SHARED"), ("mixtral", "MIXTRAL"), ("qwen3", "MLP"), ("llama", "MLP")]
)
def test_relatives_load_and_take_adapters(arch: str, kind: str) -> None:
    model = make_t1(arch)
    oracle = Oracle(model)
    adapter = make_adapter(model, kind, std=0.2)
    assert (oracle.logprobs(IDS, adapter) - oracle.logprobs(IDS)).abs().max() > 0.1


def test_overrides_reach_the_files() -> None:
    model = make_t1(
        num_experts=16,
        config_json={"rope_parameters": None, "rope_theta": 1e6},
        max_shard_size="100KB",
        generation={"temperature": 0.5},
    )
    config = json.loads((model / "config.json").read_text())
    assert config["rope_theta"] == 1e6
    assert "rope_parameters" not in config
    assert moe_sizes(model)["num_experts"] == 16
    assert json.loads((model / "generation_config.json").read_text())["temperature"] == 0.5
    assert (model / "model.safetensors.index.json").exists()
    assert make_t1(num_experts=16) != model
