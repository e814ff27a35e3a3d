"""How much memory adapters and KV get."""

import os
from collections.abc import Sequence

import torch

from loraplex.engine.config import CacheConfig

CPU_KV_BYTES = 4 << 30
"""Largest automatic KV pool on CPU; --max-total-tokens overrides."""
CPU_ARENA_BYTES = 1 << 30
"""Largest share of free memory that the adapter arena takes by itself on CPU; --lora-memory overrides."""


def available_bytes(device: torch.device, mem_fraction: float) -> int:
    """Bytes the KV pool may take now: the device's share not yet used, or a quarter of the free RAM on CPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total * mem_fraction) - (total - free)
    return min(CPU_KV_BYTES, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)


def arena_bytes(asked: int | None, startup: Sequence[int], available: int, device: torch.device) -> int:
    """Size of the adapter arena: `asked` (--lora-memory), or by itself the start-up adapters (bytes of each) and one
    more as large as the largest, at least a tenth of what is available.

    Raises ValueError when the start-up adapters, or the arena, do not fit, naming the flag and what would work.
    """
    needed = sum(startup)
    if asked is not None:
        if asked < needed:
            raise ValueError(
                f"--lora-memory: the {len(startup)} adapters of --lora-paths take {needed} bytes, {asked} are given; "
                f"the smallest value that works is {needed}"
            )
        size = asked
    else:
        share = max(0, available) // 10
        if device.type == "cpu":
            share = min(share, CPU_ARENA_BYTES)
        size = max(needed + max(startup, default=0), share)
    if device.type == "cuda" and size > available:
        raise ValueError(
            f"--lora-memory: {size} bytes for adapters, but {max(0, available)} are left after weights; "
            f"the adapters of --lora-paths take {needed}"
        )
    return size


def num_kv_pages(cache: CacheConfig, bytes_per_token: int, available: int, most_tokens: int) -> int:
    """Pages of the KV pool: --max-total-tokens, else what fits, but no more than could ever be used.

    Raises ValueError when not even one page fits, naming the flag and what is missing.
    """
    page_bytes = bytes_per_token * cache.page_size
    if cache.max_total_tokens is not None:
        pages = cache.max_total_tokens // cache.page_size
        if pages < 1:
            raise ValueError(f"--max-total-tokens {cache.max_total_tokens} is less than one page of {cache.page_size}")
        if pages * page_bytes > available:
            fits = max(0, available // page_bytes) * cache.page_size
            raise ValueError(
                f"--max-total-tokens {cache.max_total_tokens} needs {pages * page_bytes >> 20} MiB for KV, "
                f"{max(0, available) >> 20} MiB are left: at most {fits} fit"
            )
        return pages
    pages = min(available // page_bytes, -(-most_tokens // cache.page_size))
    if pages < 1:
        raise ValueError(
            f"no memory is left for KV ({max(0, available) >> 20} MiB of the share --mem-fraction-static "
            f"{cache.mem_fraction_static} allows): raise it, or use fewer or smaller adapters"
        )
    return pages


def parameter_bytes(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values())
