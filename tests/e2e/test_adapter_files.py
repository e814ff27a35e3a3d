"""Adapter folders through a real server: good ones answer as the oracle says, bad ones change nothing."""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from kit.adapters import make_a, make_adapter
from kit.oracle import Oracle
from kit.server import Server, assert_idle, serve

PROMPT = "hello adapters"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def server(t1: Path, root: Path) -> Iterator[Server]:
    flags = ("--device", "cpu", "--max-total-tokens", "1024", "--max-lora-rank", "64", "--served-model-name", "base")
    with serve(t1, *flags, "--enable-lora", "--adapter-root", str(root)) as url:
        yield url


@pytest.fixture(autouse=True)
def idle_afterwards(server: Server) -> Iterator[None]:
    yield
    assert_idle(server)


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server}{path}", json=body, timeout=60, trust_env=False)


def served(server: Server) -> set[str]:
    return {m["id"] for m in httpx.get(f"{server}/v1/models", trust_env=False).json()["data"]}


def prompt_logprobs(server: Server, model: str) -> list[float]:
    answer = post(
        server, "/v1/completions", model=model, prompt=PROMPT, max_tokens=1, temperature=0, echo=True, logprobs=1
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["logprobs"]["token_logprobs"][1 : len(PROMPT)]


def expected_logprobs(oracle: Oracle, adapter: Path | None) -> list[float]:
    ids = list(PROMPT.encode())
    table = oracle.logprobs(ids, adapter)
    return [float(table[t, ids[t + 1]]) for t in range(len(ids) - 1)]


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


@pytest.mark.parametrize("kind", ["A1", "ATT", "EXP", "FUSED", "MIXTRAL", "STACK", "OUTER", "GATE_UP", "ALL"])
def test_layouts_answer_as_the_oracle(server: Server, root: Path, t1: Path, t1_oracle: Oracle, kind: str) -> None:
    source = make_a(1, t1) if kind == "A1" else make_adapter(t1, kind, r=3, std=0.15)
    folder = copied(source, root / kind)
    answer = post(server, "/v1/load_lora_adapter", lora_name=kind, lora_path=str(folder))
    assert answer.status_code == 200, answer.text
    got = torch.tensor(prompt_logprobs(server, kind))
    expected = torch.tensor(expected_logprobs(t1_oracle, folder))
    assert (got - expected).abs().max() <= 1e-4
    assert (got - torch.tensor(expected_logprobs(t1_oracle, None))).abs().max() > 0.05
    assert post(server, "/v1/unload_lora_adapter", lora_name=kind).status_code == 200
    assert kind not in served(server)


def truncate(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def set_field(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


BAD: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "truncated": (truncate, 422, "truncated"),
    "no-config": (lambda folder: (folder / "adapter_config.json").unlink(), 404, "adapter_config.json"),
    "no-tensors": (lambda folder: (folder / "adapter_model.safetensors").unlink(), 404, "adapter_model.safetensors"),
    "dora": (set_field(use_dora=True), 422, "DoRA"),
    "pissa": (set_field(init_lora_weights="pissa"), 422, "init_lora_weights"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_adapters_are_refused(server: Server, root: Path, t1: Path, t1_oracle: Oracle, case: str) -> None:
    spoil, status, word = BAD[case]
    folder = copied(make_adapter(t1, "ATT"), root / case)
    spoil(folder)
    answer = post(server, "/v1/load_lora_adapter", lora_name=case, lora_path=str(folder))
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    assert word in message
    assert str(root) not in message
    assert served(server) == {"base"}
    assert post(server, "/v1/completions", model=case, prompt="a").status_code == 404
    got = torch.tensor(prompt_logprobs(server, "base"))
    assert (got - torch.tensor(expected_logprobs(t1_oracle, None))).abs().max() <= 1e-4


def test_rank_over_the_limit(server: Server, root: Path, t1: Path) -> None:
    folder = copied(make_adapter(t1, "ATT", r=65), root / "r65")
    answer = post(server, "/v1/load_lora_adapter", lora_name="r65", lora_path=str(folder))
    assert answer.status_code == 422
    message = answer.json()["error"]["message"]
    assert "65" in message
    assert "64" in message


def test_g29_loading_twice_leaves_one(server: Server, root: Path, t1: Path, t1_oracle: Oracle) -> None:
    """In turn and at once; another adapter under the same name is refused."""
    folder, other = copied(make_a(1, t1), root / "one"), copied(make_a(2, t1), root / "two")

    def load(path: Path) -> int:
        return post(server, "/v1/load_lora_adapter", lora_name="x", lora_path=str(path)).status_code

    with ThreadPoolExecutor(8) as pool:
        for load_all in (map, pool.map):
            statuses = list(load_all(load, [folder] * 8))
            assert set(statuses) <= {200, 409}
            assert 200 in statuses
            assert load(other) == 409
            got = torch.tensor(prompt_logprobs(server, "x"))
            assert (got - torch.tensor(expected_logprobs(t1_oracle, folder))).abs().max() <= 1e-4
            assert post(server, "/v1/unload_lora_adapter", lora_name="x").status_code == 200
            assert served(server) == {"base"}
            assert post(server, "/v1/completions", model="x", prompt="a").status_code == 404
            assert post(server, "/v1/unload_lora_adapter", lora_name="x").status_code == 404
            assert_idle(server)
