"""Our layers with an adapter against the same layers with the adapter merged into their weights, in fp32.

Layer by layer, so that one layer of the model is in memory at a time. In every layer both start from the same input
(the merged model's), which shows where a difference arises; beside it runs our model's own stream of hidden states,
whose log-probabilities are compared at the end. A layer's output may be dominated by few huge values, so the delta of
each of its sites is compared by itself too (`site_check`). T tokens, D hidden, V vocabulary.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loraplex.engine.batch import ForwardContext, StepPlan
from loraplex.engine.config import LoRAConfig
from loraplex.engine.device import resolve_device
from loraplex.engine.inputs import PageTable, build_inputs
from loraplex.engine.layers.checkpoint import CheckpointTensor, HasConstants, TensorOwner
from loraplex.engine.layers.embedding import LMHead
from loraplex.engine.layers.rotary import CosSin
from loraplex.engine.lora.adapter import HostAdapter
from loraplex.engine.lora.backend import make_backend
from loraplex.engine.lora.base_weights import BaseWeights
from loraplex.engine.lora.fused_experts import BLayout
from loraplex.engine.lora.merge import AdapterMerge
from loraplex.engine.lora.pool import AdapterPool
from loraplex.engine.lora.reader import read_adapter
from loraplex.engine.lora.report import ANY_RANK
from loraplex.engine.lora.site_check import SiteListener, embedding_error
from loraplex.engine.model_config import read_model_spec
from loraplex.engine.models import build_model
from loraplex.engine.models.decoder import CausalLM, DecoderLayer
from loraplex.engine.models.sites import Adapted, lora_sites
from loraplex.engine.parallel import Parallel
from loraplex.engine.weights import owned_tensors
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.experts import expert_lora_op

META = torch.device("meta")
_EMBEDDING = "model.embed_tokens"
_SMALL_EFFECT = 0.001
"""Of the largest value. Rounding in one layer is a few millionths of that."""
_SMALL_EFFECT_AT_THE_END = 0.01
"""Rounding of all layers has met there."""


@dataclass(frozen=True)
class Comparison:
    """The embedding, one layer, `lm_head`, or `log-probabilities` at the end."""

    name: str
    difference: float
    """max |ours − merged|."""
    effect: float
    """max |merged − base|: what the adapter changes from the same input."""
    size: float
    """max |merged|."""
    small_effect: float = _SMALL_EFFECT
    site: str = ""
    """The weight whose delta is farthest from its merge."""
    site_error: float = 0.0
    """How far: `output_error`."""

    def sites_within(self, tolerance: float) -> bool:
        return self.site_error <= tolerance

    def within(self, tolerance: float) -> bool:
        """Whether the difference is at most this share of the effect, or, because rounding alone makes a difference, of
        a small effect (as a share of the size), and every site's delta too. False for NaN."""
        floor = max(self.effect, self.small_effect * self.size)
        return self.difference <= tolerance * floor and self.sites_within(tolerance)


def verify_adapter(folder: Path, model: Path, *, device: str, tokens: int, b_layout: BLayout) -> Iterator[Comparison]:
    """Yields the comparisons in the model's order, for `tokens` random token ids.

    Raises ValueError (AdapterError for the adapter's files) for what cannot be read.
    """
    run = _Run(folder, model, device, tokens, b_layout)
    with run.merge, run.weights, torch.inference_mode():
        yield from run.compare()


