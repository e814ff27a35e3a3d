"""PEFT adapter folders in every layout found in the field.

`make_adapter` gives one by name (A1, ATT, EXP …). A1 and ATT are written by PEFT itself; other layouts come
from `Factors` (A, B per site, plain to reason about) through one of the writers below.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kit import cache
from kit.oracle import moe_sizes
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

PREFIX = "base_model.model."
EXPERT_PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
A_RANKS = (1, 2, 3, 8, 16, 64)
"""Ranks of A2, A3 … in turn; A1 has rank 4."""

W_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Mixtral's names of the experts' projections."""

Factors = dict[str, tuple[Tensor, Tensor]]
"""Site path → (A, B). Dense: A [r, in], B [out, r].
Routed experts (`….experts.gate_proj`): A [E, r, in], B [E, out, r]."""


def make_a(number: int, model_dir: Path) -> Path:
    """A1, A2 … An: the same recipe with other seeds and ranks."""
    rank = 4 if number == 1 else A_RANKS[(number - 2) % len(A_RANKS)]
    return make_adapter(model_dir, "A1", r=rank, seed=number)


def make_adapter(
    model_dir: Path,
    kind: str = "A1",
    *,
    r: int = 4,
    alpha: int = 8,
    seed: int = 1,
    std: float = 0.08,
    layers: Iterable[int] | None = None,
    experts: Iterable[int] | None = None,
    dtype: str = "float32",
    **config: Any,
) -> Path:
    """Folder of a random adapter for the checkpoint.

    kind: A1 (q, v, o + fused experts, rank_pattern, alpha_pattern, rslora; by PEFT), ATT (q, k, v, o; by
    PEFT), EMB (embedding and q, patterns for the embedding; by PEFT), EXP (routed experts, per-expert 2-D
    keys), FUSED (routed experts as target_parameters), MIXTRAL (EXP under Mixtral's names), STACK (routed
    experts, 3-D), OUTER (3-D under w names without `.weight`, A of gate and up and B of down shared by all
    experts), GATE_UP (3-D, gate and up fused, A's on top of each other), ROUTER (mlp.gate), SHARED (q + the shared
    expert of qwen2_moe), MLP (dense gate, up, down), ALL (attention + router + EXP).
    layers and experts restrict the hand-written kinds. config: fields written over adapter_config.json's.
    """
    layers, experts = _listed(layers), _listed(experts)
    key = [str(model_dir), kind, r, alpha, seed, std, layers, experts, dtype, config]

    def make(path: Path) -> None:
        if kind in _PEFT_KINDS:
            _make_with_peft(path, model_dir, r, alpha, seed, std, _PEFT_KINDS[kind](r) | config)
            return
        factors = make_factors(model_dir, _SITES[kind], r=r, seed=seed, std=std, layers=layers)
        if kind == "OUTER":
            factors = share_outer(factors)
        tensors = _WRITERS.get(kind, per_expert_tensors)(factors, experts)
        extra = {}
        if kind == "FUSED":
            extra = {"target_parameters": list(EXPERT_PARAMETERS), "rank_pattern": {r".*\.gate_up_proj": 2 * r}}
        tensors = {name: t.to(getattr(torch, dtype)) for name, t in tensors.items()}
        write_adapter(path, tensors, r=r, lora_alpha=alpha, **(extra | config))

    return cache.folder(f"adapter-{kind}", key, make)


def make_factors(
    model_dir: Path,
    names: Iterable[str],
    *,
    r: int,
    seed: int,
    std: float = 0.08,
    layers: Iterable[int] | None = None,
) -> Factors:
    """Random (A, B) for the named sites (`self_attn.q_proj`, `mlp.experts.up_proj` …) of each layer."""
    config = json.loads((model_dir / "config.json").read_text())
    shapes = site_shapes(model_dir)
    generator = torch.Generator().manual_seed(seed)
    num_experts = moe_sizes(model_dir)["num_experts"]
    factors: Factors = {}
    for layer in range(config["num_hidden_layers"]) if layers is None else layers:
        for name in names:
            d_out, d_in = shapes[name]
            lead = (num_experts,) if ".experts." in name else ()
            a = torch.randn(*lead, r, d_in, generator=generator) * std
            b = torch.randn(*lead, d_out, r, generator=generator) * std
            factors[f"model.layers.{layer}.{name}"] = (a, b)
    return factors


