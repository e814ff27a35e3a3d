"""Continuous batching: decodes and prompt chunks share a step; KV pages, rows and adapter leases are accounted exactly.

A step takes every running sequence that has a token to compute (one token each when decoding, a chunk while its prompt
lasts), then admits waiting ones while the chunk budget, rows and pages allow. Mixing keeps running streams moving while
long prompts are read. When pages run out the newest running sequence is preempted and recomputed later, so the oldest
always finishes. A waiting sequence whose adapter finds no slot is passed by others, but not for longer than
`ADAPTER_WAIT_LIMIT_S`: then it runs, and adapters take turns. One whose adapter finds no room on the device is passed
as well; after that time no sequence with an adapter behind it is admitted before it has run.
"""

import random
import time
from bisect import insort
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Protocol

from loraplex.engine.kv_cache import PagePool
from loraplex.engine.lora.registry import AdapterRegistry, AdapterVersion
from loraplex.engine.messages import ErrorInfo, TokenOut
from loraplex.engine.prefix import extend_chain, namespace_root
from loraplex.engine.request import Request
from loraplex.engine.sequence import Sequence, Ticket
from loraplex.engine.step import Batch, StepResult

ADAPTER_WAIT_LIMIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    page_size: int
    context_length: int
    max_running: int
    max_queued: int | None
    chunk: int
    """Prompt tokens a step may compute."""
    adapter_slots: int
    """Distinct adapters a step may hold."""
    eos_token_ids: frozenset[int]


class Residency(Protocol):
    """Which adapters are on the device: `engine.lora.residency`."""

    def ensure(self, version: AdapterVersion, keep: Set[AdapterVersion]) -> bool: ...

    def touch(self, used: Iterable[AdapterVersion]) -> None: ...


