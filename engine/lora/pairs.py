"""From the header of an adapter's file to its (A, B) pairs: names matched with the model's sites, shapes checked."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from loraplex.engine.lora.adapter import SiteShape
from loraplex.engine.lora.adapter_config import CONFIG_FILE, AdapterConfig
from loraplex.engine.lora.errors import AdapterError
from loraplex.engine.lora.fused_experts import PARAMETERS, ParameterFit, Role, choose_role, fit_shapes
from loraplex.engine.lora.tensor_file import TENSOR_FILE, Entry
from loraplex.engine.lora.tensor_names import Place, copied_site, find_place, homeless_reason, parse_name, refuse_known


@dataclass(frozen=True)
class Pair:
    """The A and B of one module in the file, and where they belong."""

    module: str
    """As PEFT's patterns see it; a fused parameter's ends in its name."""
    a: str
    b: str
    """Tensor names."""
    place: Place
    sites: tuple[SiteShape, ...]
    """The site, or several that split the rows of B in this order. They share A, or A has `rank` rows for each."""
    rank: int
    scale: float
    role: Role = "natural"
    is_shared: bool = False
    """All experts of a stack share A or B."""

    @property
    def layout(self) -> str:
        if self.place.form == "parameter":
            return "fused experts" if self.role == "natural" else "fused experts (exchanged)"
        if self.place.form == "stack":
            return "stacked experts (shared outer)" if self.is_shared else "stacked experts"
        return "per-expert" if self.place.form == "expert" else self.place.form


@dataclass(frozen=True)
class Names:
    """What the tensor names say."""

    modules: dict[str, tuple[str, str]]
    """Module → names of its A and B."""
    ignored: list[str]
    """Tensors that have no place in the model."""
    notes: list[str]


def match_names(entries: Mapping[str, Entry], sites: Mapping[str, SiteShape], *, strict: bool) -> Names:
    """Finds the modules. A tensor without place (strict), without partner, or for a taken place is an AdapterError."""
    factors: dict[str, dict[str, str]] = {}
    ignored, notes = [], []
    for name, entry in entries.items():
        if site := copied_site(name, sites):
            _check_copy(name, entry, site)
            what = "embedding" if site.kind == "embedding" else "head"
            notes.append(f"tensor {name!r} is the base model's own {what}, saved by PEFT; it is not used")
            continue
        refuse_known(name)
        parsed = parse_name(name)
        place = find_place(parsed.module, sites) if parsed else None
        if parsed is None or place is None or not parsed.fits(place):
            ignored.append(name)
            continue
        of_module = factors.setdefault(parsed.module, {})
        if other := of_module.get(parsed.factor):
            raise AdapterError(f"tensors {other!r} and {name!r} are for the same place")
        of_module[parsed.factor] = name
    if not factors:
        first = f" (first: {ignored[0]!r}{homeless_reason(ignored[0])})" if ignored else ""
        raise AdapterError(f"no tensor of {TENSOR_FILE} has a place in this model{first}: was it made for another one?")
    if ignored and strict:
        more = f" (and {len(ignored) - 1} more)" if len(ignored) > 1 else ""
        raise AdapterError(
            f"tensor {ignored[0]!r}{more} has no place in this model{homeless_reason(ignored[0])}; "
            "--no-lora-strict-loading ignores such tensors"
        )
    return Names({module: _both(found) for module, found in factors.items()}, ignored, notes)


def make_pairs(
    modules: Mapping[str, tuple[str, str]],
    entries: Mapping[str, Entry],
    sites: Mapping[str, SiteShape],
    config: AdapterConfig,
    max_rank: int,
) -> list[Pair]:
    """Checks every shape against the sites. Raises AdapterError naming the tensor."""
    shapes = _Shapes(entries)
    places = {module: find_place(module, sites) for module in modules}
    fused = _FusedPairs(modules, {m: p for m, p in places.items() if p and p.form == "parameter"}, shapes, config)
    pairs = []
    for module, place in places.items():
        assert place is not None, f"{module = } was matched before"
        a, b = modules[module]
        if place.form == "parameter":
            pair = fused.pair(module)
        else:
            rank = shapes.rank(a, b, place)
            shared = place.form == "stack" and shapes.is_shared(a, b, place.sites[0].num_experts)
            pair = Pair(module, a, b, place, place.sites, rank, config.scale(module, rank), is_shared=shared)
        if pair.rank > max_rank:
            raise AdapterError(f"tensor {a!r} has rank {pair.rank}, above the limit of {max_rank} (--max-lora-rank)")
        pairs.append(pair)
    _refuse_overlap(pairs)
    return pairs


def rank_notes(pairs: Iterable[Pair], config: AdapterConfig) -> list[str]:
    """A remark when the config states other ranks than the tensors have."""
    different = [(p, stated) for p in pairs if (stated := config.rank(p.module)) != p.rank]
    notes = [
        f"{pair.module!r} has rank {pair.rank}; its scale is of rank {stated}, which {CONFIG_FILE} states, as in PEFT "
        "with ensure_weight_tying"
        for pair, stated in different
        if config.states_rank(pair.module)
    ]
    different = [(pair, stated) for pair, stated in different if not config.states_rank(pair.module)]
    if not different:
        return notes
    pair, stated = different[0]
    return [
        *notes,
        f"{len(different)} modules have another rank than {CONFIG_FILE} states (first: {pair.module!r} has "
        f"{pair.rank}, stated {stated}); the tensors' rank is used",
    ]


def _both(found: Mapping[str, str]) -> tuple[str, str]:
    if len(found) == 1:
        ((factor, name),) = found.items()
        raise AdapterError(f"tensor {name!r} has no lora_{'B' if factor == 'A' else 'A'} beside it")
    return found["A"], found["B"]


def _check_copy(name: str, entry: Entry, site: SiteShape) -> None:
    """The weight of the embedding is [vocabulary, hidden], as that of the head."""
    is_embedding = site.kind == "embedding"
    expected = (site.in_features, site.out_features) if is_embedding else (site.out_features, site.in_features)
    if entry.shape != expected:
        raise AdapterError(
            f"tensor {name!r} is {list(entry.shape)} but the model's is {list(expected)}: adapters that change the "
            "vocabulary are not supported"
        )


def _refuse_overlap(pairs: list[Pair]) -> None:
    owners: dict[tuple[str, int], Pair] = {}
    for pair in pairs:
        for site in pair.sites:
            for expert in [pair.place.expert] if pair.place.form == "expert" else range(site.num_experts or 1):
                other = owners.setdefault((site.path, expert), pair)
                if other is not pair:
                    raise AdapterError(f"tensors {other.a!r} and {pair.a!r} both adapt {site.path!r}")


class _Shapes:
    """Shapes of the file's matrices."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries

    def matrix(self, name: str) -> tuple[int, int]:
        shape = self._entries[name].shape
        if len(shape) != 2:
            raise AdapterError(f"tensor {name!r} is {list(shape)}; a matrix was expected")
        return shape[0], shape[1]

    def rank(self, a: str, b: str, place: Place) -> int:
        """r of A [r, in] and B [out, r] that fit the sites, with experts (or 1 for all) in front in a stack.

        A of n sites may have n · r rows: their own A's on top of each other.
        """
        sites = place.sites
        may_hold_own_as = place.form != "expert" and not sites[0].is_interleaved
        if place.form == "stack" and len(sites) > 1 and sites[0].is_interleaved:
            raise AdapterError(
                f"tensor {b!r}: this model's experts hold gate and up outputs in turn, and whether the tensor's rows "
                "do so, or come in two halves, cannot be known; name gate_proj and up_proj apart"
            )
        d_in, d_out = sites[0].in_features, sum(s.out_features for s in sites)
        num_experts = sites[0].num_experts if place.form == "stack" else None
        (rows, a_width), (b_rows, rank) = self._inner(a, num_experts), self._inner(b, num_experts)
        lead = "" if num_experts is None else f"{num_experts} or 1, "
        if a_width != d_in or rows == 0:
            raise AdapterError(f"tensor {a!r} is {self._show(a)} but this model needs [{lead}rank, {d_in}]")
        if b_rows != d_out or rank == 0 or rows not in (rank, len(sites) * rank if may_hold_own_as else rank):
            raise AdapterError(
                f"tensor {b!r} is {self._show(b)} but this model and its lora_A need [{lead}{d_out}, {rows}]"
            )
        return rank

    def is_shared(self, a: str, b: str, num_experts: int) -> bool:
        return num_experts > 1 and 1 in (self._entries[a].shape[0], self._entries[b].shape[0])

    def _inner(self, name: str, num_experts: int | None) -> tuple[int, int]:
        """The matrix, or that of one expert."""
        if num_experts is None:
            return self.matrix(name)
        shape = self._entries[name].shape
        if len(shape) != 3 or shape[0] not in (1, num_experts):
            raise AdapterError(
                f"tensor {name!r} is {self._show(name)}; three dimensions were expected, the first {num_experts} (the "
                "model's experts) or 1 (shared by all)"
            )
        return shape[1], shape[2]

    def _show(self, name: str) -> str:
        return str(list(self._entries[name].shape))

    def flattened_rank(self, a: str, b: str, num_experts: int) -> int:
        """r of A [E·r, ·] and B [·, r·E]."""
        rows, columns = self.matrix(a)[0], self.matrix(b)[1]
        if rows == 0 or rows % num_experts:
            raise AdapterError(f"tensor {a!r} has {rows} rows, not a multiple of the model's {num_experts} experts")
        if columns != rows:
            raise AdapterError(f"tensor {b!r} has {columns} columns but its lora_A has {rows} rows")
        return rows // num_experts


