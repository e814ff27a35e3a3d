"""Checks between settings; each message names the flag."""

from typing import Any

import pytest

from loraplex.engine import config as c


@pytest.mark.parametrize(
    ("group", "values", "words"),
    [
        (c.ModelConfig, {"context_length": 0}, "--context-length must be at least 1"),
        (c.ModelConfig, {"random_seed": -1}, "--random-seed must be at least 0"),
        (
            c.ModelConfig,
            {"served_model_name": ("a:b",)},
            "--served-model-name: the name 'a:b' may not contain ':'",
        ),
        (
            c.ModelConfig,
            {"served_model_name": ("a", "a")},
            "--served-model-name: the name 'a' is given twice",
        ),
        (c.ModelConfig, {"served_model_name": ("a\nb",)}, "--served-model-name"),
        (
            c.ModelConfig,
            {"skip_tokenizer_init": True, "chat_template": "f"},
            "--skip-tokenizer-init contradicts --chat",
        ),
        (c.CacheConfig, {"mem_fraction_static": 1.0}, "--mem-fraction-static must be between 0 and 1"),
        (c.CacheConfig, {"mem_fraction_static": float("nan")}, "--mem-fraction-static"),
        (c.CacheConfig, {"page_size": 0}, "--page-size must be at least 1"),
        (c.CacheConfig, {"max_total_tokens": 8}, "--max-total-tokens 8 holds no page of --page-size 16"),
        (c.SchedulerConfig, {"max_running_requests": 0}, "--max-running-requests"),
        (c.SchedulerConfig, {"max_queued_requests": -1}, "--max-queued-requests"),
        (c.SchedulerConfig, {"chunked_prefill_size": 0}, "--chunked-prefill-size must be at least 1, or -1"),
        (c.SchedulerConfig, {"chunked_prefill_size": -2}, "--chunked-prefill-size"),
        (c.SchedulerConfig, {"watchdog_timeout": float("nan")}, "--watchdog-timeout"),
        (c.ParallelConfig, {"tp_size": 0}, "--tp-size"),
        (c.LoRAConfig, {"lora_paths": ("a=x", "a=y")}, "--lora-paths: the name 'a' is given twice"),
        (c.LoRAConfig, {"lora_paths": ("a:b=x",)}, "may not contain ':'"),
        (c.LoRAConfig, {"lora_paths": ("dummy:rank=4",)}, "may not contain ':'"),
        (c.LoRAConfig, {"lora_paths": ("=x",)}, "--lora-paths: '' is empty"),
        (
            c.LoRAConfig,
            {"lora_paths": ("a=x",), "enable_lora": False},
            "--lora-paths contradicts --no-enable-lora",
        ),
        (c.LoRAConfig, {"max_lora_chunk_size": 48}, "--max-lora-chunk-size must be 16, 32, 64 or 128, not 48"),
        (c.LoRAConfig, {"max_loras_per_batch": 0}, "--max-loras-per-batch"),
        (
            c.LoRAConfig,
            {"max_loaded_loras": 4},
            "--max-loaded-loras 4 must not be below --max-loras-per-batch 8",
        ),
        (
            c.LoRAConfig,
            {"max_loaded_loras": 1, "max_loras_per_batch": 1, "lora_paths": ("a=x", "b=y")},
            "--max-loaded-loras 1 is less than the 2 adapters of --lora-paths",
        ),
        (c.LoRAConfig, {"lora_memory": "lots"}, "--lora-memory: 'lots' is no amount of memory; write 8GB, 512MiB"),
        (c.LoRAConfig, {"lora_host_memory": "auto"}, "--lora-host-memory: 'auto' is no amount of memory"),
        (c.ServerConfig, {"port": 65536}, "--port"),
        (c.ServerConfig, {"api_key": ("",)}, "--api-key"),
    ],
)
def test_each_check_names_its_flags(group: Any, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        group(**values)
    assert words in str(caught.value)


def test_adapter_and_base_names_are_apart() -> None:
    lora = c.LoRAConfig(lora_paths=("base=x",))
    with pytest.raises(ValueError, match="'base' has a name of the base model"):
        c.Config(model=c.ModelConfig(model_path="m", served_model_name=("other", "base")), lora=lora)
    with pytest.raises(ValueError, match="give --served-model-name"):
        c.Config(model=c.ModelConfig(model_path="a:b"))


def test_derived_values() -> None:
    assert c.LoRAConfig(lora_paths=("a=x=y",)).adapters == (("a", "x=y"),)
    assert c.LoRAConfig(lora_paths=("a=x",)).enable_lora is True
    assert c.LoRAConfig().enable_lora is False
    assert c.LoRAConfig().memory_bytes is None
    assert c.LoRAConfig().host_memory_bytes is None
    assert c.LoRAConfig(lora_memory="8GB", lora_host_memory="1GiB").memory_bytes == 8 * 10**9
    assert c.LoRAConfig(lora_memory="8GB", lora_host_memory="1GiB").host_memory_bytes == 1 << 30
    assert c.LoRAConfig().table_rows == 256
    assert c.LoRAConfig(max_loaded_loras=9).table_rows == 9
    assert c.LoRAConfig(max_loras_per_batch=300).table_rows == 300
    assert c.SchedulerConfig(chunked_prefill_size=-1).prefill_budget > 10**9
    assert c.SchedulerConfig(chunked_prefill_size=7).prefill_budget == 7
    assert c.ModelConfig(model_path="m", tokenizer_path="t").tokenizer_dir == "t"
    assert c.ModelConfig(model_path="m").tokenizer_dir == "m"
