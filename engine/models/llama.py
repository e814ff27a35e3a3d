from torch import nn

from loraplex.engine.layers.mlp import GatedMLP
from loraplex.engine.models.decoder import CausalLM


class LlamaForCausalLM(CausalLM):
    """Llama: dense gated feed-forward, optional biases."""

    def make_mlp(self, layer: int) -> nn.Module:
        spec = self.spec
        return GatedMLP(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias, parallel=self.parallel)
