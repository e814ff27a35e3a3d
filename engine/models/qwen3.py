from torch import nn

from loraplex.engine.layers.mlp import GatedMLP
from loraplex.engine.models.decoder import CausalLM


class Qwen3ForCausalLM(CausalLM):
    """Qwen3, dense: Llama with normalised q and k."""

    qk_norm = True

    def make_mlp(self, layer: int) -> nn.Module:
        return GatedMLP(self.spec.hidden_size, self.spec.intermediate_size, parallel=self.parallel)
