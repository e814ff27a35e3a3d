"""Token embedding and output head, both split over the ranks by vocabulary, padded to an even split.

V vocabulary, N positions whose logits are wanted.
"""

import torch
import torch.nn.functional as F
from torch import nn

from loraplex.engine.layers.checkpoint import CheckpointTensor, plain
from loraplex.engine.layers.linear import LoRAOp, Shard
from loraplex.engine.parallel import Parallel
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.embedding import embedding_lora_add_
from loraplex.kernels.lora.reference import lora_add_
from loraplex.kernels.lora.weights import LoRAWeights


class Embedding(nn.Module):
    """ids [T] → x [T, D]. A site of LoRA whose input is the vocabulary: A [r, V] is split over the ranks, B whole."""

    def __init__(self, vocab_size: int, hidden: int, *, parallel: Parallel) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden = hidden
        self.parallel = parallel
        self.rows = parallel.padded_slice(vocab_size)
        self.num_rows = parallel.padded(vocab_size) // parallel.size
        """Of this rank's weight; `rows` may be fewer, the rest is padding."""
        self.weight = nn.Parameter(torch.empty(self.num_rows, hidden))
        self.lora: LoRAWeights | None = None

    def forward(self, ids_T: torch.Tensor, lora: LoRABatchInfo | None = None) -> torch.Tensor:
        if self.parallel.size == 1:
            return self._rows_of(ids_T, lora)
        foreign_T = (ids_T < self.rows.start) | (ids_T >= self.rows.stop)
        x_TD = self._rows_of((ids_T - self.rows.start).masked_fill(foreign_T, 0), lora)
        return self.parallel.all_reduce_(x_TD.masked_fill(foreign_T[:, None], 0))

    def _rows_of(self, local_T: torch.Tensor, lora: LoRABatchInfo | None) -> torch.Tensor:
        x_TD = F.embedding(local_T, self.weight)
        if self.lora is not None and lora is not None:
            embedding_lora_add_(x_TD, local_T, self.lora, lora)
        return x_TD

    def fill_constants(self) -> None:
        """Zeroes the padding rows."""
        self.weight.data[self.rows.stop - self.rows.start :] = 0

    def checkpoint_tensors(self, path: str) -> dict[str, CheckpointTensor]:
        name = f"{path}.weight"
        dest = self.weight[: self.rows.stop - self.rows.start]
        return {name: plain(name, (self.vocab_size, self.hidden), (self.rows, slice(None)), dest)}


class LMHead(nn.Module):
    """hidden [N, D] → logits [N, V] in its dtype, complete on every rank. `tied` shares the embedding's weight, not
    its LoRA.

    A site of LoRA like a column-parallel `Linear` of one part, with the same attributes.
    """

    def __init__(self, vocab_size: int, hidden: int, *, parallel: Parallel, tied: Embedding | None = None) -> None:
        super().__init__()
        self.in_features = hidden
        self.parts = {"lm_head": vocab_size}
        self.shard: Shard = "col"
        self.parallel = parallel
        self.tied = tied is not None
        self.in_range = slice(0, hidden)
        self.out_ranges = {"lm_head": parallel.padded_slice(vocab_size)}
        """May be shorter than `slices` says: the rest is padding."""
        self.slices = (parallel.padded(vocab_size) // parallel.size,)
        self.weight = tied.weight if tied is not None else nn.Parameter(torch.empty(self.slices[0], hidden))
        self.lora: LoRAWeights | None = None
        self.lora_op: LoRAOp = lora_add_

    def forward(self, hidden_ND: torch.Tensor, lora: LoRABatchInfo | None = None) -> torch.Tensor:
        """`lora` describes the N rows, not the tokens of the step."""
        local_NV = F.linear(hidden_ND, self.weight)
        if self.lora is not None and lora is not None:
            self.lora_op(local_NV, hidden_ND, self.lora, lora)
        return self.parallel.all_gather_last(local_NV)[:, : self.parts["lm_head"]]

    def fill_constants(self) -> None:
        """Zeroes the padding rows."""
        rows = self.out_ranges["lm_head"]
        self.weight.data[rows.stop - rows.start :] = 0

    def checkpoint_tensors(self, path: str) -> dict[str, CheckpointTensor]:
        """Nothing when tied: `weights.py` compares a redundant copy with the embedding."""
        if self.tied:
            return {}
        name, rows = f"{path}.weight", self.out_ranges["lm_head"]
        dest = self.weight[: rows.stop - rows.start]
        return {name: plain(name, (self.parts["lm_head"], self.in_features), (rows, slice(None)), dest)}
