"""Health, metrics, keys, adapter endpoints, the OpenAPI document and the debug state."""

import json
import os

import pytest

from loraplex.engine.config import LoRAConfig, ModelConfig
from loraplex.engine.messages import ErrorInfo, Heartbeat
from loraplex.server.sampling import GenerationDefaults

OPEN_PATHS = {"/health", "/ready", "/ping"}
KEY = {"Authorization": "Bearer k1"}


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_health_follows_the_engine(make_server, path):
    assert make_server().get(path).status_code == 200
    dead = make_server(dead=True).get(path)
    assert dead.status_code == 503
    assert dead.json()["error"]["message"]


def test_version(server):
    assert server.get("/version").json()["version"]


def test_metrics(make_server):
    server = make_server(cached_tokens=1)
    server.engine.last_heartbeat = Heartbeat(
        step=1, num_running=3, num_waiting=2, kv_used_tokens=40, kv_cached_tokens=7, preemptions=5
    )
    server.complete()
    server.stream("/v1/completions")
    for i in range(50):
        server.post("/v1/completions", {"model": f"unknown{i}", "prompt": "a"})
        server.get(f"/nowhere/{i}")
        server.get(f"/v1/models/unknown{i}")
    lines = server.get("/metrics").text.splitlines()
    for wanted in [
        'loraplex:requests_total{endpoint="/v1/completions",status="200"} 2.0',
        'loraplex:requests_total{endpoint="/v1/completions",status="404"} 50.0',
        'loraplex:requests_total{endpoint="other",status="404"} 50.0',
        'loraplex:requests_total{endpoint="/v1/models/{name}",status="404"} 50.0',
        "loraplex:prompt_tokens_total 2.0",
        "loraplex:generation_tokens_total 22.0",
        "loraplex:cached_tokens_total 2.0",
        "loraplex:num_running 3.0",
        "# TYPE loraplex:preemptions_total counter",
        "loraplex:preemptions_total 5.0",
        "loraplex:num_waiting 2.0",
        "loraplex:kv_used_tokens 40.0",
        'vllm:num_requests_running{model_name="m"} 3.0',
        'vllm:num_requests_waiting{model_name="m"} 2.0',
        "loraplex:time_to_first_token_seconds_count 2.0",
        "loraplex:e2e_request_latency_seconds_count 2.0",
    ]:
        assert wanted in lines
    assert not any("unknown" in line or "_created" in line for line in lines)


def all_routes(server):
    document = server.get("/openapi.json", headers=KEY).json()
    return {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}


def test_every_route_needs_a_key(make_server):
    server = make_server(api_key=("k1", "k2"))
    routes = all_routes(server) | {
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/debug/state"),
        ("GET", "/x"),
    }
    assert len(routes) > 15
    for method, path in routes:
        answer = server.call(method, path.replace("{name}", "m"))
        if path in OPEN_PATHS:
            assert answer.status_code == 200
            continue
        assert answer.status_code == 401, path
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        wrong = server.call(method, path.replace("{name}", "m"), headers={"Authorization": "Bearer k3"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_api_key")
        assert wrong.json()["error"]["message"] != answer.json()["error"]["message"]
    for key in ("k1", "k2"):
        for scheme in ("Bearer", "bearer"):
            assert server.get("/v1/models", headers={"Authorization": f"{scheme} {key}"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "Bearer k")],
        [("Authorization", "Bearer k11")],
        [("Authorization", "Basic k1")],
        [("Authorization", "k1")],
        [("Authorization", "Bearer k1"), ("Authorization", "Bearer k1")],
        [("Authorization", "bearer")],
        [("X-Api-Key", "k1")],
        [("Host", "a/health?c=")],
        [("Host", "foo#"), ("X-Original-URL", "/health")],
        [("X-Forwarded-Prefix", "/health")],
    ],
)
@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "//v1/models",
        "/v1/./models",
        "/V1/models",
        "/%76%31/models",
        "/v1/models;x",
        "/health/../v1/models",
        "/v1/models?api_key=k1",
        "/metrics",
        "//health",
        "/health/",
        "/health;x",
    ],
)
def test_no_way_around_the_key(make_server, headers, path):
    server = make_server(api_key=("k1",))
    for method in ("GET", "POST", "HEAD", "OPTIONS"):
        assert server.call(method, path, headers=headers).status_code == 401


