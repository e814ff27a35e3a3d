"""Independent reading of an adapter folder as ΔW matrices, for the layouts that the kit writes.

Shares no code with the server: straight from the definition W' = W + scale · B A.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

_PREFIX = re.compile(r"^(base_model\.model\.)*")
_EXPERT = re.compile(r"^(?P<experts>.*\.mlp\.experts)\.(?P<e>\d+)\.(?P<proj>gate|up|down)_proj$")
_STACK = re.compile(r"^(?P<experts>.*\.mlp\.experts)\.(?P<proj>gate|up|down|gate_up)_proj$")
_SPELLINGS = (
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.w1$", ".gate_proj"),
    (r"\.w3$", ".up_proj"),
    (r"\.w2$", ".down_proj"),
)


def scale(config: dict[str, Any], module: str, rank: int) -> float:
    """alpha/r or alpha/sqrt(r) of a module, alpha_pattern included; r is the tensors' own, or the stated one of modules
    that PEFT ties."""
    alpha = _find(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))
    if config.get("ensure_weight_tying") and module.endswith(("embed_tokens", "lm_head")):
        rank = _find(config.get("rank_pattern"), module, config["r"])
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def weight_deltas(
    adapter_dir: Path, *, num_experts: int = 0, intermediate: int = 0, hidden: int = 0
) -> dict[str, Tensor]:
    """ΔW in fp32 by parameter name of the transformers 5 model in memory.

    Routed experts are fused: gate_up [E, 2I, H], down [E, H, I]. The three sizes
    are the MoE's; a dense model needs none.
    """
    config = json.loads((adapter_dir / "adapter_config.json").read_text())
    tensors = load_file(adapter_dir / "adapter_model.safetensors")
    moe_shapes = {
        "gate_up_proj": (num_experts, 2 * intermediate, hidden),
        "down_proj": (num_experts, hidden, intermediate),
    }
    deltas: dict[str, Tensor] = {}
    for name, a in tensors.items():
        if name.endswith(".lora_embedding_A"):
            module, b = _PREFIX.sub("", name).removesuffix(".lora_embedding_A"), tensors[name[:-1] + "B"].float()
            deltas[f"{module}.weight"] = scale(config, module, a.shape[0]) * (b @ a.float()).T
            continue
        if not name.removesuffix(".weight").endswith(".lora_A"):
            continue
        a, b = a.float(), tensors[name.replace(".lora_A", ".lora_B")].float()
        module = _PREFIX.sub("", name).removesuffix(".weight").removesuffix(".lora_A")
        for other, usual in _SPELLINGS:
            module = re.sub(other, usual, module)
        if match := _STACK.match(module):
            parameter = "down_proj" if match["proj"] == "down" else "gate_up_proj"
            whole = deltas.setdefault(f"{match['experts']}.{parameter}", torch.zeros(moe_shapes[parameter]))
            start = intermediate if match["proj"] == "up" else 0
            rank = b.shape[2]
            parts = b.shape[1] // intermediate if a.shape[1] != rank else 1  # A's of gate and up on top of each other
            product = [b_i @ a_i for b_i, a_i in zip(b.chunk(parts, 1), a.chunk(parts, 1), strict=True)]
            whole[:, start : start + b.shape[1]] += scale(config, module, rank) * torch.cat(product, 1)
        elif match := _EXPERT.match(module):
            parameter = "down_proj" if match["proj"] == "down" else "gate_up_proj"
            whole = deltas.setdefault(f"{match['experts']}.{parameter}", torch.zeros(moe_shapes[parameter]))
            start = intermediate if match["proj"] == "up" else 0
            whole[int(match["e"]), start : start + b.shape[0]] += scale(config, module, a.shape[0]) * (b @ a)
        elif module.endswith((".experts", ".experts.base_layer")):
            experts = module.removesuffix(".base_layer")
            parameter = _fused_parameter(config, module)
            rank = a.shape[0] // num_experts
            s = scale(config, f"{experts}.{parameter}", rank)
            natural = a.shape[1] == moe_shapes[parameter][2]
            per_expert = [
                b[:, e::num_experts] @ a[e * rank : (e + 1) * rank] for e in range(num_experts)
            ]  # A expert-slowest, B expert-fastest
            deltas[f"{experts}.{parameter}"] = s * torch.stack([d if natural else d.T for d in per_expert])
        else:
            deltas[f"{module}.weight"] = scale(config, module, a.shape[0]) * (b @ a)
    return deltas


def _find(patterns: dict[str, Any] | None, module: str, default: Any) -> Any:
    """PEFT's: the first pattern that fits."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _fused_parameter(config: dict[str, Any], module: str) -> str:
    targets = {t.rsplit(".", 1)[-1] for t in config["target_parameters"] if "experts" in t}
    if len(targets) == 1:
        return targets.pop()
    return "gate_up_proj" if module.endswith(".base_layer") else "down_proj"
