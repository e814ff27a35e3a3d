"""PEFT folder → `HostAdapter`. Everything is checked here: what this accepts cannot fail later.

Three steps: names and shapes of the header are matched with the model's sites (`_Plan`), the tensors are read, and
their values become one `SiteDelta` per site. Every tensor must have a place; an adapter of which only a part would act
is worse than one that is refused.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from loraplex.engine.lora.adapter import HostAdapter, SiteDelta, SiteShape
from loraplex.engine.lora.adapter_config import CONFIG_FILE, AdapterConfig, parse_config
from loraplex.engine.lora.errors import AdapterError
from loraplex.engine.lora.fused_experts import ParameterFit, Role, choose_role, fit_shapes, unflatten
from loraplex.engine.lora.tensor_file import TENSOR_FILE, Entry, TensorFile, open_tensors, read_small_file
from loraplex.engine.lora.tensor_names import Place, find_place, is_head_copy, refuse_known, split_name

_MAX_CONFIG = 1_000_000
_UNSLOTH_NOTE = (
    "made with Unsloth: versions before 2026-09-17 stored lora_B of fused experts in another order with the same shape, "
    "which cannot be seen from the file; compare the answers with the training framework's"
)


@dataclass(frozen=True)
class _Pair:
    """The A and B of one module in the file, and where they belong."""

    module: str
    a: str
    b: str
    place: Place
    sites: tuple[SiteShape, ...]
    rank: int
    scale: float
    role: Role = "natural"

    @property
    def layout(self) -> str:
        if self.place.form == "parameter":
            return "fused experts" if self.role == "natural" else "fused experts (exchanged)"
        return {"dense": "dense", "expert": "per-expert"}[self.place.form]


@dataclass
class _Plan:
    """What the header says: the pairs to read, and the tensors left out."""

    pairs: list[_Pair]
    ignored: list[str]
    notes: list[str] = field(default_factory=list)


def read_adapter(
    path: str | Path, sites: Mapping[str, SiteShape], *, max_rank: int, strict: bool = True
) -> HostAdapter:
    """Reads and validates the adapter in folder `path` for a model with these sites (by site path).

    Args:
        max_rank: largest rank of a tensor pair; a fused gate_up parameter counts with the rank it is stored with.
        strict: False ignores (and lists) tensors that have no place in the model; at least one must have.

    Raises:
        AdapterError: status 404 when a file is missing, 422 when the adapter is wrong or not supported.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise AdapterError("the adapter folder does not exist", status=404)
    config = parse_config(read_small_file(folder, CONFIG_FILE, _MAX_CONFIG))
    with open_tensors(folder) as file:
        plan = _make_plan(file, config, sites, max_rank, strict)
        names = {
            name: f"{p.module}.{factor}" for p in plan.pairs for factor, name in (("A", p.a), ("B", p.b))
        }
        digest = hashlib.sha256()
        tensors = {}
        for name in sorted(names, key=names.__getitem__):
            tensors[name] = file.read(name)
            _hash_tensor(digest, names[name], tensors[name])
        by_unsloth = config.by_unsloth or "unsloth" in str(file.metadata).lower()
    for pair in sorted(plan.pairs, key=lambda p: p.module):
        digest.update(f"{pair.module} {pair.scale!r} {pair.role}\n".encode())
    if by_unsloth and any(p.place.form == "parameter" for p in plan.pairs):
        plan.notes.append(_UNSLOTH_NOTE)
    return HostAdapter(
        digest=digest.hexdigest(),
        layout=" + ".join(sorted({p.layout for p in plan.pairs})),
        sites=_build_deltas(plan.pairs, tensors),
        num_tensors=len(names),
        ignored=tuple(plan.ignored),
        notes=(*config.notes, *plan.notes),
    )


