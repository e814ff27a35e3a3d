"""What the layers see of a resident adapter: the file's values, sliced for the rank, in exactly their own bytes."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.adapters import make_a, make_adapter

from loraplex.engine.layers.embedding import Embedding
from loraplex.engine.layers.experts import Experts
from loraplex.engine.lora.adapter import HostAdapter, SiteDelta
from loraplex.engine.lora.arena import ALIGN, Arena
from loraplex.engine.lora.dummy import dummy_adapter
from loraplex.engine.lora.errors import AdapterError
from loraplex.engine.lora.packed import lay_out
from loraplex.engine.lora.pool import AdapterPool
from loraplex.engine.lora.reader import read_adapter
from loraplex.engine.model_config import read_model_spec
from loraplex.engine.models import build_model
from loraplex.engine.models.sites import lora_sites, shard_delta
from loraplex.engine.parallel import Parallel

CPU, META = torch.device("cpu"), torch.device("meta")
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128, "hidden_size": 2048,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 151936, "hidden_act": "silu",
}  # fmt: skip


def op(*_: object) -> None: ...


def make_pool(model_dir: Path, *, parallel: Parallel | None = None, dtype=torch.float32, elements=1 << 20, rows=8):
    model = build_model(read_model_spec(model_dir), parallel or Parallel(), dtype, META)
    pool = AdapterPool(model, CPU, dtype, dense_op=op, expert_op=op)
    pool.allocate(elements * dtype.itemsize, rows)
    pool._memory.fill_(torch.nan)
    return pool


def assert_seen(pool: AdapterPool, row: int, adapter: HostAdapter | None, dtype=torch.float32) -> None:
    """Row `row` of every layer holds `adapter`, on the host's tables and on the device's; None: nothing."""
    for path, site in pool.sites.items():
        module = site.module
        names = ["gate_proj", "up_proj", "down_proj"] if isinstance(module, Experts) else [site.part]
        part = (names if isinstance(module, Experts | Embedding) else list(module.parts)).index(site.part)
        weights = module.lora
        assert weights is not None
        seen = weights.part(row, part)
        delta = adapter.sites.get(path) if adapter is not None else None
        assert int(weights.ranks[row, part]) == weights.host_ranks[row, part] == (delta.rank if delta else 0)
        if delta is None:
            assert seen is None
            continue
        a, b = shard_delta(site, delta.a, delta.b)
        assert torch.equal(seen.a_ERD, a.to(dtype).expand_as(seen.a_ERD)), path
        assert torch.equal(seen.b_ERN, b.mT.to(dtype).expand_as(seen.b_ERN)), path
        assert seen.scale == np.float32(delta.scale)
        assert torch.equal(weights.places[row, part], torch.from_numpy(weights.host_places[row, part]))
        assert (weights.places[row, part] % ALIGN == 0).all()
        assert float(weights.scales[row, part]) == weights.host_scales[row, part]
        assert seen.a_ERD.stride(0) == 0 or a.dim() == 3
        assert weights.in_features[part] == a.shape[-1]
        assert weights.slices[part] == b.shape[-2]


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(0, 2), Parallel(1, 2)], ids=["tp1", "tp2 0", "tp2 1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_see_the_values_of_the_files(t1: Path, parallel: Parallel, dtype: torch.dtype) -> None:
    pool = make_pool(t1, parallel=parallel, dtype=dtype)
    folders = [make_a(1, t1), make_a(3, t1), make_adapter(t1, "ALL", r=5), make_adapter(t1, "FUSED", r=2)]
    adapters = [read_adapter(f, pool.sites, max_rank=64) for f in folders]
    adapters.append(dummy_adapter(pool.sites, 3, dtype=torch.float32))  # lm_head and embed_tokens as well
    for row, adapter in enumerate(adapters):
        pool.store(row, pool.pack(adapter))
        pool.place(row, row + 1)
    for row, adapter in enumerate(adapters):
        assert_seen(pool, row + 1, adapter, dtype)
        assert pool.ranks[row + 1] == adapter.rank_max
    for untouched in (0, 6, 7):
        assert_seen(pool, untouched, None)


def test_a_row_is_replaced_and_the_others_stay(t1: Path) -> None:
    """Evict, place elsewhere, place another in the same row: layers always see what was placed last."""
    pool = make_pool(t1, elements=300_000)
    adapters = {key: dummy_adapter(pool.sites, rank, key) for key, rank in enumerate([1, 4, 9, 2, 6])}
    for key, adapter in adapters.items():
        pool.store(key, pool.pack(adapter))
    rng = random.Random(0)
    rows: dict[int, int] = {}
    for _ in range(60):
        key = rng.choice(list(adapters))
        if key in rows:
            pool.evict(key)
            assert_seen(pool, rows.pop(key), None)
        elif pool.fits(key) == 0:
            rows[key] = rng.choice([r for r in range(8) if r not in rows.values()])
            pool.place(key, rows[key])
        pool.arena.check()
        assert pool.ranks == {row: adapters[k].rank_max for k, row in rows.items()}
        for k, row in rows.items():
            assert_seen(pool, row, adapters[k])
    for key in adapters:
        pool.drop(key)
        pool.drop(key)
    assert (pool.used_bytes, pool.host_bytes) == (0, 0)
    assert pool.arena.largest_free == pool.arena.capacity


def shared_adapter(pool: AdapterPool) -> HostAdapter:
    """Shared-outer experts, and gate and up that share one A, as a fused adapter has it."""
    site = pool.sites["model.layers.0.mlp.experts.gate_proj"]
    hidden, inner, num = site.in_features, site.out_features, site.num_experts
    shared = torch.randn(1, 4, hidden)
    q, k = (pool.sites[f"model.layers.1.self_attn.{p}_proj"] for p in "qk")
    a = torch.randn(4, q.in_features)
    sites = {
        "model.layers.0.mlp.experts.gate_proj": SiteDelta(shared, torch.randn(num, inner, 4), 0.5),
        "model.layers.0.mlp.experts.up_proj": SiteDelta(shared, torch.randn(num, inner, 4), 0.5),
        "model.layers.0.mlp.experts.down_proj": SiteDelta(torch.randn(num, 2, inner), torch.randn(1, hidden, 2), 2.0),
        q.path: SiteDelta(a, torch.randn(q.out_features, 4), 1.0),
        k.path: SiteDelta(a, torch.randn(k.out_features, 4), 1.0),
    }
    return HostAdapter("", "", sites, 8)


def test_shared_matrices_are_stored_once_and_have_no_stride(t1: Path) -> None:
    pool = make_pool(t1)
    adapter = shared_adapter(pool)
    pool.store(1, pool.pack(adapter))
    pool.place(1, 3)
    assert_seen(pool, 3, adapter)
    experts = pool.sites["model.layers.0.mlp.experts.gate_proj"].module.lora
    strides = experts.places[3, :, 2:].tolist()
    assert [[bool(s) for s in row] for row in strides] == [[False, True], [False, True], [True, False]]
    assert experts.places[3, 0, 0] == experts.places[3, 1, 0]
    qkv = pool.sites["model.layers.1.self_attn.q_proj"].module.lora
    assert qkv.places[3, 0, 0] == qkv.places[3, 1, 0]
    assert pool.used_bytes == adapter.nbytes


def test_ranks_have_the_same_layout(t1: Path) -> None:
    """So rank 0 can decide for all."""
    layouts = []
    for rank in range(4):
        sites = lora_sites(build_model(read_model_spec(t1), Parallel(rank, 4), torch.float32, META))
        layouts.append(lay_out(read_adapter(make_a(2, t1), sites, max_rank=64), sites)[0])
    assert all(layout.sizes == layouts[0].sizes for layout in layouts)
    assert all((layout.places == layouts[0].places).all() for layout in layouts)


@pytest.fixture(scope="module")
def qwen3_30b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("geometry")
    (folder / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    return folder


@pytest.mark.parametrize("size", [1, 2])
def test_eight_adapters_of_rank_8_take_their_exact_bytes_on_qwen3_30b(qwen3_30b: Path, size: int) -> None:
    """An arena as large as the matrices themselves holds them: nothing but alignment is added, here nothing at all."""
    sites = lora_sites(build_model(read_model_spec(qwen3_30b), Parallel(0, size), torch.bfloat16, META))
    exact = 0
    layouts = []
    for seed in range(8):
        adapter = dummy_adapter(sites, 8, seed)
        layouts.append(lay_out(adapter, sites)[0])
        for path, delta in adapter.sites.items():
            exact += sum(t.numel() for t in shard_delta(sites[path], delta.a, delta.b))
    taken = sum(layout.numel for layout in layouts)
    assert 0.99 * exact <= taken <= 1.02 * exact
    assert exact * 2 > 6e9 / size
    arena = Arena(taken)
    assert all(arena.allocate(layout.sizes) is not None for layout in layouts)
    assert arena.free == 0
    assert max(layouts[0].sizes) < layouts[0].numel / 40, "chunks are layers, small beside the adapter"


def test_an_adapter_larger_than_the_arena_is_refused_before_it_takes_memory(t1: Path) -> None:
    pool = make_pool(t1, elements=10_000)
    with pytest.raises(AdapterError, match="--lora-memory") as caught:
        pool.pack(dummy_adapter(pool.sites, 8))
    assert caught.value.status == 507
    assert pool.host_bytes == 0


def test_values_beyond_float16_are_refused(t1: Path) -> None:
    pool = make_pool(t1, dtype=torch.float16)
    adapter = read_adapter(make_a(1, t1), pool.sites, max_rank=64)
    pool.pack(adapter)
    path = next(iter(adapter.sites))
    adapter.sites[path].a[0, 0] = 70_000
    with pytest.raises(AdapterError, match="float16"):
        pool.pack(adapter)


def test_tables_are_views_of_static_buffers(t1: Path) -> None:
    """What a CUDA graph captured stays where it is."""
    pool = make_pool(t1)
    weights = [site.module.lora for site in pool.sites.values()]
    pointers = [(w.arena.data_ptr(), w.places.data_ptr(), w.ranks.data_ptr(), w.scales.data_ptr()) for w in weights]
    pool.store(1, pool.pack(dummy_adapter(pool.sites, 4)))
    pool.place(1, 0)
    pool.evict(1)
    pool.place(1, 5)
    after = [site.module.lora for site in pool.sites.values()]
    assert all(a is b for a, b in zip(weights, after, strict=True))
    assert pointers == [
        (w.arena.data_ptr(), w.places.data_ptr(), w.ranks.data_ptr(), w.scales.data_ptr()) for w in after
    ]
