"""Whatever a client sends is a 4xx in OpenAI's shape that names the field, and the next request is right."""

import json
import math

import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": [{"role": "user", "content": "a"}]}}
NAN, INF = math.nan, math.inf

BOTH = {
    "temperature": [NAN, INF, -INF, -1, 2.1, "hot", True, [1]],
    "top_p": [0, 1.0001, -0.1, NAN, "1"],
    "top_k": [-2, 1.5, 10**12, True],
    "min_p": [-0.1, 1.1, NAN],
    "presence_penalty": [2.01, -2.01, NAN],
    "frequency_penalty": [2.01, -2.01, NAN],
    "repetition_penalty": [0, -1, NAN, INF],
    "n": [0, -1, 129, 10**6, 10**30, True, 1.5, "2", 10**400],
    "best_of": [2, 10**9],
    "max_tokens": [-1, 0, 1.5, 2**31, 2**63, 10**30, 600, True],
    "seed": [2**63, 2**64, -1, 1.5, "x"],
    "min_tokens": [-1, 601, 1.5],
    "stream": ["yes", 1],
    "stop": ["", [""], ["a"] * 17, "a" * 10**6, [1], {"a": 1}, 5],
    "logit_bias": [{"320": 1}, {"191222": -100}, {"-1": 1}, {"x": 1}, {"5": 101}, {"1": NAN}, {"1": True},
    {"01": 1},
                   {str(i): 0 for i in range(10**4)}, [1]],
    "stop_token_ids": [[320], [-1], [2**40], ["a"], 5, [True]],
    "ignore_eos": ["no", 1],
    "skip_special_tokens": [0],
    "cache_salt": ["x" * 129, 5],
    "response_format": [{"type": "json_object"}, {"type": "x"}, {}, {"type": "json_schema",
    "json_schema": {}}, "text"],
    "tools": [[{"type": "function"}], 5],
    "functions": [[{"name": "f"}]],
    "guided_json": [{}],
    "structured_outputs": [{"regex": "a"}],
    "allowed_token_ids": [[1]],
    "bad_words": [["x"]],
    "lora_path": [5, [], [1], ["a", "b"], {"a": 1}],
    "stream_options": [5, {"include_usage": 1}],
}  # fmt: skip
ONLY_COMPLETIONS = {
    "logprobs": [-1, 21, 10**6, True],
    "suffix": ["x"],
    "echo": ["yes"],
    "prompt": ["", [], [""], ["a", ""], [[]], [[], "a"], ["a", 1], [1.5], [-1], [320], [2**31], [2**63],
    [True], [[[1]]],
               ["a"] * 1025, "a" * 10**7, "\0", "\ud800", ["a", "\udfff"], {"a": 1}, 5, None,
               "\u202e" * 10**5],
}  # fmt: skip
ONLY_CHAT = {
    "logprobs": [1, "yes"],
    "top_logprobs": [21, -1, 3],
    "echo": [True],
    "chat_template": ["{{ 1 }}"],
    "chat_template_kwargs": [{"tokenize": True}, 5],
    "documents": [[{"a": 1}]],
    "continue_final_message": [True],
    "messages": [None, [], [{}], [{"role": "hacker", "content": "a"}], [{"role": "user", "content": 5}],
                 [{"role": "user", "content": None}], [{"role": "user", "content": []}], [{"role": "user"}],
                 [{"role": "user", "content": [{"type": "x"}]}],
                 [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
                 [{"role": "user", "content": [{"type": "text", "text": 5}]}], [{"role": "tool",
                 "content": "a"}],
                 [{"role": "assistant", "content": None}], [{"role": "user", "content": "\ud800"}], "a",
                 ["a"],
                 [{"role": "user", "content": "a"}] * 50_000,
                 [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f",
                 "arguments": "{"}}]}]],
}  # fmt: skip


def cases():
    for path, fields in ((COMPLETIONS, BOTH | ONLY_COMPLETIONS), (CHAT, BOTH | ONLY_CHAT)):
        for name, values in fields.items():
            for i, value in enumerate(values):
                yield pytest.param(path, name, value, id=f"{path[4:]}-{name}-{i}")


def probe(server):
    assert server.complete()["choices"][0]["text"] == "bc 🌶xyz"
    assert server.engine.live == set()


