"""`loraplex adapter inspect` and `convert`: true numbers, the same ΔW in every layout, one line for every error."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.adapters import (
    block_gate_up,
    embedding_pair,
    fused_pair,
    fused_tensors,
    make_adapter,
    make_factors,
    pair,
    per_expert_tensors,
    write_adapter,
)
from kit.deltas import weight_deltas
from kit.models import make_t1
from kit.oracle import Oracle, assert_logprobs_close, moe_sizes
from kit.sites import assert_deltas_equal
from safetensors.torch import load_file, save_file
from torch import Tensor

from loraplex.server.cli import main

EXPERTS = ("mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj")
EMBEDDING_COPY = "base_model.model.model.embed_tokens.base_layer.weight"
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS = ("A1", "ATT", "EXP", "FUSED", "MIXTRAL", "STACK", "OUTER", "GATE_UP", "ROUTER", "ALL", "EMB")
WITH_EXPERTS = tuple(kind for kind in KINDS if kind not in ("ATT", "ROUTER", "EMB"))


def run(capsys: pytest.CaptureFixture[str], *argv: object, status: int = 0) -> str:
    """stdout, or the one line of an error."""
    capsys.readouterr()
    assert main(["adapter", *map(str, argv)]) == status
    out, err = capsys.readouterr()
    if status:
        assert out == ""
        assert err.count("\n") == 1, err
        return err
    assert err == ""
    return out


def inspect(capsys: pytest.CaptureFixture[str], folder: Path, *argv: object) -> dict[str, Any]:
    return json.loads(run(capsys, "inspect", folder, "--json", *argv))


def deltas(model: Path, folder: Path) -> dict[str, Tensor]:
    """Parameters that the adapter changes."""
    return {name: d for name, d in weight_deltas(folder, **moe_sizes(model)).items() if d.any()}


# inspect


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_without_the_model_agrees_with_one_of_the_model(
    t1: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    folder = make_adapter(t1, kind, r=3)
    alone, full = inspect(capsys, folder), inspect(capsys, folder, "--model", t1, "--dtype", "bfloat16")
    if kind == "MIXTRAL":
        assert {m["module"] for m in alone["modules"]} == {m["module"] for m in full["modules"]}
    for report in (alone, full):
        report["modules"].sort(key=lambda m: m["module"])
        for module in (report, *report["modules"]):
            assert (module.pop("coverage") is None) == (report is alone)
        for module in report["modules"]:
            assert (module.pop("relative_norm") is None) == (report is alone)
    assert alone == full


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("arch", "kind"), [*(("qwen3_moe", kind) for kind in KINDS), ("mixtral", "ALL")])
def test_relative_norms(capsys: pytest.CaptureFixture[str], arch: str, kind: str, fused: bool) -> None:
    model = make_t1(arch, num_hidden_layers=2, fused=fused)
    folder = make_adapter(model, kind, r=3, use_rslora=True)
    report = inspect(capsys, folder, "--model", model)
    base = Oracle(model).base.state_dict()
    changes = weight_deltas(folder, **moe_sizes(model))
    for module in report["modules"]:
        name = module["module"]
        halves = {"experts.gate_proj": slice(0, 32), "experts.up_proj": slice(32, 64)}
        parameter = {"experts.gate_proj": "gate_up_proj", "experts.up_proj": "gate_up_proj"}.get(name, name)
        found = [n for n in changes if n.removesuffix(".weight").endswith(parameter)]
        rows = halves.get(name, slice(None))
        delta, whole = (torch.stack([source[n] for n in found])[..., rows, :] for source in (changes, base))
        assert module["relative_norm"] == pytest.approx(float(delta.norm() / whole.norm()), rel=1e-5), name
        assert module["coverage"] == 1
        assert module["layers"] == ([] if name == "model.embed_tokens" else [0, 1])


def test_what_a_report_says(t1: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    factors = make_factors(t1, ["self_attn.q_proj", "mlp.experts.up_proj"], r=4, seed=1, layers=[0, 2])
    tensors = per_expert_tensors(factors, experts=[1, 2, 7]) | pair("lm_head", torch.randn(2, 64), torch.randn(320, 2))
    tensors |= pair("model.layers.9.self_attn.q_proj", torch.ones(4, 64), torch.ones(64, 4))
    folder = write_adapter(
        tmp_path, {n: t.bfloat16() for n, t in tensors.items()}, lora_alpha=8, alpha_pattern={"q_proj": 2}, made_by="me"
    )
    report = inspect(capsys, folder, "--model", t1)
    q, up, head = report["modules"]
    assert (q["module"], q["layers"], q["experts"], q["scale"]) == ("q_proj", [0, 2], None, [0.5, 0.5])
    assert (up["module"], up["experts"], up["coverage"]) == ("experts.up_proj", 3, pytest.approx(2 / 3))
    assert (head["module"], head["layers"], head["rank"], head["scale"]) == ("lm_head", [], [2, 2], [4, 4])
    assert (report["rank"], report["scale"], report["num_experts"]) == ([2, 4], [0.5, 4], 8)
    assert report["coverage"] == pytest.approx(5 / (3 * 8 + 2))
    elements = 2 * 4 * (64 + 64) + 2 * 8 * 4 * (64 + 32) + 2 * (64 + 320)
    assert (report["host_bytes"], report["device_bytes"]) == (2 * elements, 4 * elements)
    assert report["disk_bytes"] == sum(f.stat().st_size for f in tmp_path.iterdir())
    assert sorted(report["ignored"]) == sorted(n for n in tensors if "layers.9" in n)
    assert "made_by" in report["notes"][0]
    text = run(capsys, "inspect", folder, "--model", t1)
    for word in ("0,2", "3/8", "67%", "layers.9", "--no-lora-strict-loading", "note: ", "19% of the model's sites"):
        assert word in text


def test_shared_factors_are_shown(t1: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = inspect(capsys, make_adapter(t1, "OUTER"))
    assert {m["module"]: m["shared"] for m in report["modules"]} == {
        "experts.gate_proj": ["A"],
        "experts.up_proj": ["A"],
        "experts.down_proj": ["B"],
    }
    assert "8/8 (one A)" in run(capsys, "inspect", make_adapter(t1, "OUTER"))


@pytest.mark.parametrize("parameter", [0, 1])
@pytest.mark.parametrize("version", ["0.18.1", "0.21.2"])
def test_a_lone_fused_parameter_is_read_by_targets_and_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], parameter: int, version: str
) -> None:
    model = make_t1(moe_intermediate_size=24, num_hidden_layers=1)
    gate, up, down = make_factors(model, EXPERTS, r=3, seed=4).values()
    a, b = down if parameter else block_gate_up(gate, up)
    folder = write_adapter(
        tmp_path,
        fused_pair("model.layers.0.mlp.experts", a, b, exchanged=version < "0.19"),
        r=a.shape[1],
        peft_version=version,
        target_parameters=[BOTH[parameter]],
    )
    alone, full = inspect(capsys, folder), inspect(capsys, folder, "--model", model)
    assert (alone["digest"], alone["num_experts"]) == (full["digest"], 8)
    assert {m["module"] for m in alone["modules"]} == {m["module"] for m in full["modules"]}


def unknowable(t1: Path) -> Mapping[str, tuple[dict[str, Tensor], dict[str, Any]]]:
    fused = fused_tensors(make_factors(t1, EXPERTS, r=4, seed=1))
    down = {n: t for n, t in fused.items() if "base_layer" not in n}
    return {
        "no ranks": (fused, {"target_parameters": BOTH}),
        "no targets": (down, {}),
        "no version": (down, {"target_parameters": BOTH[1:], "peft_version": None}),
        "odd rank": (down, {"target_parameters": BOTH[1:], "r": 5}),
        "qkv": (pair("model.layers.0.self_attn.qkv_proj", torch.randn(12, 64), torch.randn(128, 4)), {}),
    }


@pytest.mark.parametrize("case", ["no ranks", "no targets", "no version", "odd rank", "qkv"])
def test_what_only_the_model_tells(t1: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    tensors, config = unknowable(t1)[case]
    folder = write_adapter(tmp_path, tensors, **config)
    assert "--model" in run(capsys, "inspect", folder, status=1)
    if case != "no version":  # here down is not square, so the model's shapes are enough
        assert inspect(capsys, folder, "--model", t1)["coverage"] > 0


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), ["adapter_config.json", "not found"]),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), ["adapter_config.json", "JSON"]),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x"), ["adapter_model.safetensors"]),
        (lambda folder: spoil(folder, torch.full((4, 64), math.nan)), ["q_proj.lora_A", "NaN"]),
        (lambda folder: spoil(folder, torch.ones(64)), ["q_proj.lora_A", "[64]"]),
        (lambda folder: spoil(folder, torch.ones(3, 4, 64)), ["q_proj.lora_A"]),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_errors_are_one_line(
    t1: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, damage: Any, words: list[str]
) -> None:
    tensors = load_file(make_adapter(t1, "ALL") / "adapter_model.safetensors")
    folder = write_adapter(tmp_path / "a", tensors)
    damage(folder)
    extra = (tmp_path / "out", "--layout", "fused") if command == "convert" else ()
    error = run(capsys, command, folder, *extra, status=1)
    for word in (f"loraplex adapter {command}: error:", *words):
        assert word in error
    assert list(tmp_path.iterdir()) == [folder]


def spoil(folder: Path, tensor: Tensor) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": tensor}, path)


def test_errors_of_the_model(t1: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_adapter(t1, "ATT")
    for command in (("inspect",), ("verify",), ("convert", tmp_path / "out", "--layout", "fused")):
        error = run(capsys, command[0], folder, *command[1:], "--model", tmp_path, status=1)
        assert "config.json does not exist: --model must be" in error
    (tmp_path / "config.json").write_bytes((t1 / "config.json").read_bytes())
    assert "no safetensors weights" in run(capsys, "inspect", folder, "--model", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert "model.safetensors" in run(capsys, "inspect", folder, "--model", tmp_path, status=1)


def test_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["unknown"], ["inspect"], ["convert", "a", "b"], ["convert", "a", "b", "--layout", "x"]):
        with pytest.raises(SystemExit) as caught:
            main(["adapter", *argv])
        assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


# convert


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("kind", WITH_EXPERTS)
def test_conversions_and_their_round_trips_keep_every_delta(
    t1: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, rslora: bool
) -> None:
    source = make_adapter(t1, kind, r=3, alpha=7, use_rslora=rslora)
    expected = deltas(t1, source)
    for first, second in (("per-expert", "fused"), ("fused", "per-expert")):
        there, back = tmp_path / first / "there", tmp_path / first / "back"
        text = run(capsys, "convert", source, there, "--layout", first)
        assert str(there) in text
        run(capsys, "convert", there, back, "--layout", second)
        layouts = {"per-expert": "per-expert", "fused": "fused experts"}
        for folder, layout in ((there, first), (back, second)):
            assert_deltas_equal(deltas(t1, folder), expected)
            report = inspect(capsys, folder)
            assert layouts[layout] in report["layout"].split(" + ")
            assert report["notes"] == []
        assert inspect(capsys, back)["rank"] == inspect(capsys, tmp_path / first / "back")["rank"]


@pytest.mark.parametrize("kind", ["A1", "ALL", "OUTER"])
def test_peft_reads_a_converted_adapter_as_we_do(t1: Path, t1_oracle: Oracle, tmp_path: Path, kind: str) -> None:
    source = make_adapter(t1, kind, r=3, std=0.15)
    assert main(["adapter", "convert", str(source), str(tmp_path / "fused"), "--layout", "fused"]) == 0
    ids = list(b"hello adapters")
    expected = t1_oracle.logprobs(ids, source)
    assert_logprobs_close(t1_oracle.peft_logprobs(ids, tmp_path / "fused"), expected)
    assert (expected - t1_oracle.logprobs(ids)).abs().max() > 0.05


def test_a_shared_a_keeps_its_rank(t1: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There and back, a block-diagonal gate_up falls apart again; one with a common A stays as narrow."""
    for kind, fused_rank in (("A1", 4), ("EXP", 8)):
        source = make_adapter(t1, kind, r=4)
        run(capsys, "convert", source, tmp_path / kind / "fused", "--layout", "fused")
        run(capsys, "convert", tmp_path / kind / "fused", tmp_path / kind / "split", "--layout", "per-expert")
        fused, split = (
            {m["module"]: m["rank"][1] for m in inspect(capsys, tmp_path / kind / name)["modules"]}
            for name in ("fused", "split")
        )
        assert (fused["experts.gate_proj"], split["experts.gate_proj"], split["experts.up_proj"]) == (fused_rank, 4, 4)


