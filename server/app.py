"""The HTTP application: routes, errors, keys and counters put together."""

import time

from fastapi import FastAPI

from loraplex.engine.config import Config
from loraplex.engine.hooks import read_hooks
from loraplex.server import adapters_api, completions, errors, models_api, openapi, operations_api, tokens_api
from loraplex.server.auth import RequireKey
from loraplex.server.engine_api import Engine
from loraplex.server.front import Front
from loraplex.server.metrics import CountRequests, Metrics
from loraplex.server.sampling import GenerationDefaults
from loraplex.server.text import TextProcessor
from loraplex.server.version import version


def create_app(engine: Engine, text: TextProcessor | None, config: Config, defaults: GenerationDefaults) -> FastAPI:
    """`text` is None with --skip-tokenizer-init. The engine is ready; its life is not managed here."""
    model_name = (config.model.served_model_name or (config.model.model_path,))[0]
    metrics = Metrics(engine, model_name)
    front = Front(engine, text, config, defaults, metrics, read_hooks(), created=int(time.time()))
    app = FastAPI(title="loraplex", version=version(), redirect_slashes=False)
    health = operations_api.open_router(front)
    app.include_router(health)
    for api in (completions, models_api, tokens_api, adapters_api, operations_api):
        app.include_router(api.router(front))
    errors.install(app)
    openapi.install(app)
    if config.server.api_key:
        app.add_middleware(RequireKey, keys=config.server.api_key, open_routes=health.routes)
    app.add_middleware(CountRequests, metrics=front.metrics)
    return app
