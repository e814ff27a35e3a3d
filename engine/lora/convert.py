"""An adapter's routed experts rewritten in another layout; every ΔW stays what it was.

per-expert: 2-D tensors `experts.{e}.gate_proj`, as PEFT writes them under transformers 4.
fused: flattened parameters `experts.base_layer` (gate_up) and `experts` (down), as PEFT from 0.19.1 on writes them
under transformers 5. gate and up share one A there: when theirs differ, it holds both, and B is block-diagonal.

What is no routed expert is copied as it is.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors.torch import save_file

from loraplex.engine.lora.adapter import HostAdapter, SiteDelta, SiteShape
from loraplex.engine.lora.adapter_config import CONFIG_FILE
from loraplex.engine.lora.convert_config import NewModule, converted_config, is_expert_module
from loraplex.engine.lora.errors import AdapterError
from loraplex.engine.lora.fused_experts import BLayout, flatten
from loraplex.engine.lora.infer import infer_sites
from loraplex.engine.lora.model_sites import read_sites
from loraplex.engine.lora.reader import read_adapter, read_config, read_config_object
from loraplex.engine.lora.report import ANY_RANK
from loraplex.engine.lora.tensor_file import TENSOR_FILE, open_tensors
from loraplex.engine.lora.tensor_names import EXPERT_PROJECTIONS, MIXTRAL, parse_name, split_expert

Layout = Literal["per-expert", "fused"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
_PREFIX = "base_model.model."
_TOLERANCE = 1e-5

Tensors = dict[str, torch.Tensor]
Group = Mapping[str, SiteDelta]
"""The deltas of one layer's routed experts, by projection."""