@pytest.mark.parametrize("rslora", [False, True])
def test_ranks_and_scales_that_differ_by_layer_and_half(
    t1: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rslora: bool
) -> None:
    tensors: dict[str, Tensor] = {}
    for layer, (gate_rank, up_rank, down_rank) in enumerate([(2, 3, 5), (2, 2, 5), (1, 4, 2)]):
        ranks = dict(zip(EXPERTS, (gate_rank, up_rank, down_rank)))
        for name, rank in ranks.items():
            tensors |= per_expert_tensors(make_factors(t1, [name], r=rank, seed=layer + rank, layers=[layer]))
    tensors |= per_expert_tensors(make_factors(t1, ["self_attn.q_proj"], r=3, seed=5))
    source = write_adapter(
        tmp_path / "source",
        tensors,
        r=3,
        lora_alpha=5,
        use_rslora=rslora,
        alpha_pattern={r"layers\.1\..*gate_proj": 7, "up_proj": 9, "q_proj": 2, ".*": 3},
    )
    expected = deltas(t1, source)
    run(capsys, "convert", source, tmp_path / "fused", "--layout", "fused")
    run(capsys, "convert", tmp_path / "fused", tmp_path / "split", "--layout", "per-expert")
    for name in ("fused", "split"):
        assert_deltas_equal(deltas(t1, tmp_path / name), expected)


