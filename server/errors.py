"""What a client sees when something is wrong, always as OpenAI's `{"error": {message, type, param, code}}`.

ApiError                     any answer that is not 2xx
├── InvalidRequestError           400, a field is wrong
│   └── ContextTooLongError       400, code context_length_exceeded
├── NotFoundError                 404
│   └── ModelNotFoundError        404, param model, code model_not_found
├── UnauthorizedError             401
├── ForbiddenError                403
├── UnavailableError              503, with Retry-After
└── InternalError            500, says nothing of the inside

ClientGoneError is not an answer: nobody is left to read one.
"""

from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from loraplex.server.engine_api import EngineError

MAX_SHOWN = 200
"""Characters of a client's own value that an error message repeats."""
NOT_SENT = 499


class ClientGoneError(Exception):
    """The client closed the connection; its request has been aborted."""


class ApiError(Exception):
    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": "1"} if self.status == 503 else {}

    def body(self) -> dict[str, Any]:
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": fields}


class InvalidRequestError(ApiError):
    pass


class ContextTooLongError(InvalidRequestError):
    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class NotFoundError(ApiError):
    status = 404


class ModelNotFoundError(NotFoundError):
    def __init__(self, name: str, *, param: str = "model") -> None:
        super().__init__(
            f"The model {clip(name)} does not exist here; GET /v1/models lists the names",
            param=param,
            code="model_not_found",
        )


class UnauthorizedError(ApiError):
    status = 401

    def __init__(self, message: str = "Send an API key as 'Authorization: Bearer KEY'") -> None:
        super().__init__(message, code="invalid_api_key")

    @property
    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class ForbiddenError(ApiError):
    status = 403
    type = "permission_error"


class UnavailableError(ApiError):
    status = 503
    type = "service_unavailable"


class InternalError(ApiError):
    status = 500
    type = "server_error"

    def __init__(self, message: str = "Internal error; the server's log says more") -> None:
        super().__init__(message)


def clip(value: object) -> str:
    """A client's value, quoted, escaped and short enough for a message."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def with_status(status: int, message: str, **fields: Any) -> ApiError:
    """An ApiError of a status that has no class of its own (413, 415, 422 …)."""
    error = InternalError(message) if status == 500 else ApiError(message, **fields)
    error.status = status
    return error


def from_exception(exc: Exception) -> ApiError:
    """What a client may know of any exception."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, EngineError):
        error = with_status(exc.info.status, exc.info.message)
        error.type, error.param, error.code = exc.info.type, exc.info.param, exc.info.code
        return error
    return InternalError()


def error_response(error: ApiError) -> Response:
    return Response(orjson.dumps(error.body()), error.status, error.headers, "application/json")


def install(app: FastAPI) -> None:
    """Every exception, unknown routes and wrong methods included, answers in OpenAI's shape."""

    async def known(_: Request, exc: Exception) -> Response:
        return error_response(from_exception(exc))

    async def routing(_: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        response = error_response(with_status(exc.status_code, exc.detail))
        response.headers.update(exc.headers or {})
        return response

    async def gone(_: Request, exc: Exception) -> Response:
        return Response(status_code=NOT_SENT)

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(EngineError, known)
    app.add_exception_handler(Exception, known)
    app.add_exception_handler(HTTPException, routing)
    app.add_exception_handler(ClientGoneError, gone)
