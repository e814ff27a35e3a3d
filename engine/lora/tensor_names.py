"""The grammar of tensor names, against the model's site tree. What the grammar does not know has no place.

name      = {"base_model.model."} module ".lora_" ("A" | "B") [".default"] [".weight"]    prefix 0, 1 or 2 times
          | {"base_model.model."} embedding ".lora_embedding_" ("A" | "B") [".default"]
module    = dense site | parts | expert | stack | parameter
parts     = dense parent ".qkv_proj" | ".gate_up_proj" | …              B's rows are split among the sites
expert    = experts parent "." number "." projection                    one expert of an experts site
          | experts parent "." ("gate_up_projs" | "down_projs") "." number     the same, as Unsloth unfolds gpt-oss
stack     = experts parent "." projection | ".gate_up_proj"             3-D, all experts; ".weight" may be missing
parameter = experts parent [".base_layer"]                              fused 3-D parameter, flattened (PEFT)

A module that the tree does not have is looked up under its other spellings (`_spellings`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from loraplex.engine.lora.adapter import SiteShape
from loraplex.engine.lora.errors import AdapterError

_NAME = re.compile(
    r"(?:base_model\.model\.){0,2}(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<factor>[AB])(?:\.default)?"
    r"(?P<weight>\.weight)?"
)
_COPY = re.compile(r"(?:base_model\.model\.){0,2}(?P<module>.+)\.base_layer\.weight")
_EXPERT = re.compile(r"(?P<parent>.+)\.(?P<index>0|[1-9][0-9]{0,5})\.(?P<projection>[a-z0-9_]+)")
PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_UNFOLDED = re.compile(
    r"(?P<parent>.+\.experts)\.(?P<projection>gate_up_proj|down_proj)s\.(?P<index>0|[1-9][0-9]{0,5})"
)

_REASONS = (
    (r"\.lora_magnitude_vector", "DoRA (lora_magnitude_vector) is not supported"),
    (r"\.token_adapter\.", "trained token embeddings (trainable_token_indices) are not supported"),
    (r"\.embed_tokens\.(?!lora_embedding_)", "of embed_tokens only lora_embedding_A and _B are supported"),
    (r"\.e_score_correction_bias", "trained router biases (e_score_correction_bias) are not supported"),
    (r"\.lora_B(\.default)?\.bias$", "a bias in lora_B (lora_bias) is not supported"),
    (r"\.bias$", "trained biases (bias) are not supported"),
    (r"^(?!.*\.lora_).*\.weight$", "replaced whole weights (modules_to_save) are not supported"),
)
_ELSEWHERE = tuple(
    (re.compile(rf"\.(?:{modules})\."), reason)
    for modules, reason in (
        (
            "q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|fused_qkv_a_proj_with_mqa",
            "a projection of latent attention (MLA)",
        ),
        ("mlp.gate|block_sparse_moe.gate|mlp.router", "a router of this name"),
        ("mlp.experts|block_sparse_moe.experts", "routed experts of this name or number"),
        ("shared_experts?|shared_expert_gate", "a shared expert of this name"),
    )
)
_REASONS_COMPILED = tuple((re.compile(pattern), reason) for pattern, reason in _REASONS)


@dataclass(frozen=True)
class Place:
    """Where the pair of one module belongs."""

    form: Literal["dense", "embedding", "expert", "stack", "parameter"]
    sites: tuple[SiteShape, ...]
    """dense, embedding, stack and expert: the site, or the parts of a fused projection in row order.
    parameter: gate, up and down of the layer; shapes tell which of them the tensors are for."""
    expert: int = 0
    is_base_layer: bool = False


@dataclass(frozen=True)
class ParsedName:
    module: str
    """The name that PEFT's patterns match."""
    factor: Literal["A", "B"]
    is_bare: bool
    """Without `.weight`, as 3-D tensors may be called and those of an embedding are."""
    is_embedding: bool

    def fits(self, place: Place) -> bool:
        """Whether a tensor in this place may be called so."""
        if self.is_embedding or place.form == "embedding":
            return self.is_embedding and self.is_bare and place.form == "embedding"
        return not self.is_bare or place.form == "stack"


