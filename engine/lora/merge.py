"""A second, separate reading of adapter files, for `verify`: W' = W + scale · B A as the formats define it.

Shares no code with the reader, so that one mistake cannot hide in both. It is slower, checks little, and knows nothing
of sites: a delta is addressed to a weight of the checkpoint, one expert at a time. It knows the layouts of the models
that are served, so not those of gpt-oss. E experts, H hidden, I expert width.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open

Delta = tuple[str, torch.Tensor]
"""Name of a weight (`….q_proj.weight`, `….experts.3.up_proj.weight`) and its ΔW [out, in], fp32; of the embedding
[V, H]."""

_SPELLINGS = (
    (r"^(base_model\.model\.)+", ""),
    (r"(\.weight)?$", ""),
    (r"\.default$", ""),
    (r"^(model\.)?language_model\.", r"\1"),
    (r"^(model\.)?unembed_tokens\.lora", "lm_head.lora"),
    (r"\.lora_embedding_", ".lora_"),
    (r"\.w1\.lora", ".gate_proj.lora"),
    (r"\.w3\.lora", ".up_proj.lora"),
    (r"\.w2\.lora", ".down_proj.lora"),
)
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}


class AdapterMerge:
    """The adapter in `folder`, for a checkpoint with weights of these shapes (by name, experts one by one)."""

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]], *, expert_major_b: bool = False) -> None:
        self._config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
        self._shapes = shapes
        self._expert_major_b = expert_major_b
        self._stack = ExitStack()
        self._file = self._stack.enter_context(safe_open(folder / "adapter_model.safetensors", framework="pt"))
        self._modules: dict[str, dict[str, str]] = {}
        """Module → {"A": tensor name, "B": …}."""
        for name in self._file.keys():  # noqa: SIM118 (not a dict)
            usual = name
            for pattern, other in _SPELLINGS:
                usual = re.sub(pattern, other, usual)
            module, found, factor = usual.rpartition(".lora_")
            if found:
                self._modules.setdefault(self._moe_spelling(module), {})[factor] = name

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def deltas(self, prefix: str) -> Iterator[Delta]:
        """All below a module path of the model, or of that module itself."""
        for module, names in self._modules.items():
            if module == prefix or module.startswith(f"{prefix}."):
                a, b = (self._file.get_tensor(names[factor]).float() for factor in "AB")
                yield from self._of_module(module, a, b)

    def _of_module(self, module: str, a: torch.Tensor, b: torch.Tensor) -> Iterator[Delta]:
        parent, _, last = module.rpartition(".")
        if module.endswith((".experts", ".experts.base_layer")):
            yield from self._flattened(module, a, b)
        elif last == "embed_tokens":  # its weight has a row for each token: [vocabulary, hidden]
            yield f"{module}.weight", self._scale(module, b.shape[1]) * (b @ a).T
        elif a.dim() == 3:
            scale = self._scale(module, b.shape[2])
            for e in range(self._num_experts(parent)):
                yield from self._split(
                    f"{parent}.{e}", last, scale, a[e if len(a) > 1 else 0], b[e if len(b) > 1 else 0]
                )
        else:
            yield from self._split(parent, last, self._scale(module, b.shape[1]), a, b)

    def _split(self, parent: str, name: str, scale: float, a: torch.Tensor, b: torch.Tensor) -> Iterator[Delta]:
        """B's rows are those of a fused projection's parts, one after the other; A is theirs together, or one each."""
        prefix = f"{parent}." if parent else ""
        weights = [f"{prefix}{part}.weight" for part in _FUSED.get(name, (name,))]
        if f"{prefix}{name}.weight" in self._shapes:
            weights = [f"{prefix}{name}.weight"]
        start = 0
        for i, weight in enumerate(weights):
            if weight not in self._shapes:
                raise ValueError(f"the independent merge finds no weight {weight}")
            rows = self._shapes[weight][0]
            rank = b.shape[1]
            own_a = a if len(a) == rank else a[i * rank : (i + 1) * rank]
            yield weight, scale * (b[start : start + rows] @ own_a)
            start += rows

    def _flattened(self, module: str, a: torch.Tensor, b: torch.Tensor) -> Iterator[Delta]:
        """PEFT's form of a fused parameter [E, out, in]: A rows expert by expert, B columns rank by rank."""
        parent = module.removesuffix(".base_layer")
        num_experts = self._num_experts(parent)
        inner, hidden = self._shapes[f"{parent}.0.gate_proj.weight"]
        rank = len(a) // num_experts
        parameter = self._parameter(module, parent)
        d_out, d_in = (2 * inner, hidden) if parameter == "gate_up_proj" else (hidden, inner)
        natural = (b.shape[0], a.shape[1]) == (d_out, d_in)
        if d_out == d_in:
            natural = self._is_natural(parent, inner, hidden)
        scale = self._scale(f"{parent}.{parameter}", rank)
        for e in range(num_experts):
            columns = slice(e * rank, (e + 1) * rank) if self._expert_major_b else slice(e, None, num_experts)
            delta = scale * (b[:, columns] @ a[e * rank : (e + 1) * rank])
            delta = delta if natural else delta.T
            if parameter == "down_proj":
                yield f"{parent}.{e}.down_proj.weight", delta
            else:
                yield f"{parent}.{e}.gate_proj.weight", delta[:inner]
                yield f"{parent}.{e}.up_proj.weight", delta[inner:]

    def _parameter(self, module: str, parent: str) -> str:
        """`base_layer` is gate_up; without one beside it, target_parameters say what `experts` is, else its shape."""
        if module.endswith(".base_layer"):
            return "gate_up_proj"
        targets = {str(t).rpartition(".")[2] for t in self._config.get("target_parameters") or []}
        targets &= {"gate_up_proj", "down_proj"}
        if f"{parent}.base_layer" in self._modules or targets == {"down_proj"}:
            return "down_proj"
        if targets == {"gate_up_proj"}:
            return "gate_up_proj"
        inner, hidden = self._shapes[f"{parent}.0.gate_proj.weight"]
        return "down_proj" if set(self._widths(module)) == {inner, hidden} else "gate_up_proj"

    def _is_natural(self, parent: str, inner: int, hidden: int) -> bool:
        """For a square parameter: as its siblings are, which are not square, else as the version of PEFT wrote."""
        for module in self._modules:
            if module.endswith((".experts", ".experts.base_layer")):
                widths = self._widths(module)
                if widths[0] != widths[1]:
                    is_down = self._parameter(module, module.removesuffix(".base_layer")) == "down_proj"
                    return widths == ((inner, hidden) if is_down else (hidden, 2 * inner))
        version = [int(n) for n in re.findall(r"\d+", str(self._config.get("peft_version")))[:3]]
        return version >= [0, 19, 1]

    def _widths(self, module: str) -> tuple[int, int]:
        """Columns of A, rows of B."""
        a, b = (self._file.get_slice(self._modules[module][factor]).get_shape() for factor in "AB")
        return a[1], b[0]

    def _scale(self, module: str, rank: int) -> float:
        alpha = self._config.get("lora_alpha")
        alpha = 8 if alpha is None else alpha
        for pattern, value in (self._config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = value
                break
        if self._config.get("ensure_weight_tying") and module.endswith(("embed_tokens", "lm_head")):
            rank = self._config["r"]  # what PEFT scales by, though both have the rank of the one that was created first
            for pattern, value in (self._config.get("rank_pattern") or {}).items():
                if re.match(rf"(.*\.)?({pattern})$", module):
                    rank = value
                    break
        return float(alpha) / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _num_experts(self, parent: str) -> int:
        return sum(name.startswith(f"{parent}.") and name.endswith(".gate_proj.weight") for name in self._shapes)

    def _moe_spelling(self, module: str) -> str:
        """transformers 4 and 5 call Mixtral's block by different names; the checkpoint decides."""
        here = any(".block_sparse_moe." in name for name in self._shapes)
        old, new = (".mlp.", ".block_sparse_moe.") if here else (".block_sparse_moe.", ".mlp.")
        return module.replace(old, new)
