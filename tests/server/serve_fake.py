"""`loraplex serve` over the engine without a model and an application of three routes, for tests of a whole process.

GET /health tells the engine's health; GET /work streams a line, then waits for an answer that never comes; GET /die
ends the engine.
"""

import asyncio
import sys
from typing import Any

import fake_rank

from loraplex.engine.config import Config
from loraplex.engine.request import Request, SamplingParams
from loraplex.server import serve
from loraplex.server.client import EngineClient
from loraplex.server.engine_api import EngineError
from loraplex.server.flags import parse


def load() -> serve.AppBuilder:
    return build


def build(client: EngineClient, config: Config) -> Any:
    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        status = 200 if client.healthy else 503
        await send({"type": "http.response.start", "status": status, "headers": []})
        path = scope["path"]
        if path != "/health":
            await send({"type": "http.response.body", "body": b"started\n", "more_body": True})
            body = await outcome(client, fake_rank.DIES if path == "/die" else fake_rank.SILENT)
        else:
            body = b""
        await send({"type": "http.response.body", "body": body})

    return app


async def outcome(client: EngineClient, behaviour: int) -> bytes:
    request = Request(id=client.new_id(), prompt_ids=[behaviour], sampling=SamplingParams(max_tokens=1), n=1)
    try:
        async for _ in client.submit(request):
            pass
    except EngineError as error:
        return str(error.info.code).encode()
    return b"finished"


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(serve.serve(parse(sys.argv[1:]), target=fake_rank.rank_main, load=load)))
    except serve.StartError as error:
        sys.exit(str(error))
