"""Random adapters without files, for benchmarks and geometry tests: `--lora-paths a=dummy:rank=16`."""

import hashlib
import random
import re
from collections.abc import Mapping
from typing import Literal

import torch

from loraplex.engine.lora.adapter import HostAdapter, SiteDelta, SiteShape
from loraplex.engine.lora.errors import AdapterError

DUMMY_PREFIX = "dummy:"
_STD = 0.02
_ALIGN = 64


def parse_dummy_spec(spec: str) -> tuple[int, int]:
    """`dummy:rank=16,seed=3` → (16, 3). The seed is 0 when left out. Raises AdapterError for any other text."""
    match = re.fullmatch(rf"{DUMMY_PREFIX}rank=([1-9][0-9]{{0,5}})(?:,seed=([0-9]{{1,9}}))?", spec)
    if match is None:
        raise AdapterError(f"{spec[:80]!r} is no random adapter; write dummy:rank=16 or dummy:rank=16,seed=3")
    return int(match[1]), int(match[2] or 0)


def dummy_adapter(
    sites: Mapping[str, SiteShape],
    rank: int,
    seed: int = 0,
    which: Literal["all", "dense", "experts"] = "all",
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> HostAdapter:
    """An adapter with normal A and B (std 0.02) and scale 1 at every site, at the routed experts, or at the others
    (dense).

    All tensors are windows, at random offsets, of one random buffer twice as long as the largest: at 48 layers of 128
    experts and rank 16 that is 17 MB instead of 1.6 GB, and made in a moment. They must not be written to.
    """
    chosen = {
        path: site for path, site in sites.items() if which == "all" or (which == "experts") == (site.kind == "experts")
    }
    shapes = {path: _shapes(site, rank) for path, site in chosen.items()}
    largest = max(torch.Size(shape).numel() for pair in shapes.values() for shape in pair)
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.empty(2 * largest + _ALIGN, dtype=torch.float32).normal_(std=_STD, generator=generator).to(dtype)
    offsets = random.Random(seed)

    def window(shape: tuple[int, ...]) -> torch.Tensor:
        size = torch.Size(shape).numel()
        start = offsets.randrange((buffer.numel() - size) // _ALIGN + 1) * _ALIGN
        return buffer[start : start + size].view(shape)

    deltas = {path: SiteDelta(window(a), window(b), 1.0) for path, (a, b) in shapes.items()}
    identity = f"dummy rank={rank} seed={seed} which={which} dtype={dtype} {sorted(shapes.items())}"
    return HostAdapter(
        digest=hashlib.sha256(identity.encode()).hexdigest(),
        layout="dummy",
        sites=deltas,
        num_tensors=2 * len(deltas),
    )


def _shapes(site: SiteShape, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    lead = (site.num_experts,) if site.kind == "experts" else ()
    return (*lead, rank, site.in_features), (*lead, site.out_features, rank)
