"""How layers declare what checkpoint tensors they own. `weights.py` reads these declarations; there is no name map."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class Piece:
    """A box of a checkpoint tensor and the parameter view it fills."""

    box: tuple[slice, ...]
    dest: torch.Tensor


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor a layer takes from the checkpoint."""

    shape: tuple[int, ...]
    """Of the whole tensor in the file, before any split over ranks."""
    pieces: tuple[Piece, ...]
    fills: tuple[str, ...]
    """Names it stands for: its own, or those of the tensors it replaces (fused experts)."""


@runtime_checkable
class TensorOwner(Protocol):
    """A layer with parameters."""

    def checkpoint_tensors(self, path: str) -> Mapping[str, CheckpointTensor]:
        """Every checkpoint name this layer, found at module path `path`, accepts."""
        ...


@runtime_checkable
class HasConstants(Protocol):
    """A layer with tensors that come from no checkpoint."""

    def fill_constants(self) -> None: ...


def sibling(path: str, name: str) -> str:
    """Path of `name` beside `path`: fused layers own tensors that the checkpoint keeps beside each other."""
    parent = path.rpartition(".")[0]
    return f"{parent}.{name}" if parent else name


def plain(name: str, shape: tuple[int, ...], box: tuple[slice, ...], dest: torch.Tensor) -> CheckpointTensor:
    """A tensor that fills one view under its own name."""
    return CheckpointTensor(shape, (Piece(box, dest),), (name,))
