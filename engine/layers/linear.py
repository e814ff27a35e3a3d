"""Linear layers, fused and sharded as their `parts` say. One declaration serves the checkpoint, the ranks and LoRA."""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from loraplex.engine.batch import ForwardContext
from loraplex.engine.layers.checkpoint import CheckpointTensor, plain, sibling
from loraplex.engine.parallel import Parallel
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.reference import lora_add_
from loraplex.kernels.lora.weights import LoRAWeights

Shard = Literal["col", "row"] | None
LoRAOp = Callable[[torch.Tensor, torch.Tensor, LoRAWeights, LoRABatchInfo], None]


class Linear(nn.Module):
    """y = x Wᵀ (+ bias), W = the parts' weights on top of each other: [sum of local outputs, local input].

    `parts` maps the checkpoint's names to output widths. shard "col" splits each part's outputs over the ranks,
    "row" the input (one part only; the forward ends in an all-reduce), None keeps the whole layer on every rank.
    `units` gives the number of indivisible blocks (heads) of a part that is not split element by element.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        parallel: Parallel,
        shard: Shard = None,
        bias: bool = False,
        units: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        assert shard != "row" or len(parts) == 1, parts
        self.in_features = in_features
        self.parts = dict(parts)
        self.shard: Shard = shard
        self.parallel = parallel
        self.in_range = parallel.local_slice(in_features) if shard == "row" else slice(0, in_features)
        self.out_ranges = {
            name: parallel.local_slice(width, (units or {}).get(name)) if shard == "col" else slice(0, width)
            for name, width in parts.items()
        }
        self.slices = tuple(r.stop - r.start for r in self.out_ranges.values())
        """Output width of each part on this rank."""
        self.weight = nn.Parameter(torch.empty(sum(self.slices), self.in_range.stop - self.in_range.start))
        self.bias = nn.Parameter(torch.empty(sum(self.slices))) if bias else None
        self.lora: LoRAWeights | None = None
        self.lora_op: LoRAOp = lora_add_

    def forward(self, x_TD: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        row = self.shard == "row"
        y_TN = F.linear(x_TD, self.weight, None if row else self.bias)
        if self.lora is not None and ctx.lora is not None:
            self.lora_op(y_TN, x_TD, self.lora, ctx.lora)
        if row:
            self.parallel.all_reduce_(y_TN)
            if self.bias is not None:
                y_TN += self.bias
        return y_TN

    def checkpoint_tensors(self, path: str) -> dict[str, CheckpointTensor]:
        tensors = {}
        first = 0
        for (name, width), rows, local in zip(self.parts.items(), self.out_ranges.values(), self.slices, strict=True):
            weight = sibling(path, f"{name}.weight")
            dest = self.weight[first : first + local]
            tensors[weight] = plain(weight, (width, self.in_features), (rows, self.in_range), dest)
            if self.bias is not None:
                bias = sibling(path, f"{name}.bias")
                tensors[bias] = plain(bias, (width,), (rows,), self.bias[first : first + local])
            first += local
        return tensors
