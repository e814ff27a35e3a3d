"""The one error of adapter files."""


class AdapterError(ValueError):
    """An adapter cannot be served. The text goes to API clients: it names tensor, field or file, never a folder."""

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status: 404 when the files are missing, 422 when they are wrong."""
