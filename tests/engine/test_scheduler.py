"""The scheduler against a simulated device whose memory remembers what was written where.

The simulated model's next token is a hash of all tokens it can *read* through the row's pages, plus the adapter. So a
page freed too early, a wrong prefix match, a lost token after preemption or a mixed-up adapter changes the output.
"""

import random
from collections.abc import Iterable, Iterator, Set
from dataclasses import replace

import pytest

from loraplex.engine.kv_cache import PagePool
from loraplex.engine.lora.registry import AdapterRegistry, AdapterVersion
from loraplex.engine.messages import AdapterInfo, ErrorInfo, TokenLogprobs, TokenOut
from loraplex.engine.request import Request, SamplingParams
from loraplex.engine.scheduler import Limits, Scheduler
from loraplex.engine.step import StepResult

VOCAB = 50
EOS = 0


def next_token(tokens: list[int], adapter: str) -> int:
    return random.Random(f"{adapter}:{tokens}").randrange(1, VOCAB)


def solo(request: Request, max_tokens: int) -> list[int]:
    tokens = list(request.prompt_ids)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, request.adapter or ""))
    return tokens[len(request.prompt_ids) :]


def replace_prompt(request: Request, prompt: list[int]) -> Request:
    return Request(id=request.id, prompt_ids=prompt, sampling=request.sampling)


class Device:
    """KV memory of (token, adapter) cells."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.size = page_size
        self.kv: list[tuple[int, str] | None] = [None] * (pages * page_size)
        self.last: dict[int, int] = {}
        self.pages: dict[int, list[int]] = {}
        """Of each row, as the plans told them."""

    def run(self, batch) -> StepResult:
        plan = batch.plan()
        sampling = batch.sampling_plan()
        result = StepResult([], [], [], [])
        at = 0
        for i, seq in enumerate(batch.seqs):
            n, row = plan.num_new[i], plan.rows[i]
            known = self.pages.setdefault(row, [])
            assert plan.first_page[i] <= len(known), "a page was never told"
            known[plan.first_page[i] :] = plan.new_pages[i]
            pages = known
            assert pages == seq.pages
            adapter = seq.adapter.info.name if seq.adapter else ""
            assert (plan.slots[i] < 0) == (seq.adapter is None)
            if seq.adapter:
                assert seq.adapter.row >= 0
                assert plan.slot_rows[plan.slots[i]] == seq.adapter.row
            for j, p in enumerate(range(plan.seq_lens[i] - n, plan.seq_lens[i])):
                token = plan.ids[at + j]
                token = self.last[row] if token < 0 else token
                self.kv[pages[p // self.size] * self.size + p % self.size] = (token, adapter)
            at += n
            seen = [self.kv[pages[p // self.size] * self.size + p % self.size] for p in range(plan.seq_lens[i])]
            assert all(cell is not None and cell[1] == adapter for cell in seen), "read another adapter's KV"
            token = next_token([cell[0] for cell in seen], adapter) if plan.sample[i] else -1
            if plan.sample[i]:
                self.last[row] = token
            result.tokens.append(token)
            result.broken.append(False)
            result.logprobs.append(TokenLogprobs(token, -1.0) if seq.sampling.logprobs is not None else None)
            result.prompt_logprobs.append([TokenLogprobs(t, -1.0) for t in sampling.prompt_targets[i]])
        assert at == len(plan.ids)
        assert len(plan.slot_rows) == len(set(plan.slot_rows))
        return result


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Memory:
    """Stands for the arena: holds up to `size` adapters, evicts the least recently used."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.resident: list[AdapterVersion] = []
        self.rows = 0

    def ensure(self, version: AdapterVersion, keep: Set[AdapterVersion]) -> bool:
        if version in self.resident:
            return True
        if len(self.resident) == self.size:
            victim = next((v for v in self.resident if v not in keep), None)
            if victim is None:
                return False
            self.resident.remove(victim)
            victim.row = -1
        self.resident.append(version)
        version.row = self.rows
        self.rows += 1
        return True

    def touch(self, used: Iterable[AdapterVersion]) -> None:
        for version in used:
            self.resident.remove(version)
            self.resident.append(version)