def parse_name(name: str) -> ParsedName | None:
    """None for a name outside the grammar."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    factor: Literal["A", "B"] = "A" if match["factor"] == "A" else "B"
    return ParsedName(match["module"], factor, not match["weight"], bool(match["embedding"]))


@dataclass(frozen=True)
class ExpertName:
    parent: str
    index: int
    projection: str


def split_expert(module: str) -> ExpertName | None:
    """`….experts.3.up_proj` → (`….experts`, 3, `up_proj`); None for a module that is not in an expert."""
    match = _EXPERT.fullmatch(module)
    return ExpertName(match["parent"], int(match["index"]), match["projection"]) if match else None


def split_unfolded(module: str) -> ExpertName | None:
    """`….experts.gate_up_projs.3` → (`….experts`, 3, `gate_up_proj`); None for other modules."""
    match = _UNFOLDED.fullmatch(module)
    return ExpertName(match["parent"], int(match["index"]), match["projection"]) if match else None


def copied_site(name: str, sites: Mapping[str, SiteShape]) -> SiteShape | None:
    """The head or the embedding when `name` is its base weight, which PEFT saves beside a LoRA on it."""
    match = _COPY.fullmatch(name)
    place = find_place(match["module"], sites) if match else None
    site = place.sites[0] if place else None
    return site if site and (site.path == "lm_head" or site.kind == "embedding") else None


def find_place(module: str, sites: Mapping[str, SiteShape]) -> Place | None:
    """The place of a module in the model; None when it has none, or several under its other spellings."""
    if place := _place_as_spelt(module, sites):
        return place
    found = [place for spelling in _spellings(module) if (place := _place_as_spelt(spelling, sites))]
    return found[0] if len(found) == 1 else None


def _spellings(module: str) -> Iterator[str]:
    """Names that the module may have in a text-only model, or under another version of transformers.

    Multimodal models hold the same decoder below `language_model`. Mixtral's `block_sparse_moe`, the name in its
    checkpoints, is `mlp` in transformers 5. Some trainers call the head `unembed_tokens`.
    """
    inner = re.sub(r"^(model\.)?language_model\.", r"\1", module)
    if inner in ("unembed_tokens", "model.unembed_tokens"):
        yield "lm_head"
    moe = inner.replace(".block_sparse_moe.", ".mlp.")
    if moe == inner:
        moe = inner.replace(".mlp.", ".block_sparse_moe.")
    yield from {inner, moe} - {module}


def _place_as_spelt(module: str, sites: Mapping[str, SiteShape]) -> Place | None:
    parent, _, last = module.rpartition(".")
    site = sites.get(module) or sites.get(f"{parent}.{MIXTRAL.get(last, last)}")
    if site is not None and (site.path == module or site.kind == "experts"):
        return Place("stack" if site.kind == "experts" else site.kind, (site,))
    if parts := _all_sites(parent, PARTS.get(last, ()), sites, "dense"):
        return Place("dense", parts)
    if parts := _all_sites(parent, PARTS.get(last, ()), sites, "experts"):
        return Place("stack", parts)
    if expert := split_expert(module):
        site = sites.get(f"{expert.parent}.{MIXTRAL.get(expert.projection, expert.projection)}")
        if site is not None and site.kind == "experts" and expert.index < site.num_experts:
            return Place("expert", (site,), expert=expert.index)
    if expert := split_unfolded(module):
        names = PARTS.get(expert.projection, (expert.projection,))
        found = _all_sites(expert.parent, names, sites, "experts")
        fits = found and found[0].is_interleaved and expert.index < found[0].num_experts
        return Place("expert", found, expert=expert.index) if found and fits else None
    is_base_layer = last == "base_layer"
    if projections := _all_sites(parent if is_base_layer else module, EXPERT_PROJECTIONS, sites, "experts"):
        return Place("parameter", projections, is_base_layer=is_base_layer)
    return None


def homeless_reason(name: str) -> str:
    """What is known of a tensor that has no place in the model: for which kind of model it was made."""
    for pattern, reason in _ELSEWHERE:
        if pattern.search(name):
            return f" ({reason}, which this model does not have)"
    return ""


def refuse_known(name: str) -> None:
    """Raises the reason for tensors that are no plain LoRA factor: leaving them out would change the adapter."""
    for pattern, reason in _REASONS_COMPILED:
        if pattern.search(name):
            raise AdapterError(f"tensor {name!r}: {reason}")


def _all_sites(
    parent: str, names: tuple[str, ...], sites: Mapping[str, SiteShape], kind: str
) -> tuple[SiteShape, ...] | None:
    found = tuple(site for n in names if (site := sites.get(f"{parent}.{n}")) is not None and site.kind == kind)
    return found if names and len(found) == len(names) else None
