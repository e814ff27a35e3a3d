"""PEFT folder → `HostAdapter`. Everything is checked here: what this accepts cannot fail later.

Three steps: names and shapes in the file's header are matched with the model's sites (`pairs`), the tensors are read,
and their values become one `SiteDelta` per site. Every tensor must have a place: an adapter of which only a part acts
is worse than one that is refused.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from loraplex.engine.lora.adapter import HostAdapter, SiteDelta, SiteShape
from loraplex.engine.lora.adapter_config import CONFIG_FILE, AdapterConfig, parse_config
from loraplex.engine.lora.errors import AdapterError
from loraplex.engine.lora.fused_experts import BLayout, split_rows, unflatten
from loraplex.engine.lora.pairs import Pair, make_pairs, match_names, rank_notes
from loraplex.engine.lora.tensor_file import TensorFile, open_tensors, read_small_file

_MAX_CONFIG = 1_000_000
_UNSLOTH_NOTE = (
    "made with Unsloth: versions before 2026-09-17 stored lora_B of fused experts expert-major, with the same shape, "
    "which cannot be seen from the file; compare the answers with the training framework's, and if they differ "
    "convert the adapter with `loraplex adapter convert --lora-b-layout expert-major`"
)


def read_config(folder: Path) -> AdapterConfig:
    """adapter_config.json of the adapter in `folder`. Raises AdapterError."""
    return parse_config(_config_bytes(folder))


def read_config_object(folder: Path) -> dict[str, Any]:
    """The same file's fields as they are, once they are known to be good."""
    text = _config_bytes(folder)
    parse_config(text)
    fields: dict[str, Any] = json.loads(text)
    return fields


def _config_bytes(folder: Path) -> bytes:
    if not folder.is_dir():
        raise AdapterError("the adapter folder does not exist", status=404)
    return read_small_file(folder, CONFIG_FILE, _MAX_CONFIG)


def read_adapter(
    path: str | Path,
    sites: Mapping[str, SiteShape],
    *,
    max_rank: int,
    strict: bool = True,
    moe_lora_b_layout: BLayout = "rank-major",
) -> HostAdapter:
    """Reads and validates the adapter in folder `path` for a model with these sites (by site path).

    Args:
        max_rank: largest rank of a tensor pair; a fused gate_up parameter counts with the rank it is stored with.
        moe_lora_b_layout: order of lora_B's columns in fused expert parameters; PEFT's is rank-major.
        strict: False ignores (and lists) tensors that have no place in the model; at least one must have.

    Raises:
        AdapterError: status 404 when a file is missing, 422 when the adapter is wrong or not supported.
    """
    folder = Path(path)
    config = read_config(folder)
    with open_tensors(folder) as file:
        names = match_names(file.entries, sites, strict=strict)
        pairs = make_pairs(names.modules, file.entries, sites, config, max_rank)
        tensors, digest = _read_tensors(file, pairs, moe_lora_b_layout)
        by_unsloth = config.by_unsloth or "unsloth" in str(file.metadata).lower()
    notes = [*config.notes, *names.notes, *rank_notes(pairs, config)]
    if by_unsloth and moe_lora_b_layout == "rank-major" and any(p.place.form == "parameter" for p in pairs):
        notes.append(_UNSLOTH_NOTE)
    if not any(bool(tensors[p.a].any()) and bool(tensors[p.b].any()) for p in pairs):
        notes.append("lora_A or lora_B is zero everywhere (an untrained adapter?): it changes nothing")
    return HostAdapter(
        digest=digest,
        layout=" + ".join(sorted({p.layout for p in pairs})),
        sites=_build_deltas(pairs, tensors, moe_lora_b_layout),
        num_tensors=2 * len(pairs),
        ignored=tuple(names.ignored),
        notes=tuple(notes),
    )


def _read_tensors(file: TensorFile, pairs: list[Pair], b_layout: BLayout) -> tuple[dict[str, torch.Tensor], str]:
    """All tensors by name, and the digest of what decides the output: values, places, scales and roles."""
    tensors: dict[str, torch.Tensor] = {}
    digest = hashlib.sha256(b_layout.encode())
    for pair in sorted(pairs, key=lambda p: p.module):
        digest.update(f"{pair.module} {pair.scale!r} {pair.role}\n".encode())
        for name in (pair.a, pair.b):
            tensor = tensors[name] = file.read(name)
            digest.update(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return tensors, digest.hexdigest()


def _build_deltas(pairs: list[Pair], tensors: dict[str, torch.Tensor], b_layout: BLayout) -> dict[str, SiteDelta]:
    """Takes the tensors out of `tensors` as it goes, so that at most one site is in memory twice."""
    deltas: dict[str, SiteDelta] = {}
    by_expert: dict[str, list[Pair]] = {}
    for pair in pairs:
        if pair.place.form == "expert":
            for site in pair.sites:
                by_expert.setdefault(site.path, []).append(pair)
            continue
        a, b = tensors.pop(pair.a), tensors.pop(pair.b)
        if pair.place.form == "parameter":
            a, b = unflatten(a, b, pair.sites[0].num_experts, pair.role, b_layout)
        count = len(pair.sites)
        is_stacked = a.shape[-2] != b.shape[-1]
        a_parts = a.chunk(count, dim=-2) if is_stacked else [a] * count
        for site, a_part, b_part in zip(pair.sites, a_parts, split_rows(b, pair.sites), strict=True):
            deltas[site.path] = SiteDelta(a_part.contiguous(), b_part.contiguous(), pair.scale)
    uses = Counter(pair.a for members in by_expert.values() for pair in members)
    for path, members in by_expert.items():
        deltas[path] = _stack_experts(path, members, tensors)
        for pair in members:
            uses[pair.a] -= 1
            if not uses[pair.a]:
                del tensors[pair.a], tensors[pair.b]
    return deltas


def _stack_experts(path: str, pairs: list[Pair], tensors: Mapping[str, torch.Tensor]) -> SiteDelta:
    """One site of all experts: those the file lacks are zero, lower ranks are padded with zeros.

    A site has one scale; experts with another one (rank_pattern, alpha_pattern) get the quotient into B, in fp32.
    """
    scale = pairs[0].scale
    site = next(s for s in pairs[0].sites if s.path == path)
    rank = max(p.rank for p in pairs)
    dtypes = {tensors[name].dtype for p in pairs for name in (p.a, p.b)}
    dtype = dtypes.pop() if len(dtypes) == 1 and all(p.scale == scale for p in pairs) else torch.float32
    a_ERD = torch.zeros(site.num_experts, rank, site.in_features, dtype=dtype)
    b_ENR = torch.zeros(site.num_experts, site.out_features, rank, dtype=dtype)
    for pair in pairs:
        e = pair.place.expert
        a_ERD[e, : pair.rank] = tensors[pair.a]
        b = split_rows(tensors[pair.b], pair.sites)[pair.sites.index(site)]
        b_ENR[e, :, : pair.rank] = b if pair.scale == scale else b.float() * (pair.scale / scale)
    return SiteDelta(a_ERD, b_ENR, scale)
