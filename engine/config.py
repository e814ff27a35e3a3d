"""Every setting of the server, once. A field is a command-line flag, a YAML key and a `LORAPLEX_*` variable.

Groups are frozen; checks between fields live in `__post_init__` as `ValueError` naming the flag. A config is never
written to after parsing: what is derived from it is a property, what is derived from the model or the device is
computed where it is used.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from loraplex.engine.units import parse_bytes

NO_LIMIT = 2**31 - 1
DEFAULT_TABLE_ROWS = 256
"""Resident adapters the tables have room for. A row of Qwen3-30B-A3B's takes 15 kB."""


def flag(
    default: Any,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    metavar: str | None = None,
    negates: str | None = None,
    repeat: bool = False,
    item: Callable[[Any], str] | None = None,
    value_aliases: dict[str, str] | None = None,
    amount: bool = False,
) -> Any:
    """A dataclass field that is also a flag.

    aliases: other projects' spellings of the same meaning, without the dashes.
    negates: a spelling of the opposite meaning (boolean fields).
    repeat: a list whose flag takes one value and may be given several times.
    item: puts one item of a list, from any source, into its written form; raises ValueError.
    value_aliases: other spellings of values.
    amount: text whose value may be a plain number in a file.
    """
    assert not isinstance(default, list | dict), "a default must be immutable: use a tuple"
    metadata = {
        "help": help,
        "aliases": aliases,
        "metavar": metavar,
        "negates": negates,
        "repeat": repeat,
        "item": item,
        "value_aliases": value_aliases or {},
        "amount": amount,
    }
    return dataclasses.field(default=default, metadata=metadata)


def adapter_item(item: Any) -> str:
    """One adapter as `NAME=PATH`, from `NAME=PATH`, a plain `PATH` (the path is then the name, as in SGLang), or an
    object `{"lora_name", "lora_path"}` (SGLang) or `{"name", "path"}` (vLLM), as a mapping or as JSON text."""
    if isinstance(item, str) and item.lstrip().startswith("{"):
        try:
            item = json.loads(item)
        except ValueError as error:
            raise ValueError(f"{item!r} is not a JSON object: {error}") from None
    if isinstance(item, dict):
        return _adapter_from_object(item)
    if not isinstance(item, str):
        raise ValueError(f"{item!r} is neither NAME=PATH nor an object with a name and a path")
    return item if "=" in item else f"{item}={item}"


def _adapter_from_object(item: dict[Any, Any]) -> str:
    for name_key, path_key in (("lora_name", "lora_path"), ("name", "path")):
        if set(item) == {name_key, path_key}:
            name, path = item[name_key], item[path_key]
            if not isinstance(name, str) or not isinstance(path, str) or "=" in name:
                raise ValueError(f"{item!r}: name and path must be strings, and the name free of '='")
            return f"{name}={path}"
    raise ValueError(f'{item!r} must have exactly the keys "lora_name" and "lora_path", or "name" and "path"')


def _check_at_least(low: int, group: Any, *names: str) -> None:
    for name in names:
        value = getattr(group, name)
        if value is not None and value < low:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {low}, not {value}")


def _check_amount(flag_name: str, text: str) -> None:
    try:
        parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{flag_name}: {error}") from None


