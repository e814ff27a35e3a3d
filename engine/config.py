"""Every setting of the server, once. A field is a command-line flag, a YAML key and a `LORAPLEX_*` variable.

Groups are frozen; checks between fields live in `__post_init__` as `ValueError` naming the flag. A config is never
written to after parsing: what is derived from the model or the device is computed where it is used.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal


def flag(default: Any, help: str, *, aliases: tuple[str, ...] = (), metavar: str | None = None, **extra: Any) -> Any:
    """A dataclass field that is also a flag. `aliases` are other projects' spellings of the same meaning (without --)."""
    metadata = {"help": help, "aliases": aliases, "metavar": metavar, **extra}
    if isinstance(default, list | dict):
        raise TypeError("use a tuple")
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """model"""

    model_path: str = flag("", "folder with config.json and safetensors", aliases=("model",))
    tokenizer_path: str | None = flag(None, "folder of the tokenizer (default: the model's)", aliases=("tokenizer",))
    skip_tokenizer_init: bool = flag(False, "serve token ids only, load no tokenizer")
    chat_template: str | None = flag(None, "Jinja file that replaces the tokenizer's chat template")
    served_model_name: tuple[str, ...] = flag((), "names of the base model in the API (default: the model as typed)")
    load_format: Literal["auto", "dummy"] = flag("auto", "auto reads safetensors; dummy makes random weights")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        "auto", "auto: float32 on CPU, the checkpoint's on CUDA"
    )
    context_length: int | None = flag(
        None, "tokens of prompt + completion (default: the model's)", aliases=("max-model-len",)
    )
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "where the model runs")
    random_seed: int = flag(0, "seed of requests that bring none, and of dummy weights", aliases=("seed",))
    sampling_defaults: Literal["model", "openai"] = flag(
        "model", "model: temperature, top_p and top_k of generation_config.json; openai: 1, 1 and off"
    )
    logprobs_mode: Literal["raw", "processed"] = flag(
        "raw",
        "raw: log-softmax of the model's logits; processed: after bias, penalties, temperature and masks",
    )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """memory and prefix cache"""

    mem_fraction_static: float = flag(0.88, "share of device memory for weights, adapters and KV (CUDA)")
    max_total_tokens: int | None = flag(None, "size of the KV pool in tokens (default: what fits)")
    page_size: int = flag(16, "tokens in one KV page", aliases=("block-size",))
    disable_radix_cache: bool = flag(
        False, "do not reuse the KV of common prompt prefixes", negates="enable-prefix-caching"
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """scheduling"""

    max_running_requests: int = flag(256, "sequences that run at once", aliases=("max-num-seqs",))
    max_queued_requests: int | None = flag(None, "sequences that may wait; more answer 503 (default: no limit)")
    chunked_prefill_size: int = flag(2048, "prompt tokens computed in one step", aliases=("max-num-batched-tokens",))
    watchdog_timeout: float = flag(30.0, "seconds without a sign of life before /health answers 503")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """parallelism"""

    tp_size: int = flag(1, "tensor-parallel ranks, one process each", aliases=("tp", "tensor-parallel-size"))


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """LoRA adapters"""

    enable_lora: bool = flag(False, "accept adapters (implied by --lora-paths)")
    lora_paths: tuple[str, ...] = flag((), "adapters to load at start", aliases=("lora-modules",), metavar="NAME=PATH")
    adapter_root: tuple[str, ...] = flag((), "run-time loads only from below these folders", metavar="DIR", repeat=True)
    lora_backend: Literal["torch", "csgmv", "triton"] = flag("torch", "kernels of the dense layers' LoRA")
    lora_use_virtual_experts: bool = flag(True, "MoE LoRA by virtual experts; off: adapter by adapter")
    max_loras_per_batch: int = flag(8, "distinct adapters in one step", aliases=("max-loras",))
    max_loaded_loras: int | None = flag(None, "adapters loaded at once (default: no limit)", aliases=("max-cpu-loras",))
    max_lora_rank: int = flag(512, "largest rank accepted")
    lora_strict_loading: bool = flag(True, "refuse an adapter with a tensor that has no place")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """HTTP"""

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8000, "port to listen on")
    api_key: tuple[str, ...] = flag((), "keys a request must bring as a bearer token (default: open)")
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "least severe message shown")


@dataclass(frozen=True, kw_only=True)
class Config:
    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    lora: LoRAConfig = LoRAConfig()
    server: ServerConfig = ServerConfig()
