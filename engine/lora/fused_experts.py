"""Flattened LoRA of fused expert parameters, as PEFT writes it for `target_parameters`.

A parameter is [E, out, in]: gate_up [E, 2I, H] (gate rows first), down [E, H, I]. That of gpt-oss is transposed,
[E, in, out], and its gate and up outputs are interleaved: gate [..., ::2], up [..., 1::2]. PEFT stores, for rank r,

    lora_A [E·r, a]    row e·r + j       rank j of expert e: expert slowest
    lora_B [b, r·E]    column j·E + e    rank j of expert e: expert fastest

In the natural role a = in and b = out. PEFT before 0.19.1 exchanged them (a = out, b = in; of transposed parameters
only 0.19.0 did), so ΔW_e is the transpose of B_e A_e: shrink with B_eᵀ, expand with A_eᵀ. Shapes tell the role, and
which parameter it is, except for a square one.
Unsloth before 2026-09-17 wrote lora_B expert-major instead, column e·r + j, which no shape tells.

Example, E = 2, r = 2: lora_A rows are e0j0 e0j1 e1j0 e1j1; lora_B columns are j0e0 j0e1 j1e0 j1e1.
"""

import re
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from loraplex.engine.lora.adapter import SiteShape
from loraplex.engine.lora.errors import AdapterError

Parameter = Literal["gate_up_proj", "down_proj"]
PARAMETERS: tuple[Parameter, ...] = get_args(Parameter)
Role = Literal["natural", "exchanged"]
BLayout = Literal["rank-major", "expert-major"]
"""Order of lora_B's columns: j·E + e, or e·r + j."""
B_LAYOUTS: tuple[BLayout, ...] = get_args(BLayout)
_FIRST_EXCHANGED_TRANSPOSED = (0, 19, 0)
_FIRST_NATURAL = (0, 19, 1)


@dataclass(frozen=True)
class ParameterFit:
    """One reading of a pair of shapes."""

    parameter: Parameter
    sites: tuple[SiteShape, ...]
    """gate and up, or down."""
    roles: frozenset[Role]
    """Both for a square parameter."""


def fit_shapes(projections: tuple[SiteShape, ...], a_width: int, b_rows: int) -> list[ParameterFit]:
    """The parameters (of gate, up and down sites) that a pair with A [·, a_width], B [b_rows, ·] can belong to.

    At most one: widths alone distinguish gate_up [2I, H] from down [H, I] in either role.
    """
    gate, up, down = projections
    parameters: tuple[tuple[Parameter, tuple[SiteShape, ...]], ...] = (
        ("gate_up_proj", (gate, up)),
        ("down_proj", (down,)),
    )
    fits = []
    for parameter, sites in parameters:
        d_in, d_out = sites[0].in_features, sum(s.out_features for s in sites)
        shapes: dict[Role, tuple[int, int]] = {"natural": (d_in, d_out), "exchanged": (d_out, d_in)}
        roles = frozenset(role for role, shape in shapes.items() if shape == (a_width, b_rows))
        if roles:
            fits.append(ParameterFit(parameter, sites, roles))
    return fits


def choose_role(fit: ParameterFit, decided: set[Role], peft_version: str | None, tensor: str) -> Role:
    """The role by shape; for a square parameter that of its siblings, then that of the PEFT version.

    Args:
        decided: roles that the shapes of the adapter's other parameters fix.
    """
    if len(fit.roles) == 1:
        return next(iter(fit.roles))
    if len(decided) == 1:
        return next(iter(decided))
    role = role_of_version(peft_version, is_transposed=fit.sites[0].is_transposed)
    if role is None:
        raise AdapterError(
            f"tensor {tensor!r}: the {fit.parameter} parameter is square, so only peft_version in adapter_config.json "
            "tells how it was written; set the field to the version of PEFT that saved the adapter"
        )
    return role


def role_of_version(peft_version: str | None, *, is_transposed: bool) -> Role | None:
    """The role that this PEFT writes for parameters stored as [E, out, in], or transposed; None for no version."""
    match = re.match(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?", peft_version or "")
    if match is None:
        return None
    version = tuple(int(n or 0) for n in match.groups())
    if version >= _FIRST_NATURAL or (is_transposed and version < _FIRST_EXCHANGED_TRANSPOSED):
        return "natural"
    return "exchanged"


def split_rows(b: torch.Tensor, sites: tuple[SiteShape, ...]) -> tuple[torch.Tensor, ...]:
    """B [..., out, r] of a fused projection → that of each site, as views; interleaved ones take turns."""
    if sites[0].is_interleaved:
        return tuple(b[..., i :: len(sites), :] for i in range(len(sites)))
    return b.split([site.out_features for site in sites], dim=-2)


def flatten(a_ERD: torch.Tensor, b_ENR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A [E, r, in], B [E, out, r] → lora_A [E·r, in], lora_B [out, r·E], in the natural role."""
    return a_ERD.flatten(0, 1), b_ENR.permute(1, 2, 0).flatten(1)


def unflatten(
    a: torch.Tensor, b: torch.Tensor, num_experts: int, role: Role, b_layout: BLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """lora_A [E·r, ·], lora_B [·, r·E] → a_ERD [E, r, in], b_ENR [E, out, r]."""
    rank = a.shape[0] // num_experts
    first_ERa = a.view(num_experts, rank, -1)
    if b_layout == "rank-major":
        second_bRE = b.view(b.shape[0], rank, num_experts)
    else:
        second_bRE = b.view(b.shape[0], num_experts, rank).mT
    if role == "natural":
        return first_ERa, second_bRE.permute(2, 0, 1).contiguous()
    return second_bRE.permute(2, 1, 0).contiguous(), first_ERa.mT.contiguous()
