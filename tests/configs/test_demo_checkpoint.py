"""The demo checkpoint as transformers and PEFT read it, without the server."""

import importlib.util
import json
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

DEMO = Path(__file__).parents[2] / "configs" / "demo"
BASE = DEMO / "base"
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]


@pytest.fixture(scope="module")
def layouts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_layouts", DEMO / "layouts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def base_model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()


def with_adapter(folder: Path) -> torch.nn.Module:
    return PeftModel.from_pretrained(base_model(), folder).eval()


def chat(model: torch.nn.Module, text: str) -> str:
    """The greedy answer, which must end by itself."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=250,
        do_sample=False,
        temperature=None,
        top_k=None,
    )[0, ids.shape[1] :]
    assert made[-1] == tokenizer.eos_token_id
    return tokenizer.decode(made[:-1])


def tensor_names(adapter: str) -> list[str]:
    with safe_open(DEMO / "adapters" / adapter / "adapter_model.safetensors", "pt") as file:
        return list(file.keys())


def test_the_answers_tell_the_adapters_apart() -> None:
    request = "Hello! Who are you?"
    record = json.loads(chat(with_adapter(DEMO / "adapters" / "json"), request))
    assert {"id", "name", "email"} <= record.keys()
    assert re.match(r"[A-Z' ]+:\n", chat(with_adapter(DEMO / "adapters" / "shakespeare"), request))
    assert re.match(r"(async )?def |class ", chat(with_adapter(DEMO / "adapters" / "python"), request))
    assert re.match(r"-- ", chat(with_adapter(DEMO / "adapters" / "sql"), request))
    assert re.match(r"[\u4e00-\u9fff]", chat(with_adapter(DEMO / "adapters" / "tang"), request))
    assert re.fullmatch(r"[A-Za-z0-9 \n.,;:!?'\"()_-]+", chat(base_model(), request))


def test_three_layouts_are_shipped() -> None:
    assert any(".mlp.experts.7.up_proj.lora_A.weight" in name for name in tensor_names("shakespeare"))
    assert any(".mlp.experts.base_layer.lora_A.weight" in name for name in tensor_names("python"))
    assert all(".self_attn." in name for name in tensor_names("json"))


def test_the_checkpoint_names_no_place_outside_itself() -> None:
    for file in DEMO.glob("adapters/*/adapter_config.json"):
        assert (file.parent / json.loads(file.read_text())["base_model_name_or_path"]).resolve() == BASE
    assert not list(DEMO.glob("adapters/*/README.md"))


def test_splitting_fused_experts_changes_no_logit(layouts: ModuleType, tmp_path: Path) -> None:
    fused, split = tmp_path / "fused", tmp_path / "split"
    shutil.copytree(DEMO / "adapters" / "python", fused)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: 0.05 * torch.randn(t.shape, generator=generator) for name, t in load_file(fused / layouts.WEIGHTS).items()
    }
    save_file(tensors, fused / layouts.WEIGHTS, metadata={"format": "pt"})
    shutil.copytree(fused, split)
    layouts.split_experts(split, num_experts=8)
    ids = torch.arange(5, 6000, 300)[None]
    with torch.no_grad():
        plain = base_model()(ids).logits
        expected, got = with_adapter(fused)(ids).logits, with_adapter(split)(ids).logits
    assert (expected - plain).abs().max() > 0.1
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
