"""Adapter folders as they are shipped: PEFT's fused expert tensors, or one pair of tensors per expert.

Shapes: E experts, r rank, H hidden size, I expert size.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def tidy(folder: Path, base: str) -> None:
    """Weights in bfloat16, a relative path to the base, lists in a fixed order, no generated model card."""
    tensors = {name: t.to(torch.bfloat16).contiguous() for name, t in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / CONFIG).read_text())
    config["base_model_name_or_path"] = base
    config["target_modules"] = sorted(config["target_modules"])
    _write(folder, config)
    (folder / "README.md").unlink(missing_ok=True)


def split_experts(folder: Path, num_experts: int) -> None:
    """Replace PEFT's fused expert tensors by `mlp.experts.{e}.{gate,up,down}_proj.lora_{A,B}.weight`.

    Fused: A `[E*r, in]` with the rows of one expert together, B `[out, r*E]` with the expert as the fastest
    column index. `experts.base_layer` holds gate and up (gate rows first), `experts` itself holds down. Gate
    and up each get a copy of the A they shared, so the adapter computes the same as before.
    """
    split: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        if ".mlp.experts." not in name:
            split[name] = tensor
            continue
        prefix, _, rest = name.partition(".mlp.experts.")
        gate_up = rest.startswith("base_layer.")
        side = "lora_A" if ".lora_A." in f".{rest}" else "lora_B"
        for expert in range(num_experts):
            mine = _expert(tensor, side, expert, num_experts)
            if not gate_up:
                parts = {"down_proj": mine}
            elif side == "lora_A":
                parts = {"gate_proj": mine, "up_proj": mine}
            else:
                parts = dict(zip(("gate_proj", "up_proj"), mine.chunk(2)))
            for projection, part in parts.items():
                split[f"{prefix}.mlp.experts.{expert}.{projection}.{side}.weight"] = part.clone().contiguous()
    save_file(split, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / CONFIG).read_text())
    config["target_parameters"] = None
    config["target_modules"] = sorted([*config["target_modules"], *EXPERT_PROJECTIONS])
    _write(folder, config)


def _expert(tensor: torch.Tensor, side: str, expert: int, num_experts: int) -> torch.Tensor:
    if side == "lora_A":
        return tensor.chunk(num_experts)[expert]
    return tensor[:, expert::num_experts]


def _write(folder: Path, config: dict[str, object]) -> None:
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
