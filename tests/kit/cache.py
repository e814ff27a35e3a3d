"""Folders made once per test session, keyed by the arguments that make them."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_root: Path | None = None


def folder(name: str, key: Any, make: Callable[[Path], None]) -> Path:
    """The folder that `make(path)` fills; the same JSON-able `key` gives the same folder again."""
    global _root
    if _root is None:
        _root = Path(tempfile.mkdtemp(prefix="loraplex-tests-"))
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:12]
    path = _root / f"{name}-{digest}"
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        make(unfinished)
        unfinished.rename(path)
    return path


def remove() -> None:
    global _root
    if _root is not None:
        shutil.rmtree(_root, ignore_errors=True)
        _root = None
