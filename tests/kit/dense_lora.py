"""Dense-LoRA steps for tests of the backends: random adapters, requests and inputs, and the comparison."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loraplex.engine.config import LoRAConfig
from loraplex.engine.lora.backend import make_backend
from loraplex.engine.lora.planning import PlannedBackend
from loraplex.kernels.lora.reference import lora_add_
from loraplex.kernels.lora.weights import LoRAWeights
from loraplex.kernels.testing import plain_batch

RANK_MIXES: dict[str, list[tuple[int, int, int]]] = {
    "one": [(16, 16, 16)] * 5,
    "odd": [(1, 3, 5), (33, 7, 2), (3, 3, 3), (5, 1, 33), (1, 1, 1)],
    "partial": [(8, 0, 0), (0, 0, 0), (0, 4, 16), (16, 0, 16), (0, 0, 1)],
    "wide": [(1, 3, 5), (33, 64, 512), (0, 512, 1), (0, 0, 0), (16, 16, 16)],
    "steps": [(r, r, r) for r in (4, 16, 32, 64, 128)],
}
"""Ranks of five adapters at three parts; 0 = untouched."""


def backend(name: str, chunk_size: int | None = None) -> PlannedBackend:
    config = LoRAConfig(lora_backend=name, max_lora_chunk_size=chunk_size)  # type: ignore[arg-type]
    made = make_backend(config, torch.device("cpu"))
    assert isinstance(made, PlannedBackend)
    return made


def max_ranks(w: LoRAWeights) -> dict[int, int]:
    return {row: int(ranks.max()) for row, ranks in enumerate(w.host_ranks)}


@dataclass(frozen=True)
class Step:
    """Requests and inputs; rows of base tokens and of padding hold NaN in x, which must reach nothing."""

    slots: list[int]
    num_tokens: list[int]
    slot_rows: list[int]
    x_TD: torch.Tensor
    y_TN: torch.Tensor

    @property
    def touched(self) -> torch.Tensor:
        """Tokens with an adapter."""
        at = torch.repeat_interleave(torch.tensor(self.slots), torch.tensor(self.num_tokens)) >= 0
        padding = len(self.x_TD) - len(at)
        return torch.cat([at, at.new_zeros(padding)]).to(self.x_TD.device)

    def expected(self, w: LoRAWeights) -> torch.Tensor:
        """What the reference makes of y, computed in fp32 from the same inputs."""
        device = self.x_TD.device
        upcast = LoRAWeights(**{**vars(w), "arena": w.arena.float()})
        y = self.y_TN.float()
        batch = plain_batch(self.slots, self.num_tokens, self.slot_rows, device=device)
        lora_add_(y, self.x_TD.float(), upcast, batch)
        return y

    def check(self, y_TN: torch.Tensor, w: LoRAWeights, tolerance: float) -> None:
        """Relative RMS error of the rows with an adapter; all others bit for bit as before."""
        touched, expected = self.touched, self.expected(w)
        assert torch.equal(y_TN[~touched].view(torch.uint8), self.y_TN[~touched].view(torch.uint8))
        error = (y_TN.float() - expected)[touched].norm() / expected[touched].norm().clamp(min=1e-9)
        assert error < tolerance, float(error)


def make_step(
    slots: Sequence[int],
    num_tokens: Sequence[int],
    slot_rows: Sequence[int],
    w: LoRAWeights,
    *,
    padding: int = 0,
    seed: int = 0,
) -> Step:
    generator = torch.Generator().manual_seed(seed)
    total = sum(num_tokens) + padding
    x = torch.randn(total, w.in_features[0], generator=generator).to(w.arena)
    # The base output is small, so that its own rounding does not hide an error of the delta.
    y = (torch.randn(total, sum(w.slices), generator=generator) * 0.1).to(w.arena)
    step = Step(list(slots), list(num_tokens), list(slot_rows), x, y)
    x[~step.touched] = torch.nan
    return step
