"""`loraplex adapter verify`: every layout agrees with its merge, and what is wrong in one layer is found there."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.adapters import embedding_pair, make_adapter, pair, write_adapter
from kit.models import make_t1
from safetensors.torch import load_file, save_file

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


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["A1", "MIXTRAL", "STACK", "ALL"])
def test_layouts_on_mixtral(kind: str, fused: bool) -> None:
    model = make_t1("mixtral", fused=fused)
    folder = make_adapter(model, kind, r=3, std=0.15)
    rows = list(verify.verify_adapter(folder, model, device=DEVICE, tokens=37, b_layout="rank-major"))
    assert all(row.difference <= 1e-5 * row.size and row.site_error <= 1e-4 for row in rows)
    assert {row.name for row in rows if row.site} == {f"model.layers.{i}" for i in range(3)}


def test_a_tied_head_with_patterns_of_its_own() -> None:
    model = make_t1(tie_word_embeddings=True)
    patterns = {"rank_pattern": {"embed_tokens": 5}, "alpha_pattern": {"lm_head": 24}, "ensure_weight_tying": True}
    folder = make_adapter(model, "EMB", r=3, std=0.2, **patterns)
    rows = list(verify.verify_adapter(folder, model, device=DEVICE, tokens=7, b_layout="rank-major"))
    assert all(row.within(1e-3) for row in rows)
    effects = {row.name: row.effect for row in rows}
    assert min(effects["lm_head"], effects["model.embed_tokens"]) > 0.1


def twice_the_scale(d: SiteDelta) -> SiteDelta:
    return SiteDelta(d.a, d.b, 2 * d.scale)


def one_expert_wrong(d: SiteDelta) -> SiteDelta:
    return SiteDelta(d.a, d.b.roll(1, 0), d.scale)


def spoil(monkeypatch: pytest.MonkeyPatch, path: str, change: Callable[[SiteDelta], SiteDelta]) -> None:
    """Makes `verify` serve another delta at one site than the file has."""
    right = verify.read_adapter

    def read_wrongly(*args: Any, **kwargs: Any) -> HostAdapter:
        adapter = right(*args, **kwargs)
        return verify.replace(adapter, sites=dict(adapter.sites) | {path: change(adapter.sites[path])})

    monkeypatch.setattr(verify, "read_adapter", read_wrongly)


SPOILT: list[tuple[str, Callable[[SiteDelta], SiteDelta]]] = [
    ("self_attn.q_proj", twice_the_scale),
    ("mlp.gate", twice_the_scale),
    ("mlp.experts.up_proj", one_expert_wrong),
    ("mlp.experts.down_proj", one_expert_wrong),
]


@pytest.mark.parametrize(("site", "change"), SPOILT)
def test_a_mistake_in_one_layer_is_found_there(
    t1: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    site: str,
    change: Callable[[SiteDelta], SiteDelta],
) -> None:
    spoil(monkeypatch, f"model.layers.1.{site}", change)
    assert run(t1, make_adapter(t1, "ALL", r=3, std=0.15)) == 1
    out, err = capsys.readouterr()
    marked = [line.split()[0] for line in out.splitlines() if "MISMATCH" in line]
    assert marked[0] == "model.layers.1"
    assert not {"model.layers.0", "model.layers.2"} & set(marked)
    assert "model.layers.1 differs" in err
    assert err.count("\n") == 1


def one_row_slightly_wrong(d: SiteDelta) -> SiteDelta:
    b = d.b.clone()
    b[(5, 7) if b.dim() == 3 else 7] *= 1.05
    return SiteDelta(d.a, b, d.scale)


@pytest.fixture(scope="module")
def massive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T1 with one hidden feature that layer 0 sets to thousands, as large models have."""
    model = tmp_path_factory.mktemp("massive")
    shutil.copytree(make_t1(), model, dirs_exist_ok=True)
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if name.startswith("model.layers.0.") and name.endswith("down_proj.weight"):
            weight[11] *= 1e5
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize(
    ("site", "found"),
    [
        ("mlp.experts.gate_proj", "mlp.experts.5.gate_proj"),
        ("mlp.experts.up_proj", "mlp.experts.5.up_proj"),
        ("mlp.experts.down_proj", "mlp.experts.5.down_proj"),
        ("self_attn.v_proj", "self_attn.v_proj"),
        ("mlp.gate", "mlp.gate"),
    ],
)
def test_a_small_mistake_beside_massive_activations(
    massive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], site: str, found: str
) -> None:
    """One row of one expert's B is 5 % too large. The layer's output, measured by its largest value, hides it."""
    folder = make_adapter(massive, "ALL", r=3, std=0.05)
    assert run(massive, folder) == 0
    capsys.readouterr()
    spoil(monkeypatch, f"model.layers.1.{site}", one_row_slightly_wrong)
    rows = list(verify.verify_adapter(folder, massive, device=DEVICE, tokens=64, b_layout="rank-major"))
    row = next(r for r in rows if r.name == "model.layers.1")
    assert row.size > 1e4
    assert row.difference <= 0.01 * max(row.effect, row.small_effect * row.size)
    assert row.site == f"model.layers.1.{found}"
    assert row.site_error == pytest.approx(0.05, rel=0.02)
    assert run(massive, folder) == 1
    out, err = capsys.readouterr()
    assert next(line.split()[0] for line in out.splitlines() if "MISMATCH" in line) == "model.layers.1"
    assert f"an output of model.layers.1.{found} by 0.05 of its norm" in err


@pytest.mark.parametrize("site", ["mlp.experts.down_proj", "self_attn.k_proj", "lm_head"])
def test_a_site_too_few_and_a_site_too_many(
    t1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: str
) -> None:
    head = pair("lm_head", torch.randn(2, 64), torch.randn(320, 2))
    tensors = load_file(make_adapter(t1, "ALL", r=3, std=0.05) / "adapter_model.safetensors")
    path = site if site == "lm_head" else f"model.layers.2.{site}"
    right = verify.read_adapter
    full = write_adapter(tmp_path / "full", tensors | head, r=3)
    lacking = write_adapter(
        tmp_path / "lacking",
        {
            name: t
            for name, t in (tensors | head).items()
            if not re.search(rf"{path.replace('experts.', 'experts.[0-9]+.')}\.lora", name)
        },
        r=3,
    )
    for truth, served in ((full, lacking), (lacking, full)):
        monkeypatch.setattr(verify, "read_adapter", lambda _, *args, served=served, **kw: right(served, *args, **kw))
        rows = list(verify.verify_adapter(truth, t1, device=DEVICE, tokens=9, b_layout="rank-major"))
        (row,) = [r for r in rows if not r.sites_within(0.01)]
        assert row.name == ("lm_head" if site == "lm_head" else "model.layers.2")
        assert site.rpartition(".")[2] in row.site
        nothing_ran = served is lacking and site == "lm_head"
        assert row.site_error == (float("inf") if served is full or nothing_ran else pytest.approx(1, rel=1e-3))


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
