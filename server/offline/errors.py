"""What a call of `LLM` raises besides ValueError for wrong arguments.

ValueError
└── RequestError     the request is at fault: what the server answers with 4xx
RuntimeError         the engine did not start, failed or has ended
"""

from collections.abc import Iterator
from contextlib import contextmanager

from loraplex.server.engine_api import EngineError
from loraplex.server.errors import ApiError, from_exception


class RequestError(ValueError):
    """Says what the server would. `status` is its HTTP status, `param` the field, `code` OpenAI's word if any."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


@contextmanager
def as_python_errors() -> Iterator[None]:
    """Turns errors meant for HTTP into RequestError, or RuntimeError when it is not the request's fault."""
    try:
        yield
    except (ApiError, EngineError) as exc:
        error = from_exception(exc)
        if error.status >= 500:
            raise RuntimeError(error.message) from None
        raise RequestError(error.message, status=error.status, param=error.param, code=error.code) from None