class Bench:
    overlap = False
    """A batch is made and run before the one before it is committed."""

    def __init__(self, pages: int = 64, page_size: int = 4, adapters: int = 0, cache: bool = True, **limits) -> None:
        defaults = Limits(
            page_size=page_size, context_length=10_000, max_running=16, max_queued=None, chunk=16,
            adapter_slots=2, eos_token_ids=frozenset([EOS]),
        )  # fmt: skip
        self.clock = Clock()
        self.registry = AdapterRegistry()
        for i in range(adapters):
            self.load(f"a{i}")
        self.memory = Memory(limits.pop("memory", 1000))
        preempt_every = limits.pop("preempt_every", None)
        self.pool = PagePool(pages, prefix_cache=cache)
        self.scheduler = Scheduler(
            replace(defaults, **limits),
            self.pool,
            self.registry,
            self.memory,
            preempt_every=preempt_every,
            clock=self.clock,
        )
        self.device = Device(pages, page_size)
        self.outputs: dict[tuple[int, int], list[TokenOut]] = {}
        self.batches: list = []
        self.in_flight: tuple | None = None

    def load(self, name: str, digest: str | None = None) -> None:
        info = AdapterInfo(
            name=name, path="", digest=digest or name, version=self.registry.new_version(), rank_min=1, rank_max=1,
            layout="", bytes=0, num_tensors=1,
        )  # fmt: skip
        self.registry.publish(AdapterVersion(info))

    def add(self, id: int, prompt: list[int], max_tokens: int = 5, **kw) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens, **kw.pop("sampling", {}))
        request = Request(id=id, prompt_ids=prompt, sampling=sampling, **kw)
        error = self.scheduler.add(request)
        assert error is None, error
        return request

    def step(self) -> bool:
        batch = self.scheduler.next_batch()
        self.scheduler.check()
        launched = None
        if batch is not None:
            self.batches.append(batch)
            assert len({s.adapter for s in batch.seqs if s.adapter}) <= self.scheduler.limits.adapter_slots
            launched = batch, self.device.run(batch)
        progress = launched is not None or self.in_flight is not None
        self.commit()
        self.in_flight = launched
        if not self.overlap:
            self.commit()
        return progress

    def commit(self) -> None:
        if self.in_flight is not None:
            for out in self.scheduler.commit(*self.in_flight):
                self.outputs.setdefault((out.id, out.index), []).append(out)
            self.in_flight = None
        self.scheduler.check()

    def run(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.scheduler.has_work and self.in_flight is None:
                return self.idle()
            self.step()
        raise AssertionError("requests do not end")

    def idle(self) -> None:
        self.scheduler.check()
        assert self.pool.counts().held == 0
        assert self.scheduler.num_live == 0
        assert not any(self.registry.refs().values())

    def tokens(self, id: int, index: int = 0) -> list[int]:
        return [t for out in self.outputs.get((id, index), []) for t in out.tokens]


@pytest.fixture(params=[False, True], ids=["", "overlap"], autouse=True)
def _overlap(request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "overlap", request.param)


@pytest.fixture(params=[1, 7, 16, 10**6], ids=lambda c: f"chunk{c}")
def chunk(request) -> Iterator[int]:
    return request.param


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("preempt_every", [None, 3])
def test_mixed_requests_equal_their_solo_runs(chunk: int, page_size: int, preempt_every: int | None) -> None:
    rng = random.Random(chunk * page_size)
    bench = Bench(
        pages=200 // page_size + 12, page_size=page_size, adapters=4, chunk=chunk, preempt_every=preempt_every
    )
    prefix = [rng.randrange(VOCAB) for _ in range(20)]
    requests = []
    for id in range(1, 25):
        own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
        prompt = prefix + own if rng.random() < 0.5 else own
        adapter = rng.choice([None, "a0", "a1", "a2", "a3"])
        requests.append(bench.add(id, prompt, rng.randrange(1, 15), adapter=adapter))
        if rng.random() < 0.3:
            bench.step()
    bench.run()
    for request in requests:
        assert bench.tokens(request.id) == solo(request, request.sampling.max_tokens), request.id
        outs = bench.outputs[request.id, 0]
        assert [o.finish_reason for o in outs[:-1]] == [None] * (len(outs) - 1)
        assert outs[-1].finish_reason == "length"
        assert 0 <= outs[0].cached_tokens <= len(request.prompt_ids) - 1
    if preempt_every:
        assert bench.scheduler.num_preemptions > 0


def test_small_pool_preempts_and_everyone_still_gets_the_right_tokens() -> None:
    bench = Bench(pages=24, page_size=4, chunk=16)
    requests = [bench.add(id, [id] * 8, 40) for id in range(1, 7)]
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    for request in requests:
        assert bench.tokens(request.id) == solo(request, 40)


def test_three_requests_of_sixty_percent_of_the_pool_do_not_thrash() -> None:
    bench = Bench(pages=10, page_size=4, cache=False)
    requests = [bench.add(id, [id] * 12, 12) for id in range(1, 4)]
    bench.run(most=200)
    for request in requests:
        assert bench.tokens(request.id) == solo(request, 12)
    assert bench.scheduler.num_preemptions <= 20


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_repeated_prompts_are_cached_but_for_the_last_token(length: int) -> None:
    bench = Bench(page_size=16)
    prompt = list(range(1, length + 1))
    for id in (1, 2, 3):
        request = bench.add(id, prompt, 4)
        bench.run()
        assert bench.tokens(id) == solo(request, 4)
    cached = bench.outputs[2, 0][0].cached_tokens
    assert cached == (length - 1) // 16 * 16
    assert bench.outputs[1, 0][0].cached_tokens == 0


def test_cached_prefix_is_not_shared_across_adapters_or_salts() -> None:
    bench = Bench(adapters=2)
    prompt = list(range(1, 20))
    for id, kw in enumerate([{}, {"adapter": "a0"}, {"adapter": "a1"}, {"cache_salt": "s"}], start=1):
        bench.add(id, prompt, 2, **kw)
        bench.run()
        assert bench.outputs[id, 0][0].cached_tokens == 0
    bench.load("a0", digest="new content")
    bench.add(9, prompt, 2, adapter="a0")
    bench.run()
    assert bench.outputs[9, 0][0].cached_tokens == 0, "KV of the replaced content was reused"
    bench.load("other-name", digest="a1")
    bench.add(10, prompt, 2, adapter="a1")
    bench.run()
    assert bench.outputs[10, 0][0].cached_tokens == 16


def test_replaced_adapter_serves_its_requests_to_the_end() -> None:
    bench = Bench(adapters=1)
    bench.add(1, [1, 2, 3], 6, adapter="a0")
    bench.step()
    bench.load("a0", digest="second")
    bench.add(2, [1, 2, 3], 6, adapter="a0")
    for _ in range(3):
        bench.step()
    versions = {s.request.id: s.adapter for s in bench.scheduler.running}
    assert versions[1] is not versions[2]
    assert bench.registry.take_freed() == []
    bench.run()
    assert bench.registry.take_freed() == [versions[1]]


def test_unknown_adapter_is_refused_and_leaves_nothing() -> None:
    bench = Bench()
    error = bench.scheduler.add(Request(id=1, prompt_ids=[1], sampling=SamplingParams(max_tokens=1), adapter="x"))
    assert isinstance(error, ErrorInfo)
    assert (error.status, error.param) == (404, "model")
    bench.idle()


def test_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    bench = Bench(pages=16, page_size=4)
    request = Request(id=1, prompt_ids=[1] * 60, sampling=SamplingParams(max_tokens=5))
    error = bench.scheduler.add(request)
    assert error is not None
    assert error.code == "context_length_exceeded"
    assert all(number in error.message for number in ("64", "60", "5"))
    fits = bench.add(2, [1] * 60, 4)
    bench.run()
    assert bench.tokens(2) == solo(fits, 4)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("max_queued", [0, 2])
def test_queue_limit_counts_choices_that_find_no_row(max_queued: int, started: bool) -> None:
    bench = Bench(max_running=3, max_queued=max_queued)
    bench.add(1, [1], n=2)
    if started:
        bench.step()
    bench.add(2, [1], n=1 + max_queued)
    error = bench.scheduler.add(Request(id=3, prompt_ids=[1], sampling=SamplingParams(max_tokens=1)))
    assert error is not None
    assert error.status == 503
    bench.run()


@pytest.mark.parametrize("seed", range(6))
def test_aborts_at_any_point_leak_nothing(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(pages=40, adapters=3, chunk=5)
    kept: dict[int, Request] = {}
    for id in range(1, 60):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
        n = rng.choice([1, 1, 3])
        kept[id] = bench.add(id, prompt, rng.randrange(1, 10), adapter=rng.choice([None, "a0", "a1", "a2"]), n=n)
        for _ in range(rng.randrange(3)):
            bench.step()
        if rng.random() < 0.4:
            victim = rng.randrange(1, id + 1)
            bench.scheduler.abort(victim)
            bench.scheduler.abort(victim)
            bench.scheduler.check()
            kept.pop(victim, None)
    bench.run()
    for id, request in kept.items():
        for index in range(request.n):
            assert bench.tokens(id, index) == solo(request, request.sampling.max_tokens)


def test_stop_ids_end_a_choice_and_ignore_eos_ends_only_by_length() -> None:
    probe = Request(id=0, prompt_ids=[3, 1], sampling=SamplingParams(max_tokens=9))
    stop = solo(probe, 9)[2]
    bench = Bench()
    bench.add(1, [3, 1], 9, sampling={"stop_token_ids": (stop,)})
    bench.run()
    last = bench.outputs[1, 0][-1]
    assert (last.finish_reason, last.stop_token) == ("stop", stop)
    assert bench.tokens(1) == solo(probe, 9)[: solo(probe, 9).index(stop) + 1]


def test_prompt_logprobs_cover_the_prompt_and_bypass_the_cache(chunk: int) -> None:
    bench = Bench(chunk=chunk, preempt_every=2)
    prompt = list(range(1, 22))
    bench.add(1, prompt, 2)
    bench.run()
    bench.add(2, prompt, 3, sampling={"prompt_logprobs": 0})
    bench.add(3, [1] * 9, 3)
    bench.run()
    first, *rest = bench.outputs[2, 0]
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [lp.token for lp in first.prompt_logprobs[1:]] == prompt[1:]
    assert all(out.prompt_logprobs is None for out in rest)
    assert first.cached_tokens == 0


def test_blocked_adapter_is_passed_by_others() -> None:
    bench = Bench(adapters=2, adapter_slots=1)
    bench.add(1, [1], 30, adapter="a0")
    bench.step()
    bench.add(2, [2], 2, adapter="a1")
    bench.add(3, [3], 2)
    bench.add(4, [4], 2, adapter="a0")
    for _ in range(5):
        bench.step()
    assert bench.outputs[3, 0][-1].finish_reason
    assert bench.outputs[4, 0][-1].finish_reason
    assert (2, 0) not in bench.outputs
    bench.run()
    assert bench.outputs[2, 0][-1].finish_reason


def test_flooded_adapter_does_not_starve_a_waiting_one() -> None:
    bench = Bench(pages=600, adapters=2, adapter_slots=1, max_running=4)
    bench.add(1, [1], 1000, adapter="a0")
    bench.step()
    bench.add(2, [2], 3, adapter="a1")
    for id in range(3, 200):
        bench.clock.now += 0.1
        bench.add(id, [id % VOCAB], 20, adapter="a0")
        bench.step()
        if (2, 0) in bench.outputs and bench.outputs[2, 0][-1].finish_reason:
            break
    assert bench.outputs[2, 0][-1].finish_reason, "the waiting adapter never ran"
    assert bench.clock.now <= 12.0
    bench.run(most=20_000)


def test_adapter_without_room_is_passed_and_runs_when_room_is_there() -> None:
    bench = Bench(adapters=3, adapter_slots=3, memory=1)
    bench.add(1, [1], 30, adapter="a0")
    bench.step()
    cold = bench.add(2, [2], 2, adapter="a1")
    bench.add(3, [3], 2)
    bench.add(4, [4], 2, adapter="a0")
    for _ in range(5):
        bench.step()
    assert bench.outputs[3, 0][-1].finish_reason
    assert bench.outputs[4, 0][-1].finish_reason
    assert (2, 0) not in bench.outputs
    bench.run()
    assert bench.tokens(2) == solo(cold, 2)


def test_flood_does_not_keep_a_cold_adapter_off_the_device() -> None:
    """Running sequences of a0 never end all at once; after the limit no new one is admitted before a1 has run."""
    bench = Bench(pages=600, adapters=2, adapter_slots=2, max_running=8, memory=1)
    bench.add(1, [1], 20, adapter="a0")
    bench.step()
    bench.add(2, [2], 3, adapter="a1")
    for id in range(3, 400):
        bench.clock.now += 0.1
        bench.add(id, [id % VOCAB], 20, adapter="a0" if id % 4 else None)
        bench.step()
        if (2, 0) in bench.outputs and bench.outputs[2, 0][-1].finish_reason:
            break
    assert bench.outputs[2, 0][-1].finish_reason, "the cold adapter never ran"
    assert 10.0 <= bench.clock.now <= 14.0
    bench.run(most=20_000)


def test_random_adapters_in_little_memory_get_their_own_tokens() -> None:
    rng = random.Random(3)
    bench = Bench(pages=60, adapters=6, adapter_slots=3, memory=2, preempt_every=5)
    requests = []
    for id in range(1, 60):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
        adapter = rng.choice([None, *(f"a{i}" for i in range(6))])
        requests.append(bench.add(id, prompt, rng.randrange(1, 9), adapter=adapter))
        for _ in range(rng.randrange(3)):
            bench.step()
    bench.run()
    for request in requests:
        assert bench.tokens(request.id) == solo(request, request.sampling.max_tokens)


def test_long_prompt_does_not_stop_running_streams() -> None:
    bench = Bench(pages=200, chunk=8)
    bench.add(1, [1], 50)
    bench.step()
    bench.add(2, [2] * 200, 1)
    for _ in range(20):
        before = len(bench.tokens(1))
        bench.step()
        assert len(bench.tokens(1)) == before + 1


def test_first_choice_draws_alike_whatever_n() -> None:
    bench = Bench()
    bench.add(1, [1], sampling={"seed": 42})
    bench.add(2, [1], n=3, sampling={"seed": 42})
    bench.step()
    seeds = {(s.request.id, s.index): s.seed for s in bench.scheduler.running}
    assert seeds[1, 0] == seeds[2, 0]
    assert len({seeds[2, i] for i in range(3)}) == 3
    bench.run()


def test_failed_step_ends_its_requests_only() -> None:
    bench = Bench()
    bench.add(1, [1, 2, 3, 4, 5], 5)
    batch = bench.scheduler.next_batch()
    assert batch is not None
    bench.add(2, [1, 2, 3, 4, 5], 5)
    outs = bench.scheduler.fail(batch, ErrorInfo(status=500, message="x"))
    assert [(o.id, o.finish_reason) for o in outs] == [(1, "error")]
    bench.run()
    assert bench.outputs[2, 0][0].cached_tokens == 0, "pages of a failed step were reused"


def test_pages_of_a_chunk_in_flight_have_no_name_yet() -> None:
    """The chunk before it is committed while it runs; should it fail, its pages must not be found."""
    bench = Bench(page_size=4, chunk=8)
    prompt = list(range(1, 20))
    bench.add(1, prompt, 2)
    first = bench.scheduler.next_batch()
    assert first is not None
    result = bench.device.run(first)
    second = bench.scheduler.next_batch()
    assert second is not None
    bench.scheduler.commit(first, result)
    bench.scheduler.fail(second, ErrorInfo(status=500, message="x"))
    bench.add(2, prompt, 2)
    bench.run()
    assert bench.outputs[2, 0][0].cached_tokens == 8


def test_token_too_many_is_dropped_and_a_preempted_one_drawn_again() -> None:
    probe = Request(id=0, prompt_ids=[3, 1], sampling=SamplingParams(max_tokens=9))
    stop = solo(probe, 1)[0]
    bench = Bench()
    bench.add(1, [3, 1], 9, sampling={"stop_token_ids": (stop,)})
    bench.add(2, [3, 2], 2)
    first = bench.scheduler.next_batch()
    assert first is not None
    result = bench.device.run(first)
    bench.scheduler._preempt(bench.scheduler.running[-1])
    second = bench.scheduler.next_batch()
    assert second is not None
    assert second.num_new == [1, 2], "one row goes on, the preempted one begins again"
    bench.in_flight = second, bench.device.run(second)
    outs = bench.scheduler.commit(first, result)
    assert [(o.id, o.tokens, o.finish_reason) for o in outs] == [(1, [stop], "stop")]
    bench.run()
    assert (1, 0) not in bench.outputs
    assert bench.tokens(2) == solo(replace_prompt(probe, [3, 2]), 2)
