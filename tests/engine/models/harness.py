"""Tiny random checkpoints, a hand-driven paged cache and hand-made adapters. Imported by path: see conftest.py."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from loraplex.engine.batch import AttentionPlan, ForwardContext
from loraplex.engine.layers.embedding import Embedding
from loraplex.engine.layers.experts import Experts
from loraplex.engine.model_config import read_model_spec
from loraplex.engine.models import build_model
from loraplex.engine.models.decoder import CausalLM
from loraplex.engine.models.sites import Site, lora_sites, shard_delta
from loraplex.engine.parallel import Parallel
from loraplex.engine.weights import init_dummy, load_weights  # noqa: F401 (init_dummy: used through this module)
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.experts import expert_lora_op
from loraplex.kernels.testing import Delta, weights_of

CPU = torch.device("cpu")
COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.15,
    "max_position_embeddings": 512,
}
MOE = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
CONFIGS = {
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**COMMON, **MOE, "mlp_only_layers": [1]}),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", {**COMMON, **MOE, "shared_expert_intermediate_size": 48}),
    "MixtralForCausalLM": (
        "MixtralConfig",
        {**COMMON, "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "Qwen3ForCausalLM": ("Qwen3Config", COMMON),
    "LlamaForCausalLM": ("LlamaConfig", {**COMMON, "attention_bias": True, "mlp_bias": True}),
}


def hf_model(architecture, seed=0, **overrides):
    """A random transformers model whose biases, norms and router all matter."""
    config_name, fields = CONFIGS[architecture]
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**{**fields, **overrides})
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.mul_(2)
            elif name.endswith((".bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def save(model, folder: Path, **options) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def edit_config(folder: Path, *, remove=(), **changes) -> None:
    path = folder / "config.json"
    raw = {k: v for k, v in json.loads(path.read_text()).items() if k not in remove}
    path.write_text(json.dumps({**raw, **changes}))


def load(folder: Path, parallel=None) -> CausalLM:
    parallel = parallel or Parallel()
    spec = read_model_spec(folder)
    model = build_model(spec, parallel, torch.float32, CPU)
    load_weights(model, folder, parallel, progress=False)
    return model


def hf_logprobs(model, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)


def lora_batch(lens: list[int], slots: list[int], slot_rows: list[int], chunk: int = 3) -> LoRABatchInfo:
    """As a chunking backend would cut it: tokens sorted by slot, base last, segments of at most `chunk`."""
    token_slot = [s for n, s in zip(lens, slots, strict=True) for _ in range(n)]
    order = sorted(range(len(token_slot)), key=lambda t: (token_slot[t] < 0, token_slot[t]))
    bounds, segment_slots = [0], []
    for i, token in enumerate(order):
        if i and (token_slot[token] != segment_slots[-1] or i - bounds[-1] == chunk):
            bounds.append(i)
            segment_slots.append(token_slot[token])
        elif not i:
            segment_slots.append(token_slot[token])
    bounds.append(len(order))
    host = [(slot_rows[s], bounds[i], bounds[i + 1]) for i, s in enumerate(segment_slots) if s >= 0]

    def int32(values):
        return torch.tensor(values, dtype=torch.int32)

    return LoRABatchInfo(
        token_slot=int32(token_slot),
        token_row=int32([slot_rows[s] if s >= 0 else -1 for s in token_slot]),
        req_seg_indptr=torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        req_weight_indices=int32(slots),
        slot_row=int32(slot_rows),
        seg_indptr=int32(bounds),
        weight_indices=int32(segment_slots),
        segment_row=int32([slot_rows[s] if s >= 0 else -1 for s in segment_slots]),
        permutation=torch.tensor(order),
        num_segments=int32([len(segment_slots)]),
        max_rank_in_batch=16,
        segments_host=tuple(host),
    )


@dataclass
class Driver:
    """Runs steps by hand over a paged cache whose pages are handed out in shuffled order."""

    model: CausalLM
    page_size: int = 4
    num_pages: int = 64
    pages: dict[int, list[int]] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)

    def __post_init__(self):
        self.free = list(range(self.num_pages))
        random.Random(7).shuffle(self.free)
        spec, parallel = self.model.spec, self.model.parallel
        shape = spec.kv_shape(self.num_pages * self.page_size, parallel)
        # NaN where nothing was stored: whoever reads it shows it.
        self.kv = [(torch.full(shape, float("nan")), torch.full(shape, float("nan"))) for _ in range(spec.num_layers)]

    def step(self, rows: list[tuple[int, list[int]]], lora: LoRABatchInfo | None = None) -> list[torch.Tensor]:
        """rows: (sequence, its next ids). Returns the logits of each row's tokens."""
        slots, positions, tables, seq_lens = [], [], [], []
        for seq, ids in rows:
            start = self.computed.get(seq, 0)
            pages = self.pages.setdefault(seq, [])
            while len(pages) * self.page_size < start + len(ids):
                pages.append(self.free.pop())
            positions += range(start, start + len(ids))
            slots += [
                pages[p // self.page_size] * self.page_size + p % self.page_size for p in range(start, start + len(ids))
            ]
            self.computed[seq] = start + len(ids)
            seq_lens.append(start + len(ids))
            tables.append(pages)
        width = max(map(len, tables))
        lens = [len(ids) for _, ids in rows]
        attn = AttentionPlan(
            slot_mapping_T=torch.tensor(slots),
            page_table_BP=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
            query_start_B1=torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            seq_lens_B=torch.tensor(seq_lens, dtype=torch.int32),
            query_lens=lens,
            seq_lens=seq_lens,
            page_size=self.page_size,
            is_decode=all(n == 1 for n in lens),
        )
        ctx = ForwardContext(torch.tensor(positions), attn, self.kv, lora)
        with torch.inference_mode():
            hidden = self.model(torch.tensor([i for _, ids in rows for i in ids]), ctx)
            return list(self.model.logits(hidden, lora).split(lens))

    def run(self, prompts: list[list[int]], chunks: list[list[int]], slots=None, slot_rows=()) -> list[torch.Tensor]:
        """Feeds each prompt in its own chunks, all prompts side by side; returns each one's log-probabilities."""
        done = [[] for _ in prompts]
        offsets = [0] * len(prompts)
        for turn in range(max(map(len, chunks))):
            live = [s for s in range(len(prompts)) if turn < len(chunks[s])]
            rows = [(s, prompts[s][offsets[s] : offsets[s] + chunks[s][turn]]) for s in live]
            lora = None
            if slots is not None:
                lora = lora_batch([len(ids) for _, ids in rows], [slots[s] for s in live], list(slot_rows))
            for s, logits in zip(live, self.step(rows, lora), strict=True):
                offsets[s] += chunks[s][turn]
                done[s].append(logits)
        assert offsets == [len(p) for p in prompts]
        return [torch.log_softmax(torch.cat(parts), -1) for parts in done]


def random_delta(site: Site, rank: int, generator: torch.Generator, std=0.1, shared_a=False, shared_b=False) -> Delta:
    def normal(*shape):
        return torch.randn(shape, generator=generator) * std

    if site.kind != "experts":
        return normal(rank, site.in_features), normal(site.out_features, rank), 1.75
    experts = site.num_experts
    a = normal(1 if shared_a else experts, rank, site.in_features)
    return a, normal(1 if shared_b else experts, site.out_features, rank), 1.25


def random_adapter(model, seed: int, rank: int, keep=lambda path: True, shared_outer=False) -> dict[str, Delta]:
    """A delta for every site whose path `keep` accepts; ranks differ between sites."""
    generator = torch.Generator().manual_seed(seed)
    adapter = {}
    for i, (path, site) in enumerate(lora_sites(model).items()):
        delta = random_delta(
            site,
            rank + i % 2,
            generator,
            shared_a=shared_outer and not path.endswith("down_proj"),
            shared_b=shared_outer and path.endswith("down_proj"),
        )
        if keep(path):
            adapter[path] = delta
    return adapter


def install(model, adapters: list[dict[str, Delta] | None]) -> None:
    """Row i of every layer's table is adapters[i], sliced for the model's rank."""
    by_module: dict[int, list[Site]] = {}
    for site in lora_sites(model).values():
        by_module.setdefault(id(site.module), []).append(site)
    for sites in by_module.values():
        module = sites[0].module
        rows = [[_local(s, (adapter or {}).get(s.path)) for s in sites] for adapter in adapters]
        if isinstance(module, Experts):
            widths = (module.hidden, module.hidden, module.local), (module.local, module.local, module.hidden)
            module.lora = weights_of(rows, *widths, module.num_experts)
        elif isinstance(module, Embedding):
            module.lora = weights_of(rows, [module.num_rows], [module.hidden])
        else:
            local = module.in_range.stop - module.in_range.start
            module.lora = weights_of(rows, [local] * len(sites), module.slices)


def _local(site: Site, delta: Delta | None) -> Delta | None:
    return None if delta is None else (*shard_delta(site, delta[0], delta[1]), delta[2])


def merge(hf, adapter: dict[str, Delta]) -> None:
    """W += scale · B A in a transformers model, whose head keeps its weight when the embedding changes."""
    if "model.embed_tokens" in adapter:
        hf.lm_head.weight = torch.nn.Parameter(hf.lm_head.weight.detach().clone(), requires_grad=False)
    state = hf.state_dict()
    with torch.no_grad():
        for path, (a, b, scale) in adapter.items():
            delta = scale * (b @ a)
            if path == "model.embed_tokens":
                state[f"{path}.weight"] += delta.T
                continue
            if ".experts." not in path:
                state[f"{path}.weight"] += delta
                continue
            base, _, part = path.rpartition(".")
            if part == "down_proj":
                state[f"{base}.down_proj"] += delta
            else:
                gate_up = state[f"{base}.gate_up_proj"]
                half = gate_up.shape[1] // 2
                gate_up[:, :half] += delta if part == "gate_proj" else 0
                gate_up[:, half:] += delta if part == "up_proj" else 0


TP_PROMPTS = [[(i * 37 + 5) % 320 for i in range(9)], [(i * 91 + 11) % 320 for i in range(7)], [3, 1, 4, 1, 5]]
TP_CHUNKS = [[8, 1], [3, 4], [4, 1]]


def tp_adapters(model):
    """Everything adapted, then experts with shared outer matrices only."""
    experts_only = random_adapter(model, 2, 5, keep=lambda path: ".experts." in path, shared_outer=True)
    return [random_adapter(model, 1, 3), experts_only]


def use_virtual_experts(model, virtual: bool) -> None:
    for layer in model.modules():
        if isinstance(layer, Experts):
            layer.lora_op = expert_lora_op(virtual)
