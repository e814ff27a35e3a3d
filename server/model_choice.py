"""Which model answers: `model`, and the body field `lora_path`. An unknown name is never answered by the base
model.
"""

import re
from collections.abc import Container, Sequence

from loraplex.server.errors import InvalidRequestError, ModelNotFoundError, clip

MAX_NAME_CHARS = 256
_NAME = re.compile(r"[A-Za-z0-9_.@+-]+(/[A-Za-z0-9_.@+-]+)*")


def check_adapter_name(name: str, served_names: Sequence[str]) -> None:
    """Raises ValueError for a name that could not be told from others in a request."""
    if len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name) or {".", ".."} & set(name.split("/")):
        allowed = f"1 to {MAX_NAME_CHARS} letters, digits and . _ - + @, with single / inside"
        raise ValueError(f"adapter name {clip(name)}: use {allowed}")
    if name in served_names:
        raise ValueError(f"adapter name {clip(name)} is the base model's")


def choose_adapter(model: str, served_names: Sequence[str], adapters: Container[str]) -> str | None:
    """The adapter `model` names; None is the base model. Raises ModelNotFoundError."""
    if model in served_names:
        return None
    if model in adapters:
        return model
    for served in served_names:
        adapter = model.removeprefix(served + ":")
        if adapter != model and adapter in adapters:
            return adapter
    raise ModelNotFoundError(model)


def choose_adapters(
    model: str,
    lora_path: str | list[str | None] | None,
    num_prompts: int,
    *,
    served_names: Sequence[str],
    adapters: Container[str],
) -> list[str | None]:
    """The adapter of each prompt. Raises ModelNotFoundError, or InvalidRequestError when `lora_path`
    contradicts `model`.
    """
    chosen = choose_adapter(model, served_names, adapters)
    if lora_path is None:
        return [chosen] * num_prompts
    names: list[str | None] = lora_path if isinstance(lora_path, list) else [lora_path] * num_prompts
    if len(names) != num_prompts:
        message = f"lora_path must have one item per prompt: {num_prompts}, not {len(names)}"
        raise InvalidRequestError(message, param="lora_path")
    for name in names:
        if name is not None and name not in adapters:
            raise ModelNotFoundError(name, param="lora_path")
        if chosen is not None and name != chosen:
            raise InvalidRequestError(f"lora_path contradicts model {clip(model)}", param="lora_path")
    return names
