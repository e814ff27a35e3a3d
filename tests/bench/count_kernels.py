"""How many kernel variants a server with adapters compiles, counted without a GPU and without compiling.

Every launch over the buckets of the CUDA graphs, and over eager sizes, is keyed as Triton keys it; each new key is a
compilation of about half a second. Prints, by kernel, the number of keys and what differs between them.

    PYTHONPATH=.typing python -P tests/bench/count_kernels.py [--capacities 16 512]
"""

import argparse
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import triton.language  # noqa: F401  (before TRITON_INTERPRET is set: kernels must be compiled ones)
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.append(str(Path(__file__).parents[1] / "kit"))
from hopper import Hopper

from loraplex.engine.config import LoRAConfig
from loraplex.engine.graphs import decode_sizes, token_sizes
from loraplex.engine.inputs import PageTable, StaticInputs, StepShape
from loraplex.engine.lora.backend import make_backend
from loraplex.engine.request import SamplingParams
from loraplex.engine.sampler import pack_draws
from loraplex.engine.step import SampleRow
from loraplex.kernels import _triton_sampling, devices, sampling  # noqa: F401
from loraplex.kernels.lora import _triton_experts, _triton_rows, _triton_segments  # noqa: F401
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.moe import _triton_gemm, _triton_pairs, _triton_routing, pairs  # noqa: F401
from loraplex.kernels.moe.forward import moe_lora_forward
from loraplex.kernels.moe.routing import route
from loraplex.kernels.testing import random_weights

CPU = torch.device("cpu")
EXPERTS, TOP_K, HIDDEN, INNER, VOCABULARY = 128, 8, 128, 64, 1024


def record(found: dict[str, dict[str, tuple[Any, Any]]]) -> None:
    """Launches are keyed and end there."""

    def compile_nothing(self: Any, key: str, signature: Any, device: int, constexprs: Any, options: Any, attrs: Any,
                        warmup: bool) -> None:  # fmt: skip
        found[f"{self.__module__.rpartition('._triton_')[2]}.{self.__name__}"].setdefault(
            key, (dict(constexprs), dict(attrs))
        )

    JITFunction._do_compile = compile_nothing
    driver.set_active(Hopper())
    os.environ["TRITON_INTERPRET"] = "1"  # launchers take CPU tensors
    devices.INTERPRETED = pairs.INTERPRETED = True


class Layer:
    """One layer's adapters and weights, small: their size changes no key that matters here."""

    def __init__(self) -> None:
        self.backend = make_backend(LoRAConfig(enable_lora=True, lora_backend="csgmv"), CPU)
        widths = ([HIDDEN] * 2 + [INNER], [INNER] * 2 + [HIDDEN])
        self.experts = random_weights([(8, 8, 8)], *widths, num_experts=EXPERTS)
        self.dense = random_weights([(8, 8, 8)], [HIDDEN] * 3, [HIDDEN, INNER, INNER])
        self.w13, self.w2 = torch.empty(EXPERTS, 2 * INNER, HIDDEN), torch.empty(EXPERTS, HIDDEN, INNER)
        self.w13, self.w2 = (w.to(self.experts.arena.dtype) for w in (self.w13, self.w2))
        self.static = StaticInputs(16384, 256, 8, CPU)

    def run(self, tokens: int, info: LoRABatchInfo | None, capacity: int | None) -> None:
        x = torch.zeros(tokens, HIDDEN, dtype=self.w2.dtype)
        attn = self.static.views(StepShape(tokens, min(tokens, 256), False), PageTable(256, 8, 16)).attn
        weights, ids = route(torch.zeros(tokens, EXPERTS), TOP_K, norm=True, kv_slots_T=attn.slot_mapping_T)
        lora = None if info is None else self.experts
        moe_lora_forward(x, ids, weights, self.w13, self.w2, lora, info, rank_capacity=capacity)
        if info is not None:
            self.backend.add_(torch.zeros(tokens, sum(self.dense.slices), dtype=x.dtype), x, self.dense, info)


def draw(rows: int) -> None:
    params = SamplingParams(max_tokens=1, top_p=0.9)
    draws = pack_draws([SampleRow(i, params, 1, 1) for i in range(rows)], CPU)
    sampling.draw(torch.zeros(rows, VOCABULARY), draws)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--capacities", type=int, nargs="+", default=[16, 512])
    args = parser.parse_args()
    found: dict[str, dict[str, tuple[Any, Any]]] = defaultdict(dict)
    layer = Layer()
    record(found)
    for tokens in sorted({*decode_sizes(256), *token_sizes(8192)}):
        layer.run(tokens, None, None)
        for capacity in args.capacities:
            layer.run(tokens, layer.backend.static(tokens, min(tokens, 256), CPU, capacity).info, capacity)
    for tokens in (*range(1, 34), 63, 100, 257, 1000):
        layer.run(tokens, layer.backend.plan([0], [tokens], [0], {0: 8}, CPU), None)
        draw(min(tokens, 256))
    for name, keys in sorted(found.items()):
        constants = defaultdict(set)
        for values, _ in keys.values():
            for at, value in values.items():
                constants[at].add(str(value))
        varying = sum(len(values) > 1 for values in constants.values())
        aligned = len({str(attrs) for _, attrs in keys.values()})
        print(f"{name}: {len(keys)} variants; {varying} constants vary, {aligned} patterns of alignment")
    print(f"in all: {sum(map(len, found.values()))}")


if __name__ == "__main__":
    main()
