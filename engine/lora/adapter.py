"""`HostAdapter`: an adapter in host memory, as the model's sites see it and free of file layouts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch


class SiteShape(Protocol):
    """What a reader must know of one adaptable projection of the model."""

    @property
    def path(self) -> str:
        """`model.layers.0.self_attn.q_proj`; routed experts of a layer: `model.layers.0.mlp.experts.gate_proj`."""

    @property
    def kind(self) -> Literal["dense", "embedding", "experts"]: ...

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def num_experts(self) -> int:
        """Routed experts of the layer; 0 or without meaning elsewhere."""

    @property
    def is_interleaved(self) -> bool:
        """Routed experts whose fused gate_up parameter has gate and up outputs in turn (gpt-oss), not in two halves."""

    @property
    def is_transposed(self) -> bool:
        """Routed experts that the checkpoint stores as [E, in, out] (gpt-oss), not [E, out, in]."""


@dataclass(frozen=True)
class PlainSite:
    """A site known by its shape alone, without a layer of the model."""

    path: str
    kind: Literal["dense", "embedding", "experts"]
    in_features: int
    out_features: int
    num_experts: int = 0
    is_interleaved: bool = False
    is_transposed: bool = False


@dataclass(frozen=True)
class SiteDelta:
    """W += scale · b @ a at one site of the whole model (not split over ranks); of the embedding, Wᵀ."""

    a: torch.Tensor
    """Dense [r, in], embedding [r, vocabulary]; experts [E or 1, r, in], where 1 is shared by all experts. Stored dtype
    (fp32, fp16, bf16)."""
    b: torch.Tensor
    """Dense [out, r]; experts [E or 1, out, r]. Parts of one fused tensor share `a`'s memory."""
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[-2]


@dataclass(frozen=True)
class HostAdapter:
    """A validated adapter: nothing in it can fail in the step loop."""

    digest: str
    """SHA-256 over what decides the output: scales and the tensors used."""
    layout: str
    """Layouts found in the file, for the load report."""
    sites: Mapping[str, SiteDelta]
    """By site path; a site that is missing is not adapted."""
    num_tensors: int
    """Tensors used."""
    ignored: tuple[str, ...] = ()
    """Tensors without a place in the model; empty when loaded strictly."""
    notes: tuple[str, ...] = ()
    """Remarks for the operator."""

    @property
    def rank_min(self) -> int:
        return min(d.rank for d in self.sites.values())

    @property
    def rank_max(self) -> int:
        return max(d.rank for d in self.sites.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all A and B; a shared A counts once."""
        return sum(t.nbytes for t in self._distinct_tensors())

    @property
    def numel(self) -> int:
        """Elements of all A and B; a shared A counts once."""
        return sum(t.numel() for t in self._distinct_tensors())

    def _distinct_tensors(self) -> Iterable[torch.Tensor]:
        return {(t.data_ptr(), t.shape): t for d in self.sites.values() for t in (d.a, d.b)}.values()

    @property
    def modules(self) -> dict[str, int]:
        """Module name (q_proj, experts.gate_proj, gate …) → number of layers it is adapted in."""
        counts: dict[str, int] = {}
        for path in self.sites:
            name = module_name(path)
            counts[name] = counts.get(name, 0) + 1
        return counts


def module_name(path: str) -> str:
    """`model.layers.3.mlp.experts.up_proj` → `experts.up_proj`; `lm_head` stays."""
    parts = path.split(".")
    layer = next((i for i, p in enumerate(parts) if p.isdecimal()), None)
    return path if layer is None else ".".join(parts[layer + 2 :])