def test_open_routes_only_with_their_method(make_server):
    assert make_server(api_key=("k1",)).post("/health", {}).status_code == 401


def test_openapi_shows_the_request_models(server):
    document = server.get("/openapi.json").json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/ChatRequest"}
    schemas = document["components"]["schemas"]
    assert {"ChatRequest", "CompletionRequest", "Message"} <= set(schemas)
    for reference in {part.split('"')[0] for part in json.dumps(document).split('"#/components/schemas/')[1:]}:
        assert reference in schemas


@pytest.fixture
def adapter_server(make_server, tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "good", root / "sub" / "deep", outside / "evil"):
        folder.mkdir(parents=True)
    (root / "inside-link").symlink_to(root / "sub" / "deep")
    (root / "outside-link").symlink_to(outside / "evil")
    (root / "loop").symlink_to(root / "loop")
    (root / "file").write_text("x")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (root / f"leak-{name}").mkdir()
        (root / f"leak-{name}" / name).symlink_to(outside / "evil" / name)
        (root / "linked").mkdir(exist_ok=True)
        (root / "linked" / name).symlink_to(root / "good" / name)
    return make_server(lora=LoRAConfig(enable_lora=True, adapter_root=(str(tmp_path / "nowhere"), str(root)))), root


@pytest.mark.parametrize("prefix", ["/v1", ""])
def test_load_and_unload(adapter_server, prefix):
    server, root = adapter_server
    for name, path in [("a", "good"), ("b", str(root / "sub" / "deep")), ("c", "inside-link")]:
        assert server.post(f"{prefix}/load_lora_adapter", {"lora_name": name, "lora_path": path}).status_code == 200
    assert server.engine.loads[2] == ("c", str(root / "sub" / "deep"), False, False)
    again = server.post(f"{prefix}/load_lora_adapter", {"lora_name": "a", "lora_path": "good"})
    assert again.status_code == 409
    body = {
        "lora_name": "a",
        "lora_path": "good",
        "load_inplace": True,
        "pinned": True,
        "is_3d_lora_weight": False,
    }
    assert server.post(f"{prefix}/load_lora_adapter", body).status_code == 200
    assert server.engine.loads[-1][2:] == (True, True)
    gone = server.post(f"{prefix}/unload_lora_adapter", {"lora_name": "a", "lora_int_id": 4})
    assert gone.status_code == 200
    missing = server.post(f"{prefix}/unload_lora_adapter", {"lora_name": "a"})
    assert missing.status_code == 404
    assert missing.json()["error"]["message"]
    if prefix == "":
        assert set(gone.json()["loaded_adapters"]) == {"b", "c"}
        assert gone.json()["success"] is True
        assert missing.json()["success"] is False
        assert missing.json()["error_message"]


@pytest.mark.parametrize("prefix", ["/v1", ""])
@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("outside-link", 403),
        ("leak-adapter_config.json", 403),
        ("leak-adapter_model.safetensors", 403),
        ("../outside/evil", 403),
        ("good/../../outside/evil", 403),
        ("/etc", 403),
        ("/nowhere/at/all", 403),
        (".", 403),
        ("none", 404),
        ("file", 404),
        ("loop", 404),
        ("x" * 5000, 404),
        ("dummy:rank=4", 404),
        ("a\nb", 404),
    ],
)
def test_load_only_from_below_the_roots(adapter_server, prefix, path, status):
    server, root = adapter_server
    answer = server.post(f"{prefix}/load_lora_adapter", {"lora_name": "a", "lora_path": path})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == "lora_path"
    assert str(root) not in answer.text
    assert server.engine.loads == []


def test_files_may_be_links_below_the_roots(adapter_server):
    """As in the hub's cache, where snapshots link to blobs."""
    server, _ = adapter_server
    assert server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "linked"}).status_code == 200


def test_a_path_relative_to_the_working_directory(adapter_server, monkeypatch):
    """Accepted below a root; outside, the answer does not tell whether it exists."""
    server, root = adapter_server
    monkeypatch.chdir(root.parent)
    load = {"lora_name": "a", "lora_path": "root/sub/deep"}
    assert server.post("/v1/load_lora_adapter", load).status_code == 200
    assert server.engine.loads == [("a", str(root / "sub" / "deep"), False, False)]
    messages = set()
    for path in ("outside/evil", "outside/none"):
        answer = server.post("/v1/load_lora_adapter", {"lora_name": "b", "lora_path": path})
        assert answer.status_code == 404
        messages.add(answer.json()["error"]["message"].replace(path, ""))
    assert len(messages) == 1


