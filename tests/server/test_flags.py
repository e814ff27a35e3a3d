"""Every source, their order, and each way to get a setting wrong."""

import json
from pathlib import Path

import pytest

from loraplex.engine.config import Config
from loraplex.server.flags import build_parser, parse
from loraplex.server.setting_sources import FlagError
from loraplex.server.settings import settings


def config(*argv: str, env: dict[str, str] | None = None) -> Config:
    return parse(argv, env or {})


def refusal(*argv: str, env: dict[str, str] | None = None) -> str:
    with pytest.raises(FlagError) as caught:
        config(*argv, env=env)
    text = str(caught.value)
    assert "\n" not in text
    return text


def yaml_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    return str(path)


def test_defaults() -> None:
    found = config("some/model")
    assert found.model.model_path == "some/model"
    assert found.model.served_names == ("some/model",)
    assert (found.server.host, found.server.port) == ("127.0.0.1", 8000)
    assert found.lora.enable_lora is False


@pytest.mark.parametrize(
    "argv", [["m"], ["--model-path", "m"], ["--model=m"], ["--port", "9", "m"], ["--model_path=m"]]
)
def test_model_may_be_given_in_every_way(argv: list[str]) -> None:
    assert config(*argv).model.model_path == "m"


def test_each_source_overrides_the_one_before(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "port: 1\npage_size: 1\nmax-running-requests: 1\n")
    env = {"LORAPLEX_PAGE_SIZE": "2", "LORAPLEX_MAX_RUNNING_REQUESTS": "2"}
    found = config("m", "--config", file, "--max-running-requests", "3", env=env)
    assert found.server.port == 1
    assert found.cache.page_size == 2
    assert found.scheduler.max_running_requests == 3
    assert found.scheduler.chunked_prefill_size == 2048
    assert config("m", env={"LORAPLEX_CONFIG": file}).server.port == 1


def test_a_source_overrides_in_another_spelling(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "enable_prefix_caching: false\nseed: 4\n")
    assert config("m", "--config", file).cache.disable_radix_cache is True
    found = config("m", "--config", file, "--enable-prefix-caching", env={"LORAPLEX_RANDOM_SEED": "5"})
    assert found.cache.disable_radix_cache is False
    assert found.model.random_seed == 5


@pytest.mark.parametrize(
    ("flags", "group", "field", "value"),
    [
        ("--tensor-parallel-size 2", "parallel", "tp_size", 2),
        ("--tp 2", "parallel", "tp_size", 2),
        ("--max-model-len 64", "model", "context_length", 64),
        ("--max-num-seqs 3", "scheduler", "max_running_requests", 3),
        ("--max-num-batched-tokens 64", "scheduler", "chunked_prefill_size", 64),
        ("--chunked-prefill-size -1", "scheduler", "chunked_prefill_size", -1),
        ("--block-size 4", "cache", "page_size", 4),
        ("--kv-cache-dtype fp8", "cache", "kv_cache_dtype", "fp8_e4m3"),
        ("--kv-cache-dtype bfloat16", "cache", "kv_cache_dtype", "bfloat16"),
        ("--attention-backend torch", "model", "attention_backend", "torch"),
        ("--seed 9", "model", "random_seed", 9),
        ("--tokenizer t", "model", "tokenizer_path", "t"),
        ("--max-loras 2", "lora", "max_loras_per_batch", 2),
        ("--max-cpu-loras 9", "lora", "max_loaded_loras", 9),
        ("--no-enable-prefix-caching", "cache", "disable_radix_cache", True),
        ("--enable-prefix-caching", "cache", "disable_radix_cache", False),
        ("--enable-lora", "lora", "enable_lora", True),
        ("--no_lora_use_virtual_experts", "lora", "lora_use_virtual_experts", False),
        ("--lora-backend torch_native", "lora", "lora_backend", "torch"),
        ("--mem-fraction-static .5", "cache", "mem_fraction_static", 0.5),
        ("--lora-memory 8GB", "lora", "memory_bytes", 8 * 10**9),
        ("--lora-host-memory 512MiB", "lora", "host_memory_bytes", 512 << 20),
        ("--lora-eviction-policy fifo", "lora", "lora_eviction_policy", "fifo"),
        ("--served-model-name a b", "model", "served_model_name", ("a", "b")),
        ("--api-key k1 --api-key k2", "server", "api_key", ("k1", "k2")),
        ("--adapter-root x --adapter-root y", "lora", "adapter_root", ("x", "y")),
        ("--lora-modules a=x --lora-paths b=y", "lora", "lora_paths", ("a=x", "b=y")),
    ],
)
def test_spellings(flags: str, group: str, field: str, value: object) -> None:
    assert getattr(getattr(config("m", *flags.split()), group), field) == value


