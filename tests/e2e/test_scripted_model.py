"""Field cases over HTTP on the scripted model CH0: prompt "a" gives "bc 🌶xyz" and eos, one byte a token."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from kit import models
from kit.server import Server, assert_idle, serve

TEXT = "bc 🌶xyz"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(ch0: Path) -> Iterator[Server]:
    with serve(ch0, "--served-model-name", "m", "--page-size", "4") as s:
        yield s


@pytest.fixture(autouse=True)
def idle_after(server: Server) -> Iterator[None]:
    yield
    assert_idle(server)


def post(server: Server, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    body = {"model": "m", "temperature": 0} | body
    return httpx.post(f"{server}{path}", json=body, timeout=60, trust_env=False)


def complete(server: Server, **body: Any) -> dict[str, Any]:
    answer = post(server, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(server: Server, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """The parsed SSE events; checks that exactly one [DONE] ends them."""
    answer = post(server, path, stream=True, **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    return [json.loads(event) for event in events[:-1]]


def streamed_text(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for e in events for c in e["choices"] if c["index"] == index)


@pytest.mark.parametrize(
    ("stop", "text", "tokens"), [(["c 🌶x"], "b", 8), (["🌶"], "bc ", 7), (["zz"], TEXT, 11), ("x", "bc 🌶", 8)]
)
def test_g01_stop_strings_across_tokens(server: Server, stop: Any, text: str, tokens: int) -> None:
    whole = complete(server, prompt="a", stop=stop)
    events = chunks(server, prompt="a", stop=stop, stream_options={"include_usage": True})
    assert whole["choices"][0]["text"] == streamed_text(events) == text
    reasons = [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]]
    assert reasons == [whole["choices"][0]["finish_reason"]] == ["stop"]
    assert whole["usage"]["completion_tokens"] == events[-1]["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize(
    ("options", "count"), [(None, 0), ({}, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 1)]
)
def test_g02_usage_only_when_asked(server: Server, options: Any, count: int) -> None:
    body: dict[str, Any] = {"prompt": "a"}
    if options is not None:
        body["stream_options"] = options
    events = chunks(server, **body)
    with_usage = [e for e in events if e.get("usage")]
    assert len(with_usage) == count
    if count:
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == complete(server, prompt="a")["usage"]
        assert events[-1]["usage"]["completion_tokens"] == 11


def test_g05_null_means_default(server: Server) -> None:
    assert complete(server, prompt="a", max_tokens=None)["choices"][0]["text"] == TEXT
    names = [
        "n",
        "stop",
        "stream",
        "stream_options",
        "logprobs",
        "echo",
        "seed",
        "user",
        "logit_bias",
        "max_tokens",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "top_k",
        "min_p",
        "min_tokens",
        "stop_token_ids",
        "ignore_eos",
        "best_of",
        "suffix",
    ]
    assert complete(server, prompt="a", **dict.fromkeys(names))["choices"][0]["text"] == TEXT


def test_g08_no_half_characters(server: Server) -> None:
    events = chunks(server, prompt="a")
    assert streamed_text(events) == TEXT
    assert all("\ufffd" not in c["text"] for e in events for c in e["choices"])
    cut = chunks(server, prompt="a", max_tokens=5)
    whole = complete(server, prompt="a", max_tokens=5)["choices"][0]["text"]
    assert streamed_text(cut) == whole
    assert "\ufffd" not in whole[:-1]


def test_g18_batches_keep_their_order(server: Server) -> None:
    prompts = ["x", "a", "y"]
    texts = ["yz", TEXT, "z"]
    assert [c["text"] for c in complete(server, prompt=prompts)["choices"]] == texts
    double = complete(server, prompt=prompts, n=2)
    assert [c["text"] for c in double["choices"]] == [t for t in texts for _ in range(2)]
    assert [c["index"] for c in double["choices"]] == list(range(6))
    assert double["usage"]["prompt_tokens"] == 3
    events = chunks(server, prompt=prompts, n=2)
    assert [streamed_text(events, i) for i in range(6)] == [t for t in texts for _ in range(2)]
    assert [c["text"] for c in complete(server, prompt=[[97], [120]])["choices"]] == [TEXT, "yz"]


@pytest.mark.parametrize("prompt", ["", [""], ["a", ""], [], [[]], None])
def test_g19_empty_prompts(server: Server, prompt: Any) -> None:
    answer = post(server, prompt=prompt)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert complete(server, prompt="a")["choices"][0]["text"] == TEXT


@pytest.mark.parametrize("messages", [[], [{}], None])
def test_g19_empty_chats(server: Server, messages: Any) -> None:
    answer = post(server, "/v1/chat/completions", messages=messages)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_unknown_models_are_404_never_base_output(server: Server) -> None:
    for name in ("A1x", "", "m ", "M", "m:", "m:x", ":m", "x:m"):
        for path, body in [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": MESSAGES})]:
            for stream in (False, True):
                answer = post(server, path, model=name, stream=stream, **body)
                assert answer.status_code == 404, (name, answer.text)
                assert answer.json()["error"]["param"] == "model"
    assert post(server, model=None, prompt="a").status_code == 400


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_g16_numbers_that_are_none(server: Server, value: str) -> None:
    body = f'{{"model":"m","prompt":"a","temperature":{value}}}'
    answer = httpx.post(
        f"{server}/v1/completions", content=body, headers={"content-type": "application/json"}, trust_env=False
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert complete(server, prompt="a")["choices"][0]["text"] == TEXT


def test_concurrent_streams_do_not_mix(server: Server) -> None:
    prompts = ["a", "b", "c", "x", "y", " "] * 6
    expected = {"a": TEXT, "b": TEXT[1:], "c": TEXT[2:], "x": "yz", "y": "z", " ": TEXT[3:]}

    def ask(prompt: str) -> str:
        return streamed_text(chunks(server, prompt=prompt))

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, prompts)) == [expected[p] for p in prompts]


def test_client_that_leaves_frees_everything(ch0: Path) -> None:
    endless = models.make_chain("abcd", succ={100: 97})
    with serve(endless, "--served-model-name", "m", env={"LORAPLEX_TEST_SLOW_STEP_MS": "5"}) as server:
        body = {"model": "m", "prompt": "a", "temperature": 0, "max_tokens": 3000, "n": 3}
        with (
            httpx.Client(trust_env=False) as client,
            client.stream("POST", f"{server}/v1/completions", json=body | {"stream": True}) as answer,
        ):
            next(answer.iter_lines())
        assert_idle(server)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server}/v1/completions", json=body, timeout=0.5, trust_env=False)
        assert_idle(server)
        assert complete(server, prompt="a", max_tokens=3)["choices"][0]["text"] == "bcd"
