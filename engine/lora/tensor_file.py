"""adapter_model.safetensors, read with checks and without mmap.

A mapped file that shrinks while it is read kills the process (SIGBUS); `read` can only fail with an error. Each tensor
gets memory of its own, so nothing is read, or held, that the names and shapes in the header do not justify.
"""

import json
import math
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from loraplex.engine.lora.errors import AdapterError

TENSOR_FILE = "adapter_model.safetensors"
_MAX_HEADER = 100_000_000
"""Bytes; the format's own limit."""
_MAX_NAME = 500  # error texts quote names
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}
"""Every other type of the format takes one byte, or is too new to be in an adapter."""


@dataclass(frozen=True)
class Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Byte offset in the file."""
    nbytes: int


class TensorFile:
    """An open safetensors file: `entries` from its header, `read` for the values."""

    def __init__(self, file: BufferedReader) -> None:
        self._file = file
        self.size = os.fstat(file.fileno()).st_size
        """Bytes of the whole file."""
        header, data_start = _read_header(file, self.size)
        metadata = header.pop("__metadata__", None)
        self.metadata: dict[str, Any] = metadata if isinstance(metadata, dict) else {}
        self.entries = {name: _entry(name, fields, data_start, self.size) for name, fields in header.items()}
        _check_covered(self.entries.values(), data_start, self.size)

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype. Raises AdapterError for types that are no float, and for NaN and Inf."""
        entry = self.entries[name]
        if entry.dtype not in _DTYPES:
            raise AdapterError(f"tensor {name!r} has type {entry.dtype}; only F32, F16, BF16 and F64 are supported")
        data = torch.empty(entry.nbytes, dtype=torch.uint8)
        self._file.seek(entry.start)
        if self._file.readinto(data.numpy().data) != entry.nbytes:
            raise AdapterError(f"{TENSOR_FILE} is truncated: tensor {name!r} is incomplete")
        tensor = data.view(_DTYPES[entry.dtype]).view(entry.shape)
        if tensor.dtype == torch.float64:
            tensor = tensor.float()
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterError(f"tensor {name!r} holds NaN or infinite values")
        return tensor


@contextmanager
def open_tensors(folder: Path) -> Iterator[TensorFile]:
    """Opens the adapter's tensors. Raises AdapterError: 404 without the file, 422 when it is damaged."""
    try:
        file = open_regular(folder, TENSOR_FILE)
    except AdapterError as error:
        if error.status == 404 and (folder / "adapter_model.bin").exists():
            raise AdapterError(
                f"the adapter has only adapter_model.bin, which is not loaded: a pickle can run code. Save it as "
                f"{TENSOR_FILE}"
            ) from None
        raise
    with file:
        yield TensorFile(file)


def read_small_file(folder: Path, name: str, limit: int) -> bytes:
    """Whole content of a regular file of at most `limit` bytes."""
    with open_regular(folder, name) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise AdapterError(f"{name} is larger than {limit} bytes")
    return data


def open_regular(folder: Path, name: str) -> BufferedReader:
    """Opens folder/name when it is a regular file; never waits on a pipe or a device."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise AdapterError(f"{name} not found in the adapter folder", status=404) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "invalid path"
        raise AdapterError(f"{name} cannot be opened: {reason}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AdapterError(f"{name} is not a regular file")
    return os.fdopen(descriptor, "rb")


def _read_header(file: BufferedReader, size: int) -> tuple[dict[str, Any], int]:
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER):
        raise AdapterError(f"{TENSOR_FILE} is truncated or no safetensors file: its header does not fit")
    try:
        header = json.loads(file.read(length).decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise AdapterError(f"{TENSOR_FILE} has a damaged header") from None
    if not isinstance(header, dict):
        raise AdapterError(f"{TENSOR_FILE} has a damaged header")
    if any(len(name) > _MAX_NAME for name in header):
        raise AdapterError(f"{TENSOR_FILE} has a tensor name of more than {_MAX_NAME} characters")
    return header, 8 + length


def _check_covered(entries: Iterable[Entry], start: int, size: int) -> None:
    """The format allows no byte outside a tensor and none in two: other readers refuse such a file."""
    for entry in sorted(entries, key=lambda e: (e.start, e.nbytes)):
        if entry.start != start:
            raise AdapterError(f"{TENSOR_FILE} is damaged: its tensors overlap or leave gaps at byte {start}")
        start += entry.nbytes
    if start != size:
        raise AdapterError(f"{TENSOR_FILE} is damaged: {size - start} bytes after the last tensor")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _entry(name: str, fields: Any, data_start: int, file_size: int) -> Entry:
    try:
        dtype, shape, (start, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise AdapterError(f"{TENSOR_FILE} has a damaged header at tensor {name!r}") from None
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
        raise AdapterError(f"{TENSOR_FILE} has a damaged header at tensor {name!r}")
    if data_start + end > file_size:
        raise AdapterError(f"{TENSOR_FILE} is truncated: tensor {name!r} ends after the end of the file")
    if end - start != math.prod(shape) * _ITEM_BYTES.get(dtype, 1):
        raise AdapterError(f"{TENSOR_FILE}: tensor {name!r} has {end - start} bytes, wrong for {dtype} {list(shape)}")
    return Entry(dtype, shape, data_start + start, end - start)