@pytest.mark.parametrize("missing", [EXPERTS[:1], EXPERTS[1:2], EXPERTS[2:], EXPERTS[:2]])
def test_missing_projections(
    t1: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: tuple[str, ...]
) -> None:
    """In all layers, and in one layer only: PEFT needs a parameter in all layers, so zeros take its place."""
    factors = make_factors(t1, EXPERTS, r=3, seed=2)
    for case, layers in (("all", "012"), ("one", "1")):
        kept = {p: f for p, f in factors.items() if not (p[13] in layers and p.endswith(missing))}
        source = write_adapter(tmp_path / case, per_expert_tensors(kept), r=3)
        run(capsys, "convert", source, tmp_path / f"{case}-fused", "--layout", "fused")
        run(capsys, "convert", tmp_path / f"{case}-fused", tmp_path / f"{case}-split", "--layout", "per-expert")
        for name in ("fused", "split"):
            assert_deltas_equal(deltas(t1, tmp_path / f"{case}-{name}"), deltas(t1, source))
        config = json.loads((tmp_path / f"{case}-fused" / "adapter_config.json").read_text())
        lacks = set()
        if case == "all":
            lacks = {2: {BOTH[0]}, 1: {BOTH[1]} if missing == EXPERTS[2:] else set()}[len(missing)]
        assert set(config["target_parameters"]) == set(BOTH) - lacks


