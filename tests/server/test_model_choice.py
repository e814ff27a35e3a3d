"""`model`, `served:adapter` and `lora_path`: which model answers, and never the base model by mistake."""

import pytest

from loraplex.server.model_choice import check_adapter_name, choose_adapter

PATHS = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


@pytest.fixture
def lora_server(make_server):
    server = make_server()
    for name in ("A1", "A2", "org/x"):
        server.engine.add_adapter(name, f"/adapters/{name}")
    return server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        ("m", None),
        ("m2", None),
        ("A1", "A1"),
        ("m:A1", "A1"),
        ("m2:A2", "A2"),
        ("org/x", "org/x"),
        ("m:org/x", "org/x"),
    ],
)
def test_known_names(lora_server, path, stream, model, adapter):
    answer = lora_server.post(path, {"model": model, "stream": stream} | PATHS[path])
    assert answer.status_code == 200
    assert lora_server.engine.requests[0].adapter == adapter
    assert f'"model":"{model}"' in answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "model",
    [
        "A1x",
        "a1",
        "",
        "A1 ",
        "m:",
        ":A1",
        "other:A1",
        "m:A3",
        "m:m",
        "m:A1:A1",
        "A1:A1",
        "M",
        "../x",
        "a\nb",
        "x" * 10**6,
    ],
)
def test_unknown_names(lora_server, path, stream, model):
    answer = lora_server.post(path, {"model": model, "stream": stream} | PATHS[path])
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert len(error["message"]) < 300
    assert lora_server.engine.requests == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [{}, {"model": None}, {"model": 5}])
def test_missing_model(lora_server, path, body):
    answer = lora_server.post(path, body | PATHS[path])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("model", "lora_path", "adapters"),
    [
        ("m", "A1", ["A1", "A1"]),
        ("m", ["A1", None], ["A1", None]),
        ("m", None, [None, None]),
        ("A1", "A1", ["A1", "A1"]),
        ("m:A1", ["A1", "A1"], ["A1", "A1"]),
        ("m", ["A2", "A1"], ["A2", "A1"]),
    ],
)
def test_lora_path(lora_server, model, lora_path, adapters):
    lora_server.complete(["a", "x"], model=model, lora_path=lora_path)
    assert [request.adapter for request in lora_server.engine.requests] == adapters


@pytest.mark.parametrize(
    ("model", "lora_path", "status"),
    [
        ("A1", "A2", 400),
        ("A1", ["A1", None], 400),
        ("m", ["A1"], 400),
        ("m", ["A1"] * 3, 400),
        ("m", "zz", 404),
        ("m", "", 404),
        ("m", ["A1", "zz"], 404),
        ("m", "m:A1", 404),
        ("m", "m", 404),
        ("zz", "A1", 404),
    ],
)
def test_wrong_lora_path(lora_server, model, lora_path, status):
    body = {"model": model, "prompt": ["a", "x"], "lora_path": lora_path}
    answer = lora_server.post("/v1/completions", body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == ("model" if model == "zz" else "lora_path")
    assert lora_server.engine.requests == []


def test_chat_lora_path(lora_server):
    lora_server.chat(lora_path=["A2"])
    assert lora_server.engine.requests[0].adapter == "A2"


def test_served_name_with_a_colon():
    assert choose_adapter("gpt:120b", ["gpt:120b"], {"A"}) is None
    assert choose_adapter("gpt:120b:A", ["gpt:120b"], {"A"}) == "A"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a:b",
        "/a",
        "a/",
        "a//b",
        "a\n",
        "a b",
        "ü",
        "x" * 257,
        "..",
        "a/../b",
        "m",
        "\x1b[0m",
        "a\\b",
        "<a>",
    ],
)
def test_bad_adapter_names(name):
    with pytest.raises(ValueError, match="adapter name"):
        check_adapter_name(name, ("m",))


@pytest.mark.parametrize("name", ["a", "A-1_b.c+d@2", "org/name", "x" * 256])
def test_good_adapter_names(name):
    check_adapter_name(name, ("m",))


def test_models_list_and_cards(lora_server):
    listed = lora_server.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["m", "m2", "A1", "A2", "org/x"]
    adapter = lora_server.get("/v1/models/org/x").json()
    assert adapter == listed["data"][-1]
    assert (adapter["parent"], adapter["root"], adapter["owned_by"]) == ("m", "/adapters/org/x", "loraplex")
    assert adapter["max_model_len"] == 512
    base = lora_server.get("/v1/models/m").json()
    assert (base["parent"], base["object"]) == (None, "model")
    assert lora_server.get("/v1/models/m2:org/x").json() == adapter | {"id": "m2:org/x"}
    for name in ("nope", "m:nope", "m:m", "nope:A1"):
        missing = lora_server.get(f"/v1/models/{name}")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"
        assert "GET /v1/models" in missing.json()["error"]["message"]