class _Run:
    def __init__(self, folder: Path, model: Path, device: str, tokens: int, b_layout: BLayout) -> None:
        self.device = resolve_device(device, 0)
        self.spec = read_model_spec(model, "--model")
        if not 1 <= tokens <= self.spec.context_length:
            raise ValueError(f"--tokens must be 1 to the model's {self.spec.context_length}, not {tokens}")
        self.model: CausalLM = build_model(self.spec, Parallel(), torch.float32, META)
        sites = lora_sites(self.model)
        self.adapter = read_adapter(folder, sites, max_rank=ANY_RANK, moe_lora_b_layout=b_layout)
        self.weights = BaseWeights(model)
        shapes = {name: owned.shape for name, owned in owned_tensors(self.model).items() if owned.fills == (name,)}
        shapes["lm_head.weight"] = (self.spec.vocab_size, self.spec.hidden_size)
        self.merge = AdapterMerge(folder, shapes, expert_major_b=b_layout == "expert-major")
        generator = torch.Generator().manual_seed(0)
        self.ids_T = torch.randint(self.spec.vocab_size, (tokens,), generator=generator).to(self.device)

    def compare(self) -> Iterator[Comparison]:
        decoder = self.model.model
        self._materialise(decoder.embed_tokens, _EMBEDDING)
        self._materialise(decoder.rotary, "model.rotary")
        base_TD = merged_TD = decoder.embed_tokens(self.ids_T)
        with _Served(decoder.embed_tokens, _EMBEDDING, self.adapter, len(self.ids_T), self.device) as lora:
            ours_TD = decoder.embed_tokens(self.ids_T, lora)
            errors = {}
            for name, delta_VD in self.merge.deltas(_EMBEDDING):  # not into the weight, which may be the head's as well
                delta_VD = delta_VD.to(self.device)
                merged_TD = merged_TD + delta_VD[self.ids_T]
                errors[name] = embedding_error(decoder.embed_tokens, self.ids_T, lora, delta_VD)
        yield _comparison(_EMBEDDING, ours_TD, merged_TD, base_TD, errors)
        if not self.model.lm_head.tied:
            decoder.embed_tokens.to(META)
        cos_sin = decoder.rotary(self._context(None).positions_T)
        for i, layer in enumerate(decoder.layers):
            assert isinstance(layer, DecoderLayer)
            path = f"model.layers.{i}"
            self._materialise(layer, path)
            base_TD = _through(layer, merged_TD, cos_sin, self._context(None))
            with _Served(layer, path, self.adapter, len(self.ids_T), self.device) as lora:
                with SiteListener(layer, path) as listener:
                    same_input_TD = _through(layer, merged_TD, cos_sin, self._context(lora))
                ours_TD = _through(layer, ours_TD, cos_sin, self._context(lora))
            errors = self._merge_into(layer, path, listener)
            merged_TD = _through(layer, merged_TD, cos_sin, self._context(None))
            yield _comparison(path, same_input_TD, merged_TD, base_TD, errors)
            layer.to(META)
        yield from self._compare_heads(merged_TD, ours_TD)

    def _compare_heads(self, merged_TD: torch.Tensor, ours_TD: torch.Tensor) -> Iterator[Comparison]:
        norm, head = self.model.model.norm, self.model.lm_head
        self._materialise(norm, "model.norm")
        if head.tied:
            head.weight = self.model.model.embed_tokens.weight
        else:
            self._materialise(head, "lm_head")
        merged_TD, ours_TD = norm(merged_TD), norm(ours_TD)
        base_TV = head(merged_TD)
        with _Served(head, "lm_head", self.adapter, len(self.ids_T), self.device) as lora:
            with SiteListener(head, "lm_head") as listener:
                same_input_TV = head(merged_TD, lora)
            ours_TV = head(ours_TD, lora)
        errors = self._merge_into(head, "lm_head", listener)
        merged_TV = head(merged_TD)
        yield _comparison("lm_head", same_input_TV, merged_TV, base_TV, errors)
        ours, merged, base = (logits.log_softmax(-1) for logits in (ours_TV, merged_TV, base_TV))
        at_the_end = _comparison("log-probabilities", ours, merged, base, {})
        yield replace(at_the_end, small_effect=_SMALL_EFFECT_AT_THE_END)

    def _materialise(self, module: nn.Module, path: str) -> None:
        """Fills a module that was on the meta device from the checkpoint."""
        module.to_empty(device=self.device)
        for layer in module.modules():
            for parameter in layer.parameters(recurse=False):
                parameter.fill_(float("nan"))
            if isinstance(layer, HasConstants):
                layer.fill_constants()
        for name, owned in _tensors(module, path).items():
            if name in self.weights:
                view = self.weights.slice(name, owned.shape)
                for piece in owned.pieces:
                    piece.dest.copy_(view[piece.box])
        for name, parameter in module.named_parameters():
            if parameter.isnan().any():
                raise ValueError(f"{path}.{name}: weights are missing from the checkpoint, or NaN")

    def _merge_into(self, module: nn.Module, path: str, listener: SiteListener) -> dict[str, float]:
        """Adds the deltas to the weights; returns each one's distance from what was served."""
        tensors = _tensors(module, path)
        errors = {}
        for name, delta in self.merge.deltas(path):
            delta = delta.to(self.device)
            errors[name] = listener.error(name, delta)
            weight = module.weight if isinstance(module, LMHead) else tensors[name].pieces[0].dest  # tied: no tensor
            weight[: len(delta)].add_(delta)
        return errors | dict.fromkeys(listener.unasked(), float("inf"))

    def _context(self, lora: LoRABatchInfo | None) -> ForwardContext:
        """One prompt of all tokens over an empty cache that every layer takes for its own."""
        n = len(self.ids_T)
        plan = StepPlan(
            is_decode=False,
            rows=[0],
            num_new=[n],
            seq_lens=[n],
            ids=[0] * n,
            first_page=[0],
            new_pages=[[0]],
            slots=[-1],
            slot_rows=[],
            sample=[False],
            prompt_logprobs=[-1],
        )
        inputs = build_inputs(plan, PageTable(1, 1, page_size=n), self.device)
        shape = self.spec.kv_shape(n, Parallel())
        kv = (torch.zeros(shape, device=self.device), torch.zeros(shape, device=self.device))
        return ForwardContext(inputs.positions_T, inputs.attn, [kv] * self.spec.num_layers, lora)


