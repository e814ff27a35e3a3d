"""Known architectures, and how to build one. A new model is one file here and one line in `ARCHITECTURES`."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loraplex.engine.layers.checkpoint import HasConstants
from loraplex.engine.parallel import Parallel

if TYPE_CHECKING:
    from loraplex.engine.model_config import ModelSpec
    from loraplex.engine.models.decoder import CausalLM


@dataclass(frozen=True)
class Architecture:
    model_type: str
    target: str
    """module:Class, imported when a checkpoint asks for it."""
    is_moe: bool


ARCHITECTURES = {
    "Qwen3MoeForCausalLM": Architecture("qwen3_moe", "loraplex.engine.models.qwen3_moe:Qwen3MoeForCausalLM", True),
    "Qwen2MoeForCausalLM": Architecture("qwen2_moe", "loraplex.engine.models.qwen2_moe:Qwen2MoeForCausalLM", True),
    "MixtralForCausalLM": Architecture("mixtral", "loraplex.engine.models.mixtral:MixtralForCausalLM", True),
    "Qwen3ForCausalLM": Architecture("qwen3", "loraplex.engine.models.qwen3:Qwen3ForCausalLM", False),
    "LlamaForCausalLM": Architecture("llama", "loraplex.engine.models.llama:LlamaForCausalLM", False),
}


def build_model(spec: "ModelSpec", parallel: Parallel, dtype: torch.dtype, device: torch.device) -> "CausalLM":
    """This rank's part of the model, every parameter NaN until `load_weights` or `init_dummy` fills it.

    On the meta device it has shapes only, enough for `sites.lora_sites`.
    """
    module, _, name = ARCHITECTURES[spec.architecture].target.partition(":")
    model_class = getattr(importlib.import_module(module), name)
    with _default_dtype(dtype), device:
        model: CausalLM = model_class(spec, parallel)
    model.requires_grad_(False).eval()
    if device.type != "meta":
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
        for layer in model.modules():
            if isinstance(layer, HasConstants):
                layer.fill_constants()
    return model


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
