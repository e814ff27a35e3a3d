"""LoRA on the token embedding: a column of A for every token, instead of a product with its input."""

import torch

from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.weights import LoRAWeights


def embedding_lora_add_(x_TD: torch.Tensor, ids_T: torch.Tensor, w: LoRAWeights, batch: LoRABatchInfo) -> None:
    """x[t] += scale · A[:, ids[t]]ᵀ B in place, for the tokens of each segment whose adapter touches the embedding.

    x: [T, D]; ids: int64 [T], columns of A (token ids of this rank's part of the vocabulary). Computed in fp32, rounded
    once. Rows of other tokens are neither read nor written. Segments come from the host, and a CUDA graph would keep
    those of its capture: the embedding must stay outside of graphs.
    """
    assert not (x_TD.is_cuda and torch.cuda.is_current_stream_capturing())
    for row, start, end in batch.segments_host:
        delta = w.part(row, 0)
        if delta is None:
            continue
        tokens = batch.permutation[start:end]
        z_TR = delta.a_ERD[0][:, ids_T[tokens]].T.float() * delta.scale
        x_TD[tokens] = (x_TD[tokens].float() + z_TR @ delta.b_ERN[0].float()).to(x_TD.dtype)
