import torch
from torch import nn

from loraplex.engine.batch import ForwardContext
from loraplex.engine.layers.linear import Linear
from loraplex.engine.layers.mlp import GatedMLP
from loraplex.engine.model_config import MoeSpec
from loraplex.engine.models.decoder import CausalLM
from loraplex.engine.models.qwen3_moe import SparseMoeBlock
from loraplex.engine.parallel import Parallel


class SharedExpertMoeBlock(SparseMoeBlock):
    """Routed experts plus one that sees every token, through a sigmoid gate."""

    def __init__(self, hidden: int, moe: MoeSpec, parallel: Parallel) -> None:
        super().__init__(hidden, moe, parallel)
        self.shared_expert = GatedMLP(hidden, moe.shared_intermediate_size, parallel=parallel)
        self.shared_expert_gate = Linear(hidden, parts={"shared_expert_gate": 1}, parallel=parallel)

    def forward(self, x_TD: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        shared_TD = torch.sigmoid(self.shared_expert_gate(x_TD, ctx)) * self.shared_expert(x_TD, ctx)
        return super().forward(x_TD, ctx) + shared_TD


class Qwen2MoeForCausalLM(CausalLM):
    """Qwen2-MoE: biased q, k and v; a shared expert in the sparse layers."""

    def make_mlp(self, layer: int) -> nn.Module:
        spec = self.spec
        assert spec.moe is not None
        if layer in spec.moe.sparse_layers:
            return SharedExpertMoeBlock(spec.hidden_size, spec.moe, self.parallel)
        return GatedMLP(spec.hidden_size, spec.intermediate_size, parallel=self.parallel)
