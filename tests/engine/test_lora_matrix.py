"""Every rank, layout, backend and MoE-LoRA implementation against the oracle, alone and mixed in one batch.

A seeded subset runs with the other tests, all of it with `make test-full`.
"""

import itertools
from pathlib import Path

import pytest
from kit import models
from kit.adapters import make_adapter
from kit.engine import TestEngine
from kit.oracle import Oracle

TOL = 1e-4
RANKS = (1, 3, 4, 8, 16, 33, 64)
KINDS = ("A1", "ATT", "EXP", "FUSED", "STACK", "OUTER", "MIXTRAL", "GATE_UP", "ROUTER", "ALL", "EMB")
BACKENDS = ("torch", "csgmv", "triton")
PROMPT = [(7 * i * i + 3) % 256 for i in range(21)]


@pytest.fixture(scope="module", params=[8, 64], ids=["T1", "T1-64"])
def model(request: pytest.FixtureRequest) -> Path:
    return models.make_t1(num_experts=request.param)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


def check(model: Path, oracle: Oracle, folders: dict[str, Path], backend: str, virtual: bool) -> None:
    """Base and all adapters in one batch: prompt and output logprobs equal the oracle's, greedy ids are its argmax."""
    engine = TestEngine(model, folders, lora_backend=backend, lora_use_virtual_experts=virtual)
    names: list[str | None] = [None, *folders]
    ids = {
        name: engine.submit(PROMPT[: 21 - i % 5], name, logprobs=2, prompt_logprobs=1, max_tokens=3, ignore_eos=True)
        for i, name in enumerate(names)
    }
    engine.run()
    for i, (name, id) in enumerate(ids.items()):
        prompt, tokens = PROMPT[: 21 - i % 5], engine.tokens(id)
        table = oracle.logprobs(prompt + tokens, folders.get(name or ""))
        start = len(prompt) - 1
        assert tokens == table[start : start + 3].argmax(-1).tolist(), name
        first = engine.outputs(id)[0].prompt_logprobs
        assert first is not None
        got = [*first[1:], *(out.logprobs[0] for out in engine.outputs(id))]
        for position, lp in enumerate(got):
            assert lp is not None
            assert abs(lp.logprob - table[position, lp.token].item()) <= TOL, (name, position)
            for token, value in lp.top:
                assert abs(value - table[position, token].item()) <= TOL, (name, position)


def subset(cases: list, every: int) -> list:
    """Each `every`-th case as it is, the others marked slow."""
    return [case if i % every == 0 else pytest.param(*case, marks=pytest.mark.slow) for i, case in enumerate(cases)]


@pytest.mark.parametrize(("backend", "virtual"), list(itertools.product(BACKENDS, (True, False))))
def test_all_ranks_in_one_batch(model: Path, oracle: Oracle, backend: str, virtual: bool) -> None:
    folders = {f"r{r}": make_adapter(model, "A1", r=r, seed=r) for r in RANKS}
    check(model, oracle, folders, backend, virtual)


@pytest.mark.parametrize(("backend", "virtual"), list(itertools.product(BACKENDS, (True, False))))
def test_all_layouts_in_one_batch(model: Path, oracle: Oracle, backend: str, virtual: bool) -> None:
    folders = {kind: make_adapter(model, kind, r=3 + i, seed=i) for i, kind in enumerate(KINDS)}
    check(model, oracle, folders, backend, virtual)


@pytest.mark.parametrize(
    ("kind", "rank", "backend", "virtual"), subset(list(itertools.product(KINDS, RANKS, BACKENDS, (True, False))), 53)
)
def test_one_adapter(model: Path, oracle: Oracle, kind: str, rank: int, backend: str, virtual: bool) -> None:
    check(model, oracle, {"x": make_adapter(model, kind, r=rank, seed=rank + 100)}, backend, virtual)