class _Served:
    """The adapter in one module, by the same pool and kernels that serve it; the batch is one request that uses it.

    Enters as that batch, or None when the adapter does not touch the module.
    """

    def __init__(self, module: nn.Module, path: str, adapter: HostAdapter, tokens: int, device: torch.device) -> None:
        prefix = f"{path}."
        inside = {p.removeprefix(prefix): d for p, d in adapter.sites.items() if p.startswith(prefix)}
        if path in adapter.sites:  # the module is a site itself, which the pool knows by its own name
            inside = {path.rpartition(".")[2]: adapter.sites[path]}
        self._module = module
        self.batch: LoRABatchInfo | None = None
        if inside:
            config = LoRAConfig(enable_lora=True)
            backend = make_backend(config, device)
            op = expert_lora_op(config.lora_use_virtual_experts)
            self._pool = AdapterPool(module, device, torch.float32, dense_op=backend.add_, expert_op=op)
            packed = self._pool.pack(replace(adapter, sites=inside))
            self._pool.allocate(packed.nbytes, 1)
            self._pool.store(0, packed)
            self._pool.place(0, 0)
            self.batch = backend.plan([0], [tokens], [0], self._pool.ranks, device)

    def __enter__(self) -> LoRABatchInfo | None:
        return self.batch

    def __exit__(self, *_: Any) -> None:
        if self.batch is not None:
            self._pool.drop(0)
        for layer in self._module.modules():
            if isinstance(layer, Adapted):
                layer.lora = None


def _through(layer: DecoderLayer, x_TD: torch.Tensor, cos_sin: CosSin, ctx: ForwardContext) -> torch.Tensor:
    out_TD, residual_TD = layer.forward(x_TD, None, cos_sin, ctx)
    return out_TD + residual_TD


def _tensors(module: nn.Module, path: str) -> dict[str, CheckpointTensor]:
    """Checkpoint tensors that fill the module at `path` of the model."""
    tensors: dict[str, CheckpointTensor] = {}
    for inner, layer in module.named_modules():
        if isinstance(layer, TensorOwner):
            tensors.update(layer.checkpoint_tensors(f"{path}.{inner}" if inner else path))
    return tensors


def _comparison(
    name: str, ours: torch.Tensor, merged: torch.Tensor, base: torch.Tensor, site_errors: dict[str, float]
) -> Comparison:
    def largest(t: torch.Tensor) -> float:
        return float(t.abs().max())

    result = Comparison(name, largest(ours - merged), largest(merged - base), largest(merged))
    if not site_errors:
        return result
    site = max(site_errors, key=lambda s: (math.isnan(site_errors[s]), site_errors[s]))
    return replace(result, site=site.removesuffix(".weight"), site_error=site_errors[site])
