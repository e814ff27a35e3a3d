import torch
from torch import nn

from loraplex.engine.batch import ForwardContext
from loraplex.engine.layers.linear import Linear
from loraplex.engine.parallel import Parallel
from loraplex.kernels.elementwise import silu_mul


class GatedMLP(nn.Module):
    """down(silu(gate x) · up x): the dense feed-forward block and the shared expert."""

    def __init__(self, hidden: int, intermediate: int, *, parallel: Parallel, bias: bool = False) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate, "up_proj": intermediate}
        self.gate_up_proj = Linear(hidden, parts=parts, shard="col", bias=bias, parallel=parallel)
        self.down_proj = Linear(intermediate, parts={"down_proj": hidden}, shard="row", bias=bias, parallel=parallel)

    def forward(self, x_TD: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self.down_proj(silu_mul(self.gate_up_proj(x_TD, ctx)), ctx)