def convert_adapter(
    source: Path, target: Path, layout: Layout, *, model: Path | None = None, b_layout: BLayout = "rank-major"
) -> HostAdapter:
    """Writes the adapter in folder `source` to the new folder `target`, reads it back and compares every ΔW.

    Args:
        model: checkpoint folder that says how many experts there are; None: as many as the adapter has.
        b_layout: order of lora_B's columns in the source's fused parameters.

    Returns: the adapter as read back. Raises ValueError (AdapterError for the adapter's files); nothing is left then.
    """
    if target.exists():
        raise ValueError(f"{target} exists already; name a new folder")
    config = read_config_object(source)
    sites: Mapping[str, SiteShape] = infer_sites(source) if model is None else read_sites(model)[0]
    if read_config(source).for_gpt_oss or any(site.is_interleaved for site in sites.values()):
        raise AdapterError("adapters of gpt-oss have only one layout: its experts hold gate and up outputs in turn")
    if model is None and layout == "fused":
        _check_all_experts(source, sites)
    before = read_adapter(source, sites, max_rank=ANY_RANK, moe_lora_b_layout=b_layout)
    groups = _expert_groups(before)
    if not groups:
        raise AdapterError("the adapter has no routed experts, so there is nothing to convert")
    num_experts = next(sites[p].num_experts for p in before.sites if sites[p].kind == "experts")
    new, tensors = (_per_expert if layout == "per-expert" else _fused)(groups, num_experts)
    tensors |= _other_tensors(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    unfinished.mkdir()
    try:
        (unfinished / CONFIG_FILE).write_text(json.dumps(converted_config(config, new, tensors), indent=2))
        save_file(tensors, unfinished / TENSOR_FILE, metadata={"format": "pt"})
        after = read_adapter(unfinished, sites, max_rank=ANY_RANK)
        _compare(before, after)
        os.rename(unfinished, target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return after


def _per_expert(groups: Mapping[str, Group], num_experts: int) -> tuple[list[NewModule], Tensors]:
    new: list[NewModule] = []
    tensors: Tensors = {}
    for parent, group in groups.items():
        for projection, whole in group.items():
            delta = _without_dead_ranks(whole)
            new.append(NewModule(parent, projection, delta.rank, delta.scale, is_parameter=False))
            a_ERD, b_ENR = _of_all(delta, num_experts)
            for e in range(num_experts):
                tensors |= _pair(f"{parent}.{e}.{projection}", a_ERD[e], b_ENR[e])
    return new, tensors


def _fused(groups: Mapping[str, Group], num_experts: int) -> tuple[list[NewModule], Tensors]:
    """PEFT adapts a parameter in all layers or none: a layer that lacks it gets zeros."""
    found = {parent: _parameters(group, num_experts) for parent, group in groups.items()}
    examples = {name: delta for parameters in found.values() for name, delta in parameters.items()}
    new: list[NewModule] = []
    tensors: Tensors = {}
    for old_parent, parameters in found.items():
        parent = old_parent.replace(".block_sparse_moe.", ".mlp.")  # as transformers 5 calls Mixtral's
        for name, example in examples.items():
            delta = parameters.get(name) or SiteDelta(
                torch.zeros_like(example.a), torch.zeros_like(example.b), example.scale
            )
            new.append(NewModule(parent, name, delta.rank, delta.scale, is_parameter=True))
            inner = name == "gate_up_proj" and "down_proj" in examples
            tensors |= _pair(f"{parent}.base_layer" if inner else parent, *flatten(delta.a, delta.b))
    return new, tensors


def _parameters(group: Group, num_experts: int) -> dict[str, SiteDelta]:
    """gate_up_proj and down_proj with tensors of all experts."""
    gate, up, down = (
        SiteDelta(*_of_all(group[p], num_experts), group[p].scale) if p in group else None for p in EXPERT_PROJECTIONS
    )
    parameters = {}
    if gate or up:
        parameters["gate_up_proj"] = _gate_up(gate, up)
    if down:
        parameters["down_proj"] = down
    return parameters


def _gate_up(gate: SiteDelta | None, up: SiteDelta | None) -> SiteDelta:
    """One delta of both halves: A shared when it is the same, else both with B block-diagonal."""
    if gate is None or up is None:
        some = gate or up
        assert some is not None
        b, none = some.b, torch.zeros_like(some.b)
        return SiteDelta(some.a, torch.cat([b, none] if gate else [none, b], 1), some.scale)
    up_b = up.b if up.scale == gate.scale else up.b.float() * (up.scale / gate.scale)
    if torch.equal(gate.a, up.a):
        return SiteDelta(gate.a, torch.cat([gate.b, up_b], 1), gate.scale)
    (num, width, rank), up_rank = gate.b.shape, up.rank
    dtype = torch.promote_types(gate.b.dtype, up_b.dtype)
    b = torch.zeros(num, 2 * width, rank + up_rank, dtype=dtype)
    b[:, :width, :rank] = gate.b
    b[:, width:, rank:] = up_b
    return SiteDelta(torch.cat([gate.a, up.a], 1), b, gate.scale)


def _without_dead_ranks(delta: SiteDelta) -> SiteDelta:
    """Without the ranks whose column of B is zero in all experts: the other half's of a block-diagonal gate_up."""
    live = delta.b.ne(0).flatten(0, 1).any(0)
    if live.all() or not live.any():
        return delta
    return SiteDelta(delta.a[:, live], delta.b[..., live], delta.scale)


def _of_all(delta: SiteDelta, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B with every expert in front, shared ones repeated (as views)."""
    return delta.a.expand(num_experts, -1, -1), delta.b.expand(num_experts, -1, -1)


def _expert_groups(adapter: HostAdapter) -> dict[str, dict[str, SiteDelta]]:
    groups: dict[str, dict[str, SiteDelta]] = {}
    for path, delta in adapter.sites.items():
        if delta.a.dim() == 3:
            parent, _, projection = path.rpartition(".")
            groups.setdefault(parent, {})[projection] = delta
    return groups


def _other_tensors(folder: Path) -> Tensors:
    """All but the routed experts', under their own names."""
    with open_tensors(folder) as file:
        names = [n for n in file.entries if not ((parsed := parse_name(n)) and is_expert_module(parsed.module))]
        return {name: file.read(name) for name in names}


def _pair(module: str, a: torch.Tensor, b: torch.Tensor) -> Tensors:
    """A clone each: safetensors stores no two tensors in the same memory."""
    names = (f"{_PREFIX}{module}.lora_{factor}.weight" for factor in "AB")
    return {name: t.clone(memory_format=torch.contiguous_format) for name, t in zip(names, (a, b), strict=True)}


def _check_all_experts(folder: Path, sites: Mapping[str, SiteShape]) -> None:
    """The fused layout needs the number of experts, which a file that lacks some does not tell."""
    found: dict[str, set[int]] = {}
    with open_tensors(folder) as file:
        for name in file.entries:
            if (parsed := parse_name(name)) and (expert := split_expert(parsed.module)):
                path = f"{expert.parent}.{MIXTRAL.get(expert.projection, expert.projection)}"
                found.setdefault(path, set()).add(expert.index)
    for path, indices in found.items():
        if path in sites and (missing := set(range(sites[path].num_experts)) - indices):
            raise AdapterError(
                f"{path!r} has no tensors for expert {min(missing)}: the model's number of experts cannot be known "
                "from the adapter's files alone; give the model with --model"
            )


def _compare(before: HostAdapter, after: HostAdapter) -> None:
    """A site on one side only must be zero."""
    for path in before.sites.keys() | after.sites.keys():
        old, new = before.sites.get(path), after.sites.get(path)
        some = old or new
        assert some is not None
        for e in range(max(d.shape[0] for d in (some.a, some.b)) if some.a.dim() == 3 else 1):
            was, now = _product(old, e), _product(new, e)
            error = (was - now).abs().max()
            if not error <= _TOLERANCE * was.abs().max():
                raise ValueError(f"the converted adapter differs at {path}, expert {e}, by {float(error):.3g}")


def _product(delta: SiteDelta | None, expert: int) -> torch.Tensor:
    if delta is None:
        return torch.zeros(())
    a, b = (t[expert % len(t)] if t.dim() == 3 else t for t in (delta.a, delta.b))
    return delta.scale * (b.float() @ a.float())
