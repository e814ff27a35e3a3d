"""Where a model can be adapted: every projection, and the embedding, by its checkpoint module path."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from loraplex.engine.layers.checkpoint import sibling
from loraplex.engine.layers.embedding import Embedding, LMHead
from loraplex.engine.layers.experts import Experts
from loraplex.engine.layers.linear import Linear, Shard

Adapted = Linear | Embedding | LMHead | Experts
"""A layer with `lora`."""


@dataclass(frozen=True)
class Site:
    path: str
    """As in the checkpoint: `model.layers.0.self_attn.q_proj`, `model.layers.1.mlp.experts.up_proj`, `lm_head`."""
    kind: Literal["dense", "embedding", "experts"]
    in_features: int
    """The vocabulary for the embedding."""
    out_features: int
    """Both of the whole model, before any split over ranks."""
    num_experts: int
    """0 without experts."""
    module: Adapted
    """The layer whose `lora` holds this site's deltas."""
    part: str
    """Which of the module's parts: a key of `Linear.parts`, or gate_proj | up_proj | down_proj of experts."""
    shard: Shard
    """col: the output is split over the ranks, row: the input."""
    is_interleaved: bool = False
    is_transposed: bool = False
    """How the checkpoint stores routed experts: see `SiteShape`."""


def lora_sites(model: nn.Module) -> dict[str, Site]:
    """All sites in module order, by path. The model may be on the meta device."""
    sites: dict[str, Site] = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear | LMHead):
            for part, width in module.parts.items():
                name = sibling(path, part)
                sites[name] = Site(name, "dense", module.in_features, width, 0, module, part, module.shard)
        elif isinstance(module, Embedding):
            name = sibling(path, "embed_tokens")
            sites[name] = Site(name, "embedding", module.vocab_size, module.hidden, 0, module, "embed_tokens", "row")
        elif isinstance(module, Experts):
            inner, hidden, num = module.intermediate, module.hidden, module.num_experts
            for part in ("gate_proj", "up_proj"):
                name = f"{path}.{part}"
                sites[name] = Site(name, "experts", hidden, inner, num, module, part, "col")
            name = f"{path}.down_proj"
            sites[name] = Site(name, "experts", inner, hidden, num, module, "down_proj", "row")
    return sites


def shard_delta(site: Site, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a delta of the whole model: A [r, in], B [out, r], or both with experts in front.

    A column-parallel site splits B's rows, a row-parallel one A's columns; the other factor stays whole. Returns
    views, except of a padded vocabulary, where B of lm_head and A of the embedding are filled up with zeros.
    """
    module = site.module
    if isinstance(module, Experts):
        inner = module.inner_range
        return (a[..., inner], b) if site.shard == "row" else (a, b[..., inner, :])
    if isinstance(module, Embedding):
        a_local = a[:, module.rows]
        missing = module.num_rows - a_local.shape[1]
        return F.pad(a_local, (0, missing)) if missing else a_local, b
    b_local = b[..., module.out_ranges[site.part], :]
    missing = module.slices[list(module.parts).index(site.part)] - b_local.shape[-2]
    if missing:
        b_local = torch.cat((b_local, b_local.new_zeros(missing, b.shape[-1])))
    return a[..., module.in_range], b_local
