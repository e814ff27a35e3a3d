"""Tile sizes of Triton kernels: a table per operation and device, written by the tuners in `tests/bench`.

`configs/kernels/<device>/<op>.json` holds a list of entries: the shape (names chosen by the operation), `tokens`, and
the tile. A look-up takes the nearest shape and there the next larger token count. Nothing is timed while serving.
"""

import json
import logging
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """One kernel's tile. An operation uses the fields it has a meaning for."""

    block_m: int = 16
    """Rows (tokens)."""
    block_n: int = 128
    """Output columns."""
    block_k: int = 128
    """Step of the inner dimension."""
    block_r: int = 16
    """Rank rows of A, or step along the rank."""
    split_k: int = 1
    """Programs that share the inner dimension; their partial sums are added in a fixed order."""
    num_warps: int = 4
    num_stages: int = 3


@cache
def choose_tile(op: str, device: torch.device, default: TileConfig, tokens: int, **shape: int) -> TileConfig:
    """The tile of `op` for a shape and a token count; `default` where the device has no table."""
    if device.type != "cuda":
        return default
    name = device_folder(torch.cuda.get_device_name(device))
    entries = read_table(op, name)
    if not entries:
        _say_untuned(name)
        return default
    return nearest(entries, tokens, shape)


def power_of_two(n: int) -> int:
    """The least one that is not below n ≥ 1: what a block of n elements takes in Triton."""
    return 1 << (n - 1).bit_length()


def nearest(entries: list[dict[str, Any]], tokens: int, shape: dict[str, int]) -> TileConfig:
    """The tile of the entry whose shape is nearest (sum of |log2| of the ratios), then of the next larger token count.

    Example: entries for 64 and 256 tokens; 65 tokens take the one of 256, and so do 1000.
    """

    def distance(entry: dict[str, Any]) -> float:
        return sum(abs(math.log2(entry[key] / value)) for key, value in shape.items())

    least = min(distance(entry) for entry in entries)
    near = sorted((e for e in entries if distance(e) == least), key=lambda e: int(e["tokens"]))
    chosen = next((e for e in near if e["tokens"] >= tokens), near[-1])
    return TileConfig(**chosen["tile"])


def device_folder(name: str) -> str:
    """Folder of a device's tables: "NVIDIA H200" → "nvidia-h200"."""
    return "-".join(name.lower().split())


@cache
def read_table(op: str, folder: str) -> list[dict[str, Any]]:
    """Entries of one table; empty where there is none."""
    path = resources.files("loraplex.configs") / "kernels" / folder / f"{op}.json"
    if not path.is_file():
        return []
    entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return entries


@cache
def _say_untuned(folder: str) -> None:
    log.warning("no tuned kernel tiles for this device (configs/kernels/%s): defaults are used", folder)
