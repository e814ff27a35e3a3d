"""Rotary position embedding: the angles, once per step."""

import torch
from torch import nn

from loraplex.engine.model_config import RopeSpec
from loraplex.kernels.rotary import rope_angles

CosSin = tuple[torch.Tensor, torch.Tensor]
"""Each fp32 [T, head_dim / 2]."""


class Rotary(nn.Module):
    def __init__(self, spec: RopeSpec) -> None:
        super().__init__()
        self.spec = spec
        self.inv_freq = nn.Buffer(torch.empty(len(spec.inv_freq), dtype=torch.float32), persistent=False)

    def fill_constants(self) -> None:
        self.inv_freq.copy_(torch.tensor(self.spec.inv_freq, dtype=torch.float32, device="cpu"))

    def forward(self, positions_T: torch.Tensor) -> CosSin:
        return rope_angles(positions_T, self.inv_freq, self.spec.attention_factor)
