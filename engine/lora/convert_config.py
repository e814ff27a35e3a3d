"""adapter_config.json of a converted adapter: what is targeted, and ranks and alphas that keep every scale."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loraplex.engine.lora.fused_experts import PARAMETERS, role_of_version
from loraplex.engine.lora.tensor_names import parse_name, split_expert

_NATURAL_PEFT = "0.19.1"
_LAYERS_PER_KEY = 30
"""Keeps a pattern of many layers below the length that readers accept."""


@dataclass(frozen=True)
class NewModule:
    """Routed experts of one layer in the new layout."""

    parent: str
    """`model.layers.0.mlp.experts`."""
    name: str
    """A projection, or a fused parameter."""
    rank: int
    scale: float
    is_parameter: bool

    @property
    def layer(self) -> str:
        return next(part for part in self.parent.split(".") if part.isdecimal())

    def pattern(self, layers: Sequence[str] = ()) -> str:
        """A key of rank_pattern and alpha_pattern: for these layers, or all."""
        inside = self.parent.partition(f".{self.layer}.")[2]
        if not layers and self.is_parameter:
            return f"{inside}.{self.name}"
        tail = rf"\.{self.name}" if self.is_parameter else rf"\.\d+\.{self.name}"
        where = rf"layers\.({'|'.join(layers)})\." if layers else ""
        return where + inside.replace(".", r"\.") + tail


def is_expert_module(module: str) -> bool:
    """Whether a module name of the file is for routed experts, in any layout."""
    expert = split_expert(module)
    parent = expert.parent if expert else module.removesuffix(".base_layer")
    parent, _, last = parent.rpartition(".")
    return last == "experts" or parent.endswith(".experts")


def converted_config(config: Mapping[str, Any], new: Sequence[NewModule], names: Iterable[str]) -> dict[str, Any]:
    """The old fields with targets and patterns for the new modules, whose keys come first: the first match wins.

    Args:
        names: of all tensors of the new adapter.
    """
    old_parameters = config.get("target_parameters") or []
    parameters = [p for p in old_parameters if p.rpartition(".")[2] not in PARAMETERS]
    modules = {parsed.module for name in names if (parsed := parse_name(name))}
    dense = {m for m in modules if not is_expert_module(m) and not any(f"{m}.weight".endswith(p) for p in parameters)}
    targets = {m.rpartition(".")[2] for m in dense}
    if new[0].is_parameter:
        parameters += sorted({m.pattern() for m in new}, reverse=True)
    else:
        targets |= {m.name for m in new}
    changed = dict(config) | {"target_modules": sorted(targets), "target_parameters": parameters or None}
    if new[0].is_parameter and role_of_version(config.get("peft_version"), is_transposed=False) != "natural":
        changed["peft_version"] = _NATURAL_PEFT
    rslora = bool(config.get("use_rslora"))
    ranks = {m: m.rank for m in new}
    alphas = {m: m.scale * (math.sqrt(m.rank) if rslora else m.rank) for m in new}
    changed["rank_pattern"] = _patterns(ranks, config["r"], config.get("rank_pattern") or {})
    changed["alpha_pattern"] = _patterns(alphas, config.get("lora_alpha"), config.get("alpha_pattern") or {})
    return changed


def _patterns(values: Mapping[NewModule, float], default: float | None, old: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for single layers, then one for all, per module name; none for what the default says already."""
    new: dict[str, Any] = {}
    for name in dict.fromkeys(m.name for m in values):
        of_name = {m: _plain(v) for m, v in values.items() if m.name == name}
        usual, _ = Counter(of_name.values()).most_common(1)[0]
        for value in dict.fromkeys(v for v in of_name.values() if v != usual):
            having = [m for m, v in of_name.items() if v == value]
            for i in range(0, len(having), _LAYERS_PER_KEY):
                new[having[0].pattern([m.layer for m in having[i : i + _LAYERS_PER_KEY]])] = value
        if usual != default or old:
            new[next(iter(of_name)).pattern()] = usual
    return new | {key: value for key, value in old.items() if key not in new}


def _plain(value: float) -> float | int:
    """Whole numbers as such; rounding of the last bits undone, so that equal scales give equal alphas."""
    rounded = round(value, 9)
    return int(rounded) if float(rounded).is_integer() else value
