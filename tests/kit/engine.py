"""A whole engine in the test's own process: the real loop, stepped by hand, its messages collected in a list."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from loraplex.engine import ranks
from loraplex.engine.config import CacheConfig, Config, GraphConfig, LoRAConfig, ModelConfig, SchedulerConfig
from loraplex.engine.loop import EngineLoop
from loraplex.engine.messages import (
    Abort,
    EngineMessage,
    LoadAdapter,
    Reply,
    StepOutput,
    Submit,
    TokenOut,
    UnloadAdapter,
)
from loraplex.engine.request import Request, SamplingParams

DEVICE: Any = os.environ.get("KIT_DEVICE", "cpu")
"""KIT_DEVICE=cuda runs the engine tests on a GPU, in fp32 as here."""


class Collector(list[EngineMessage]):
    def send(self, message: EngineMessage) -> None:
        self.append(message)


class TestEngine:
    """Settings by field name, whatever their group: TestEngine(t1, page_size=4, adapters={"a": folder})."""

    __test__ = False

    def __init__(self, model_dir: Path, adapters: Mapping[str, Path | str] | None = None, **settings: Any) -> None:
        groups = [
            ModelConfig(model_path=str(model_dir), device=settings.pop("device", DEVICE)),
            CacheConfig(max_total_tokens=settings.pop("max_total_tokens", 2048)),
            SchedulerConfig(max_running_requests=settings.pop("max_running_requests", 32)),
            LoRAConfig(
                enable_lora=True,
                lora_paths=tuple(f"{n}={p}" for n, p in (adapters or {}).items()),
                lora_memory=settings.pop("lora_memory", "64MiB"),
            ),
            GraphConfig(),
        ]
        for i, group in enumerate(groups):
            own = {k: settings.pop(k) for k in list(settings) if k in group.__dataclass_fields__}
            groups[i] = replace(group, **own)
        assert not settings, f"unknown settings: {settings}"
        model, cache, scheduler, lora, graphs = groups
        self.config = Config(model=model, cache=cache, scheduler=scheduler, lora=lora, graphs=graphs)
        self.sent = Collector()
        self.loop = EngineLoop.start(self.config, ranks.Followers([]), "", self.sent)
        self._last_id = 0

    def submit(
        self, prompt: list[int], adapter: str | None = None, *, n: int = 1, salt: str = "", **sampling: Any
    ) -> int:
        """Queues a request (greedy, 8 tokens, unless `sampling` says otherwise); returns its id."""
        self._last_id += 1
        params = SamplingParams(**({"max_tokens": 8, "temperature": 0.0} | sampling))
        self.loop.inbox.put(
            Submit(
                request=Request(
                    id=self._last_id, prompt_ids=prompt, sampling=params, adapter=adapter, n=n, cache_salt=salt
                )
            )
        )
        return self._last_id

    def abort(self, id: int) -> None:
        self.loop.inbox.put(Abort(id=id))

    def load(self, name: str, path: Path | str, *, replace: bool = False, pinned: bool = False) -> Reply:
        message = LoadAdapter(op=self._new_op(), name=name, path=str(path), replace=replace, pinned=pinned)
        return self._operation(message)

    def unload(self, name: str) -> Reply:
        return self._operation(UnloadAdapter(op=self._new_op(), name=name))

    def turn(self) -> None:
        assert self.loop.turn()
        self.loop.scheduler.check()

    def run(self, most: int = 20_000) -> None:
        """Until every request has ended; then nothing may be held."""
        for _ in range(most):
            if self.loop.inbox.empty() and self.loop.is_idle:
                self.assert_idle()
                return
            self.turn()
        raise AssertionError("requests do not end")

    def assert_idle(self) -> None:
        scheduler = self.loop.scheduler
        scheduler.check()
        counts = scheduler.pool.counts()
        assert counts.held == 0, counts
        assert scheduler.num_live == 0
        assert not any(self.loop.manager.registry.refs().values())

    def outputs(self, id: int, index: int = 0) -> list[TokenOut]:
        steps = (m for m in self.sent if isinstance(m, StepOutput))
        return [out for step in steps for out in step.outputs if (out.id, out.index) == (id, index)]

    def tokens(self, id: int, index: int = 0) -> list[int]:
        return [t for out in self.outputs(id, index) for t in out.tokens]

    def generate(
        self, prompts: Iterable[list[int]], adapters: Iterable[str | None] = (), **sampling: Any
    ) -> list[list[int]]:
        """Greedy continuations of a batch, in order."""
        prompts = list(prompts)
        names = list(adapters) or [None] * len(prompts)
        ids = [self.submit(p, a, **sampling) for p, a in zip(prompts, names, strict=True)]
        self.run()
        return [self.tokens(id) for id in ids]

    def _new_op(self) -> int:
        self._last_id += 1
        return self._last_id

    def _operation(self, message: LoadAdapter | UnloadAdapter) -> Reply:
        self.loop.inbox.put(message)
        while True:
            self.turn()
            for sent in self.sent:
                if isinstance(sent, Reply) and sent.op == message.op:
                    return sent
