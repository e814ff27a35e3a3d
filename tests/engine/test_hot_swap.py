"""Adapters change under one name while requests run, wait, are preempted and aborted: each answer is one version's."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kit.adapters import make_a
from kit.engine import TestEngine

from loraplex.engine.messages import LoadAdapter, Reply, StepOutput, TokenOut, UnloadAdapter

NUM_VERSIONS = 4


@dataclass
class Asked:
    prompt: list[int]
    n: int
    sampling: dict[str, Any]
    version: int | None = None
    """Index of the adapter content at admission; None: the base model."""
    refused: bool = False
    aborted: bool = False
    outputs: list[list[TokenOut]] = field(default_factory=list)


class Traffic:
    """Random requests and adapter operations on the names x and y, in a pool that holds few of them."""

    def __init__(self, t1: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folders = [make_a(i + 1, t1) for i in range(NUM_VERSIONS)]
        self.reference = TestEngine(t1, {f"v{i}": f for i, f in enumerate(self.folders)})
        infos = self.reference.loop.manager.registry.infos()
        self.version_of = {info.digest: int(info.name[1:]) for info in infos}
        self.engine = TestEngine(
            t1,
            {"x": self.folders[0]},
            max_total_tokens=4 * self.rng.choice([12, 20]),
            page_size=4,
            chunked_prefill_size=5,
            max_loras_per_batch=self.rng.choice([1, 2]),
            max_running_requests=6,
        )
        self.prompts = [[self.rng.randrange(256) for _ in range(length)] for length in (1, 4, 8, 11, 20)]
        self.asked: dict[int, Asked] = {}
        self.num_operations = 0

    def ask(self) -> None:
        prompt = self.rng.choice(self.prompts)  # few, so that prefixes are found in the cache
        sampling: dict[str, Any] = {"max_tokens": self.rng.choice([1, 5, 20]), "ignore_eos": self.rng.random() < 0.7}
        if self.rng.random() < 0.4:
            sampling |= {"temperature": 1.0, "seed": 7, "top_p": 0.9}
        if self.rng.random() < 0.4:
            sampling |= {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
        if self.rng.random() < 0.2:
            sampling |= {"prompt_logprobs": 1}
        asked = Asked(prompt, self.rng.choice([1, 1, 3]), sampling)
        name = self.rng.choice(["x", "x", "y", None])
        id = self.engine.submit(prompt, name, n=asked.n, **sampling)
        self.asked[id] = asked

    def operate(self) -> None:
        name, kind = self.rng.choice("xy"), self.rng.random()
        op = 1_000_000 + self.num_operations
        self.num_operations += 1
        if kind < 0.3:
            self.engine.loop.inbox.put(UnloadAdapter(op=op, name=name))
        else:
            path = str(self.rng.choice(self.folders))
            self.engine.loop.inbox.put(LoadAdapter(op=op, name=name, path=path, replace=kind < 0.9))

    def run(self, num_requests: int) -> None:
        self._note_versions()
        while len(self.asked) < num_requests or self.engine.loop.scheduler.has_work:
            chance = self.rng.random()
            if len(self.asked) < num_requests and chance < 0.4:
                self.ask()
            elif chance < 0.5 and self.asked:
                id = self.rng.choice(list(self.asked))
                self.asked[id].aborted = True
                self.engine.abort(id)
            elif len(self.asked) < num_requests and chance < 0.6:
                self.operate()
            self.engine.turn()
        while sum(isinstance(message, Reply) for message in self.engine.sent) < self.num_operations:
            self.engine.turn()
        self.engine.assert_idle()

    def _note_versions(self) -> None:
        scheduler = self.engine.loop.scheduler
        add = scheduler.add

        def noting(request):
            error = add(request)
            adapter = self.engine.loop.manager.registry.get(request.adapter) if request.adapter else None
            self.asked[request.id].refused = error is not None
            self.asked[request.id].version = self.version_of[adapter.info.digest] if adapter else None
            return error

        scheduler.add = noting  # type: ignore[method-assign]

    def outputs(self) -> None:
        for asked in self.asked.values():
            asked.outputs = [[] for _ in range(asked.n)]
        for message in self.engine.sent:
            if isinstance(message, StepOutput):
                for out in message.outputs:
                    self.asked[out.id].outputs[out.index].append(out)


@pytest.mark.parametrize("seed", range(2))
def test_every_answer_is_one_versions(t1: Path, seed: int) -> None:
    traffic = Traffic(t1, seed)
    traffic.run(50)
    traffic.outputs()
    reference = traffic.reference
    complete = 0
    for asked in traffic.asked.values():
        if asked.refused:
            assert all(outs[0].error is not None and outs[0].error.status == 404 for outs in asked.outputs)
            continue
        adapter = None if asked.version is None else f"v{asked.version}"
        id = reference.submit(asked.prompt, adapter, n=asked.n, **asked.sampling)
        reference.run()
        for index, outs in enumerate(asked.outputs):
            expected = reference.outputs(id, index)
            tokens = [token for out in outs for token in out.tokens]
            ended = [out.finish_reason for out in outs if out.finish_reason]
            if asked.aborted and not ended:
                assert tokens == reference.tokens(id, index)[: len(tokens)]
                continue
            assert tokens == reference.tokens(id, index)
            assert ended == [expected[-1].finish_reason]
            got, wanted = outs[0].prompt_logprobs, expected[0].prompt_logprobs
            assert [p and p.logprob for p in got or []] == pytest.approx(
                [p and p.logprob for p in wanted or []], abs=1e-4
            )
            complete += 1
    assert complete > 20
    manager = traffic.engine.loop.manager
    for name in ("x", "y"):
        traffic.engine.unload(name)
    assert manager.bytes == 0, "the bytes of versions that nobody uses"
    assert manager.registry.refs() == {}
