"""loraplex: a server for Mixture-of-Experts language models with many LoRA adapters, and its Python API.

    from loraplex import LLM, SamplingParams

This folder is installed as the package `loraplex` itself. Importing it costs nothing: what it exports is loaded when
it is first used.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loraplex.server.offline.errors import RequestError
    from loraplex.server.offline.llm import LLM
    from loraplex.server.offline.outputs import CompletionOutput, Logprob, RequestOutput
    from loraplex.server.offline.params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestError", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "llm",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
    "RequestError": "errors",
    "RequestOutput": "outputs",
    "SamplingParams": "params",
}


# In an editable installation loraplex.server and the like are folders elsewhere, without __init__.py. The finder that
# setuptools installed knows them; it is asked through an entry of the path, which it has put into sys.path.
__path__ += [entry for entry in sys.path if entry.startswith("__editable__.loraplex-")]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from loraplex.server.version import version

        return version()
    if name not in _HOMES:
        raise AttributeError(f"module 'loraplex' has no attribute {name!r}")
    return getattr(importlib.import_module(f"loraplex.server.offline.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
