"""Dense LoRA in torch: the specification every backend is tested against."""

import torch

from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.weights import LoRAWeights


def lora_add_(y_TN: torch.Tensor, x_TD: torch.Tensor, w: LoRAWeights, batch: LoRABatchInfo) -> None:
    """y[t, part] += (scale · x[t] Aᵀ) B in place, for the tokens of each segment and the parts its adapter touches.

    y: [T, sum(w.slices)]; x: [T, D]. Both products accumulate in fp32; the scaled x Aᵀ is rounded to x's dtype
    between them. Rows of other tokens are neither read nor written.
    """
    for row, start, end in batch.segments_host:
        tokens = batch.permutation[start:end]
        x32 = x_TD[tokens].float() if w.touches(row) else x_TD[:0]
        first = 0
        for part, width in enumerate(w.slices):
            delta = w.part(row, part)
            if delta is not None:
                z = (x32 @ delta.a_ERD[0].float().T * delta.scale).to(x_TD.dtype)
                columns = y_TN[:, first : first + width]
                columns[tokens] = (columns[tokens].float() + z.float() @ delta.b_ERN[0].float()).to(y_TN.dtype)
            first += width
