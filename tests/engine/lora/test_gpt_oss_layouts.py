"""Adapters of gpt-oss: gate and up outputs in turn, and parameters stored [E, in, out], whose roles have eras of their
own. There is no such model in the engine; the truth is PEFT's forward over transformers, and the factors themselves."""

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import cache
from kit.adapters import Factors, fused_pair, pair, write_adapter
from kit.oracle import assert_logprobs_close
from kit.sites import assert_deltas_equal
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from loraplex.engine.lora.adapter import HostAdapter, SiteDelta, SiteShape
from loraplex.engine.lora.errors import AdapterError
from loraplex.engine.lora.model_sites import read_sites
from loraplex.engine.lora.reader import read_adapter
from loraplex.server.cli import main

HIDDEN, NUM_EXPERTS, LAYERS = 64, 8, 2
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
IDS = torch.tensor([list(b"interleaved halves")])
INNERS = (24, 32, 64)
"""No parameter square, gate_up square, down square."""


def checkpoint(inner: int = 24) -> Path:
    def make(path: Path) -> None:
        config: Any = GptOssConfig(
            vocab_size=320,
            hidden_size=HIDDEN,
            intermediate_size=inner,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=NUM_EXPERTS,
            num_experts_per_tok=2,
            sliding_window=8,
            initializer_range=0.15,
            max_position_embeddings=512,
        )
        torch.manual_seed(0)
        GptOssForCausalLM(config).save_pretrained(path)

    return cache.folder("gpt-oss", [inner], make)


def read(model: Path, folder: Path) -> HostAdapter:
    return read_adapter(folder, read_sites(model)[0], max_rank=64)


def experts(inner: int, rank: int = 3, seed: int = 0) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    widths = {"gate_proj": (HIDDEN, inner), "up_proj": (HIDDEN, inner), "down_proj": (inner, HIDDEN)}
    return {
        f"model.layers.{layer}.mlp.experts.{name}": (
            torch.randn(NUM_EXPERTS, rank, d_in, generator=generator) * 0.1,
            torch.randn(NUM_EXPERTS, d_out, rank, generator=generator) * 0.1,
        )
        for layer in range(LAYERS)
        for name, (d_in, d_out) in widths.items()
    }


