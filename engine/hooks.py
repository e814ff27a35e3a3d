"""Fault injection for tests: `LORAPLEX_TEST_<NAME>` variables, live only with `LORAPLEX_TEST_HOOKS=1`.

They exist because cancellation, preemption, engine failure and hot-swap cannot be tested from outside without them.
No request can set them. Requests are named by the server's own ids: 1 is the first one accepted. The size of the KV
pool, its pages, chunks and adapter slots need no hook: they are flags.
"""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields

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


def read_hooks(environ: Mapping[str, str] = os.environ) -> Hooks:
    """Hooks from the environment; all off, with one warning, unless LORAPLEX_TEST_HOOKS=1."""
    given = {k.removeprefix(PREFIX): v for k, v in environ.items() if k.startswith(PREFIX)}
    enabled = given.pop("HOOKS", "") == "1"
    if given and not enabled:
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
