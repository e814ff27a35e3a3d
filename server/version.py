"""The version of the installed distribution."""

import importlib.metadata


def version() -> str:
    """As pyproject.toml had it at installation; says so when the sources run without one."""
    try:
        return importlib.metadata.version("loraplex")
    except importlib.metadata.PackageNotFoundError:
        return "0+not.installed"
