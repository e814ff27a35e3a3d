"""What a checkpoint folder says about its model: `ModelSpec` from config.json, end tokens beside it.

config.json comes in two generations of spelling (rope_theta + rope_scaling or rope_parameters, torch_dtype or dtype,
num_experts or num_local_experts). transformers' own config classes fill in each architecture's defaults; what they
would silently pass over (a misspelt generation, a contradiction, a feature not built here) is refused before.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from loraplex.engine.models import ARCHITECTURES
from loraplex.engine.parallel import Parallel

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies do not depend on the sequence's length."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class RopeSpec:
    inv_freq: tuple[float, ...]
    """[head_dim / 2] fp32 values."""
    attention_factor: float
    """Multiplies cos and sin."""


@dataclass(frozen=True)
class MoeSpec:
    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: frozenset[int]
    """Layers that have experts; the others are dense."""
    shared_intermediate_size: int
    """Width of the shared expert, 0 without one."""


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only model, as the layers need it. Sizes are global, before any split over ranks."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_length: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    dtype: torch.dtype
    """The checkpoint's; float32 when it says none."""
    rope: RopeSpec
    moe: MoeSpec | None

    def kv_shape(self, num_tokens: int, parallel: Parallel) -> tuple[int, int, int]:
        """Shape of one layer's k (or v) cache on this rank."""
        return num_tokens, parallel.local_units(self.num_kv_heads), self.head_dim


def read_config_json(folder: str | Path, argument: str = "--model-path") -> tuple[Path, dict[str, Any]]:
    """Path and content of `folder`/config.json. Raises ValueError, naming the argument that gave the folder."""
    path = Path(folder) / "config.json"
    raw = _read_json(path)
    if raw is None:
        raise ValueError(f"{path} does not exist: {argument} must be a folder with config.json and safetensors")
    return path, raw


