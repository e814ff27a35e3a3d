"""Every site's delta as it is served, against x ΔWᵀ of an independent merge, output by output.

What a layer gives may hide a local mistake: a few huge activations set its scale. Here each output of each matrix is
measured by its own norm, and on two inputs: those that the site has in the forward, with the experts that the router
chose, and random numbers, for which no feature is larger than another and every expert has its turn.

P rows, N outputs, D inputs; M (token, expert) pairs.
"""

from types import TracebackType
from typing import Self

import torch
from torch import nn

from loraplex.engine.layers.checkpoint import sibling
from loraplex.engine.layers.embedding import Embedding, LMHead
from loraplex.engine.layers.experts import Experts
from loraplex.engine.layers.linear import Linear, LoRAOp
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.embedding import embedding_lora_add_
from loraplex.kernels.lora.experts import ExpertLoRAOp, Projection
from loraplex.kernels.lora.weights import LoRAWeights

_ROUNDING = 1e-5
"""Of Σ |x| |ΔW|: more than the sums of thousands of fp32 products differ by."""


class SiteListener:
    """Between enter and exit, takes down what the LoRA ops of `module` (at `path` of the model) add for which inputs.

    One forward of the module belongs between them.
    """

    def __init__(self, module: nn.Module, path: str) -> None:
        self._layers = {f"{path}.{inner}" if inner else path: layer for inner, layer in module.named_modules()}
        self._usual: list[tuple[Linear | LMHead, LoRAOp]] = []
        self._usual_experts: list[tuple[Experts, ExpertLoRAOp]] = []
        self._heard: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """Name of a weight → inputs [P, D] and what was added for them [P, N]."""

    def __enter__(self) -> Self:
        for path, layer in self._layers.items():
            if isinstance(layer, Linear | LMHead):
                self._usual.append((layer, layer.lora_op))
                layer.lora_op = self._dense_listener(path, layer)
            elif isinstance(layer, Experts):
                self._usual_experts.append((layer, layer.lora_op))
                layer.lora_op = self._expert_listener(path, layer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for dense, dense_op in self._usual:
            dense.lora_op = dense_op
        for experts, expert_op in self._usual_experts:
            experts.lora_op = expert_op

    def error(self, weight: str, delta_ND: torch.Tensor) -> float:
        """Largest `output_error` of what was heard of this weight, given its true ΔW; inf when it was not served."""
        heard = self._heard.pop(weight, [])
        if not heard:
            return float("inf") if delta_ND.any() else 0.0
        return max(output_error(y_PN, x_PD @ delta_ND.T, x_PD.abs() @ delta_ND.abs().T) for x_PD, y_PN in heard)

    def unasked(self) -> list[str]:
        """Weights that something was added for and whose `error` nobody asked for."""
        return [name for name, heard in self._heard.items() if any(bool(y_PN.any()) for _, y_PN in heard)]

    def _hear(self, weight: str, x_PD: torch.Tensor, y_PN: torch.Tensor) -> None:
        self._heard.setdefault(weight, []).append((x_PD, y_PN))

    def _dense_listener(self, path: str, layer: Linear | LMHead) -> LoRAOp:
        op = layer.lora_op

        def listen(y_TN: torch.Tensor, x_TD: torch.Tensor, w: LoRAWeights, batch: LoRABatchInfo) -> None:
            op(y_TN, x_TD, w, batch)
            for inputs_TD in (x_TD, _noise(x_TD)):
                added_TN = torch.zeros_like(y_TN)
                op(added_TN, inputs_TD, w, batch)
                for part, columns in zip(layer.parts, added_TN.split(layer.slices, dim=1), strict=True):
                    self._hear(f"{sibling(path, part)}.weight", inputs_TD, columns[:, : layer.parts[part]])

        return listen

    def _expert_listener(self, path: str, layer: Experts) -> ExpertLoRAOp:
        op, num_experts = layer.lora_op, layer.num_experts

        def listen(
            y_MN: torch.Tensor,
            x_MD: torch.Tensor,
            position_TK: torch.Tensor,
            ids_TK: torch.Tensor,
            w: LoRAWeights,
            projection: Projection,
            batch: LoRABatchInfo,
        ) -> None:
            op(y_MN, x_MD, position_TK, ids_TK, w, projection, batch)
            in_order = torch.arange(ids_TK.numel(), device=ids_TK.device)
            runs = [(x_MD, position_TK, ids_TK)]
            for first in range(0, num_experts, len(in_order)):
                turns = (in_order + first) % num_experts
                runs.append(
                    (_noise(x_MD), in_order.to(position_TK).view_as(position_TK), turns.to(ids_TK).view_as(ids_TK))
                )
            for inputs_MD, positions_TK, experts_TK in runs:
                added_MN = torch.zeros(y_MN.shape, dtype=y_MN.dtype, device=y_MN.device)
                op(added_MN, inputs_MD, positions_TK, experts_TK, w, projection, batch)
                for e in experts_TK.unique().tolist():
                    rows = positions_TK[experts_TK == e]
                    self._hear(f"{path}.{e}.{projection}_proj.weight", inputs_MD[rows], added_MN[rows])

        return listen


def embedding_error(layer: Embedding, ids_T: torch.Tensor, lora: LoRABatchInfo | None, delta_VD: torch.Tensor) -> float:
    """`output_error` of what is added to the embeddings of these tokens."""
    added_TD = torch.zeros(len(ids_T), layer.hidden, device=ids_T.device)
    if layer.lora is not None and lora is not None:
        embedding_lora_add_(added_TD, ids_T, layer.lora, lora)
    expected_TD = delta_VD[ids_T]
    return output_error(added_TD, expected_TD, expected_TD.abs())


def output_error(got_PN: torch.Tensor, expected_PN: torch.Tensor, size_PN: torch.Tensor) -> float:
    """max over outputs n of ‖got − expected‖ / ‖expected‖, without what rounding explains (a share of `size`)."""
    rounding_N = _ROUNDING * size_PN.norm(dim=0)
    error_N = ((got_PN - expected_PN).norm(dim=0) - rounding_N).clamp_min(0)
    relative_N = torch.where(error_N == 0, 0.0, error_N / expected_PN.norm(dim=0))
    return float(relative_N.max())


def _noise(like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)
