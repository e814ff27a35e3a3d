"""Compiles what a MoE layer and a dense site launch for an H200, without one, and prints for each kernel with dependent
launch whether its code starts an asynchronous copy before it waits for its predecessor.

A loop that Triton pipelines reads its first tiles ahead of everything in its body, a `gdc_wait` there included: data of
the predecessor would be read before they are written, which no run with unchanged inputs can show. Triton 3.6 does so;
3.9 was not seen to.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.append(str(Path(__file__).parents[1] / "kit"))
from hopper import Hopper

from loraplex.engine.config import LoRAConfig
from loraplex.engine.lora.backend import make_backend
from loraplex.kernels import devices
from loraplex.kernels.lora import dense, experts_ops
from loraplex.kernels.moe import expert_gemm, forward, pairs
from loraplex.kernels.testing import plain_batch, random_weights

CPU = torch.device("cpu")


def compile_only(self: JITFunction, grid: Any) -> Any:
    def call(*args: Any, **options: Any) -> None:
        ptx = self.run(*args, grid=grid, warmup=True, **options).asm["ptx"]
        if options.get("launch_pdl"):
            copy, wait = ptx.find("cp.async.c"), ptx.find("griddepcontrol.wait")
            print("early" if -1 < copy < wait or wait < 0 else "ok", self.__name__)

    return call


def main() -> None:
    driver.set_active(Hopper())
    JITFunction.__getitem__ = compile_only
    for module in (expert_gemm, experts_ops, forward, pairs, dense):
        for name in ("runs_triton", "use_triton", "has_dependent_launch", "has_tensor_descriptors"):
            if hasattr(module, name):
                setattr(module, name, lambda _: True)
    devices.dependent_launch = dense.dependent_launch = lambda _: {"PDL": True, "launch_pdl": True}
    hidden, inner, experts = 256, 128, 8
    lora = random_weights(
        [(16, 16, 16)] * 2, [hidden, hidden, inner], [inner, inner, hidden], num_experts=experts, dtype=torch.bfloat16
    )
    w13, w2 = torch.empty(experts, 2 * inner, hidden).bfloat16(), torch.empty(experts, hidden, inner).bfloat16()
    for tokens in (4, 400, 2000):  # rows, chunks, fused
        x, ids = torch.empty(tokens, hidden).bfloat16(), torch.zeros(tokens, 4, dtype=torch.int64)
        batch = dataclasses.replace(plain_batch([0] * tokens, [1] * tokens, [0, 1]), max_rank_in_batch=16)
        forward.moe_lora_forward(x, ids, torch.empty(tokens, 4), w13, w2, lora, batch)
    site = random_weights([[16] * 3] * 2, [hidden] * 3, (hidden, 64, 64), dtype=torch.bfloat16)
    for tokens in (4, 200, 2000):
        plan = make_backend(LoRAConfig(enable_lora=True, lora_backend="csgmv"), CPU).plan(
            [0], [tokens], [0], {0: 16, 1: 16}, CPU
        )
        y, x = torch.empty(tokens, hidden + 128).bfloat16(), torch.empty(tokens, hidden).bfloat16()
        make_backend(LoRAConfig(enable_lora=True, lora_backend="csgmv"), CPU).add_(y, x, site, plan)


if __name__ == "__main__":
    assert triton.__version__
    main()