def site_shapes(model_dir: Path) -> dict[str, tuple[int, int]]:
    """(out, in) of each adaptable projection of a layer, by its name below the layer; `lm_head` too."""
    c = json.loads((model_dir / "config.json").read_text())
    hidden = c["hidden_size"]
    head_dim = c.get("head_dim") or hidden // c["num_attention_heads"]
    q, kv = c["num_attention_heads"] * head_dim, c["num_key_value_heads"] * head_dim
    shapes = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "lm_head": (c["vocab_size"], hidden),
    }
    mlps = {"mlp": c.get("intermediate_size")}
    if moe := (sizes := moe_sizes(model_dir))["num_experts"]:
        shapes["mlp.gate"] = (moe, hidden)
        mlps = {
            "mlp.experts": sizes["intermediate"],
            "mlp.shared_expert": c.get("shared_expert_intermediate_size"),
        }
    if c.get("shared_expert_intermediate_size"):
        shapes["mlp.shared_expert_gate"] = (1, hidden)
    for mlp, width in mlps.items():
        if width:
            shapes[f"{mlp}.gate_proj"] = shapes[f"{mlp}.up_proj"] = (width, hidden)
            shapes[f"{mlp}.down_proj"] = (hidden, width)
    return shapes


def per_expert_tensors(factors: Factors, experts: Iterable[int] | None = None) -> dict[str, Tensor]:
    """Tensors under 2-D keys; a routed expert's is `….experts.{e}.gate_proj.lora_A.weight`."""
    tensors: dict[str, Tensor] = {}
    for path, (a, b) in factors.items():
        if a.dim() == 2:
            tensors |= pair(path, a, b)
            continue
        parent, proj = path.rsplit(".", 1)
        for e in range(a.shape[0]) if experts is None else experts:
            tensors |= pair(f"{parent}.{e}.{proj}", a[e], b[e])
    return tensors


def mixtral_tensors(factors: Factors, experts: Iterable[int] | None = None) -> dict[str, Tensor]:
    """Per-expert tensors as transformers 4 names Mixtral's: `block_sparse_moe.experts.{e}.w1`."""
    tensors = per_expert_tensors(factors, experts)
    for projection, short in W_NAMES.items():
        tensors = {
            re.sub(rf"\.mlp\.(experts\.\d+)\.{projection}\.", rf".block_sparse_moe.\1.{short}.", name): t
            for name, t in tensors.items()
        }
    return tensors


def stacked_tensors(
    factors: Factors, experts: Iterable[int] | None = None, *, short_names: bool = False
) -> dict[str, Tensor]:
    """3-D tensors of all experts; `experts.w1.lora_A` instead of `experts.gate_proj.lora_A.weight` with short names."""
    assert experts is None, "a stack always holds all experts"
    tensors: dict[str, Tensor] = {}
    for path, (a, b) in factors.items():
        parent, projection = path.rsplit(".", 1)
        if short_names:
            named = pair(f"{parent}.{W_NAMES[projection]}", a, b)
            tensors |= {name.removesuffix(".weight"): t for name, t in named.items()}
        else:
            tensors |= pair(path, a, b)
    return tensors


def share_outer(factors: Factors) -> Factors:
    """The factors with expert 0's A of gate and up, and its B of down, for all experts: leading dimension 1."""
    return {path: (a, b[:1]) if path.endswith("down_proj") else (a[:1], b) for path, (a, b) in factors.items()}


def stacked_gate_up_tensors(factors: Factors, experts: Iterable[int] | None = None) -> dict[str, Tensor]:
    """3-D tensors with gate and up in one: A [E, 2r, H] holds both A's, B [E, 2I, r] both B's."""
    assert experts is None, "a stack always holds all experts"
    tensors: dict[str, Tensor] = {}
    for parent in sorted({path.rsplit(".", 1)[0] for path in factors}):
        (gate_a, gate_b), (up_a, up_b) = factors[f"{parent}.gate_proj"], factors[f"{parent}.up_proj"]
        tensors |= pair(f"{parent}.gate_up_proj", torch.cat([gate_a, up_a], 1), torch.cat([gate_b, up_b], 1))
        tensors |= pair(f"{parent}.down_proj", *factors[f"{parent}.down_proj"])
    return tensors


def fused_tensors(
    factors: Factors, experts: Iterable[int] | None = None, *, exchanged: bool = False
) -> dict[str, Tensor]:
    """PEFT's `target_parameters` layout: gate_up under `experts.base_layer`, down under `experts`.

    gate and up become one rank-2r block: A rows gate then up, B block-diagonal. `exchanged`: the roles of A
    and B as PEFT up to 0.18 wrote them.
    """
    assert experts is None, "the fused layout always holds all experts"
    tensors: dict[str, Tensor] = {}
    for parent in sorted({path.rsplit(".", 1)[0] for path in factors}):
        gate_up = block_gate_up(factors[f"{parent}.gate_proj"], factors[f"{parent}.up_proj"])
        tensors |= fused_pair(f"{parent}.base_layer", *gate_up, exchanged=exchanged)
        tensors |= fused_pair(parent, *factors[f"{parent}.down_proj"], exchanged=exchanged)
    return tensors


