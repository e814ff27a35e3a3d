import torch
from torch import nn

from loraplex.engine.layers.checkpoint import CheckpointTensor, plain
from loraplex.kernels.elementwise import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """weight · x / sqrt(mean(x²) + eps) over the last dimension; the same on every rank."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return rms_norm(x_TD, self.weight, self.eps)

    def add(self, x_TD: torch.Tensor, residual_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)."""
        return add_rms_norm(x_TD, residual_TD, self.weight, self.eps)

    def checkpoint_tensors(self, path: str) -> dict[str, CheckpointTensor]:
        name = f"{path}.weight"
        return {name: plain(name, tuple(self.weight.shape), (slice(None),), self.weight)}
