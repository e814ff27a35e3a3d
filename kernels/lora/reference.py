"""Dense LoRA in torch: the specification every backend is tested against."""

import torch

from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.weights import LoRAWeights


def lora_add_(y_TN: torch.Tensor, x_TD: torch.Tensor, w: LoRAWeights, batch: LoRABatchInfo) -> None:
    """y[t, part] += B (scale · A x[t]) in place, for the tokens of each segment and the parts its adapter touches.

    y: [T, sum(w.slices)]; x: [T, D]. Both products accumulate in fp32; the scaled A x is rounded to x's dtype
    between them. Rows of other tokens are neither read nor written.
    """
    for row, start, end in batch.segments_host:
        parts = w.rows[row]
        if parts is None:
            continue
        tokens = batch.permutation[start:end]
        x32 = x_TD[tokens].float()
        first = 0
        for width, delta in zip(w.slices, parts, strict=True):
            if delta is not None:
                z = (x32 @ delta.a_RD.float().T * delta.scale).to(x_TD.dtype)
                part = y_TN[:, first : first + width]
                part[tokens] = (part[tokens].float() + z.float() @ delta.b_NR.float().T).to(y_TN.dtype)
            first += width
