"""GET /v1/models and /v1/models/{id}: the base model under each of its names, and the adapters."""

from typing import Any

from fastapi import APIRouter

from loraplex.server.front import Front
from loraplex.server.model_choice import choose_adapter


def router(front: Front) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": list(_cards(front).values())}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        cards = _cards(front)
        if name in cards:
            return cards[name]
        adapter = choose_adapter(name, front.served_names, front.engine.adapters)
        assert adapter is not None, "the base model's names have cards"
        return cards[adapter] | {"id": name}

    return routes


def _cards(front: Front) -> dict[str, dict[str, Any]]:
    base = front.served_names[0]
    bases = {name: _card(front, name, root=front.config.model.model_path, parent=None) for name in front.served_names}
    adapters = {name: _card(front, name, root=info.path, parent=base) for name, info in front.engine.adapters.items()}
    return bases | adapters


def _card(front: Front, name: str, *, root: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": front.created,
        "owned_by": "loraplex",
        "root": root,
        "parent": parent,
        "max_model_len": front.max_length,
    }