def test_what_is_no_expert_stays(t1: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_adapter(t1, "ALL", r=3, dtype="bfloat16", target_modules=["q_proj", "gate_proj"])
    embedding = embedding_pair(torch.randn(4, 320), torch.randn(64, 4)) | {EMBEDDING_COPY: torch.randn(320, 64)}
    source = shutil.copytree(made, tmp_path / "source")
    tensors = load_file(made / "adapter_model.safetensors") | {n: t.bfloat16() for n, t in embedding.items()}
    save_file(tensors, source / "adapter_model.safetensors")
    run(capsys, "convert", source, tmp_path / "fused", "--layout", "fused")
    old, new = (load_file(folder / "adapter_model.safetensors") for folder in (source, tmp_path / "fused"))
    assert {t.dtype for t in new.values()} == {torch.bfloat16}
    dense = [name for name in old if ".experts." not in name]
    assert all(torch.equal(old[name], new[name]) for name in dense)
    assert len(new) == len(dense) + 3 * 4
    config = json.loads((tmp_path / "fused" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["embed_tokens", "gate", "k_proj", "o_proj", "q_proj", "v_proj"]


def test_old_eras_and_packers_become_what_peft_writes_now(
    t1: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factors = make_factors(t1, EXPERTS, r=3, seed=3)
    config = {"r": 3, "target_parameters": BOTH, "rank_pattern": {"gate_up_proj": 6}}
    new = write_adapter(tmp_path / "new", fused_tensors(factors), **config)
    old = write_adapter(tmp_path / "old", fused_tensors(factors, exchanged=True), peft_version="0.18.1", **config)
    packed = {
        name: t.view(t.shape[0], -1, 8).mT.reshape(t.shape) if ".lora_B." in name else t
        for name, t in fused_tensors(factors).items()
    }
    unsloth = write_adapter(tmp_path / "unsloth", packed, **config)
    run(capsys, "convert", old, tmp_path / "a", "--layout", "fused")
    run(capsys, "convert", unsloth, tmp_path / "b", "--layout", "fused", "--lora-b-layout", "expert-major")
    for name in ("a", "b"):
        assert inspect(capsys, tmp_path / name)["layout"] == "fused experts"
        assert_deltas_equal(deltas(t1, tmp_path / name), deltas(t1, new))
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["peft_version"] == "0.19.1"


def test_missing_experts_need_the_model(t1: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = per_expert_tensors(make_factors(t1, EXPERTS, r=3, seed=3), experts=[0, 1, 6])
    source = write_adapter(tmp_path / "source", tensors, r=3)
    out = tmp_path / "out"
    error = run(capsys, "convert", source, out, "--layout", "fused", status=1)
    assert "expert 2" in error
    assert "--model" in error
    run(capsys, "convert", source, out, "--layout", "fused", "--model", t1)
    assert_deltas_equal(deltas(t1, out), deltas(t1, source))


def test_refusals(t1: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert "no routed experts" in run(capsys, "convert", make_adapter(t1, "ATT"), out, "--layout", "fused", status=1)
    oss = make_adapter(t1, "FUSED", base_model_name_or_path="openai/gpt-oss-20b")
    assert "gpt-oss" in run(capsys, "convert", oss, out, "--layout", "per-expert", status=1)
    out.mkdir()
    (out / "precious").write_text("x")
    error = run(capsys, "convert", make_adapter(t1, "EXP"), out, "--layout", "fused", status=1)
    assert f"{out} exists" in error
    assert [f.name for f in out.iterdir()] == ["precious"]


def test_inspect_of_a_base_that_is_zero_where_it_is_adapted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = make_t1()
    adapter = make_adapter(model, "ROUTER", r=2)
    zeroed = tmp_path / "zeroed"
    shutil.copytree(model, zeroed)
    weights = load_file(zeroed / "model.safetensors")
    save_file(
        {name: torch.zeros_like(w) if name.endswith("mlp.gate.weight") else w for name, w in weights.items()},
        zeroed / "model.safetensors",
    )
    text = run(capsys, "inspect", adapter, "--model", zeroed, "--json")
    (module,) = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["modules"]
    assert module["relative_norm"] is None
    assert "–" in run(capsys, "inspect", adapter, "--model", zeroed)
