"""Fault injection for tests: `LORAPLEX_TEST_<NAME>` variables, live only with `LORAPLEX_TEST_HOOKS=1`.

They exist because cancellation, preemption, engine failure and hot-swap cannot be tested from outside without them.
No request can set them. Requests are named by the server's own ids: 1 is the first one accepted.
"""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from loraplex.engine.config import Config

PREFIX = "LORAPLEX_TEST_"


@dataclass(frozen=True)
class Hooks:
    fail_step: tuple[int, int | None] | None = None
    """FAIL_STEP=k[:req]: the k-th step raises; with req, the first step from k on that holds this request."""
    hang_step: int | None = None
    """HANG_STEP=k: the k-th step never returns."""
    nan_logits: int | None = None
    """NAN_LOGITS=req: this request's logits are NaN."""
    oom_alloc: int | None = None
    """OOM_ALLOC=k: the k-th step raises the out-of-memory error of the device."""
    slow_step_ms: int = 0
    """SLOW_STEP_MS=n: every step takes n ms longer."""
    preempt_every: int | None = None
    """PREEMPT_EVERY=k: every k-th step preempts the newest running sequence."""
    load_delay_ms: int = 0
    """LOAD_DELAY_MS=n: reading an adapter takes n ms longer."""
    detok_fail: int | None = None
    """DETOK_FAIL=req: the front's detokeniser raises for this request."""
    kv_blocks: int | None = None
    """KV_BLOCKS=n: pages of the KV pool, whatever the flags say. So do the next three."""
    block_size: int | None = None
    """BLOCK_SIZE=n: tokens of a page."""
    chunk: int | None = None
    """CHUNK=n: prompt tokens of a step."""
    max_loras: int | None = None
    """MAX_LORAS=n: adapters of a step."""
    static_steps: int = 0
    """STATIC_STEPS=1: steps run in the padded buffers of CUDA graphs, on a CPU too, where nothing is captured."""
    overlap: int = 0
    """OVERLAP=1: a step is launched before the outputs of the one before it are known, on a CPU too."""

    def resized(self, config: Config) -> Config:
        """The settings with this test's sizes."""
        cache, scheduler, lora = config.cache, config.scheduler, config.lora
        page_size = self.block_size or cache.page_size
        tokens = cache.max_total_tokens if self.kv_blocks is None else self.kv_blocks * page_size
        return replace(
            config,
            cache=replace(cache, page_size=page_size, max_total_tokens=tokens),
            scheduler=replace(scheduler, chunked_prefill_size=self.chunk or scheduler.chunked_prefill_size),
            lora=replace(lora, max_loras_per_batch=self.max_loras or lora.max_loras_per_batch),
        )

    def before_step(self, step: int, request_ids: list[int]) -> None:
        """Called before each forward with the step's number (1 is the first) and its requests."""
        if self.slow_step_ms:
            time.sleep(self.slow_step_ms / 1000)
        if self.hang_step == step:
            while True:
                time.sleep(3600)
        if self.oom_alloc == step:
            raise MemoryError(f"injected allocation failure at step {step}")
        if self.fail_step is not None:
            k, request = self.fail_step
            if (request is None and step == k) or (request is not None and step >= k and request in request_ids):
                raise RuntimeError(f"injected failure at step {step}")


def read_hooks(environ: Mapping[str, str] = os.environ, *, warn: bool = True) -> Hooks:
    """Hooks from the environment; all off, with a warning, unless LORAPLEX_TEST_HOOKS=1."""
    given = {k.removeprefix(PREFIX): v for k, v in environ.items() if k.startswith(PREFIX)}
    enabled = given.pop("HOOKS", "") == "1"
    if given and not enabled and warn:
        print(f"loraplex: {PREFIX}* variables are ignored without {PREFIX}HOOKS=1", file=sys.stderr)
    if not enabled:
        return Hooks()
    values: dict[str, object] = {}
    for field in fields(Hooks):
        text = given.pop(field.name.upper(), None)
        if text is None:
            continue
        if field.name == "fail_step":
            step, _, request = text.partition(":")
            values[field.name] = (int(step), int(request) if request else None)
        else:
            values[field.name] = int(text)
    if given:
        raise ValueError(f"unknown test hooks: {', '.join(PREFIX + k for k in sorted(given))}")
    return Hooks(**values)  # type: ignore[arg-type]