def in_turn(gate: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A [E, 2r, H] of both, B [E, 2I, 2r] with the gate's rows at even places and the up's at odd ones."""
    num, width, rank = gate[1].shape
    b = torch.zeros(num, 2 * width, 2 * rank)
    b[:, ::2, :rank], b[:, 1::2, rank:] = gate[1], up[1]
    return torch.cat([gate[0], up[0]], 1), b


def fused(factors: Factors, targets: list[str], *, exchanged: bool) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for parent in sorted({path.rpartition(".")[0] for path in factors}):
        gate, up, down = (factors[f"{parent}.{name}_proj"] for name in ("gate", "up", "down"))
        if BOTH[0] in targets:
            module = f"{parent}.base_layer" if BOTH[1] in targets else parent
            tensors |= fused_pair(module, *in_turn(gate, up), exchanged=exchanged)
        if BOTH[1] in targets:
            tensors |= fused_pair(parent, *down, exchanged=exchanged)
    return tensors


def products(sites: Mapping[str, SiteDelta] | Factors) -> dict[str, Tensor]:
    factors = {p: (d.a, d.scale * d.b) if isinstance(d, SiteDelta) else d for p, d in sites.items()}
    return {path: b @ a for path, (a, b) in factors.items()}


def merged(model: Path, adapter: HostAdapter) -> Any:
    hf = GptOssForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    parameters = dict(hf.named_parameters())
    for path, delta in products(adapter.sites).items():
        parent, _, name = path.rpartition(".")
        if not parent.endswith(".experts"):
            parameters[f"{path}.weight"].data += delta
        elif name == "down_proj":
            parameters[path].data += delta.mT
        else:
            parameters[f"{parent}.gate_up_proj"].data[..., int(name == "up_proj") :: 2] += delta.mT
    return hf


@pytest.mark.parametrize("targets", [BOTH, BOTH[:1], BOTH[1:]], ids=["both", "gate_up", "down"])
@pytest.mark.parametrize("inner", INNERS)
def test_what_peft_writes_does_what_peft_does(tmp_path: Path, inner: int, targets: list[str]) -> None:
    from peft import LoraConfig, get_peft_model

    model = checkpoint(inner)
    hf = GptOssForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        base = hf(IDS).logits[0].log_softmax(-1)
        config = LoraConfig(
            r=3,
            lora_alpha=7,
            use_rslora=True,
            target_modules=["q_proj", "o_proj"],
            target_parameters=[*targets, "mlp.router.weight"],
            rank_pattern={"experts.down_proj": 5},
            alpha_pattern={"experts.gate_up_proj": 4},
        )
        wrapped = get_peft_model(hf, config).eval()
        generator = torch.Generator().manual_seed(1)
        for name, weight in wrapped.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.15, generator=generator)
        wrapped.save_pretrained(str(tmp_path))
        expected = wrapped(input_ids=IDS).logits[0].log_softmax(-1)
    adapter = read(model, tmp_path)
    with torch.no_grad():
        assert_logprobs_close(merged(model, adapter)(IDS).logits[0].log_softmax(-1), expected)
    assert (expected - base).abs().max() > 0.1
    assert adapter.layout == "dense + fused experts"
    assert adapter.modules["router"] == LAYERS


ERAS = {"0.18.1": False, "0.19.0": True, "0.19.1": False, "0.21.2": False}
"""Version of PEFT → whether it exchanged the roles of A and B for transposed parameters."""


@pytest.mark.parametrize("targets", [BOTH, BOTH[:1], BOTH[1:]], ids=["both", "gate_up", "down"])
@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("version", ERAS)
def test_every_era(tmp_path: Path, version: str, inner: int, targets: list[str]) -> None:
    factors = experts(inner)
    patterns = {"experts.gate_up_proj": 6, "experts.down_proj": 3}
    folder = write_adapter(
        tmp_path,
        fused(factors, targets, exchanged=ERAS[version]),
        peft_version=version,
        target_parameters=targets,
        rank_pattern=patterns,
        alpha_pattern=patterns,
    )
    adapter = read(checkpoint(inner), folder)
    wanted = {p for p in factors if (BOTH[1] if p.endswith("down_proj") else BOTH[0]) in targets}
    assert_deltas_equal(products(adapter.sites), products({p: f for p, f in factors.items() if p in wanted}))
    assert adapter.layout == ("fused experts (exchanged)" if ERAS[version] else "fused experts")


@pytest.mark.parametrize("exchanged", [False, True])
def test_the_sibling_of_a_square_parameter_outweighs_the_version(tmp_path: Path, exchanged: bool) -> None:
    """The real model's down is square, 2880 × 2880; old transformers moved the eras, so shapes come first."""
    factors = experts(HIDDEN)
    version = "0.18.1" if exchanged else "0.19.0"
    tensors = fused(factors, BOTH, exchanged=exchanged)
    patterns = {"experts.gate_up_proj": 6, "experts.down_proj": 3}
    for name, options in {"none": {"peft_version": None}, "other": {"peft_version": version}}.items():
        folder = write_adapter(
            tmp_path / name, tensors, target_parameters=BOTH, alpha_pattern=patterns, rank_pattern=patterns, **options
        )
        assert_deltas_equal(products(read(checkpoint(HIDDEN), folder).sites), products(factors))


def test_a_square_parameter_alone_without_a_version_is_refused(tmp_path: Path) -> None:
    tensors = fused(experts(HIDDEN), BOTH[1:], exchanged=False)
    folder = write_adapter(tmp_path, tensors, peft_version=None, target_parameters=BOTH[1:])
    with pytest.raises(AdapterError, match="peft_version"):
        read(checkpoint(HIDDEN), folder)


def test_experts_unfolded_one_by_one(tmp_path: Path) -> None:
    """Unsloth's 4-bit gpt-oss has a list of linear layers in place of each parameter; some experts may be missing."""
    factors = experts(24)
    tensors: dict[str, Tensor] = {}
    adapted = (1, 3, 7)
    for parent in sorted({path.rpartition(".")[0] for path in factors}):
        gate, up, (down_a, down_b) = (factors[f"{parent}.{name}_proj"] for name in ("gate", "up", "down"))
        a, b = in_turn(gate, up)
        for e in adapted:
            tensors |= pair(f"{parent}.gate_up_projs.{e}", a[e], b[e])
            tensors |= pair(f"{parent}.down_projs.{e}", down_a[e], down_b[e])
    folder = write_adapter(
        tmp_path,
        tensors,
        r=3,
        lora_alpha=3,
        alpha_pattern={r".*gate_up_projs\.\d+": 6},
        base_model_name_or_path="unsloth/gpt-oss-20b-unsloth-bnb-4bit",
    )
    adapter = read(checkpoint(), folder)
    lost = [e for e in range(NUM_EXPERTS) if e not in adapted]
    for _, b in factors.values():
        b[lost] = 0
    assert_deltas_equal(products(adapter.sites), products(factors))
    assert adapter.layout == "per-expert"


GATE_UP = "model.layers.0.mlp.experts"
REFUSED: list[tuple[str, tuple[int, ...], tuple[int, ...], str]] = [
    (f"{GATE_UP}.gate_up_proj", (8, 3, 64), (8, 48, 3), "in turn"),
    (f"{GATE_UP}.gate_up_projs.3", (6, 64), (48, 3), "lora_B"),
    (f"{GATE_UP}.gate_up_projs.8", (3, 64), (48, 3), "no place"),
    (f"{GATE_UP}.gate_up_projs.03", (3, 64), (48, 3), "no place"),
    ("model.layers.0.mlp.gate", (3, 64), (8, 3), "no place"),
]


@pytest.mark.parametrize(("module", "a", "b", "word"), REFUSED)
def test_what_cannot_be_placed(tmp_path: Path, module: str, a: tuple[int, ...], b: tuple[int, ...], word: str) -> None:
    good = pair("model.layers.0.self_attn.q_proj", torch.ones(3, 64), torch.ones(64, 3))
    folder = write_adapter(tmp_path, good | pair(module, torch.ones(a), torch.ones(b)))
    with pytest.raises(AdapterError, match=word) as caught:
        read(checkpoint(), folder)
    assert module in str(caught.value)


def test_parameters_that_are_biases_are_refused(tmp_path: Path) -> None:
    folder = write_adapter(
        tmp_path, fused(experts(24), BOTH, exchanged=False), target_parameters=[*BOTH, "mlp.experts.down_proj_bias"]
    )
    with pytest.raises(AdapterError, match="down_proj_bias"):
        read(checkpoint(), folder)


def test_sites_are_the_model_s_own() -> None:
    model = checkpoint()
    sites: Mapping[str, SiteShape] = read_sites(model)[0]
    hf = GptOssForCausalLM.from_pretrained(model)
    for path, site in sites.items():
        parent, _, name = path.rpartition(".")
        if site.kind == "experts":
            parameter = "down_proj" if name == "down_proj" else "gate_up_proj"
            outputs = site.out_features * (1 if name == "down_proj" else 2)
            assert hf.get_parameter(f"{parent}.{parameter}").shape == (NUM_EXPERTS, site.in_features, outputs)
        else:
            shape = (site.in_features, site.out_features)
            assert tuple(hf.get_parameter(f"{path}.weight").shape) == (shape if name == "embed_tokens" else shape[::-1])


def run(capsys: pytest.CaptureFixture[str], *argv: object, status: int = 0) -> str:
    capsys.readouterr()
    assert main(["adapter", *map(str, argv)]) == status
    out, err = capsys.readouterr()
    return err if status else out


@pytest.mark.parametrize("unfolded", [False, True])
def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str], unfolded: bool) -> None:
    """With the weights, with config.json alone, and without a model."""
    model, factors = checkpoint(), experts(24)
    tensors, patterns = fused(factors, BOTH, exchanged=False), {"experts.gate_up_proj": 6, "experts.down_proj": 3}
    if unfolded:
        tensors, patterns = {}, {r"gate_up_projs\.\d+": 6}
        for parent in sorted({path.rpartition(".")[0] for path in factors}):
            gate, up, down = (factors[f"{parent}.{name}_proj"] for name in ("gate", "up", "down"))
            for name, (a, b) in {"gate_up_projs": in_turn(gate, up), "down_projs": down}.items():
                for e in range(NUM_EXPERTS):
                    tensors |= pair(f"{parent}.{name}.{e}", a[e], b[e])
    folder = write_adapter(
        tmp_path / "adapter",
        tensors,
        r=3,
        lora_alpha=3,
        rank_pattern=patterns,
        alpha_pattern=patterns,
        target_parameters=BOTH,
        base_model_name_or_path="/models/x" if unfolded else "openai/gpt-oss-20b",
    )
    config_only = tmp_path / "config-only"
    config_only.mkdir()
    (config_only / "config.json").write_text((model / "config.json").read_text())
    full, shapes, alone = (
        json.loads(run(capsys, "inspect", folder, "--json", *option))
        for option in (("--model", model), ("--model", config_only), ())
    )
    assert full["digest"] == shapes["digest"] == alone["digest"]
    assert full["num_experts"] == alone["num_experts"] == NUM_EXPERTS
    assert full["coverage"] == shapes["coverage"] > 0
    assert "no safetensors" in shapes["notes"][-1]
    assert "‖ΔW‖" in run(capsys, "inspect", folder, "--model", config_only)
    hf = GptOssForCausalLM.from_pretrained(model)
    for module, bare in zip(full["modules"], shapes["modules"], strict=True):
        name = module["module"].removeprefix("experts.")
        paths = [p for p in factors if p.endswith(name)]
        weights = [
            hf.get_parameter(p)
            if name == "down_proj"
            else hf.get_parameter(p.replace(name, "gate_up_proj"))[..., int(name == "up_proj") :: 2]
            for p in paths
        ]
        deltas = torch.stack([products({p: factors[p]})[p] for p in paths])
        assert module["relative_norm"] == pytest.approx(
            float(deltas.norm() / torch.stack(weights).detach().norm()), rel=1e-4
        )
        assert bare["relative_norm"] is None


