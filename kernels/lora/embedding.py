"""LoRA on the token embedding: a column of A for every token, instead of a product with its input."""

import torch

from loraplex.kernels.devices import dependent_launch, use_triton
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.weights import LoRAWeights

BLOCK_N, BLOCK_R = 256, 16


def embedding_lora_add_reference_(
    x_TD: torch.Tensor, ids_T: torch.Tensor, w: LoRAWeights, batch: LoRABatchInfo
) -> None:
    """Segments come from the host, and a CUDA graph would keep those of its capture: not for graphs."""
    assert not (x_TD.is_cuda and torch.cuda.is_current_stream_capturing())
    for row, start, end in batch.segments_host:
        delta = w.part(row, 0)
        if delta is None:
            continue
        tokens = batch.permutation[start:end]
        z_TR = delta.a_ERD[0][:, ids_T[tokens]].T.float() * delta.scale
        x_TD[tokens] = (x_TD[tokens].float() + z_TR @ delta.b_ERN[0].float()).to(x_TD.dtype)


def embedding_lora_add_(x_TD: torch.Tensor, ids_T: torch.Tensor, w: LoRAWeights, batch: LoRABatchInfo) -> None:
    """x[t] += scale · A[:, ids[t]]ᵀ B in place, for the tokens whose adapter touches the embedding.

    x: [T, D], contiguous; ids: int64 [T], columns of A (token ids of this rank's part of the vocabulary). Computed in
    fp32, rounded once. Rows of other tokens are neither read nor written. The kernel reads `token_slot` and the tables,
    nothing of the host: a CUDA graph replays with other adapters and ranks than those of its capture.
    """
    if not use_triton(x_TD):
        embedding_lora_add_reference_(x_TD, ids_T, w, batch)
        return
    from loraplex.kernels.lora import _triton_embedding as kernels

    tokens, hidden = x_TD.shape
    assert x_TD.is_contiguous(), x_TD.stride()
    assert ids_T.shape == (tokens,), (ids_T.shape, x_TD.shape)
    assert w.slices == (hidden,), (w.slices, hidden)
    assert w.ranks.stride() == w.scales.stride(), "ranks and scales are laid out alike"
    if tokens == 0:
        return
    kernels.add_columns[(tokens, -(-hidden // BLOCK_N))](
        x_TD,
        ids_T,
        w.arena,
        w.places,
        w.ranks,
        w.scales,
        batch.token_slot,
        batch.slot_row,
        VOCAB=w.in_features[0],
        HIDDEN=hidden,
        PLACES_ROW=w.places.stride(0),
        RANKS_ROW=w.ranks.stride(0),
        BLOCK_N=BLOCK_N,
        BLOCK_R=BLOCK_R,
        num_warps=1,
        **dependent_launch(x_TD.device),
    )