def test_loads_and_unloads_are_logged_without_paths(adapter_server, caplog):
    server, root = adapter_server
    caplog.set_level("INFO", "loraplex.server.adapters_api")
    server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "good"})
    server.post("/v1/unload_lora_adapter", {"lora_name": "a"})
    server.post("/v1/unload_lora_adapter", {"lora_name": "a"})
    loaded, unloaded = [record.getMessage() for record in caplog.records]
    assert loaded.startswith("loaded adapter 'a', version 1: 1 bytes in 0.")
    assert unloaded.startswith("unloaded adapter 'a', version 1: 1 bytes in 0.")
    assert str(root) not in caplog.text


def test_load_refusals_name_flag_and_field(make_server, adapter_server):
    body = {"lora_name": "a", "lora_path": "good"}
    assert "--adapter-root" in make_server().post("/v1/load_lora_adapter", body).json()["error"]["message"]
    off = make_server(lora=LoRAConfig()).post("/v1/load_lora_adapter", body)
    assert off.status_code == 403
    assert "--enable-lora" in off.json()["error"]["message"]
    server, _ = adapter_server
    for fields, param in [
        ({"lora_name": "m"}, "lora_name"),
        ({"lora_name": "a:b"}, "lora_name"),
        ({"lora_name": None}, "lora_name"),
        ({"lora_path": 5}, "lora_path"),
        ({"lora_path": ""}, "lora_path"),
        ({"pinned": "yes"}, "pinned"),
        ({"load_inplace": "yes"}, "load_inplace"),
    ]:
        answer = server.post("/load_lora_adapter", body | fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


def test_engine_refusal_keeps_its_status(adapter_server, monkeypatch):
    from loraplex.server.engine_api import EngineError

    server, _ = adapter_server

    async def refuse(name, path, **options):
        raise EngineError(ErrorInfo(status=422, message="tensor x has no place", param="lora_path"))

    monkeypatch.setattr(server.engine, "load_adapter", refuse)
    for prefix in ("/v1", ""):
        answer = server.post(f"{prefix}/load_lora_adapter", {"lora_name": "a", "lora_path": "good"})
        assert answer.status_code == 422
        assert answer.json()["error"]["message"] == "tensor x has no place"


def test_debug_state_only_for_tests_and_loopback(make_server, monkeypatch):
    monkeypatch.delenv("LORAPLEX_TEST_HOOKS", raising=False)
    server = make_server()
    assert server.get("/debug/state").status_code == 404
    monkeypatch.setitem(os.environ, "LORAPLEX_TEST_HOOKS", "1")
    state = server.get("/debug/state").json()
    assert {"free", "cached", "held", "adapter_refs", "live_requests"} <= set(state)
    for host in ("10.0.0.1", "testclient"):
        assert server.get("/debug/state", client=(host, 1)).status_code == 404
    assert server.get("/debug/state", client=("::1", 1)).status_code == 200


@pytest.mark.parametrize(
    ("stored", "mode", "wanted"),
    [
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20}, "model", (0.6, 0.9, 20)),
        ({"temperature": 0.6}, "openai", (1.0, 1.0, 0)),
        (None, "model", (1.0, 1.0, 0)),
        ({"top_k": None}, "model", (1.0, 1.0, 0)),
    ],
)
def test_defaults_of_the_model(tmp_path, stored, mode, wanted):
    if stored is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    found = GenerationDefaults.of_model(ModelConfig(model_path=str(tmp_path), sampling_defaults=mode))
    assert (found.temperature, found.top_p, found.top_k) == wanted


@pytest.mark.parametrize("stored", ['{"temperature": "hot"}', '{"top_p": 0}', "[]", "{", '{"temperature": NaN}'])
def test_bad_defaults_name_the_file(tmp_path, stored):
    (tmp_path / "generation_config.json").write_text(stored)
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        GenerationDefaults.of_model(ModelConfig(model_path=str(tmp_path)))
