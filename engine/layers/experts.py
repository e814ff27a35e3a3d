"""The routed experts of one layer.

T tokens, K experts per token, M = T · K pairs sorted by expert, E experts, D hidden, I expert width on this rank.
"""

import torch
from torch import nn

from loraplex.engine.batch import ForwardContext
from loraplex.engine.layers.checkpoint import CheckpointTensor, Piece, plain
from loraplex.engine.parallel import Parallel
from loraplex.kernels.lora.experts import ExpertLoRAOp, virtual_experts_add_
from loraplex.kernels.lora.weights import LoRAWeights
from loraplex.kernels.moe.forward import moe_lora_forward

ALL = slice(None)


class Experts(nn.Module):
    """out[t] = Σ_k weights[t, k] · down[e] (silu(gate[e] x) · up[e] x), e = ids[t, k]; each rank holds a part of I.

    LoRA deltas of gate and up are added before the activation, down's to the expert's output before its router
    weight, which is applied once.
    """

    def __init__(self, num_experts: int, hidden: int, intermediate: int, *, parallel: Parallel) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.hidden = hidden
        self.intermediate = intermediate
        self.parallel = parallel
        self.inner_range = parallel.local_slice(intermediate)
        self.local = self.inner_range.stop - self.inner_range.start
        self.w13 = nn.Parameter(torch.empty(num_experts, 2 * self.local, hidden))
        """[E, 2I, D], gate rows first."""
        self.w2 = nn.Parameter(torch.empty(num_experts, hidden, self.local))
        """[E, D, I]."""
        self.lora: LoRAWeights | None = None
        self.lora_op: ExpertLoRAOp = virtual_experts_add_

    def forward(
        self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        lora, batch = (self.lora, ctx.lora) if self.lora is not None and ctx.lora is not None else (None, None)
        out_TD = moe_lora_forward(
            x_TD,
            ids_TK,
            weights_TK,
            self.w13,
            self.w2,
            lora,
            batch,
            lora_op=self.lora_op,
            rank_capacity=ctx.rank_capacity,
        )
        return self.parallel.all_reduce_(out_TD)

    def checkpoint_tensors(self, path: str) -> dict[str, CheckpointTensor]:
        """Per-expert matrices (the hub's form), or all experts fused (what transformers 5 holds in memory)."""
        inner, local = self.inner_range, self.local
        narrow, wide = (self.intermediate, self.hidden), (self.hidden, self.intermediate)
        tensors = {}
        for e in range(self.num_experts):
            gate, up, down = (f"{path}.{e}.{name}_proj.weight" for name in ("gate", "up", "down"))
            tensors[gate] = plain(gate, narrow, (inner, ALL), self.w13[e, :local])
            tensors[up] = plain(up, narrow, (inner, ALL), self.w13[e, local:])
            tensors[down] = plain(down, wide, (ALL, inner), self.w2[e])
        upper = slice(self.intermediate + inner.start, self.intermediate + inner.stop)
        tensors[f"{path}.gate_up_proj"] = CheckpointTensor(
            shape=(self.num_experts, 2 * self.intermediate, self.hidden),
            pieces=(
                Piece((ALL, inner, ALL), self.w13[:, :local]),
                Piece((ALL, upper, ALL), self.w13[:, local:]),
            ),
            fills=tuple(n for n in tensors if n.endswith((".gate_proj.weight", ".up_proj.weight"))),
        )
        tensors[f"{path}.down_proj"] = CheckpointTensor(
            shape=(self.num_experts, *wide),
            pieces=(Piece((ALL, ALL, inner), self.w2),),
            fills=tuple(n for n in tensors if n.endswith(".down_proj.weight")),
        )
        return tensors
