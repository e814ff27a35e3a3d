"""Request models in the OpenAPI document, for handlers that read their bodies themselves."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from loraplex.server.wire import Wire

_REFERENCE = "#/components/schemas/{model}"
_documented: set[type[Wire]] = set()


def documented(model: type[Wire]) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is `model`."""
    _documented.add(model)
    schema = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install(app: FastAPI) -> None:
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            models = sorted(_documented, key=lambda model: model.__name__)
            _, definitions = models_json_schema([(m, "validation") for m in models], ref_template=_REFERENCE)
            document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