def test_amounts_of_memory_in_a_file(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "lora-memory: 4096\nlora-host-memory: 1GiB\n")
    found = config("m", "--config", file).lora
    assert (found.memory_bytes, found.host_memory_bytes) == (4096, 1 << 30)


def test_lora_paths_in_every_form(tmp_path: Path) -> None:
    sglang = json.dumps({"lora_name": "b", "lora_path": "/y=1"})
    vllm = json.dumps({"name": "c", "path": "/z"})
    expected = (("a", "/x"), ("b", "/y=1"), ("c", "/z"), ("/w", "/w"), ("d", "dummy:rank=16,seed=3"))
    items = ["a=/x", sglang, vllm, "/w", "d=dummy:rank=16,seed=3"]
    assert config("m", "--lora-paths", *items).lora.adapters == expected
    assert config("m", env={"LORAPLEX_LORA_PATHS": json.dumps(items)}).lora.adapters == expected
    assert config("m", env={"LORAPLEX_LORA_PATHS": "a=/x 'b=/with space'"}).lora.adapters[1][1] == "/with space"
    lines = f"- a=/x\n- {sglang}\n- name: c\n  path: /z\n- /w\n- d=dummy:rank=16,seed=3\n"
    file = yaml_file(tmp_path, "lora_paths:\n" + lines)
    found = config("m", "--config", file)
    assert found.lora.adapters == expected
    assert found.lora.enable_lora is True


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--port x", "--port: 'x' is not an integer"),
        ("--port 1.5", "--port: '1.5' is not an integer"),
        ("--port", "--port: expected one argument"),
        ("--dtype int8", "--dtype: 'int8' is none of auto, float32"),
        ("--prot 1", "--prot is unknown; did you mean --port?"),
        ("--max-lora 1", "--max-lora is unknown; did you mean --max-loras?"),
        ("--zzzzzz", "--zzzzzz is unknown"),
        ("--port 1 --port 2", "--port is given twice (1 and 2)"),
        ("--max-loaded-loras 1 --max-loras 8", "--max-loaded-loras 1 must not be below --max-loras-per-batch 8"),
        ("other", "one MODEL_DIR is expected, not m other"),
        ("--model-path other", "m contradicts --model-path"),
        ("--seed 1 --random-seed 2", "--random-seed contradicts --seed"),
        (
            "--disable-radix-cache --enable-prefix-caching",
            "--enable-prefix-caching contradicts --disable-radix-cache",
        ),
        ("--enable-lora --no-enable-lora", "--no-enable-lora contradicts --enable-lora"),
        ("--lora-paths a=x --no-enable-lora", "--lora-paths contradicts --no-enable-lora"),
        ("--gpu-memory-utilization 0.9", "give --mem-fraction-static"),
        ("--trust-remote-code", "code that comes with a checkpoint is never run"),
        ("--lora-backend cuda", "--lora-backend"),
        ("--kv-cache-dtype int4", "--kv-cache-dtype: 'int4' is none of auto, bfloat16"),
        ("--attention-backend cuda", "--attention-backend: 'cuda' is none of auto, triton"),
        ("--lora-paths {", "is not a JSON object"),
        ('--lora-paths {"lora_name":"a"}', "must have exactly the keys"),
        ("--config nowhere.yaml", "--config nowhere.yaml: No such file"),
    ],
)
def test_wrong_command_lines(flags: str, words: str) -> None:
    assert words in refusal("m", *flags.split())


def test_an_unknown_name_is_not_likened_to_just_any_other() -> None:
    assert refusal("m", "--quantization", "fp8").endswith("--quantization is unknown")


def test_fewer_loaded_adapters_than_a_step_takes_by_default_lower_that_default() -> None:
    assert config("m", "--max-loaded-loras", "3").lora.max_loras_per_batch == 3
    assert config("m", "--max-loaded-loras", "30").lora.max_loras_per_batch == 8
    assert config("m", "--max-loaded-loras", "30", "--max-loras", "9").lora.max_loras_per_batch == 9


@pytest.mark.parametrize(
    ("line", "path"), [("model_path: nowhere", "nowhere"), ("lora_paths: [a=no/where, b=/no]", "no/where")]
)
def test_a_missing_relative_path_of_a_file_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = yaml_file(tmp_path, line)
    message = refusal("--config", file, env={"LORAPLEX_TOKENIZER_PATH": "elsewhere"} | model_for(line))
    assert message.startswith(f"{file}: {line.partition(':')[0]}: {path} does not exist")
    assert str(tmp_path) in message.removeprefix(file)
    (tmp_path / path).mkdir(parents=True)
    config("--config", file, env=model_for(line))