class Scheduler:
    """Owns every live request. `next_batch` → run → `commit`, from one thread.

    The next batch may be made before the last one is committed: a sequence whose token is on its way goes on from the
    device's copy of it. What the token decides, then, comes a step late: a sequence that it ends has computed one token
    too many, which `commit` drops, and one that is preempted loses it and draws the same one again. Pages and rows are
    given away while a step in flight still writes to them: steps run in the order of their launch.
    """

    def __init__(
        self,
        limits: Limits,
        pool: PagePool,
        adapters: AdapterRegistry,
        residency: Residency,
        *,
        seed: int = 0,
        preempt_every: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.adapters = adapters
        self.residency = residency
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.step = 0
        self._live: dict[int, list[Sequence]] = {}
        self._free_rows = list(range(limits.max_running - 1, -1, -1))
        self._arrivals = 0
        self._rng = random.Random(seed)
        self._preempt_every = preempt_every
        self._clock = clock

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_live(self) -> int:
        return len(self._live)

    # ---- requests in and out

    def add(self, request: Request) -> ErrorInfo | None:
        """Queues a request's choices and takes its adapter lease, or says why not."""
        error = self._refusal(request)
        if error is not None:
            return error
        adapter = None
        if request.adapter is not None:
            adapter = self.adapters.get(request.adapter)
            if adapter is None:
                return ErrorInfo(
                    status=404,
                    message=f"The model `{request.adapter}` does not exist.",
                    param="model",
                    code="model_not_found",
                )
            self.adapters.acquire(adapter)
        root = namespace_root(adapter.info.digest if adapter else None, request.cache_salt)
        ticket = Ticket(request, adapter, root, request.n)
        base_seed = request.sampling.seed
        seqs = []
        for index in range(request.n):
            seed = self._rng.getrandbits(63) if base_seed is None else _choice_seed(base_seed, index)
            seqs.append(
                Sequence(
                    ticket=ticket,
                    index=index,
                    arrival=self._arrivals,
                    seed=seed,
                    tokens=list(request.prompt_ids),
                    queued_at=self._clock(),
                )
            )
            self._arrivals += 1
        self._live[request.id] = seqs
        self.waiting.extend(seqs)
        return None

    def abort(self, request_id: int) -> None:
        """Ends a request wherever it is; unknown and finished ids are ignored."""
        for seq in list(self._live.get(request_id, ())):
            self._end(seq)

    # ---- a step

    def next_batch(self) -> Batch | None:
        """Chooses the next step's rows and advances them as if it were done; None when nothing can run."""
        self.step += 1
        if self._preempt_every and self.step % self._preempt_every == 0 and len(self.running) > 1:
            self._preempt(self.running[-1])
        batch = Batch()
        turn = self._adapters_of_step()
        budget = self._continue_running(batch, turn)
        self._admit(batch, turn, budget)
        used = dict.fromkeys(seq.adapter for seq in batch.seqs if seq.adapter is not None)
        for adapter in used:
            adapter.last_step = self.step
        self.residency.touch(used)
        return batch or None

    def commit(self, batch: Batch, result: StepResult) -> list[TokenOut]:
        """Takes a step's results: appends tokens, names full pages, ends what is finished."""
        outputs = []
        for i, seq in enumerate(batch.seqs):
            if batch.is_void(i):
                continue
            seq.prompt_logprobs.extend(result.prompt_logprobs[i])
            if not batch.sample[i]:
                self._name_pages(seq, batch.computed[i])
                continue
            seq.num_pending -= 1
            if result.broken[i]:
                outputs.append(self._failed(seq, NUMERICAL_ERROR))
                continue
            self._name_pages(seq, batch.computed[i])
            seq.tokens.append(result.tokens[i])
            outputs.append(self._output(seq, result, i))
        return outputs

    def fail(self, batch: Batch, error: ErrorInfo) -> list[TokenOut]:
        """Ends every sequence of a step whose forward raised. Their pages may hold anything and are not named."""
        return [self._failed(seq, error) for i, seq in enumerate(batch.seqs) if not batch.is_void(i)]

    # ---- state

    def check(self) -> None:
        """Raises AssertionError when pages, rows or leases do not add up."""
        self.pool.check()
        held = {page for seq in self.running for page in seq.pages}
        assert len(held) == self.pool.counts().held, (len(held), self.pool.counts())
        assert not any(seq.pages for seq in self.waiting)
        rows = [seq.row for seq in self.running]
        assert sorted([*rows, *self._free_rows]) == list(range(self.limits.max_running)), rows
        live = {id(s.ticket) for seqs in self._live.values() for s in seqs if s.ticket.adapter is not None}
        assert sum(self.adapters.refs().values()) == len(live), (self.adapters.refs(), len(live))

    # ---- inside

    def _refusal(self, request: Request) -> ErrorInfo | None:
        # What arrives between two steps is all in `waiting`, whatever room to run there is: rows count as room too.
        room = len(self._free_rows) - len(self.waiting)
        if self.limits.max_queued is not None and request.n > room + self.limits.max_queued:
            return ErrorInfo(
                status=503, message="The request queue is full.", code="queue_full", type="overloaded_error"
            )
        limit = min(self.limits.context_length, self.pool.num_pages * self.limits.page_size)
        prompt, asked = len(request.prompt_ids), request.sampling.max_tokens
        if prompt + asked > limit:
            return ErrorInfo(
                status=400,
                message=f"This server holds at most {limit} tokens per request; the prompt has {prompt} and "
                f"{asked} more were requested.",
                code="context_length_exceeded",
                param="max_tokens",
            )
        return None

    def _adapters_of_step(self) -> set[AdapterVersion]:
        """The adapters whose turn it is: all running ones, or as many as there are slots, longest unserved first."""
        distinct = {seq.adapter for seq in self.running if seq.adapter is not None}
        if len(distinct) <= self.limits.adapter_slots:
            return distinct
        by_turn = sorted(distinct, key=lambda a: (a.last_step, a.info.version))
        return set(by_turn[: self.limits.adapter_slots])

    def _continue_running(self, batch: Batch, turn: set[AdapterVersion]) -> int:
        """Takes the rows that go on; returns what is left of the chunk budget."""
        budget = self.limits.chunk
        for seq in list(self.running):
            preempted_meanwhile = seq.row < 0
            if preempted_meanwhile or (seq.adapter is not None and seq.adapter not in turn):
                continue
            if self._ends_with_pending(seq):
                continue
            left = seq.num_left
            decoding = left == 1
            n = 1 if decoding else min(left, budget)
            if n == 0 or not self._make_room(seq, n):
                continue
            if not decoding:
                budget -= n
            batch.take(seq, n)
        return budget

    def _make_room(self, seq: Sequence, n: int) -> bool:
        """Pages for n more tokens, preempting the newest sequences if need be. False when `seq` itself had to go.

        Rows are taken oldest first, so a victim is never in the batch already.
        """
        need = self._pages_for(seq.num_computed + n) - len(seq.pages)
        if need <= 0:
            return True
        while need > self.pool.available:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        seq.pages.extend(self.pool.allocate(need))
        return True

    def _admit(self, batch: Batch, turn: set[AdapterVersion], budget: int) -> None:
        """Starts waiting sequences in order of arrival. One that finds no pages holds back all behind it (else a long
        prompt would starve); one that finds no adapter slot, or no room for its adapter, is passed."""
        if not self.waiting:
            return
        in_use = {seq.adapter for seq in self.running if seq.adapter is not None}
        overdue = self._clock() - ADAPTER_WAIT_LIMIT_S
        no_room: set[AdapterVersion] = set()
        draining = False
        for seq in list(self.waiting):
            if budget <= 0 or not self._free_rows:
                return
            adapter = seq.adapter
            has_slot = adapter is None or adapter in in_use or len(in_use) < self.limits.adapter_slots
            if not has_slot and seq.queued_at > overdue:
                continue
            if adapter is not None:
                if draining or adapter in no_room:
                    continue
                if not self.residency.ensure(adapter, keep=in_use):
                    no_room.add(adapter)
                    draining = seq.queued_at <= overdue
                    continue
            if not self._start(seq):
                return
            if adapter is not None:
                in_use.add(adapter)
                if adapter not in turn:
                    if len(turn) >= self.limits.adapter_slots:
                        continue
                    turn.add(adapter)
            n = min(seq.num_left, budget)
            budget -= n
            batch.take(seq, n)

    def _start(self, seq: Sequence) -> bool:
        """Moves a waiting sequence to running: cached prefix, pages for all its tokens, a row. False: no pages."""
        size = self.limits.page_size
        matched: list[int] = []
        if seq.sampling.prompt_logprobs is None:
            extend_chain(seq.page_names, seq.ticket.cache_root, seq.tokens, size)
            # The last token is always computed: its logits are needed (a fully cached prompt has none).
            matched = self.pool.match(seq.page_names[: (len(seq.tokens) - 1) // size])
        need = self._pages_for(len(seq.tokens)) - len(matched)
        # One spare page per running sequence: admitting into the last pages would preempt at the next step.
        if need > self.pool.available - len(self.running):
            self.pool.release(matched)
            return False
        seq.pages = matched + self.pool.allocate(need)
        seq.num_named = len(matched)
        seq.num_computed = len(matched) * size
        if seq.num_cached is None:
            seq.num_cached = seq.num_computed
        seq.row = self._free_rows.pop()
        self.waiting.remove(seq)
        insort(self.running, seq, key=lambda s: s.arrival)
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Frees a running sequence's pages and row; it is recomputed from its tokens when its turn comes. Tokens on
        their way are given up: seed and position draw them again."""
        self._leave_running(seq)
        seq.num_pending = 0
        if not seq.reported:
            seq.prompt_logprobs.clear()
        seq.num_computed = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, seq, key=lambda s: s.arrival)

    def _leave_running(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pool.release(seq.pages)
        seq.pages = []
        seq.num_sent_pages = 0
        self._free_rows.append(seq.row)
        seq.row = -1
        seq.row_started = seq.row_holds_last = False

    def _end(self, seq: Sequence) -> None:
        """The one place where a sequence ends, for whatever reason; the request's lease goes with its last choice."""
        if seq.finished:
            return
        seq.finished = True
        if seq.row >= 0:
            self._leave_running(seq)
        else:
            self.waiting.remove(seq)
        ticket = seq.ticket
        ticket.open_choices -= 1
        if ticket.open_choices == 0:
            del self._live[ticket.request.id]
            if ticket.adapter is not None:
                self.adapters.release(ticket.adapter)

    def _name_pages(self, seq: Sequence, computed: int) -> None:
        """Names pages that this step filled: from now on other requests may start from them.

        computed: tokens whose KV is written by this step and those before it. Later steps may be in flight, and what
        a step writes has no name before it is known to have succeeded.
        """
        known = min(computed, len(seq.tokens))
        full = known // self.limits.page_size
        if full <= seq.num_named:
            return
        extend_chain(seq.page_names, seq.ticket.cache_root, seq.tokens[:known], self.limits.page_size)
        for i in range(seq.num_named, full):
            self.pool.name(seq.pages[i], seq.page_names[i])
        seq.num_named = full

    def _ends_with_pending(self, seq: Sequence) -> bool:
        """Whether the tokens on their way are certainly its last: by count, not by what they are."""
        if seq.num_pending == 0:
            return False
        full = len(seq.tokens) + seq.num_pending >= self.limits.context_length
        return full or seq.num_outputs >= seq.sampling.max_tokens

    def _output(self, seq: Sequence, result: StepResult, i: int) -> TokenOut:
        token = result.tokens[i]
        reason, stop_token = self._finish_reason(seq, token)
        lp = result.logprobs[i]
        first = not seq.reported
        seq.reported = True
        if reason is not None:
            self._end(seq)
        return TokenOut(
            id=seq.request.id,
            index=seq.index,
            tokens=[token],
            logprobs=[] if lp is None else [lp],
            prompt_logprobs=[None, *seq.prompt_logprobs]
            if first and seq.sampling.prompt_logprobs is not None
            else None,
            finish_reason=reason,
            stop_token=stop_token,
            cached_tokens=(seq.num_cached or 0) if first else 0,
        )

    def _finish_reason(self, seq: Sequence, token: int) -> tuple[str | None, int | None]:
        sampling = seq.sampling
        if token in sampling.stop_token_ids or (not sampling.ignore_eos and token in self.limits.eos_token_ids):
            return "stop", token
        outputs = len(seq.tokens) - seq.num_prompt
        if outputs >= sampling.max_tokens or len(seq.tokens) >= self.limits.context_length:
            return "length", None
        return None, None

    def _failed(self, seq: Sequence, error: ErrorInfo) -> TokenOut:
        self._end(seq)
        return TokenOut(id=seq.request.id, index=seq.index, finish_reason="error", error=error)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.page_size)


NUMERICAL_ERROR = ErrorInfo(
    status=500,
    message="The model produced numbers that are not finite for this request.",
    code="numerical_error",
    type="server_error",
)


def _choice_seed(seed: int, index: int) -> int:
    """Seed of choice `index`: the first choice of n = 4 draws like the only choice of n = 1."""
    return (seed + index * 0x9E3779B97F4A7C15) % 2**63