def block_gate_up(gate: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A [E, 2r, H] and block-diagonal B [E, 2I, 2r] of the fused gate_up parameter."""
    a = torch.cat([gate[0], up[0]], dim=1)
    width, rank = gate[1].shape[1:]
    b = torch.zeros(a.shape[0], 2 * width, a.shape[1])
    b[:, :width, :rank] = gate[1]
    b[:, width:, rank:] = up[1]
    return a, b


def fused_pair(module: str, a: Tensor, b: Tensor, *, exchanged: bool = False) -> dict[str, Tensor]:
    """A [E, r, in], B [E, out, r] → lora_A [E·r, in] expert-slowest, lora_B [out, r·E] expert-fastest."""
    if exchanged:
        a, b = b.mT, a.mT
    num_experts, rank, _ = a.shape
    return pair(module, a.reshape(num_experts * rank, -1), b.permute(1, 2, 0).reshape(b.shape[1], rank * num_experts))


def embedding_pair(a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """A [r, V], B [H, r] of the embedding, as PEFT names them."""
    name = f"{PREFIX}model.embed_tokens.lora_embedding_"
    return {f"{name}A": a, f"{name}B": b}


def pair(module: str, a: Tensor, b: Tensor, prefix: str = PREFIX) -> dict[str, Tensor]:
    return {f"{prefix}{module}.lora_A.weight": a, f"{prefix}{module}.lora_B.weight": b}


def write_adapter(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: dict[str, str] | None = None, **config: Any
) -> Path:
    """Writes the two files; config fields over the defaults below, None keeps a field out."""
    defaults = {
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
        "target_modules": [],
        "r": 4,
        "lora_alpha": 8,
    }
    path.mkdir(parents=True, exist_ok=True)
    merged = {k: v for k, v in (defaults | config).items() if v is not None}
    (path / "adapter_config.json").write_text(json.dumps(merged))
    contiguous = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(contiguous, path / "adapter_model.safetensors", metadata=metadata or {"format": "pt"})
    return path


_ATTENTION = tuple(f"self_attn.{p}_proj" for p in "qkvo")
_EXPERTS = tuple(f"mlp.experts.{p}_proj" for p in ("gate", "up", "down"))
_SITES = {
    "EXP": _EXPERTS,
    "FUSED": _EXPERTS,
    "MIXTRAL": _EXPERTS,
    "STACK": _EXPERTS,
    "OUTER": _EXPERTS,
    "GATE_UP": _EXPERTS,
    "ROUTER": ("mlp.gate",),
    "SHARED": ("self_attn.q_proj", *(f"mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down"))),
    "MLP": tuple(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
    "ALL": (*_ATTENTION, "mlp.gate", *_EXPERTS),
}
_WRITERS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "FUSED": fused_tensors,
    "MIXTRAL": mixtral_tensors,
    "STACK": stacked_tensors,
    "OUTER": partial(stacked_tensors, short_names=True),
    "GATE_UP": stacked_gate_up_tensors,
}


def _a1_config(r: int) -> dict[str, Any]:
    return {
        "target_modules": ["q_proj", "v_proj", "o_proj"],
        "target_parameters": list(EXPERT_PARAMETERS),
        "rank_pattern": {"v_proj": max(1, r // 2)},
        "alpha_pattern": {"v_proj": 12},
        "use_rslora": True,
    }


_PEFT_KINDS = {
    "A1": _a1_config,
    "ATT": lambda r: {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "EMB": lambda r: {
        "target_modules": ["embed_tokens", "q_proj"],
        "rank_pattern": {"embed_tokens": r + 1},
        "alpha_pattern": {"embed_tokens": 24},
    },
}


def _make_with_peft(
    path: Path, model_dir: Path, r: int, alpha: int, seed: int, std: float, config: dict[str, Any]
) -> None:
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT wrongly says that the patterns match nothing
        model = get_peft_model(base, LoraConfig(r=r, lora_alpha=alpha, init_lora_weights=True, **config))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_" in name:
                    weight.normal_(std=std, generator=generator)
        model.save_pretrained(str(path))


def _listed(numbers: Iterable[int] | None) -> list[int] | None:
    return None if numbers is None else list(numbers)
