"""What all our models share: embedding, pre-norm decoder layers, final norm, head. A model file gives the rest."""

from collections.abc import Callable

import torch
from torch import nn

from loraplex.engine.batch import ForwardContext
from loraplex.engine.layers.attention import SelfAttention
from loraplex.engine.layers.embedding import Embedding, LMHead
from loraplex.engine.layers.norm import RMSNorm
from loraplex.engine.layers.rotary import CosSin, Rotary
from loraplex.engine.model_config import ModelSpec
from loraplex.engine.parallel import Parallel
from loraplex.kernels.lora.batch_info import LoRABatchInfo


class DecoderLayer(nn.Module):
    def __init__(self, spec: ModelSpec, self_attn: SelfAttention, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, cos_sin: CosSin, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream is x + residual, before and after; whoever reads it adds, so that the sum and a norm are one
        launch. None: x alone."""
        if residual_TD is None:
            x_TD, residual_TD = self.input_layernorm(x_TD), x_TD
        else:
            x_TD, residual_TD = self.input_layernorm.add(x_TD, residual_TD)
        x_TD = self.self_attn(x_TD, cos_sin, ctx)
        x_TD, residual_TD = self.post_attention_layernorm.add(x_TD, residual_TD)
        return self.mlp(x_TD, ctx), residual_TD


class Decoder(nn.Module):
    def __init__(self, spec: ModelSpec, parallel: Parallel, make_layer: Callable[[int], DecoderLayer]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, parallel=parallel)
        self.layers = nn.ModuleList(make_layer(i) for i in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.rotary = Rotary(spec.rope)

    def forward(self, ids_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x_TD = self.embed_tokens(ids_T, ctx.lora)
        cos_sin = self.rotary(ctx.positions_T)
        residual_TD = None
        for layer in self.layers:
            x_TD, residual_TD = layer(x_TD, residual_TD, cos_sin, ctx)
        return self.norm(x_TD) if residual_TD is None else self.norm.add(x_TD, residual_TD)[0]


class CausalLM(nn.Module):
    """Attribute names follow the checkpoint. Subclasses say whether q and k are normalised, and the feed-forward."""

    qk_norm = False

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        self.spec = spec
        self.parallel = parallel
        self.model = Decoder(spec, parallel, self._make_layer)
        tied = self.model.embed_tokens if spec.tie_word_embeddings else None
        self.lm_head = LMHead(spec.vocab_size, spec.hidden_size, parallel=parallel, tied=tied)

    def make_mlp(self, layer: int) -> nn.Module:
        """The feed-forward block of one layer: forward(x_TD, ctx)."""
        raise NotImplementedError

    def forward(self, ids_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Hidden states after the final norm, [T, D]. Writes this step's keys and values into ctx.kv."""
        return self.model(ids_T, ctx)

    def logits(self, hidden_ND: torch.Tensor, lora: LoRABatchInfo | None = None) -> torch.Tensor:
        """[N, V] in hidden's dtype, the same on every rank. `lora` describes the N rows, for adapters with an
        lm_head delta."""
        return self.lm_head(hidden_ND, lora)

    def _make_layer(self, layer: int) -> DecoderLayer:
        attention = SelfAttention(self.spec, layer, self.parallel, qk_norm=self.qk_norm)
        return DecoderLayer(self.spec, attention, self.make_mlp(layer))
