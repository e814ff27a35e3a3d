"""Scales: PEFT's rules for r, alpha, use_rslora and the two patterns."""

import json
import math
import time
from typing import Any

import pytest

from loraplex.engine.lora.adapter_config import AdapterConfig, parse_config
from loraplex.engine.lora.errors import AdapterError
from loraplex.engine.lora.patterns import PatternTable


def config(**fields: Any) -> AdapterConfig:
    return parse_config(json.dumps({"r": 4, "lora_alpha": 8} | fields).encode())


def test_worked_example() -> None:
    """The example of PEFT's own numbers: rank and alpha of each module after its patterns."""
    c = config(
        use_rslora=True,
        rank_pattern={"layers.1.self_attn.q_proj": 2, "k_proj": 8},
        alpha_pattern={"q_proj": 16},
    )
    scales = {}
    for module in ("layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "layers.0.self_attn.k_proj"):
        scales[module] = c.scale(f"model.{module}", c.rank(f"model.{module}"))
    assert list(scales.values()) == pytest.approx([8.0, 11.3137, 2.8284], abs=1e-4)


@pytest.mark.parametrize(("r", "rslora", "expected"), [(16, True, 2.0), (16, False, 0.5), (4, False, 2.0)])
def test_plain_and_rank_stabilised(r: int, rslora: bool, expected: float) -> None:
    assert config(r=r, use_rslora=rslora).scale("model.layers.0.self_attn.q_proj", r) == expected


@pytest.mark.parametrize("text", [b'{"r": 4}', b'{"r": 4, "lora_alpha": null}'])
def test_missing_alpha_is_8(text: bytes) -> None:
    assert parse_config(text).scale("x", 4) == 2.0


def test_alpha_need_not_be_whole() -> None:
    assert config(lora_alpha=0.5).scale("x", 4) == 0.125
    assert config(lora_alpha=-8).scale("x", 4) == -2.0


Q0, Q11 = "model.layers.0.self_attn.q_proj", "model.layers.11.self_attn.q_proj"


@pytest.mark.parametrize(
    ("patterns", "module", "expected"),
    [
        ({"q_proj": 1}, Q0, 1),
        ({"proj": 1}, Q0, None),
        ({"self_attn": 1}, Q0, None),
        ({"layers.1.self_attn.q_proj": 1}, Q11, None),
        ({"model.layers.0.self_attn.q_proj": 1}, Q0, 1),
        ({"q_proj": 1, "self_attn.q_proj": 2}, Q0, 1),
        ({"self_attn.q_proj": 2, "q_proj": 1}, Q0, 2),
        ({"(q|v)_proj": 1}, Q0, 1),
        ({"k_proj|q_proj": 1}, Q0, 1),
        ({r".*\.q_proj": 1}, Q0, 1),
        ({r"layers\.[0-9]+\.self_attn\.q_proj": 1}, Q11, 1),
        ({r"layers\.\d\.self_attn\.q_proj": 1}, Q11, None),
        ({r"^model\.layers\.0\..*": 3, "q_proj": 1}, Q0, 3),
        ({"q_proj": 1, r"^model\.layers\.0\..*": 3}, Q0, 1),
        ({r"^layers\.0\..*": 3, "q_proj": 1}, Q0, 1),
        ({"experts.down_proj": 5}, "model.layers.0.mlp.experts.down_proj", 5),
        ({r".*\.gate_up_proj": 6}, "model.layers.0.mlp.experts.gate_up_proj", 6),
        ({}, Q0, None),
    ],
)
def test_pattern_matching(patterns: dict[str, float], module: str, expected: float | None) -> None:
    """The same verdict as PEFT's own matching."""
    from peft.utils.other import get_pattern_key

    assert patterns.get(get_pattern_key(list(patterns), module)) == expected
    assert PatternTable("alpha_pattern", patterns).find(module) == expected


def test_many_plain_patterns_are_fast() -> None:
    names = [f"model.layers.{i}.mlp.experts.{e}.{p}_proj" for i in range(24) for e in range(64) for p in ("gate", "up")]
    table = PatternTable("rank_pattern", {name: i for i, name in enumerate(names)})
    started = time.monotonic()
    assert [table.find(name) for name in names] == list(range(len(names)))
    assert time.monotonic() - started < 2


def test_slow_expressions_run_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.engine.lora.patterns._TIME_BUDGET", 0.05)
    table = PatternTable("alpha_pattern", {f".*.*.*.*{i}": 1 for i in range(60)})
    with pytest.raises(AdapterError, match="alpha_pattern"):
        for i in range(10_000):
            table.find(f"model.layers.{i}.mlp.experts.x.gate_proj")


def test_scale_of_fused_parameters_is_of_their_own_rank() -> None:
    c = config(use_rslora=True, rank_pattern={"experts.down_proj": 3}, alpha_pattern={"gate_up_proj": 32})
    assert c.scale("model.layers.0.mlp.experts.gate_up_proj", 8) == pytest.approx(32 / math.sqrt(8))
    assert c.scale("model.layers.0.mlp.experts.down_proj", 3) == pytest.approx(8 / math.sqrt(3))
