"""What the README promises: the preset serves, its adapters are told apart at a glance, the openai client works."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from kit.server import Server, assert_idle, serve
from openai import OpenAI

ROOT = Path(__file__).parents[2]
NAMES = ["demo", "shakespeare", "python", "json", "tang", "sql"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    here = os.getcwd()
    os.chdir(ROOT)  # the preset's paths are relative to the repository
    try:
        with serve("configs/demo/base", "--config", "configs/serve/demo.yaml", "--dtype", "float32") as s:
            yield s
    finally:
        os.chdir(here)


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


def chat(client: OpenAI, model: str) -> str:
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Hello! Who are you?"}], temperature=0, max_tokens=200
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content
    return answer.choices[0].message.content


def test_adapters_answer_in_their_own_way(client: OpenAI, server: Server) -> None:
    assert {m.id for m in client.models.list()} == set(NAMES)
    answers = {name: chat(client, name) for name in NAMES}
    assert answers["shakespeare"].split("\n")[0].isupper()
    assert answers["python"].startswith("def ")
    assert {"name", "email"} <= json.loads(answers["json"]).keys()
    assert "SELECT" in answers["sql"]
    assert any("一" <= c <= "鿿" for c in answers["tang"])
    assert answers["demo"].isascii()
    assert not any(c in answers["demo"] for c in "{}_()")
    assert_idle(server)


def test_thirty_two_at_once_answer_as_alone(client: OpenAI, server: Server) -> None:
    names = NAMES[:4]
    alone = {name: chat(client, name) for name in names}
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda i: chat(client, names[i % 4]), range(32)))
    assert answers == [alone[names[i % 4]] for i in range(32)]
    assert_idle(server)


def test_run_time_load_of_the_readme(client: OpenAI, server: Server) -> None:
    body = {"lora_name": "verse", "lora_path": "tang"}
    answer = httpx.post(f"{server}/v1/load_lora_adapter", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert chat(client, "verse") == chat(client, "tang")
    assert httpx.get(f"{server}/v1/models/demo:verse", trust_env=False).json()["root"].endswith("adapters/tang")
    httpx.post(f"{server}/v1/unload_lora_adapter", json={"lora_name": "verse"}, timeout=60, trust_env=False)
    assert "loaded adapter 'verse', version " in server.log
    assert "loading weights: 200 tensors\n" in server.log
    assert "%|" not in server.log  # no progress bar in a file


def test_stream_equals_whole(client: OpenAI) -> None:
    body = {"model": "tang", "prompt": "The king said", "max_tokens": 60, "temperature": 0}
    whole = client.completions.create(**body).choices[0].text  # type: ignore[call-overload]
    parts = [c.choices[0].text for c in client.completions.create(**body, stream=True)]  # type: ignore[call-overload]
    assert "".join(parts) == whole
    assert len(parts) > 10