def _hash_tensor(digest: "hashlib._Hash", name: str, tensor: torch.Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
    digest.update(tensor.view(-1).view(torch.uint8).numpy().data)


# names and shapes


def _make_plan(
    file: TensorFile, config: AdapterConfig, sites: Mapping[str, SiteShape], max_rank: int, strict: bool
) -> _Plan:
    modules, ignored, notes = _match_names(file.entries, sites, strict)
    halves = {m: f for m, f in modules.items() if len(f) == 1}
    for module, (name,) in ((m, f.values()) for m, f in halves.items()):
        missing = "lora_B" if "A" in halves[module] else "lora_A"
        raise AdapterError(f"tensor {name!r} has no {missing} beside it")
    places = {module: place for module in modules if (place := find_place(module, sites))}
    decided = _decided_roles(modules, places, file.entries)
    pairs = []
    for module, place in places.items():
        a, b = modules[module]["A"], modules[module]["B"]
        pair = _make_pair(module, a, b, place, file.entries, config, places, decided)
        if pair.rank > max_rank:
            raise AdapterError(
                f"tensor {a!r} has rank {pair.rank}, above the limit of {max_rank} (--max-lora-rank)"
            )
        pairs.append(pair)
    _refuse_overlap(pairs)
    notes += _rank_notes(pairs, config)
    return _Plan(pairs, ignored, notes)


def _match_names(
    entries: Mapping[str, Entry], sites: Mapping[str, SiteShape], strict: bool
) -> tuple[dict[str, dict[str, str]], list[str], list[str]]:
    """Module → {"A": tensor name, "B": tensor name}; tensors without a place; notes."""
    modules: dict[str, dict[str, str]] = {}
    ignored, notes = [], []
    for name, entry in entries.items():
        if is_head_copy(name) and (head := sites.get("lm_head")) is not None:
            _check_head_copy(name, entry, head)
            notes.append(f"tensor {name!r} is the base model's own head, saved by PEFT; it is not used")
            continue
        refuse_known(name)
        parsed = split_name(name)
        if parsed is None or find_place(parsed[0], sites) is None:
            ignored.append(name)
            continue
        module, factor = parsed
        if other := modules.setdefault(module, {}).get(factor):
            raise AdapterError(f"tensors {other!r} and {name!r} are for the same place")
        modules[module][factor] = name
    if not modules:
        first = f" (first: {ignored[0]!r})" if ignored else ""
        raise AdapterError(
            f"no tensor of {TENSOR_FILE} has a place in this model{first}: was it made for another one?"
        )
    if ignored and strict:
        more = f" (and {len(ignored) - 1} more)" if len(ignored) > 1 else ""
        raise AdapterError(
            f"tensor {ignored[0]!r}{more} has no place in this model; --no-lora-strict-loading ignores such tensors"
        )
    return modules, ignored, notes


def _check_head_copy(name: str, entry: Entry, head: SiteShape) -> None:
    expected = (head.out_features, head.in_features)
    if entry.shape != expected:
        raise AdapterError(
            f"tensor {name!r} is {list(entry.shape)} but the model's head is {list(expected)}: adapters that change "
            "the vocabulary are not supported"
        )


def _make_pair(
    module: str,
    a: str,
    b: str,
    place: Place,
    entries: Mapping[str, Entry],
    config: AdapterConfig,
    places: Mapping[str, Place],
    decided: set[Role],
) -> _Pair:
    _check_matrices(a, b, entries)
    if place.form == "parameter":
        fit = _fit_parameter(module, a, b, place, entries, config, places)
        role = choose_role(fit, decided, config.peft_version, a)
        rank = _flattened_rank(a, b, entries, place.sites[0].num_experts)
        parameter = f"{module.removesuffix('.base_layer')}.{fit.parameter}"
        return _Pair(parameter, a, b, place, fit.sites, rank, config.scale(parameter, rank), role)
    a_shape, b_shape = entries[a].shape, entries[b].shape
    d_in, d_out = place.sites[0].in_features, sum(s.out_features for s in place.sites)
    rank = a_shape[0]
    if a_shape[1] != d_in or rank == 0:
        raise AdapterError(f"tensor {a!r} is {list(a_shape)} but this model needs [rank, {d_in}]")
    if b_shape != (d_out, rank):
        raise AdapterError(
            f"tensor {b!r} is {list(b_shape)} but this model and its lora_A need [{d_out}, {rank}]"
        )
    return _Pair(module, a, b, place, place.sites, rank, config.scale(module, rank))


def _check_matrices(a: str, b: str, entries: Mapping[str, Entry]) -> None:
    for name in (a, b):
        if len(entries[name].shape) != 2:
            raise AdapterError(f"tensor {name!r} is {list(entries[name].shape)}; a matrix was expected")


# fused expert parameters


def _decided_roles(
    modules: Mapping[str, Mapping[str, str]], places: Mapping[str, Place], entries: Mapping[str, Entry]
) -> set[Role]:
    """Roles that are certain by shape anywhere in the adapter: one PEFT wrote all of it."""
    decided: set[Role] = set()
    for module, place in places.items():
        if place.form == "parameter":
            a, b = modules[module]["A"], modules[module]["B"]
            _check_matrices(a, b, entries)
            for fit in fit_shapes(place.sites, entries[a].shape[1], entries[b].shape[0]):
                decided |= fit.roles if len(fit.roles) == 1 else set()
    return decided


def _fit_parameter(
    module: str,
    a: str,
    b: str,
    place: Place,
    entries: Mapping[str, Entry],
    config: AdapterConfig,
    places: Mapping[str, Place],
) -> ParameterFit:
    """Which parameter a pair is for. Its name says so when both are adapted; else target_parameters and the shapes."""
    a_shape, b_shape = entries[a].shape, entries[b].shape
    fits = fit_shapes(place.sites, a_shape[1], b_shape[0])
    if place.is_base_layer:
        allowed, why = {"gate_up_proj"}, "its name says"
    elif f"{module}.base_layer" in places:
        allowed, why = {"down_proj"}, "its name says"
    else:
        targets = {target.rpartition(".")[2] for target in config.target_parameters}
        allowed, why = targets & {"gate_up_proj", "down_proj"}, "target_parameters says"
        allowed = allowed or {"gate_up_proj", "down_proj"}
    matching = [fit for fit in fits if fit.parameter in allowed]
    if len(matching) != 1:
        wanted = " or ".join(sorted(allowed, reverse=True))
        raise AdapterError(
            f"tensors {a!r} {list(a_shape)} and lora_B {list(b_shape)} do not fit the experts' {wanted} of this model "
            f"({why} which of the two)"
        )
    return matching[0]


def _flattened_rank(a: str, b: str, entries: Mapping[str, Entry], num_experts: int) -> int:
    rows, columns = entries[a].shape[0], entries[b].shape[1]
    if rows == 0 or rows % num_experts:
        raise AdapterError(
            f"tensor {a!r} has {rows} rows, not a multiple of the model's {num_experts} experts"
        )
    if columns != rows:
        raise AdapterError(f"tensor {b!r} has {columns} columns but its lora_A has {rows} rows")
    return rows // num_experts


# consistency


def _refuse_overlap(pairs: list[_Pair]) -> None:
    owners: dict[tuple[str, int], _Pair] = {}
    for pair in pairs:
        for site in pair.sites:
            experts = (
                [pair.place.expert] if pair.place.form == "expert" else range(max(1, site.num_experts or 1))
            )
            for expert in experts:
                other = owners.setdefault((site.path, expert), pair)
                if other is not pair:
                    raise AdapterError(f"tensors {other.a!r} and {pair.a!r} both adapt {site.path!r}")


def _rank_notes(pairs: list[_Pair], config: AdapterConfig) -> list[str]:
    different = [(p, stated) for p in pairs if (stated := config.rank(p.module)) != p.rank]
    if not different:
        return []
    pair, stated = different[0]
    return [
        f"{len(different)} modules have another rank than {CONFIG_FILE} states (first: {pair.module!r} has {pair.rank}, "
        f"stated {stated}); the tensors' rank is used"
    ]


# values


def _build_deltas(pairs: list[_Pair], tensors: dict[str, torch.Tensor]) -> dict[str, SiteDelta]:
    """Takes the tensors out of `tensors` as it goes, so that at most one site is in memory twice."""
    deltas: dict[str, SiteDelta] = {}
    by_expert: dict[str, list[_Pair]] = {}
    for pair in pairs:
        if pair.place.form == "expert":
            by_expert.setdefault(pair.sites[0].path, []).append(pair)
            continue
        a, b = tensors.pop(pair.a), tensors.pop(pair.b)
        if pair.place.form == "parameter":
            a, b = unflatten(a, b, pair.sites[0].num_experts, pair.role)
        rows = [site.out_features for site in pair.sites]
        for site, b_part in zip(pair.sites, b.split(rows, dim=-2), strict=True):
            deltas[site.path] = SiteDelta(a, b_part.contiguous(), pair.scale)
    for path, members in by_expert.items():
        deltas[path] = _stack_experts(members, tensors)
    return deltas


def _stack_experts(pairs: list[_Pair], tensors: dict[str, torch.Tensor]) -> SiteDelta:
    """One site of all experts: those the file lacks are zero, lower ranks are padded with zeros.

    A site has one scale; experts with another one (rank_pattern, alpha_pattern) get the quotient into B, in fp32.
    """
    site, scale = pairs[0].sites[0], pairs[0].scale
    rank = max(p.rank for p in pairs)
    dtypes = {tensors[name].dtype for p in pairs for name in (p.a, p.b)}
    dtype = dtypes.pop() if len(dtypes) == 1 and all(p.scale == scale for p in pairs) else torch.float32
    a_ERD = torch.zeros(site.num_experts, rank, site.in_features, dtype=dtype)
    b_ENR = torch.zeros(site.num_experts, site.out_features, rank, dtype=dtype)
    for pair in pairs:
        e = pair.place.expert
        a_ERD[e, : pair.rank] = tensors.pop(pair.a)
        b = tensors.pop(pair.b)
        b_ENR[e, :, : pair.rank] = b if pair.scale == scale else b.float() * (pair.scale / scale)
    return SiteDelta(a_ERD, b_ENR, scale)
