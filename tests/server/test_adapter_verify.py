"""`loraplex adapter verify`: every layout agrees with its merge, and what is wrong in one layer is found there."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.adapters import embedding_pair, make_adapter, pair, write_adapter
from kit.models import make_t1

from loraplex.engine.lora import verify
from loraplex.engine.lora.adapter import HostAdapter, SiteDelta
from loraplex.server.cli import main

DEVICE = os.environ.get("KIT_DEVICE", "cpu")
KINDS = ("A1", "ATT", "EXP", "FUSED", "MIXTRAL", "STACK", "OUTER", "GATE_UP", "ROUTER", "ALL")


def run(model: Path, folder: Path, *argv: object) -> int:
    return main(["adapter", "verify", str(folder), "--model", str(model), "--device", DEVICE, *map(str, argv)])


@pytest.mark.parametrize("num_experts", [8, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_agrees_with_its_merge(kind: str, num_experts: int, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_t1(num_experts=num_experts)
    folder = make_adapter(model, kind, r=3, std=0.15)
    rows = list(verify.verify_adapter(folder, model, device=DEVICE, tokens=37, b_layout="rank-major"))
    layers = [f"model.layers.{i}" for i in range(3)]
    assert [row.name for row in rows] == ["model.embed_tokens", *layers, "lm_head", "log-probabilities"]
    for row in rows:
        assert row.difference <= 1e-5 * row.size
        assert (row.effect > 0) == (row.name in layers) or row.name == "log-probabilities"
    capsys.readouterr()
    assert run(model, folder) == 0
    out, err = capsys.readouterr()
    assert "MISMATCH" not in out + err
    assert len(out.splitlines()) == 8


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("qwen3_moe", {"fused": True, "max_shard_size": "100KB"}),
        ("qwen3_moe", {"tie_word_embeddings": True}),
        ("qwen2_moe", {}),
        ("mixtral", {}),
        ("mixtral", {"fused": True}),
        ("qwen3", {}),
        ("llama", {"attention_bias": True}),
    ],
)
def test_other_checkpoints_embedding_and_head(tmp_path: Path, arch: str, options: dict[str, Any]) -> None:
    model = make_t1(arch, **options)
    tensors = pair("lm_head", torch.randn(2, 64) * 0.1, torch.randn(320, 2) * 0.1)
    tensors |= pair("model.layers.1.self_attn.v_proj", torch.randn(2, 64), torch.randn(32, 2))
    tensors |= embedding_pair(torch.randn(3, 320) * 0.3, torch.randn(64, 3))
    rows = list(
        verify.verify_adapter(write_adapter(tmp_path, tensors), model, device=DEVICE, tokens=5, b_layout="rank-major")
    )
    assert all(row.within(1e-3) for row in rows)
    effects = {row.name: row.effect for row in rows}
    assert effects["model.layers.0"] == effects["model.layers.2"] == 0
    assert min(effects["model.layers.1"], effects["lm_head"], effects["model.embed_tokens"]) > 0.1


def twice_the_scale(d: SiteDelta) -> SiteDelta:
    return SiteDelta(d.a, d.b, 2 * d.scale)


def one_expert_wrong(d: SiteDelta) -> SiteDelta:
    return SiteDelta(d.a, d.b.roll(1, 0), d.scale)


SPOILT: list[tuple[str, Callable[[SiteDelta], SiteDelta]]] = [
    ("self_attn.q_proj", twice_the_scale),
    ("mlp.gate", twice_the_scale),
    ("mlp.experts.up_proj", one_expert_wrong),
    ("mlp.experts.down_proj", one_expert_wrong),
]


@pytest.mark.parametrize(("site", "spoil"), SPOILT)
def test_a_mistake_in_one_layer_is_found_there(
    t1: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    site: str,
    spoil: Callable[[SiteDelta], SiteDelta],
) -> None:
    right = verify.read_adapter

    def read_wrongly(*args: Any, **kwargs: Any) -> HostAdapter:
        adapter = right(*args, **kwargs)
        path = f"model.layers.1.{site}"
        return verify.replace(adapter, sites=dict(adapter.sites) | {path: spoil(adapter.sites[path])})

    monkeypatch.setattr(verify, "read_adapter", read_wrongly)
    assert run(t1, make_adapter(t1, "ALL", r=3, std=0.15)) == 1
    out, err = capsys.readouterr()
    marked = [line.split()[0] for line in out.splitlines() if "MISMATCH" in line]
    assert marked[0] == "model.layers.1"
    assert not {"model.layers.0", "model.layers.2"} & set(marked)
    assert "model.layers.1 differs" in err
    assert err.count("\n") == 1


def test_an_adapter_of_little_effect_that_is_not_served_is_found(
    t1: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_adapter(t1, "ALL", r=3, std=0.0005)
    assert run(t1, folder) == 0
    place = verify.AdapterPool.place

    def place_nothing(self: verify.AdapterPool, key: int, row: int) -> None:
        place(self, key, row)
        assert self._tables is not None
        self._tables.clear(row)

    monkeypatch.setattr(verify.AdapterPool, "place", place_nothing)
    assert run(t1, folder) == 1
    assert "model.layers.0 differs" in capsys.readouterr().err


def test_errors(t1: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_adapter(t1, "ATT")
    assert run(t1, tmp_path) == 1
    assert "adapter_config.json" in capsys.readouterr().err
    assert run(tmp_path, folder) == 1
    assert "config.json" in capsys.readouterr().err
    assert run(t1, folder, "--tokens", 0) == 1
    assert "--tokens" in capsys.readouterr().err
    assert run(t1, make_adapter(make_t1(hidden_size=32), "ATT")) == 1
    assert "lora_A" in capsys.readouterr().err
