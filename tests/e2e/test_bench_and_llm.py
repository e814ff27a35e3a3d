"""`loraplex bench serve` on a real server, and LLM beside it: both ways give the same tokens."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from kit.adapters import make_a
from kit.server import Server, assert_idle, serve

from loraplex import LLM, SamplingParams
from loraplex.server.cli import main


@pytest.fixture(scope="module")
def folders(t1: Path) -> dict[str, Path]:
    return {f"A{i}": make_a(i, t1) for i in (1, 2)}


@pytest.fixture(scope="module")
def server(t1: Path, folders: dict[str, Path]) -> Iterator[Server]:
    loaded = [f"{name}={path}" for name, path in folders.items()]
    with serve(t1, "--served-model-name", "t1", "--context-length", "256", "--lora-paths", *loaded) as s:
        yield s


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_bench_serve(server: Server, tmp_path: Path, endpoint: str) -> None:
    output = tmp_path / "report.json"
    flags = ["--base-url", server, "--endpoint", endpoint, "--num-prompts", "12", "--input-len", "10"]
    flags += ["--output-len", "5", "--vocab-size", "256", "--ignore-eos", "--concurrency", "4", "--no-progress"]
    flags += ["--adapters-from-server", "--base-share", "0.3", "--output", str(output)]
    assert main(["bench", "serve", *flags]) == 0
    result = json.loads(output.read_text())
    assert (result["completed"], result["output_tokens"]) == (12, 60)
    assert set(result["adapters"]) == {"(base)", "A1", "A2"}
    assert result["ttft_ms"]["p50"] > 0
    if endpoint == "completions":
        assert result["prompt_tokens"] == 120
    assert_idle(server)


def test_the_vocabulary_comes_from_the_model_folder(server: Server) -> None:
    flags = ["--base-url", f"{server}/v1", "--num-prompts", "3", "--output-len", "2", "--ignore-eos", "--no-progress"]
    assert main(["bench", "serve", *flags]) == 0


def test_llm_answers_as_the_server_does(server: Server, t1: Path, folders: dict[str, Path]) -> None:
    prompts, names = ["The quick", "brown fox", "jumps"], ["t1", "A1", "A2"]
    expected = []
    for prompt, name in zip(prompts, names, strict=True):
        body = {"model": name, "prompt": prompt, "max_tokens": 20, "temperature": 0, "return_token_ids": True}
        answer = httpx.post(f"{server}/v1/completions", json=body, timeout=60, trust_env=False).json()["choices"][0]
        expected.append((answer["text"], answer["token_ids"], answer["finish_reason"], answer["stop_reason"]))
    with LLM(t1, adapters=folders, max_model_len=256, served_model_name="t1") as llm:
        adapters = [None if name == "t1" else name for name in names]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20), adapter=adapters)
    got = [output.outputs[0] for output in outputs]
    assert [(c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in got] == expected