class _FusedPairs:
    """The adapter's fused expert parameters, which must be looked at together to be told apart."""

    def __init__(
        self,
        modules: Mapping[str, tuple[str, str]],
        places: Mapping[str, Place],
        shapes: _Shapes,
        config: AdapterConfig,
    ) -> None:
        self._modules = modules
        self._places = places
        self._shapes = shapes
        self._config = config
        fits = [fit for module in places for fit in self._fits(module)]
        self._decided: set[Role] = {role for fit in fits if len(fit.roles) == 1 for role in fit.roles}
        """One PEFT wrote all of the adapter: what is certain by shape anywhere holds for square parameters too."""

    def pair(self, module: str) -> Pair:
        (a, b), place = self._modules[module], self._places[module]
        fit = self._choose_fit(module)
        rank = self._shapes.flattened_rank(a, b, place.sites[0].num_experts)
        role = choose_role(fit, self._decided, self._config.peft_version, a)
        parameter = f"{module.removesuffix('.base_layer')}.{fit.parameter}"
        return Pair(parameter, a, b, place, fit.sites, rank, self._config.scale(parameter, rank), role)

    def _fits(self, module: str) -> list[ParameterFit]:
        a, b = self._modules[module]
        return fit_shapes(self._places[module].sites, self._shapes.matrix(a)[1], self._shapes.matrix(b)[0])

    def _choose_fit(self, module: str) -> ParameterFit:
        """Which parameter a pair is for: its name says so when both are adapted, else target_parameters and shapes."""
        allowed, why = self._named(module)
        matching = [fit for fit in self._fits(module) if fit.parameter in allowed]
        if len(matching) != 1:
            a, b = self._modules[module]
            wanted = " or ".join(sorted(allowed, reverse=True))
            raise AdapterError(
                f"tensors {a!r} {list(self._shapes.matrix(a))} and lora_B {list(self._shapes.matrix(b))} do not fit "
                f"the experts' {wanted} of this model ({why})"
            )
        return matching[0]

    def _named(self, module: str) -> tuple[set[str], str]:
        if self._places[module].is_base_layer:
            return {"gate_up_proj"}, "chosen by the tensors' names"
        if f"{module}.base_layer" in self._places:
            return {"down_proj"}, "chosen by the tensors' names"
        targets = {target.rpartition(".")[2] for target in self._config.target_parameters} & set(PARAMETERS)
        return (targets, "chosen by target_parameters") if targets else (set(PARAMETERS), "neither fits")
