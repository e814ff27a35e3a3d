"""What all request bodies share: strict types, null means default, unknown fields ignored, named refusals."""

from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from loraplex.server.errors import InvalidRequestError, clip


class Wire(BaseModel):
    """A request body. Numbers, booleans and strings never stand for one another."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)
    not_built: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields other servers know and this one would have to ignore → values that ask for nothing."""

    def check(self) -> None:
        """Rules between fields. Raises InvalidRequestError naming the field."""

    @classmethod
    def read(cls, body: dict[str, Any]) -> Self:
        """Raises InvalidRequestError naming the first wrong field."""
        fields = {name: value for name, value in body.items() if value is not None}
        cls._refuse_not_built(fields)
        try:
            parsed = cls.model_validate(fields)
        except ValidationError as exc:
            raise _first_error(exc) from None
        parsed.check()
        return parsed

    @classmethod
    def _refuse_not_built(cls, fields: dict[str, Any]) -> None:
        for name, value in fields.items():
            if name in cls.not_built and value not in cls.not_built[name]:
                raise InvalidRequestError(f"{name} is not supported by this server", param=name)


def _first_error(exc: ValidationError) -> InvalidRequestError:
    error = exc.errors(include_url=False, include_input=False, include_context=False)[0]
    param = str(error["loc"][0]) if error["loc"] else None
    where = ".".join(str(part) for part in error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "missing":
        message = "this field is required"
    return InvalidRequestError(f"{clip(where)[1:-1]}: {message}", param=param)