def test_inspect_beside_quantised_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The published files hold the experts in MXFP4: only their norms cannot be told."""
    model = Path(shutil.copytree(checkpoint(), tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    for name in [n for n in weights if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        del weights[name]
        weights |= {f"{name}_{part}": torch.zeros(NUM_EXPERTS, 4, dtype=torch.uint8) for part in ("blocks", "scales")}
    save_file(weights, model / "model.safetensors")
    tensors = fused(experts(24), BOTH, exchanged=False)
    tensors |= pair("model.layers.0.self_attn.q_proj", torch.ones(3, 64), torch.ones(64, 3))
    folder = write_adapter(tmp_path / "adapter", tensors, target_parameters=BOTH)
    report = json.loads(run(capsys, "inspect", folder, "--model", model, "--json"))
    norms = {m["module"]: m["relative_norm"] for m in report["modules"]}
    assert norms.pop("q_proj") > 0
    assert norms == dict.fromkeys(["experts.gate_proj", "experts.up_proj", "experts.down_proj"])


def test_other_tools_say_that_the_model_is_not_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_adapter(tmp_path / "a", fused(experts(24), BOTH, exchanged=False), target_parameters=BOTH)
    assert "GptOssForCausalLM" in run(capsys, "verify", folder, "--model", checkpoint(), status=1)
    error = run(capsys, "convert", folder, tmp_path / "b", "--layout", "fused", "--model", checkpoint(), status=1)
    assert "one layout" in error
