"""How much KV fits, and the table of what memory went to."""

import os

import torch

from loraplex.engine.config import CacheConfig

CPU_KV_BYTES = 4 << 30
"""Largest automatic KV pool on CPU; --max-total-tokens overrides."""


def available_bytes(device: torch.device, mem_fraction: float) -> int:
    """Bytes the KV pool may take now: the device's share not yet used, or a quarter of the free RAM on CPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total * mem_fraction) - (total - free)
    return min(CPU_KV_BYTES, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)


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
