"""Shared set-up. Test files reach the kit with `from kit.models import make_t1` and the like.

`kit` is registered by hand: a test folder on sys.path would make `tests/kernels` importable as `kernels`, a
name that transformers looks for.
"""

import contextlib
import sys
import types
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Without a device Triton's kernels run in its interpreter. Triton decides that when it is imported, and the first
    # to import it here is transformers.
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ImportError):
        patch.setenv("TRITON_INTERPRET", "1")
        import triton  # noqa: F401

_kit = types.ModuleType("kit")
_kit.__path__ = [str(Path(__file__).parent / "kit")]
sys.modules.setdefault("kit", _kit)

from kit import cache, models  # noqa: E402
from kit.oracle import Oracle  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
        skip = pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {devices}")
        for item in items:
            if devices < needed and item.get_closest_marker(marker):
                item.add_marker(skip)


def pytest_unconfigure() -> None:
    cache.remove()


@pytest.fixture(scope="session")
def tok_dir() -> Path:
    """Folder with tokenizer TOK: token id == byte value."""
    return models.tokenizer_dir()


@pytest.fixture(scope="session")
def t1() -> Path:
    """Folder of T1, the random Qwen3-MoE checkpoint."""
    return models.make_t1()


@pytest.fixture(scope="session")
def t1_oracle(t1: Path) -> Oracle:
    return Oracle(t1)


@pytest.fixture(scope="session")
def ch0() -> Path:
    """Folder of CH0: prompt "a" gives "bc 🌶xyz" and eos."""
    return models.make_chain("abc 🌶xyz")