def model_for(line: str) -> dict[str, str]:
    return {} if line.startswith("model_path") else {"LORAPLEX_MODEL_PATH": "m"}


def test_the_same_value_twice_is_no_contradiction() -> None:
    assert config("m", "--seed", "1", "--random-seed", "1").model.random_seed == 1


def test_model_is_required() -> None:
    assert "MODEL_DIR is missing" in refusal()
    assert config(env={"LORAPLEX_MODEL_PATH": "m"}).model.model_path == "m"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", "prot is unknown; did you mean port?"),
        ("page-sizes: 1", "page-sizes is unknown; did you mean page_size?"),
        ("trust_remote_code: true", "trust_remote_code is refused"),
        ('port: "80"', "port: '80' is not an integer"),
        ("port: true", "port: True is not an integer"),
        ("port: null", "port: None is not an integer"),
        ("enable_lora: 'yes'", "enable_lora: 'yes' is not true or false"),
        ("host: 7", "host: 7 is not text"),
        ("served_model_name: [a, 7]", "served_model_name: 7 is not text"),
        ("mem_fraction_static: high", "mem_fraction_static: 'high' is not a number"),
        ("dtype: int8", "dtype: 'int8' is none of"),
        ("seed: 1\nrandom_seed: 2", "random_seed contradicts seed"),
        ("seed: 3\nport: 1\nport: 2", "serve.yaml: line 3: the key 'port' is given twice"),
        ("- port", "must hold a mapping"),
        ("port: [", "serve.yaml: line 1: expected the node content"),
        ("seed: 1\nport: 1: 2", "serve.yaml: line 2: mapping values are not allowed here"),
        ("page_size: 0", "--page-size must be at least 1, not 0 (page_size in"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, words: str) -> None:
    message = refusal("m", "--config", yaml_file(tmp_path, text))
    assert words in message
    assert "serve.yaml" in message


def test_file_values_of_the_right_type(tmp_path: Path) -> None:
    text = "mem_fraction_static: 0.5\nwatchdog_timeout: 3\ncontext_length: null\n"
    text += "served_model_name: a\nenable_lora: on\n"
    found = config("m", "--config", yaml_file(tmp_path, text))
    assert found.cache.mem_fraction_static == 0.5
    assert found.scheduler.watchdog_timeout == 3.0
    assert found.model.context_length is None
    assert found.model.served_model_name == ("a",)
    assert found.lora.enable_lora is True
    assert config("m", "--config", yaml_file(tmp_path, "")).server.port == 8000


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("LORAPLEX_PROT", "1", "LORAPLEX_PROT is unknown; did you mean LORAPLEX_PORT?"),
        ("LORAPLEX_PORT", "x", "LORAPLEX_PORT: 'x' is not an integer"),
        ("LORAPLEX_ENABLE_LORA", "maybe", "LORAPLEX_ENABLE_LORA: 'maybe' is not true or false"),
        ("LORAPLEX_TRUST_REMOTE_CODE", "1", "LORAPLEX_TRUST_REMOTE_CODE is refused"),
        (
            "LORAPLEX_PAGE_SIZE",
            "0",
            "--page-size must be at least 1, not 0 (LORAPLEX_PAGE_SIZE in the environment)",
        ),
    ],
)
def test_wrong_variables_are_named(variable: str, value: str, words: str) -> None:
    assert words in refusal("m", env={variable: value})


def test_variables_that_are_not_settings() -> None:
    env = {"LORAPLEX_TEST_FAIL_STEP": "3", "LORAPLEX_PORT": "", "PATH": "/bin", "LORAPLEX_ENABLE_LORA": "off"}
    assert config("m", env=env).server.port == 8000


def test_a_contradiction_between_sources_names_both(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "enable_lora: false\n")
    message = refusal("m", "--config", file, env={"LORAPLEX_LORA_PATHS": "a=x"})
    assert message.startswith("--lora-paths contradicts --no-enable-lora")
    assert f"enable_lora in {file}" in message
    assert "LORAPLEX_LORA_PATHS in the environment" in message


def test_help_has_a_line_with_the_default_for_every_flag() -> None:
    text = " ".join(build_parser().format_help().split())
    for setting in settings():
        start = text.index(f" --{setting.name}")
        assert "default" in text[start : start + 420] or setting.field == "model_path", setting.name
        for alias in setting.metadata["aliases"]:
            assert f"--{alias}" in text.replace("- ", "-"), alias


def test_help_calls_the_opposite_an_opposite() -> None:
    text = " ".join(build_parser().format_help().split())
    assert "[the opposite: --enable-prefix-caching]" in text
    assert "also --enable-prefix-caching" not in text


def test_no_two_flags_share_a_spelling() -> None:
    names = [name for setting in settings() for name in setting.spellings]
    assert len(names) == len(set(names))
