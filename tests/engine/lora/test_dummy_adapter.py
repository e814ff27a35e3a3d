"""Random adapters: right shapes everywhere, small in memory, the same for the same seed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit.sites import Site, make_sites

from loraplex.engine.config import LoRAConfig
from loraplex.engine.lora.dummy import dummy_adapter, parse_dummy_spec
from loraplex.engine.lora.errors import AdapterError
from loraplex.engine.lora.loader import read


def test_shapes(t1: Path) -> None:
    sites = make_sites(t1)
    adapter = dummy_adapter(sites, 3, dtype=torch.float32)
    assert adapter.sites.keys() == sites.keys()
    for path, d in adapter.sites.items():
        site = sites[path]
        lead = (8,) if site.kind == "experts" else ()
        assert d.a.shape == (*lead, 3, site.in_features)
        assert d.b.shape == (*lead, site.out_features, 3)
        assert 0.01 < d.a.std() < 0.03
        assert 0.01 < d.b.std() < 0.03
    gate, up = (adapter.sites[f"model.layers.0.mlp.experts.{p}_proj"] for p in ("gate", "up"))
    assert not torch.equal(gate.a, up.a)


def test_rank_limit(t1: Path) -> None:
    """What steps set aside is sized by --max-lora-rank."""
    config = LoRAConfig(enable_lora=True, max_lora_rank=8)
    assert read("dummy:rank=8", make_sites(t1), config, torch.float32).rank_max == 8
    with pytest.raises(AdapterError, match=r"rank 9, above the limit of 8 \(--max-lora-rank\)"):
        read("dummy:rank=9", make_sites(t1), config, torch.float32)


def test_seeds_and_kinds(t1: Path) -> None:
    sites = make_sites(t1)
    one, same, other = dummy_adapter(sites, 4, 1), dummy_adapter(sites, 4, 1), dummy_adapter(sites, 4, 2)
    path = "model.layers.1.mlp.experts.up_proj"
    assert torch.equal(one.sites[path].a, same.sites[path].a)
    assert not torch.equal(one.sites[path].a, other.sites[path].a)
    assert one.digest == same.digest != other.digest
    assert dummy_adapter(sites, 5, 1).digest != one.digest
    dense, experts = dummy_adapter(sites, 4, which="dense"), dummy_adapter(sites, 4, which="experts")
    assert dense.sites.keys() | experts.sites.keys() == sites.keys()
    assert not dense.sites.keys() & experts.sites.keys()


def test_a_large_geometry_is_small_in_memory() -> None:
    shape = Site("", "experts", 2048, 768, 128)
    sites = {p: replace(shape, path=p) for p in (f"model.layers.{i}.mlp.experts.up_proj" for i in range(48))}
    adapter = dummy_adapter(sites, 16)
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for d in adapter.sites.values() for t in (d.a, d.b)
    }
    assert sum(storages.values()) < 20e6
    assert adapter.nbytes > 500e6


def test_specs() -> None:
    assert parse_dummy_spec("dummy:rank=16") == (16, 0)
    assert parse_dummy_spec("dummy:rank=16,seed=3") == (16, 3)


@pytest.mark.parametrize(
    "spec", ["dummy:", "dummy:rank=0", "dummy:rank=x", "dummy:seed=1", "rank=4", "dummy:rank=4,sed=1"]
)
def test_bad_specs(spec: str) -> None:
    with pytest.raises(AdapterError, match="dummy:rank=16"):
        parse_dummy_spec(spec)
