"""Grouped-query self-attention over the paged KV cache."""

import torch
from torch import nn

from loraplex.engine.batch import ForwardContext
from loraplex.engine.layers.linear import Linear
from loraplex.engine.layers.norm import RMSNorm
from loraplex.engine.layers.rotary import CosSin
from loraplex.engine.model_config import ModelSpec
from loraplex.engine.parallel import Parallel
from loraplex.kernels.attention.paged import paged_attention
from loraplex.kernels.rotary import norm_rotate_store


class SelfAttention(nn.Module):
    """Heads are split over the ranks; fewer key/value heads than ranks are replicated. `qk_norm` normalises each head
    of q and k before the rotation."""

    def __init__(self, spec: ModelSpec, layer: int, parallel: Parallel, *, qk_norm: bool) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = spec.head_dim
        self.eps = spec.rms_norm_eps
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.qkv_proj = Linear(
            spec.hidden_size,
            parts={"q_proj": q, "k_proj": kv, "v_proj": kv},
            shard="col",
            bias=spec.qkv_bias,
            units={"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads, "v_proj": spec.num_kv_heads},
            parallel=parallel,
        )
        self.o_proj = Linear(q, parts={"o_proj": spec.hidden_size}, shard="row", bias=spec.o_bias, parallel=parallel)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if qk_norm else None

    def forward(self, x_TD: torch.Tensor, cos_sin: CosSin, ctx: ForwardContext) -> torch.Tensor:
        k_cache, v_cache = ctx.kv[self.layer]
        q_THD = norm_rotate_store(
            self.qkv_proj(x_TD, ctx),
            *cos_sin,
            k_cache,
            v_cache,
            ctx.attn.slot_mapping_T,
            q_weight_D=self.q_norm.weight if self.q_norm is not None else None,
            k_weight_D=self.k_norm.weight if self.k_norm is not None else None,
            eps=self.eps,
        )
        out_THD = paged_attention(q_THD, k_cache, v_cache, ctx.attn, scale=self.head_dim**-0.5)
        return self.o_proj(out_THD.flatten(1), ctx)
