import torch
from torch import nn

from loraplex.engine.batch import ForwardContext
from loraplex.engine.layers.experts import Experts
from loraplex.engine.layers.linear import Linear
from loraplex.engine.layers.mlp import GatedMLP
from loraplex.engine.model_config import MoeSpec
from loraplex.engine.models.decoder import CausalLM
from loraplex.engine.parallel import Parallel
from loraplex.kernels.moe.routing import route


class SparseMoeBlock(nn.Module):
    """Router and routed experts."""

    def __init__(self, hidden: int, moe: MoeSpec, parallel: Parallel) -> None:
        super().__init__()
        self.moe = moe
        self.gate = Linear(hidden, parts={"gate": moe.num_experts}, parallel=parallel)
        self.experts = Experts(moe.num_experts, hidden, moe.intermediate_size, parallel=parallel)

    def forward(self, x_TD: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        weights_TK, ids_TK = route(
            self.gate(x_TD, ctx),
            self.moe.top_k,
            norm=self.moe.norm_topk_prob,
            kv_slots_T=ctx.attn.slot_mapping_T,
        )
        return self.experts(x_TD, ids_TK, weights_TK, ctx)


class Qwen3MoeForCausalLM(CausalLM):
    """Qwen3-MoE: normalised q and k; layers listed in mlp_only_layers or off the sparse step are dense."""

    qk_norm = True

    def make_mlp(self, layer: int) -> nn.Module:
        spec = self.spec
        assert spec.moe is not None
        if layer in spec.moe.sparse_layers:
            return SparseMoeBlock(spec.hidden_size, spec.moe, self.parallel)
        return GatedMLP(spec.hidden_size, spec.intermediate_size, parallel=self.parallel)
