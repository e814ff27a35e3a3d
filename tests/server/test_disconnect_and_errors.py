"""Clients that go away, engines that fail: nothing is left running, nothing pretends to succeed."""

import asyncio
import json

import pytest

from loraplex.engine.messages import ErrorInfo

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class RawClient:
    """Speaks ASGI itself, so that it can leave in the middle."""

    def __init__(self, app, path, body):
        raw = json.dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"host", b"test")]
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
        }
        self.app, self.raw = app, raw
        self.sent = []
        self.left = asyncio.Event()
        self._body_given = False

    async def receive(self):
        if not self._body_given:
            self._body_given = True
            return {"type": "http.request", "body": self.raw, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.sent)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "num_requests"),
    [
        (COMPLETIONS, {"prompt": "a"}, 1),
        (COMPLETIONS, {"prompt": ["a", "x", "y"] * 3, "n": 2}, 9),
        (COMPLETIONS, {"prompt": "a", "n": 4}, 1),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 2}, 1),
    ],
)
def test_client_gone_aborts_everything(make_server, scripts, stream, path, fields, num_requests):
    async def play():
        server = make_server(script=scripts[1], hang=asyncio.Event(), max_join=1)
        client = RawClient(server.app, path, {"model": "m", "stream": stream, "max_tokens": 50} | fields)
        task = asyncio.create_task(server.app(client.scope, client.receive, client.send))
        for _ in range(200):
            await asyncio.sleep(0.001)
        assert len(server.engine.streams) == num_requests
        assert not task.done()
        client.left.set()
        await asyncio.wait_for(task, 5)
        assert all(stream.aborted for stream in server.engine.streams)
        assert server.engine.live == set()
        assert b"[DONE]" not in client.body
        assert b'"finish_reason":"' not in client.body
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(play())


def test_send_to_a_closed_socket_aborts(make_server, scripts):
    async def play():
        server = make_server(script=scripts[1], max_join=1)
        client = RawClient(server.app, COMPLETIONS, {"model": "m", "stream": True, "max_tokens": 50, "prompt": "a"})

        async def broken_send(message):
            if message["type"] == "http.response.body":
                raise OSError("closed")

        await asyncio.wait_for(server.app(client.scope, client.receive, broken_send), 5)
        assert server.engine.live == set()

    asyncio.run(play())


def test_two_requests_with_the_same_client_id(make_server):
    async def play():
        server = make_server()
        clients = [
            RawClient(
                server.app,
                COMPLETIONS,
                {"model": "m", "stream": True, "prompt": prompt, "request_id": "same", "rid": "same"},
            )
            for prompt in ("a", "x")
        ]
        for client in clients:
            client.scope["headers"].append((b"x-request-id", b"same"))
        await asyncio.gather(*(server.app(c.scope, c.receive, c.send) for c in clients))
        return [
            b"".join(
                json.loads(line[6:])["choices"][0]["text"].encode()
                for line in c.body.splitlines()
                if line.startswith(b"data: {")
            )
            for c in clients
        ]

    assert asyncio.run(play()) == ["bc 🌶xyz".encode(), b"yz"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_error_before_the_first_token_is_a_status(make_server, stream, path):
    body = {
        "model": "m",
        "stream": stream,
        "prompt": ["a", "x"],
        "messages": [{"role": "user", "content": "a"}],
    }
    server = make_server(fail_step=0, fail_with=ErrorInfo(status=400, message="never fits", param="prompt"))
    answer = server.post(path, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "never fits"
    assert server.engine.live == set()
    dead = make_server(dead=True).post(path, body)
    assert dead.status_code == 503
    assert dead.headers["retry-after"] == "1"
    assert dead.json()["error"]["type"] == "service_unavailable"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_error_in_mid_stream_is_a_frame_without_done(make_server, scripts, path):
    server = make_server(script=scripts[1], fail_step=2, max_join=1)
    body = {
        "model": "m",
        "stream": True,
        "prompt": "a",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 9,
    }
    answer = server.post(path, body)
    assert answer.status_code == 200
    frames = [json.loads(frame[6:]) for frame in answer.text.strip().split("\n\n")]
    assert frames[-1]["error"]["code"] == "numerical_error"
    assert not any(c["finish_reason"] for frame in frames[:-1] for c in frame["choices"])
    assert server.engine.live == set()
    whole = server.post(path, body | {"stream": False})
    assert whole.status_code == 500
    assert whole.json()["error"]["code"] == "numerical_error"


def test_unexpected_fault_in_mid_stream_is_logged_not_shown(make_server, scripts, caplog):
    server = make_server(script=scripts[1], fail_step=2, max_join=1, fail_with=None)
    answer = server.post(COMPLETIONS, {"model": "m", "stream": True, "prompt": "a"})
    frames = answer.text.strip().split("\n\n")
    assert json.loads(frames[-1][6:])["error"]["type"] == "server_error"
    assert "AttributeError" in caplog.text
    assert "AttributeError" not in answer.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", "/v1/nope", 404),
        ("GET", COMPLETIONS, 405),
        ("POST", "/health", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/health/", 404),
        ("GET", "/debug/state", 404),
    ],
)
def test_routing_errors_have_openai_shape(server, method, path, status):
    answer = server.call(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    if status == 405:
        assert answer.headers["allow"]
