"""adapter_config.json: the fields that decide the scale, and the refusal of what plain LoRA maths cannot serve."""

import json
import math
from dataclasses import dataclass
from typing import Any

from loraplex.engine.lora.errors import AdapterError
from loraplex.engine.lora.patterns import PatternTable

CONFIG_FILE = "adapter_config.json"
TIED = ("embed_tokens", "lm_head")
_DEFAULT_ALPHA = 8  # what PEFT takes when lora_alpha is missing

_SAME_BASE_INITS = ("gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights (besides true and false) that leave the base weights as they were."""

_REFUSED_WHEN_SET = {
    "use_dora": "DoRA adapters (weight magnitudes) are not supported",
    "lora_bias": "a bias in lora_B is not supported",
    "modules_to_save": "replaced whole weights are not supported; train the adapter without them",
    "trainable_token_indices": "trained token embeddings are not supported",
    "alora_invocation_tokens": "activated LoRA (aLoRA) is not supported",
    "layer_replication": "replicated layers are not supported",
    "use_qalora": "QALoRA is not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "megatron_config": "Megatron layers are not supported",
    "kasa_config": "KaSA is not supported",
    "arrow_config": "Arrow routing between adapters is not supported",
    "monteclora_config": "MonteCLoRA is not supported",
}
_WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "velora_config",
}
"""Fields about training or about which tensors exist: the tensors in the file decide that."""
_READ = {
    "peft_type",
    "peft_version",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
    "ensure_weight_tying",
    "bias",
    "init_lora_weights",
}


@dataclass(frozen=True)
class AdapterConfig:
    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: PatternTable
    alpha_pattern: PatternTable
    target_parameters: tuple[str, ...]
    ensure_weight_tying: bool
    """A tied head was adapted by the embedding's own matrices."""
    peft_version: str | None
    by_unsloth: bool
    """The config says that Unsloth made the adapter, or that its base came from there."""
    for_gpt_oss: bool
    """The config's base model is called gpt-oss."""
    notes: tuple[str, ...]

    def rank(self, module: str) -> int:
        """The rank that the config states for a module; the tensors' own rank is what counts."""
        value = self.rank_pattern.find(module)
        return self.r if value is None else int(value)

    def states_rank(self, module: str) -> bool:
        """Whether the config's rank of this module counts for its scale, and not its tensors'."""
        return self.ensure_weight_tying and module.rpartition(".")[2] in TIED

    def scale(self, module: str, rank: int) -> float:
        """alpha/r, or alpha/√r with use_rslora: `rank` of the tensors, alpha after alpha_pattern.

        A tied embedding and head share matrices, and so their rank, but PEFT trains each with the rank and alpha that
        the config states for its own name.

        Args:
            module: name as PEFT matches it: without prefix, `….experts.gate_up_proj` for a fused parameter.
        """
        value = self.alpha_pattern.find(module)
        alpha = self.lora_alpha if value is None else value
        if self.states_rank(module):
            rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def parse_config(text: bytes) -> AdapterConfig:
    """Reads the file's bytes. Raises AdapterError naming the field that is wrong or not supported."""
    fields = _load_object(text)
    _refuse_unsupported(fields)
    origin = json.dumps([fields.get(k) for k in ("auto_mapping", "base_model_name_or_path")]).lower()
    return AdapterConfig(
        r=_rank("r", fields.get("r")),
        lora_alpha=_DEFAULT_ALPHA if fields.get("lora_alpha") is None else _alpha("lora_alpha", fields["lora_alpha"]),
        use_rslora=_flag(fields, "use_rslora"),
        rank_pattern=_patterns(fields, "rank_pattern", _rank),
        alpha_pattern=_patterns(fields, "alpha_pattern", _alpha),
        target_parameters=_strings(fields, "target_parameters"),
        ensure_weight_tying=_flag(fields, "ensure_weight_tying"),
        peft_version=_optional_string(fields, "peft_version"),
        by_unsloth="unsloth" in origin,
        for_gpt_oss="gptoss" in origin.replace("-", "").replace("_", ""),
        notes=_unknown_fields(fields),
    )


def _load_object(text: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(text.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG_FILE} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(fields, dict):
        raise AdapterError(f"{CONFIG_FILE} must hold a JSON object")
    return fields


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    if (peft_type := fields.get("peft_type", "LORA")) != "LORA":
        raise AdapterError(f"peft_type is {_show(peft_type)}: only LORA adapters can be served")
    if (bias := fields.get("bias") or "none") != "none":
        raise AdapterError(f"bias is {_show(bias)}: adapters with trained biases are not supported, only 'none'")
    for field, reason in _REFUSED_WHEN_SET.items():
        if _is_set(fields.get(field)):
            raise AdapterError(f"{field} is set: {reason}")
    parameters = fields.get("target_parameters")
    biases = (
        [t for t in parameters if isinstance(t, str) and t.endswith("_bias")] if isinstance(parameters, list) else []
    )
    if biases:
        raise AdapterError(f"target_parameters has {_show(biases[0])}: adapters of biases are not supported")
    init = fields.get("init_lora_weights", True)
    if init is not None and not isinstance(init, bool) and init not in _SAME_BASE_INITS:
        raise AdapterError(
            f"init_lora_weights is {_show(init)}: it changes the base weights; convert the adapter to plain LoRA with "
            "PEFT and set the field to true"
        )


def _unknown_fields(fields: dict[str, Any]) -> tuple[str, ...]:
    """Fields of a newer PEFT or another tool. What looks like a variant of LoRA is refused, the rest is noted."""
    unknown = {k: v for k, v in fields.items() if k not in _WITHOUT_EFFECT | _READ | _REFUSED_WHEN_SET.keys()}
    for field, value in unknown.items():
        if _is_set(value) and (field.startswith("use_") or field.endswith("_config")):
            raise AdapterError(f"{_show(field)} is set: this field is not known here and may change the computation")
    return tuple(
        f"field {_show(field)} of {CONFIG_FILE} is not known and was ignored" for field in sorted(unknown)[:20]
    )


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value != [] and value != {}


def _rank(field: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise AdapterError(f"{field} must be a positive whole number, not {_show(value)}")
    return value


def _alpha(field: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1e-30 < abs(value) < 1e30:
        raise AdapterError(f"{field} must be a number other than 0, not {_show(value)}")
    return float(value)


def _flag(fields: dict[str, Any], field: str) -> bool:
    value = fields.get(field)
    if value is not None and not isinstance(value, bool):
        raise AdapterError(f"{field} must be true or false, not {_show(value)}")
    return bool(value)


def _patterns(fields: dict[str, Any], field: str, check: Any) -> PatternTable:
    value = fields.get(field)
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise AdapterError(f"{field} must be an object of module patterns, not {_show(value)}")
    return PatternTable(field, {key: check(f"{field}[{_show(key)}]", v) for key, v in value.items()})


def _strings(fields: dict[str, Any], field: str) -> tuple[str, ...]:
    value = fields.get(field)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise AdapterError(f"{field} must be a list of strings, not {_show(value)}")
    return tuple(value)


def _optional_string(fields: dict[str, Any], field: str) -> str | None:
    value = fields.get(field)
    if value is not None and not isinstance(value, str):
        raise AdapterError(f"{field} must be a string, not {_show(value)}")
    return value


def _show(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**50 else "a huge number"
    return text if len(text) <= 80 else text[:80] + "…"
