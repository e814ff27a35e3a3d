"""The adaptable projections of a kit checkpoint, in the form the adapter reader takes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from kit.adapters import site_shapes
from kit.oracle import moe_sizes
from torch import Tensor

from loraplex.engine.lora.adapter import PlainSite as Site


def make_sites(model_dir: Path) -> dict[str, Site]:
    """All sites of the checkpoint by path."""
    layers = json.loads((model_dir / "config.json").read_text())["num_hidden_layers"]
    num_experts = moe_sizes(model_dir)["num_experts"]
    sites = []
    for name, (d_out, d_in) in site_shapes(model_dir).items():
        prefixes = [""] if name == "lm_head" else [f"model.layers.{i}." for i in range(layers)]
        experts = ".experts." in name
        for prefix in prefixes:
            kind: Literal["dense", "experts"] = "experts" if experts else "dense"
            sites.append(Site(prefix + name, kind, d_in, d_out, num_experts if experts else 0))
    vocab_size, hidden = site_shapes(model_dir)["lm_head"]
    sites.append(Site("model.embed_tokens", "embedding", vocab_size, hidden))
    return {site.path: site for site in sites}


def merged_deltas(sites: Mapping[str, Any]) -> dict[str, Tensor]:
    """ΔW by transformers 5 parameter name from an adapter's `sites` (a, b, scale by path), fp32."""
    deltas: dict[str, Tensor] = {}
    halves: dict[str, dict[str, Tensor]] = {}
    for path, d in sites.items():
        delta = d.scale * (d.b.float() @ d.a.float())
        parent, _, projection = path.rpartition(".")
        if not parent.endswith(".experts"):
            deltas[f"{path}.weight"] = delta.T if projection == "embed_tokens" else delta
        elif projection == "down_proj":
            deltas[path] = delta
        else:
            halves.setdefault(parent, {})[projection] = delta
    for parent, found in halves.items():
        some = next(iter(found.values()))
        gate_up = [found.get(p, torch.zeros_like(some)) for p in ("gate_proj", "up_proj")]
        deltas[f"{parent}.gate_up_proj"] = torch.cat(gate_up, dim=1)
    return deltas


def assert_deltas_equal(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], tol: float = 1e-5) -> None:
    """The same parameters, and each ΔW within tol of its largest value."""
    assert sorted(got) == sorted(expected)
    for name, delta in expected.items():
        assert delta.abs().max() > 0
        error = (got[name] - delta).abs().max() / delta.abs().max()
        assert error <= tol, f"{name}: relative error {error:.2g}"
