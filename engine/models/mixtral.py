import re

from torch import nn

from loraplex.engine.layers.checkpoint import CheckpointTensor
from loraplex.engine.models.decoder import CausalLM
from loraplex.engine.models.qwen3_moe import SparseMoeBlock

_SHORT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def published_name(name: str) -> str:
    """`….mlp.experts.3.up_proj.weight` → `….block_sparse_moe.experts.3.w3.weight`."""
    name = name.replace(".mlp.", ".block_sparse_moe.")
    return re.sub(r"(\.\d+\.)(\w+)(\.weight)$", lambda m: m[1] + _SHORT.get(m[2], m[2]) + m[3], name)


class MixtralMoeBlock(SparseMoeBlock):
    """Also takes its tensors under the names of the published files; ours are those of transformers 5."""

    def checkpoint_tensors(self, path: str) -> dict[str, CheckpointTensor]:
        own = self.gate.checkpoint_tensors(f"{path}.gate") | self.experts.checkpoint_tensors(f"{path}.experts")
        return {published_name(name): tensor for name, tensor in own.items()}


class MixtralForCausalLM(CausalLM):
    """Mixtral: experts in every layer, the top-k router weights sum to 1."""

    def make_mlp(self, layer: int) -> nn.Module:
        assert self.spec.moe is not None
        return MixtralMoeBlock(self.spec.hidden_size, self.spec.moe, self.parallel)
