"""Tiny checkpoints: tokenizer TOK, random models (T1 and relatives), scripted models (CH)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from kit import cache
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers import models as tokenizer_models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

EOS, IM_START, IM_END = 256, 257, 258
TOK_SIZE = 259
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Piece = str | int | Sequence[str | int]
"""A script of `make_chain`: text, one token id, or a list of both."""


def byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]


def make_tokenizer(*, words: Sequence[str] = (), add_bos: bool = False) -> PreTrainedTokenizerFast:
    """TOK: ids 0…255 are the bytes, 256 <|endoftext|>, 257 <|im_start|>, 258 <|im_end|>, then `words`
    (not special).

    `add_bos`: encoding prepends id 257 and the chat template begins with bos_token too.
    """
    vocab = {c: b for b, c in enumerate(byte_characters())}
    core = Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    core.add_tokens([AddedToken(w, normalized=False, special=False) for w in words])
    if add_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", pair="<|im_start|> $A $B", special_tokens=[("<|im_start|>", IM_START)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        bos_token="<|im_start|>" if add_bos else None,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = ("{{ bos_token }}" if add_bos else "") + CHAT_TEMPLATE
    return tokenizer


def tokenizer_dir(**options: Any) -> Path:
    """A folder with only the tokenizer; options of `make_tokenizer`."""
    return cache.folder("tok", options, lambda path: make_tokenizer(**options).save_pretrained(path))


_T1 = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "max_position_embeddings": 4096,
}
_MOE = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
_ARCHS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, _MOE),
    "qwen2_moe": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        _MOE | {"shared_expert_intermediate_size": 48, "norm_topk_prob": False},
    ),
    "mixtral": (
        MixtralConfig,
        MixtralForCausalLM,
        {"intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"intermediate_size": 96}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"intermediate_size": 96}),
}


def make_t1(
    arch: str = "qwen3_moe",
    *,
    seed: int = 0,
    router_scale: float = 2.0,
    tokenizer: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    config_json: Mapping[str, Any] | None = None,
    fused: bool = False,
    max_shard_size: str | None = None,
    dtype: str = "float32",
    **overrides: Any,
) -> Path:
    """Folder of a random model: T1 (qwen3_moe), or its qwen2_moe, mixtral, qwen3 and llama relatives.

    overrides: fields of the HF config (num_experts=64, norm_topk_prob=False, tie_word_embeddings=True …).
    tokenizer: options of `make_tokenizer`. generation: fields of generation_config.json.
    config_json: keys written over config.json afterwards; None deletes a key (old spellings).
    fused: expert weights on disk as transformers 5 holds them in memory. max_shard_size: "100KB" shards.
    The vocabulary (320) is larger than the tokenizer's (259) on purpose.
    """
    key = [
        arch,
        seed,
        router_scale,
        tokenizer,
        generation,
        config_json,
        fused,
        max_shard_size,
        dtype,
        overrides,
    ]

    def make(path: Path) -> None:
        config_class, model_class, defaults = _ARCHS[arch]
        config = config_class(**(_T1 | defaults | overrides))
        torch.manual_seed(seed)
        model = model_class(config).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("mlp.gate.weight"):
                    weight *= router_scale
                elif name.endswith("_proj.bias"):  # HF starts them at zero, where a forgotten bias cannot show
                    weight.normal_(std=0.3)
        _save(model.to(getattr(torch, dtype)), path, fused=fused, max_shard_size=max_shard_size)
        _finish(path, tokenizer or {}, {"eos_token_id": [EOS, IM_END]} | dict(generation or {}), config_json or {})

    return cache.folder(f"t1-{arch}", key, make)


def make_chain(
    *scripts: Piece,
    words: Sequence[str] = (),
    succ: Mapping[int, int] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    hidden_size: int = 320,
) -> Path:
    """Folder of a scripted model (CH): the last token decides the next; greedy text == script, then eos.

    A script is text, or a list of texts and token ids; a text equal to one of `words` is one token
    (ids from 259 on). No token may occur twice in all scripts. `succ` adds or changes successors:
    {97: 97} never ends.
    """
    key = [scripts, words, sorted((succ or {}).items()), tokenizer, generation, vocab_size, hidden_size]
    tokens = [_script_tokens(s, words) for s in scripts]
    flat = [t for script in tokens for t in script]
    assert len(flat) == len(set(flat)), f"a token occurs twice: {sorted(t for t in flat if flat.count(t) > 1)}"
    successors = {a: b for script in tokens for a, b in zip(script, [*script[1:], EOS])} | dict(succ or {})

    def make(path: Path) -> None:
        size = vocab_size or TOK_SIZE + len(words)
        _save(_chain_model(successors, size, hidden_size), path)
        _finish(path, {"words": list(words)} | dict(tokenizer or {}), dict(generation or {}), {})

    return cache.folder("chain", key, make)


def _script_tokens(script: Piece, words: Sequence[str]) -> list[int]:
    pieces = [script] if isinstance(script, str | int) else script
    tokens: list[int] = []
    for piece in pieces:
        if isinstance(piece, int):
            tokens.append(piece)
        elif piece in words:
            tokens.append(TOK_SIZE + words.index(piece))
        else:
            tokens.extend(piece.encode())
    return tokens


def _chain_model(successors: Mapping[int, int], vocab_size: int, hidden_size: int) -> Any:
    """One-hot embeddings, layers that add nothing, and a head that maps each token to its successor."""
    assert vocab_size <= hidden_size, f"{vocab_size = } one-hot embeddings need {hidden_size = } to be as large"
    config_class: Any = Qwen3MoeConfig  # its annotations lack head_dim
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        moe_intermediate_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        bos_token_id=None,
        eos_token_id=EOS,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding.zero_()
        embedding[:, :vocab_size] = torch.eye(vocab_size)
        head.zero_()
        for token, successor in successors.items():
            head[successor, token] = 1.0
    return model


def _save(model: Any, path: Path, *, fused: bool = False, max_shard_size: str | None = None) -> None:
    options: dict[str, Any] = {"save_original_format": not fused}
    if max_shard_size:
        options["max_shard_size"] = max_shard_size
    model.save_pretrained(path, **options)


def _finish(
    path: Path, tokenizer: Mapping[str, Any], generation: Mapping[str, Any], changes: Mapping[str, Any]
) -> None:
    make_tokenizer(**tokenizer).save_pretrained(path)
    edit_json(path / "generation_config.json", {"eos_token_id": EOS} | dict(generation))
    edit_json(path / "config.json", changes)


def edit_json(path: Path, changes: Mapping[str, Any]) -> None:
    """Sets keys of a JSON file (made when missing); None deletes the key."""
    data = json.loads(path.read_text()) if path.exists() else {}
    data = {k: v for k, v in (data | dict(changes)).items() if not (k in changes and v is None)}
    path.write_text(json.dumps(data, indent=2))
