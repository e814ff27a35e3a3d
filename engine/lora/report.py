"""What an adapter holds, and how much of a model it covers: the content of `loraplex adapter inspect`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from loraplex.engine.lora.adapter import HostAdapter, SiteDelta, SiteShape, module_name
from loraplex.engine.lora.adapter_config import CONFIG_FILE
from loraplex.engine.lora.base_weights import BaseWeights
from loraplex.engine.lora.fused_experts import BLayout
from loraplex.engine.lora.infer import infer_sites
from loraplex.engine.lora.model_sites import read_sites
from loraplex.engine.lora.reader import read_adapter
from loraplex.engine.lora.tensor_file import TENSOR_FILE

ANY_RANK = 2**31
N = TypeVar("N", int, float)


@dataclass(frozen=True)
class ModuleReport:
    """One kind of module over all layers."""

    module: str
    layers: list[int]
    """Empty for modules outside the layers."""
    experts: int | None
    """Experts with a delta other than zero in at least one layer; None for dense modules."""
    shared: list[str]
    """Factors (A, B) that all experts share."""
    rank: tuple[int, int]
    scale: tuple[float, float]
    """Smallest and largest."""
    coverage: float | None
    """Adapted sites / the model's sites of this name; None without a model."""
    relative_norm: float | None
    """‖ΔW‖ / ‖W‖ (Frobenius) over the adapted sites; None without a model's weights, when they are quantised, or all
    zero."""


@dataclass(frozen=True)
class AdapterReport:
    layout: str
    digest: str
    rank: tuple[int, int]
    scale: tuple[float, float]
    num_tensors: int
    num_experts: int | None
    """Routed experts of a layer; None when none are adapted."""
    modules: list[ModuleReport]
    coverage: float | None
    """Adapted sites / all sites of the model."""
    disk_bytes: int
    host_bytes: int
    """As stored types."""
    device_bytes: int
    """As `device_dtype`, before alignment, on one rank."""
    device_dtype: str
    ignored: list[str]
    notes: list[str]


def inspect_adapter(folder: Path, model: Path | None, *, dtype: str | None, b_layout: BLayout) -> AdapterReport:
    """Reads the adapter, and with a model its weights at the adapted sites, one matrix at a time.

    Args:
        dtype: element type of the device copy; None: the model's, or bfloat16.

    Raises:
        ValueError: an AdapterError for the adapter's files, or one naming a file of the model.
    """
    sites: Mapping[str, SiteShape]
    if model is None:
        sites, served_dtype = infer_sites(folder), torch.bfloat16
    else:
        sites, served_dtype = read_sites(model)
    device_dtype = dtype or str(served_dtype).removeprefix("torch.")
    adapter = read_adapter(folder, sites, max_rank=ANY_RANK, strict=False, moe_lora_b_layout=b_layout)
    groups: dict[str, list[str]] = {}
    for path in sites:
        if path in adapter.sites:
            groups.setdefault(module_name(path), []).append(path)
    totals: dict[str, int] = {}
    for path in sites:
        totals[module_name(path)] = totals.get(module_name(path), 0) + 1
    norms: dict[str, float | None] = {}
    notes = list(adapter.notes)
    if model is not None and not any(model.glob("*.safetensors")):
        notes.append(f"{model} has no safetensors weights: ‖ΔW‖/‖W‖ is not known")
    elif model is not None:
        with BaseWeights(model) as base:
            norms = {name: _relative_norm(adapter, paths, sites, base) for name, paths in groups.items()}
    modules = [
        ModuleReport(
            module=name,
            layers=sorted(layer for path in paths if (layer := _layer(path)) is not None),
            experts=_experts_touched([adapter.sites[p] for p in paths], [sites[p] for p in paths]),
            shared=_shared([adapter.sites[p] for p in paths], [sites[p] for p in paths]),
            rank=_range([adapter.sites[p].rank for p in paths]),
            scale=_range([adapter.sites[p].scale for p in paths]),
            coverage=len(paths) / totals[name] if model else None,
            relative_norm=norms.get(name),
        )
        for name, paths in groups.items()
    ]
    return AdapterReport(
        layout=adapter.layout,
        digest=adapter.digest,
        rank=(adapter.rank_min, adapter.rank_max),
        scale=_range([d.scale for d in adapter.sites.values()]),
        num_tensors=adapter.num_tensors,
        num_experts=max((sites[p].num_experts for p in adapter.sites), default=0) or None,
        modules=modules,
        coverage=len(adapter.sites) / len(sites) if model else None,
        disk_bytes=sum((folder / name).stat().st_size for name in (CONFIG_FILE, TENSOR_FILE)),
        host_bytes=adapter.nbytes,
        device_bytes=adapter.numel * getattr(torch, device_dtype).itemsize,
        device_dtype=device_dtype,
        ignored=list(adapter.ignored),
        notes=notes,
    )


def squared_norm(delta: SiteDelta, num_experts: int) -> float:
    """‖scale · B A‖² summed over the experts, without forming the product: tr(BᵀB AAᵀ)."""
    a_ERD, b_ENR = (t if t.dim() == 3 else t[None] for t in (delta.a, delta.b))
    count = max(len(a_ERD), len(b_ENR))
    total = 0.0
    for e in range(count):
        a, b = a_ERD[e % len(a_ERD)].double(), b_ENR[e % len(b_ENR)].double()
        total += float(((b.T @ b) * (a @ a.T)).sum())
    copies = num_experts // count if num_experts else 1
    return delta.scale**2 * total * copies


def _relative_norm(
    adapter: HostAdapter, paths: Sequence[str], sites: Mapping[str, SiteShape], base: BaseWeights
) -> float | None:
    if any(base.is_quantised(sites[path]) for path in paths):
        return None
    changed, whole = 0.0, 0.0
    for path in paths:
        site = sites[path]
        changed += squared_norm(adapter.sites[path], site.num_experts)
        whole += sum(float(base.matrix(site, e).double().square().sum()) for e in range(site.num_experts or 1))
    return math.sqrt(changed / whole) if whole else None


def _experts_touched(deltas: Sequence[SiteDelta], sites: Sequence[SiteShape]) -> int | None:
    if sites[0].kind != "experts":
        return None
    touched = torch.zeros(sites[0].num_experts, dtype=torch.bool)
    for d in deltas:
        touched |= d.a.flatten(1).any(1) & d.b.flatten(1).any(1)
    return int(touched.sum())


def _shared(deltas: Sequence[SiteDelta], sites: Sequence[SiteShape]) -> list[str]:
    if sites[0].num_experts < 2:
        return []
    is_shared = {
        "A": all(d.a.dim() == 3 and d.a.shape[0] == 1 for d in deltas),
        "B": all(d.b.dim() == 3 and d.b.shape[0] == 1 for d in deltas),
    }
    return [factor for factor, shared in is_shared.items() if shared]


def _layer(path: str) -> int | None:
    return next((int(part) for part in path.split(".") if part.isdecimal()), None)


def _range(values: Sequence[N]) -> tuple[N, N]:
    return min(values), max(values)