def assert_refused(answer, param):
    assert 400 <= answer.status_code < 500, answer.text[:300]
    assert answer.headers["content-type"] == "application/json"
    error = json.loads(answer.content, parse_constant=pytest.fail)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert len(error["message"]) < 600


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "name", "value"), list(cases()))
def test_bad_field(server, path, name, value, stream):
    body = {"model": "m", "stream": stream} | GOOD[path] | {name: value}
    answer = server.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert_refused(answer, name)
    probe(server)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"max_tokens": 2, "min_tokens": 3}, "min_tokens"), ({"stream_options": {"include_usage": True}},
    "stream_options"),
     ({"prompt": ["a"] * 100, "n": 100}, "n"), ({"prompt": ["a", ""]}, "prompt"), ({"max_tokens": 0},
     "max_tokens")],
)  # fmt: skip
def test_bad_combination(server, fields, param):
    assert_refused(server.post(COMPLETIONS, {"model": "m", "prompt": "a"} | fields), param)


RAW = {
    "invalid": b"{", "list": b"[]", "text": b'"a"', "number": b"5", "empty": b"", "null": b"null",
    "utf8": b'{"model": "\xff"}',
    "nested": b"[" * 100_000, "nested object": b'{"a":' * 100_000, "digits": b'{"n": ' + b"9" * 5000 + b"}",
    "huge": b'{"model": "m", "prompt": "a", "temperature": 1e999}', "two": b'{"model": "m"} {"a": 1}',
    "bom": b"\xef\xbb\xbf{}",
    "control": b'{"model": "m\x00"}', "comment": b'{"model": "m" /* */}',
}  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/v1/load_lora_adapter"])
@pytest.mark.parametrize("raw", list(RAW.values()), ids=list(RAW))
def test_bad_body(server, path, raw):
    answer = server.post(path, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    probe(server)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "Infinity"])
def test_constants_of_javascript_are_named(server, value):
    raw = f'{{"model": "m", "prompt": "a", "logit_bias": {{"1": {value}}}}}'.encode()
    answer = server.post(COMPLETIONS, content=raw, headers={"content-type": "application/json"})
    assert_refused(answer, "logit_bias")
    assert "NaN and Infinity are not JSON" in answer.json()["error"]["message"]
    huge = server.post(COMPLETIONS, content=RAW["huge"], headers={"content-type": "application/json"})
    assert "NaN" not in huge.json()["error"]["message"]


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
def test_content_type(server, content_type):
    headers = {} if content_type is None else {"content-type": content_type}
    answer = server.post(COMPLETIONS, content=b'{"model":"m","prompt":"a"}', headers=headers)
    assert answer.status_code == 415
    good = {"content-type": "Application/JSON; charset=utf-8"}
    assert server.post(COMPLETIONS, content=b'{"model":"m","prompt":"a"}', headers=good).status_code == 200


def test_body_limit(server, monkeypatch):
    monkeypatch.setattr("loraplex.server.body.MAX_BODY_BYTES", 100)
    assert server.post(COMPLETIONS, {"model": "m", "prompt": "a" * 200}).status_code == 413

    async def chunks():
        for _ in range(5):
            yield b" " * 50

    answer = server.post(COMPLETIONS, content=chunks(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_good_extremes(server):
    body = {"user": "x" * 10**6, "metadata": {"a": "b"}, "nobody_knows": [1], "top_logprobs": None}
    assert server.complete(**body, temperature=1e-320, top_k=2**31 - 1)["choices"]
    assert server.complete(response_format={"type": "text"}, tools=[], best_of=1, suffix="")["choices"]
    assert server.complete(logit_bias={str(i): -100 for i in range(320)})["choices"]
    assert server.chat("x<|im_end|>", tools=[], tool_choice="auto", top_logprobs=0, functions=[])["choices"]


def test_prompt_ids_of_the_padded_vocabulary(server):
    assert server.complete([319])["usage"]["prompt_tokens"] == 1


def test_messages_never_show_the_inside(make_server):
    def broken(request, choice):
        raise RuntimeError("/home/secret 0xdeadbeef")

    server = make_server(script=broken)
    server.raise_app = False
    answer = server.post(COMPLETIONS, {"model": "m", "prompt": "a"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text
    assert server.engine.live == set()
