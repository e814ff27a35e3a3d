"""The model's sites as an adapter's own files tell them: names and shapes, and the config's ranks for fused experts.

For tools that run without a checkpoint. What the files leave open (how q, k and v share a fused projection, which of
two parameters a lone pair is for) is an AdapterError that asks for the model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from loraplex.engine.lora.adapter import PlainSite
from loraplex.engine.lora.adapter_config import AdapterConfig
from loraplex.engine.lora.errors import AdapterError
from loraplex.engine.lora.fused_experts import PARAMETERS, Parameter, role_of_version
from loraplex.engine.lora.reader import read_config
from loraplex.engine.lora.tensor_file import open_tensors
from loraplex.engine.lora.tensor_names import (
    EXPERT_PROJECTIONS,
    MIXTRAL,
    PARTS,
    parse_name,
    split_expert,
    split_unfolded,
)

_ASK = "cannot be known from the adapter's files alone; give the model with --model"


@dataclass(frozen=True)
class _Factors:
    """Names and shapes of one module's pair."""

    a_name: str
    a: tuple[int, ...]
    b: tuple[int, ...]
    is_embedding: bool


@dataclass
class _ExpertGroup:
    """What is known of the routed experts below one path."""

    widths: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Projection → (in, out)."""
    parameters: dict[Parameter, _Factors] = field(default_factory=dict)


def infer_sites(folder: Path) -> dict[str, PlainSite]:
    """Sites, by path, that fit the adapter in `folder`.

    The number of experts is the largest that any tensor shows; a file that lacks the last experts shows too few.
    """
    config = read_config(folder)
    dense: dict[str, PlainSite] = {}
    groups: dict[str, _ExpertGroup] = {}
    num_experts, is_gpt_oss = 0, config.for_gpt_oss
    for module, f in _modules(folder):
        parent, _, last = module.rpartition(".")
        last = MIXTRAL.get(last, last)
        is_stack = len(f.a) == 3
        unfolded = split_unfolded(module)
        if is_stack and not parent.endswith(".experts"):
            raise AdapterError(f"tensor {f.a_name!r} is {list(f.a)}, but only experts have three dimensions")
        if (expert := split_expert(module)) and expert.parent.endswith(".experts"):
            group = groups.setdefault(expert.parent, _ExpertGroup())
            group.widths[MIXTRAL.get(expert.projection, expert.projection)] = _matrix_widths(f)
            num_experts = max(num_experts, expert.index + 1)
        elif unfolded:
            is_gpt_oss = True  # no other model is unfolded so
            widths = groups.setdefault(unfolded.parent, _ExpertGroup()).widths
            for part in PARTS.get(unfolded.projection, (unfolded.projection,)):
                widths[part] = (f.a[1], f.b[0] // len(PARTS.get(unfolded.projection, (part,))))
            num_experts = max(num_experts, unfolded.index + 1)
        elif is_stack:
            num_experts = max(num_experts, f.a[0], f.b[0])
            widths = groups.setdefault(parent, _ExpertGroup()).widths
            for part in PARTS.get(last, (last,)):
                widths[part] = (f.a[2], f.b[1] // len(PARTS.get(last, (last,))))
        elif module.removesuffix(".base_layer").endswith(".experts"):
            group = groups.setdefault(module.removesuffix(".base_layer"), _ExpertGroup())
            group.parameters["gate_up_proj" if last == "base_layer" else "down_proj"] = f
        else:
            dense.update({site.path: site for site in _dense_sites(module, f)})
    for parent, group in groups.items():
        if group.parameters:
            num_experts = max(num_experts, _fill_from_parameters(parent, group, config))
        else:
            _complete(group)
    experts = [
        PlainSite(f"{parent}.{projection}", "experts", d_in, d_out, num_experts, is_gpt_oss, is_gpt_oss)
        for parent, group in groups.items()
        for projection, (d_in, d_out) in group.widths.items()
    ]
    return dense | {site.path: site for site in experts}


def _modules(folder: Path) -> Iterator[tuple[str, _Factors]]:
    """Modules with both factors, which must be matrices or stacks of them."""
    names: dict[str, dict[str, str]] = {}
    embeddings: set[str] = set()
    with open_tensors(folder) as file:
        for name, entry in file.entries.items():
            if parsed := parse_name(name):
                if len(entry.shape) not in (2, 3) or 0 in entry.shape:
                    raise AdapterError(f"tensor {name!r} is {list(entry.shape)}, which is no LoRA factor")
                names.setdefault(parsed.module, {})[parsed.factor] = name
                if parsed.is_embedding:
                    embeddings.add(parsed.module)
        for module, found in names.items():
            if len(found) == 2:
                a, b = (file.entries[found[factor]].shape for factor in "AB")
                if len(a) != len(b):
                    raise AdapterError(f"tensor {found['A']!r} is {list(a)} but its lora_B is {list(b)}")
                yield module, _Factors(found["A"], a, b, module in embeddings)


def _matrix_widths(f: _Factors) -> tuple[int, int]:
    return f.a[-1], f.b[0]


def _dense_sites(module: str, f: _Factors) -> Iterator[PlainSite]:
    """The module itself, or the parts of a fused one when they can only be equal."""
    parent, _, last = module.rpartition(".")
    d_in, d_out = _matrix_widths(f)
    if last == "gate_up_proj":
        for part in PARTS[last]:
            yield PlainSite(f"{parent}.{part}", "dense", d_in, d_out // 2)
    elif last in PARTS and f.a[0] != f.b[1]:
        raise AdapterError(f"tensor {f.a_name!r}: how its rows and those of lora_B belong to {PARTS[last]} {_ASK}")
    else:
        yield PlainSite(module, "embedding" if f.is_embedding else "dense", d_in, d_out)


def _fill_from_parameters(parent: str, group: _ExpertGroup, config: AdapterConfig) -> int:
    """Widths of gate, up and down from flattened parameters; returns the number of experts."""
    _name_lone_parameter(group, config)
    hidden, inner = _hidden_and_inner(group, config)
    group.widths |= {p: (inner, hidden) if p == "down_proj" else (hidden, inner) for p in EXPERT_PROJECTIONS}
    counts = set()
    for parameter, f in group.parameters.items():
        rank = config.rank(f"{parent}.{parameter}")
        if f.a[0] % rank:
            raise AdapterError(
                f"tensor {f.a_name!r} has {f.a[0]} rows, no multiple of the rank {rank} that the config states: the "
                f"number of experts {_ASK}"
            )
        counts.add(f.a[0] // rank)
    if len(counts) != 1:
        raise AdapterError(f"{parent!r}: its tensors and the config's ranks disagree: the number of experts {_ASK}")
    return counts.pop()


def _complete(group: _ExpertGroup) -> None:
    """Widths of all three projections from those of any."""
    projection, (d_in, d_out) = next(iter(group.widths.items()))
    narrow, wide = ((d_out, d_in), (d_in, d_out)) if projection == "down_proj" else ((d_in, d_out), (d_out, d_in))
    for name in EXPERT_PROJECTIONS:
        group.widths.setdefault(name, wide if name == "down_proj" else narrow)


def _name_lone_parameter(group: _ExpertGroup, config: AdapterConfig) -> None:
    """A single target is stored under the name that means down when there are two."""
    targets = {t.rpartition(".")[2] for t in config.target_parameters} & set(PARAMETERS)
    if "gate_up_proj" in group.parameters or targets == {"down_proj"}:
        return
    f = group.parameters.pop("down_proj")
    if targets != {"gate_up_proj"}:
        raise AdapterError(f"tensor {f.a_name!r}: whether it is for gate_up_proj or down_proj {_ASK}")
    group.parameters["gate_up_proj"] = f


def _hidden_and_inner(group: _ExpertGroup, config: AdapterConfig) -> tuple[int, int]:
    """H and I. Both parameters together fit one role only; a lone one needs the version of PEFT."""
    gate_up, down = (group.parameters.get(p) for p in PARAMETERS)
    role = role_of_version(config.peft_version, is_transposed=config.for_gpt_oss)
    if gate_up and down:
        is_natural = gate_up.a[1] == down.b[0] and gate_up.b[0] == 2 * down.a[1]
        is_exchanged = gate_up.b[0] == down.a[1] and gate_up.a[1] == 2 * down.b[0]
        if not is_natural and not is_exchanged:
            raise AdapterError(f"tensors {gate_up.a_name!r} and {down.a_name!r} are not of the same experts")
        role = "natural" if is_natural else "exchanged"
    f = gate_up or down
    assert f is not None, "a group with parameters"
    if role is None:
        raise AdapterError(f"tensor {f.a_name!r}: which side is the input {_ASK}")
    d_in, d_out = (f.a[1], f.b[0]) if role == "natural" else (f.b[0], f.a[1])
    return (d_in, d_out // 2) if gate_up else (d_out, d_in)