def _check_names(flag_name: str, names: Sequence[str]) -> None:
    """Names share one space with `served:adapter`, so none may hold a colon."""
    seen = set()
    for name in names:
        if not name or name != name.strip() or not name.isprintable():
            raise ValueError(f"{flag_name}: {name!r} is empty, has space around it or is not printable")
        if ":" in name:
            raise ValueError(f"{flag_name}: the name {name!r} may not contain ':' (it separates model and adapter)")
        if name in seen:
            raise ValueError(f"{flag_name}: the name {name!r} is given twice")
        seen.add(name)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """model"""

    model_path: str = flag("", "folder with config.json and safetensors", aliases=("model",), metavar="DIR")
    tokenizer_path: str | None = flag(
        None, "folder of the tokenizer (default: the model's)", aliases=("tokenizer",), metavar="DIR"
    )
    skip_tokenizer_init: bool = flag(False, "serve token ids only, load no tokenizer")
    chat_template: str | None = flag(None, "Jinja file that replaces the tokenizer's chat template", metavar="FILE")
    served_model_name: tuple[str, ...] = flag(
        (), "names of the base model in the API (default: the model as typed)", metavar="NAME"
    )
    load_format: Literal["auto", "dummy"] = flag("auto", "auto reads safetensors; dummy makes random weights")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        "auto", "auto: float32 on CPU, the checkpoint's on CUDA"
    )
    context_length: int | None = flag(
        None, "tokens of prompt + completion (default: the model's)", aliases=("max-model-len",)
    )
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "where the model runs; auto: CUDA when there is one")
    attention_backend: Literal["auto", "triton", "torch"] = flag(
        "auto", "kernels of attention; auto: triton on CUDA, torch (slow, for checking) on CPU"
    )
    random_seed: int = flag(
        0, "start of the random numbers of requests that bring no seed, and of dummy weights", aliases=("seed",)
    )
    sampling_defaults: Literal["model", "openai"] = flag(
        "model", "model: temperature, top_p and top_k of generation_config.json; openai: 1, 1 and off"
    )
    logprobs_mode: Literal["raw", "processed"] = flag(
        "raw",
        "raw: log-softmax of the model's logits; processed: after bias, penalties, temperature and masks",
    )

    def __post_init__(self) -> None:
        _check_at_least(1, self, "context_length")
        _check_at_least(0, self, "random_seed")
        _check_names("--served-model-name", self.served_model_name)
        if self.skip_tokenizer_init and (self.tokenizer_path is not None or self.chat_template is not None):
            other = "--tokenizer-path" if self.tokenizer_path is not None else "--chat-template"
            raise ValueError(f"--skip-tokenizer-init contradicts {other}: leave one out")

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names that mean the base model; the first is the one answers carry."""
        return self.served_model_name or (self.model_path,)

    @property
    def tokenizer_dir(self) -> str:
        return self.model_path if self.tokenizer_path is None else self.tokenizer_path


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """memory and prefix cache"""

    mem_fraction_static: float = flag(0.88, "share of device memory for weights, adapters and KV (CUDA)")
    max_total_tokens: int | None = flag(
        None, "size of the KV pool in tokens (default: what fits; on CPU a quarter of the free memory, at most 4 GiB)"
    )
    page_size: int = flag(16, "tokens in one KV page", aliases=("block-size",))
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "fp8_e4m3"] = flag(
        "auto",
        "how keys and values are stored; auto: as the model computes; fp8_e4m3: half of 16-bit's memory, less exact",
        value_aliases={"fp8": "fp8_e4m3"},
    )
    disable_radix_cache: bool = flag(
        False, "do not reuse the KV of common prompt prefixes", negates="enable-prefix-caching"
    )

    def __post_init__(self) -> None:
        if not 0 < self.mem_fraction_static < 1:
            raise ValueError(f"--mem-fraction-static must be between 0 and 1, not {self.mem_fraction_static}")
        _check_at_least(1, self, "page_size", "max_total_tokens")
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            raise ValueError(
                f"--max-total-tokens {self.max_total_tokens} holds no page of --page-size {self.page_size} tokens"
            )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """scheduling"""

    max_running_requests: int = flag(256, "sequences that run at once", aliases=("max-num-seqs",))
    max_queued_requests: int | None = flag(None, "sequences that may wait; more answer 503 (default: no limit)")
    chunked_prefill_size: int = flag(
        2048,
        "prompt tokens computed in one step; -1: no limit (on CUDA the context length)",
        aliases=("max-num-batched-tokens",),
    )
    disable_overlap_schedule: bool = flag(False, "prepare a step only when the one before it is done (CUDA)")
    watchdog_timeout: float = flag(30.0, "seconds without a sign of life before /health answers 503", metavar="SECONDS")

    def __post_init__(self) -> None:
        _check_at_least(1, self, "max_running_requests")
        _check_at_least(0, self, "max_queued_requests")
        if self.chunked_prefill_size < 1 and self.chunked_prefill_size != -1:
            raise ValueError(
                f"--chunked-prefill-size must be at least 1, or -1 for no limit, not {self.chunked_prefill_size}"
            )
        if not 0 < self.watchdog_timeout < float("inf"):
            raise ValueError(f"--watchdog-timeout must be a positive time, not {self.watchdog_timeout}")

    @property
    def prefill_budget(self) -> int:
        """Prompt tokens of one step; a number no step reaches when chunking is off."""
        return NO_LIMIT if self.chunked_prefill_size == -1 else self.chunked_prefill_size


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """CUDA graphs"""

    disable_cuda_graph: bool = flag(False, "launch every kernel of every step from Python")
    cuda_graph_max_bs: int | None = flag(
        None, "largest decode batch with a graph (default: --max-running-requests, at most 64 below 40 GiB, else 512)"
    )
    cuda_graph_max_tokens: int | None = flag(
        None,
        "largest prefill or mixed step with a graph, in tokens (default: the largest step, at most 8192 prompt tokens)",
    )

    def __post_init__(self) -> None:
        _check_at_least(1, self, "cuda_graph_max_bs", "cuda_graph_max_tokens")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """parallelism"""

    tp_size: int = flag(1, "tensor-parallel ranks, one process each", aliases=("tp", "tensor-parallel-size"))

    def __post_init__(self) -> None:
        _check_at_least(1, self, "tp_size")


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """LoRA adapters"""

    enable_lora: bool | None = flag(None, "accept adapters (default: when --lora-paths or --adapter-root is given)")
    lora_paths: tuple[str, ...] = flag(
        (),
        "adapters to load at start: NAME=PATH, PATH (which is then the name too), or a JSON object "
        '{"lora_name", "lora_path"}',
        aliases=("lora-modules",),
        metavar="NAME=PATH",
        item=adapter_item,
    )
    adapter_root: tuple[str, ...] = flag(
        (), "run-time loads only from below this folder; repeatable", metavar="DIR", repeat=True
    )
    lora_backend: Literal["auto", "csgmv", "triton", "torch"] = flag(
        "auto",
        "kernels of the dense layers' LoRA; auto: csgmv on CUDA, torch on CPU",
        value_aliases={"torch_native": "torch"},
    )
    max_lora_chunk_size: int | None = flag(
        None, "tokens of one adapter that csgmv multiplies at once: 16, 32, 64 or 128 (default: by token count)"
    )
    lora_use_virtual_experts: bool = flag(True, "MoE LoRA by virtual experts; off: adapter by adapter")
    max_loras_per_batch: int = flag(
        8, "distinct adapters in one step (default: 8, or --max-loaded-loras if less)", aliases=("max-loras",)
    )
    max_loaded_loras: int | None = flag(None, "adapters loaded at once (default: no limit)", aliases=("max-cpu-loras",))
    max_lora_rank: int = flag(512, "largest rank accepted")
    lora_memory: str = flag(
        "auto",
        "device memory of each rank for resident adapters, as 8GB or 512MiB; auto: the adapters of --lora-paths and "
        "one more, or a tenth of what the weights leave",
        metavar="BYTES",
        amount=True,
    )
    lora_host_memory: str | None = flag(
        None, "host memory of each rank for loaded adapters (default: no limit)", metavar="BYTES", amount=True
    )
    lora_eviction_policy: Literal["lru", "fifo"] = flag(
        "lru", "which adapter leaves the device for another: least recently used, or first come"
    )
    lora_strict_loading: bool = flag(True, "refuse an adapter with a tensor that has no place")

    def __post_init__(self) -> None:
        if self.lora_paths and self.enable_lora is False:
            raise ValueError("--lora-paths contradicts --no-enable-lora: leave one out")
        if self.enable_lora is None:
            asked = bool(self.lora_paths or self.adapter_root)
            object.__setattr__(self, "enable_lora", asked)  # readers see a bool
        if self.max_lora_chunk_size not in (None, 16, 32, 64, 128):
            raise ValueError(f"--max-lora-chunk-size must be 16, 32, 64 or 128, not {self.max_lora_chunk_size}")
        _check_at_least(1, self, "max_loras_per_batch", "max_loaded_loras", "max_lora_rank")
        if self.max_loaded_loras is not None:
            if self.max_loaded_loras < self.max_loras_per_batch:
                raise ValueError(
                    f"--max-loaded-loras {self.max_loaded_loras} must not be below "
                    f"--max-loras-per-batch {self.max_loras_per_batch}"
                )
            if self.max_loaded_loras < len(self.lora_paths):
                raise ValueError(
                    f"--max-loaded-loras {self.max_loaded_loras} is less than the {len(self.lora_paths)} adapters "
                    "of --lora-paths"
                )
        _check_names("--lora-paths", [name for name, _ in self.adapters])
        for name, text in (("--lora-memory", self.lora_memory), ("--lora-host-memory", self.lora_host_memory)):
            if text is not None and (text != "auto" or name == "--lora-host-memory"):
                _check_amount(name, text)

    @property
    def memory_bytes(self) -> int | None:
        """--lora-memory; None for auto."""
        return None if self.lora_memory == "auto" else parse_bytes(self.lora_memory)

    @property
    def host_memory_bytes(self) -> int | None:
        return None if self.lora_host_memory is None else parse_bytes(self.lora_host_memory)

    @property
    def table_rows(self) -> int:
        """Adapters that can be resident at once, memory aside."""
        loaded = self.max_loaded_loras or DEFAULT_TABLE_ROWS
        return max(loaded, self.max_loras_per_batch, len(self.lora_paths))

    @property
    def adapters(self) -> tuple[tuple[str, str], ...]:
        """(name, path) of each adapter to load at start."""
        pairs = (adapter_item(item).partition("=") for item in self.lora_paths)
        return tuple((name, path) for name, _, path in pairs)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """HTTP"""

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8000, "port to listen on; 0: any free one")
    api_key: tuple[str, ...] = flag(
        (), "keys a request must bring as a bearer token (default: none needed)", metavar="KEY"
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "least severe message shown")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port must be between 0 and 65535, not {self.port}")
        if "" in self.api_key:
            raise ValueError("--api-key: a key may not be empty")


@dataclass(frozen=True, kw_only=True)
class Config:
    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    graphs: GraphConfig = GraphConfig()
    parallel: ParallelConfig = ParallelConfig()
    lora: LoRAConfig = LoRAConfig()
    server: ServerConfig = ServerConfig()

    def __post_init__(self) -> None:
        served = self.model.served_names
        for name, _ in self.lora.adapters:
            if name in served:
                raise ValueError(
                    f"--lora-paths: the adapter {name!r} has a name of the base model (--served-model-name); rename one"
                )
        if any(":" in name for name in served):
            raise ValueError(
                f"the model path {self.model.model_path!r} contains ':' and cannot be the model's name; "
                "give --served-model-name"
            )