def read_model_spec(folder: str | Path, argument: str = "--model-path") -> ModelSpec:
    """Reads `folder`/config.json. Raises ValueError naming file and field for whatever cannot be served.

    Args:
        argument: what the user gave the folder by.
    """
    path, raw = read_config_json(folder, argument)
    architecture = _architecture(path, raw)
    _refuse_unbuilt(path, raw)
    rope_type = _check_rope(path, raw)
    config = _load_config(path, raw)
    read = _Fields(path, config)
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    if getattr(config, "num_key_value_heads", None) is None:
        kv_heads = heads
    else:
        kv_heads = read.size("num_key_value_heads")
    if heads % kv_heads:
        raise ValueError(f"{path}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if getattr(config, "head_dim", None) is not None:
        head_dim = read.size("head_dim")
    elif hidden % heads:
        raise ValueError(
            f"{path}: hidden_size {hidden} is no multiple of num_attention_heads {heads}, head_dim missing"
        )
    else:
        head_dim = hidden // heads
    attention_bias = bool(getattr(config, "attention_bias", False))
    return ModelSpec(
        architecture=architecture,
        model_type=config.model_type,
        vocab_size=read.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.size("intermediate_size"),
        num_layers=read.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=read.number("rms_norm_eps"),
        context_length=_context_length(read, config, rope_type),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=bool(getattr(config, "qkv_bias", attention_bias)),
        o_bias=attention_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        dtype=checkpoint_dtype(path, raw),
        rope=_rope(path, config, rope_type, head_dim),
        moe=_moe(read, raw, config) if ARCHITECTURES[architecture].is_moe else None,
    )


def read_eos_token_ids(folder: str | Path, vocab_size: int) -> tuple[int, ...]:
    """End tokens: generation_config.json's, or config.json's when that says none. Raises ValueError naming the file."""
    path = Path(folder) / "generation_config.json"
    eos = (_read_json(path) or {}).get("eos_token_id")
    if eos is None:
        path = Path(folder) / "config.json"
        eos = (_read_json(path) or {}).get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if any(not _is_int(i) or i < 0 for i in ids):
        raise ValueError(f"{path}: eos_token_id must be a token id or a list of them, not {eos!r}")
    if any(i >= vocab_size for i in ids):
        raise ValueError(f"{path}: eos_token_id {eos!r} is not below vocab_size {vocab_size}")
    return tuple(ids)


class _Fields:
    """Typed reads of config fields; errors name file and field."""

    def __init__(self, path: Path, config: PreTrainedConfig) -> None:
        self.path = path
        self.config = config

    def size(self, name: str) -> int:
        value: Any = getattr(self.config, name, None)
        if not _is_int(value) or value <= 0:
            raise ValueError(f"{self.path}: {name} must be a positive integer, not {value!r}")
        return int(value)

    def number(self, name: str) -> float:
        value = getattr(self.config, name, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(f"{self.path}: {name} must be a positive number, not {value!r}")
        return float(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return raw


def _architecture(path: Path, raw: Mapping[str, Any]) -> str:
    known = ", ".join(ARCHITECTURES)
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ValueError(f"{path}: architectures must name one model class, not {names!r}; known are {known}")
    entry = ARCHITECTURES.get(str(names[0]))
    if entry is None:
        raise ValueError(f"{path}: architecture {names[0]!r} is not known; known are {known}")
    if raw.get("model_type") != entry.model_type:
        raise ValueError(
            f"{path}: model_type {raw.get('model_type')!r} does not go with {names[0]}, which has {entry.model_type!r}"
        )
    for field in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "intermediate_size",
    ):
        if field not in raw:
            raise ValueError(f"{path}: {field} is missing")
    return str(names[0])


def _refuse_unbuilt(path: Path, raw: Mapping[str, Any]) -> None:
    if raw.get("model_type") == "mixtral" and raw.get("sliding_window"):
        raise ValueError(
            f"{path}: sliding_window is {raw['sliding_window']}; sliding-window attention is not supported"
        )
    if raw.get("use_sliding_window"):
        raise ValueError(f"{path}: use_sliding_window is true; sliding-window attention is not supported")
    layer_types = raw.get("layer_types") or []
    other = sorted({str(kind) for kind in layer_types} - {"full_attention"})
    if other:
        raise ValueError(f"{path}: layer_types has {', '.join(other)}; only full_attention is supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{path}: hidden_act {raw['hidden_act']!r} is not supported; only silu is")
    if raw.get("quantization_config"):
        raise ValueError(f"{path}: quantization_config: quantised checkpoints are not supported")


def _check_rope(path: Path, raw: Mapping[str, Any]) -> str:
    """The rope type, after refusing unknown ones and two spellings that disagree."""
    old, new = raw.get("rope_scaling"), raw.get("rope_parameters")
    for field, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{path}: {field} must be an object, not {value!r}")
        if value and any(isinstance(inner, dict) for inner in value.values()):
            raise ValueError(f"{path}: {field} differs by layer type, which is not supported")
    both = {**(old or {}), **(new or {})}
    if old and new and any(old[key] != both[key] for key in old):
        raise ValueError(f"{path}: rope_scaling and rope_parameters disagree")
    theta = both.get("rope_theta", raw.get("rope_theta"))
    if raw.get("rope_theta") not in (None, theta):
        raise ValueError(f"{path}: rope_theta {raw['rope_theta']} and rope_parameters.rope_theta {theta} disagree")
    if theta is not None and (isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0):
        raise ValueError(f"{path}: rope_theta must be a positive number, not {theta!r}")
    rope_type = both.get("rope_type", both.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"{path}: rope type {rope_type!r} is not supported; known are {', '.join(ROPE_TYPES)}")
    return str(rope_type)


def _load_config(path: Path, raw: Mapping[str, Any]) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(path.parent, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the config classes' own validation raises several kinds
        raise ValueError(f"{path}: {error}") from error


def _context_length(read: _Fields, config: PreTrainedConfig, rope_type: str) -> int:
    """max_position_embeddings, or what yarn stretches its original length to."""
    length = read.size("max_position_embeddings")
    rope = config.rope_parameters
    if rope_type == "yarn" and rope.get("original_max_position_embeddings"):
        return max(length, int(rope["original_max_position_embeddings"] * rope["factor"]))
    return length


def _rope(path: Path, config: PreTrainedConfig, rope_type: str, head_dim: int) -> RopeSpec:
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return RopeSpec(tuple((1.0 / config.rope_parameters["rope_theta"] ** exponents).tolist()), 1.0)
    try:
        inv_freq, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{path}: rope_parameters of type {rope_type!r} cannot be used: {error!r}") from error
    if 2 * len(inv_freq) != head_dim:
        raise ValueError(f"{path}: partial_rotary_factor: rotating a part of each head is not supported")
    return RopeSpec(tuple(inv_freq.tolist()), float(factor))


def _moe(read: _Fields, raw: Mapping[str, Any], config: PreTrainedConfig) -> MoeSpec:
    spellings = [raw[name] for name in ("num_experts", "num_local_experts") if raw.get(name) is not None]
    if not spellings:
        raise ValueError(f"{read.path}: num_experts is missing")
    num_experts = spellings[0]
    if not _is_int(num_experts) or num_experts <= 0 or num_experts != spellings[-1]:
        raise ValueError(f"{read.path}: num_experts / num_local_experts must be one positive integer, not {spellings}")
    top_k = read.size("num_experts_per_tok")
    if top_k > num_experts:
        raise ValueError(f"{read.path}: num_experts_per_tok {top_k} is more than num_experts {num_experts}")
    layers = range(read.size("num_hidden_layers"))
    if config.model_type == "mixtral":
        return MoeSpec(
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=read.size("intermediate_size"),
            norm_topk_prob=True,
            sparse_layers=frozenset(layers),
            shared_intermediate_size=0,
        )
    step = read.size("decoder_sparse_step")
    dense = set(config.mlp_only_layers or [])
    shared = read.size("shared_expert_intermediate_size") if config.model_type == "qwen2_moe" else 0
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=read.size("moe_intermediate_size"),
        norm_topk_prob=bool(config.norm_topk_prob),
        sparse_layers=frozenset(i for i in layers if i not in dense and (i + 1) % step == 0),
        shared_intermediate_size=shared,
    )


def checkpoint_dtype(path: Path, raw: Mapping[str, Any]) -> torch.dtype:
    """What config.json says of the weights' type; float32 when nothing."""
    names = {str(raw[key]).removeprefix("torch.") for key in ("dtype", "torch_dtype") if raw.get(key) is not None}
    if len(names) > 1:
        raise ValueError(f"{path}: dtype and torch_dtype disagree")
    name = names.pop() if names else "float32"
    if name not in DTYPES:
        raise ValueError(f"{path}: dtype {name!r} is not supported; known are {', '.join(DTYPES)}")
    return DTYPES[name]
