"""The sites of a checkpoint, from its config.json alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from loraplex.engine.lora.adapter import PlainSite, SiteShape
from loraplex.engine.model_config import checkpoint_dtype, read_config_json, read_model_spec
from loraplex.engine.models import build_model
from loraplex.engine.models.sites import lora_sites
from loraplex.engine.parallel import Parallel

_GPT_OSS = "GptOssForCausalLM"


def read_sites(folder: Path) -> tuple[Mapping[str, SiteShape], torch.dtype]:
    """Sites by path, and the checkpoint's dtype. Raises ValueError naming config.json and the field.

    gpt-oss is known here although it cannot be served: its adapters can be looked at.
    """
    path, raw = read_config_json(folder, "--model")
    if raw.get("architectures") == [_GPT_OSS]:
        return _gpt_oss_sites(path, raw), checkpoint_dtype(path, raw)
    spec = read_model_spec(folder, argument="--model")
    model = build_model(spec, Parallel(), spec.dtype, torch.device("meta"))
    return lora_sites(model), spec.dtype


def _gpt_oss_sites(path: Path, raw: Mapping[str, Any]) -> dict[str, SiteShape]:
    def size(field: str) -> int:
        value = raw.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"{path}: {field} must be a positive integer, not {value!r}")
        return value

    hidden, inner, experts = (size(field) for field in ("hidden_size", "intermediate_size", "num_local_experts"))
    q, kv = (size(field) * size("head_dim") for field in ("num_attention_heads", "num_key_value_heads"))
    vocabulary = size("vocab_size")
    dense = {"self_attn.q_proj": (hidden, q), "self_attn.k_proj": (hidden, kv), "self_attn.v_proj": (hidden, kv)}
    dense |= {"self_attn.o_proj": (q, hidden), "mlp.router": (hidden, experts)}
    routed = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    sites = [PlainSite("model.embed_tokens", "embedding", vocabulary, hidden)]
    for layer in (f"model.layers.{i}" for i in range(size("num_hidden_layers"))):
        sites += [PlainSite(f"{layer}.{name}", "dense", *widths) for name, widths in dense.items()]
        sites += [
            PlainSite(
                f"{layer}.mlp.experts.{name}", "experts", *widths, experts, is_interleaved=True, is_transposed=True
            )
            for name, widths in routed.items()
        ]
    sites.append(PlainSite("lm_head", "dense", hidden, vocabulary))
    return {site.path: site for site in sites}
