"""A step on the host of rank 0: the scheduled sequences, what the runner is asked, and what it answers."""

from dataclasses import dataclass, field
from typing import NamedTuple

from loraplex.engine.batch import StepPlan
from loraplex.engine.messages import TokenLogprobs
from loraplex.engine.request import SamplingParams
from loraplex.engine.sequence import Sequence


class SampleRow(NamedTuple):
    """One position to sample. A tuple: one is made for each row of each step."""

    row: int
    params: SamplingParams
    seed: int
    position: int
    """Outputs before this one: with the seed it fixes the draw, whatever the batch."""


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence (re)admitted in this step: resets the penalty counts of its row."""

    row: int
    params: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """What rank 0's sampler needs beside the StepPlan."""

    rows: list[SampleRow]
    prompt_targets: list[list[int]]
    """[B] next token of each prompt position in the chunk, where prompt logprobs are asked; else empty."""
    new_rows: list[NewRow]


@dataclass(slots=True)
class StepResult:
    """Per row of the plan."""

    tokens: list[int]
    """Sampled id, −1 where the row was not sampled."""
    broken: list[bool]
    """The row's logits held NaN: no token can be trusted."""
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[list[TokenLogprobs]]


@dataclass(slots=True)
class Batch:
    """One step as the scheduler sees it; never leaves rank 0."""

    seqs: list[Sequence] = field(default_factory=list)
    num_new: list[int] = field(default_factory=list)
    sample: list[bool] = field(default_factory=list)
    """Whether the row reaches its last token in this step, so that its next one is drawn."""
    from_device: list[bool] = field(default_factory=list)
    """The row's one input token is the last one it sampled, which the device still holds."""
    new_rows: list[Sequence] = field(default_factory=list)
    """Sequences that run for the first time since they were (re)admitted."""
    computed: list[int] = field(default_factory=list)
    """Tokens of each sequence whose KV is written once this step is done."""
    first_page: list[int] = field(default_factory=list)
    new_pages: list[list[int]] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)
    """`num_preemptions` of each sequence when it was taken."""

    def __bool__(self) -> bool:
        return bool(self.seqs)

    @property
    def request_ids(self) -> list[int]:
        return [seq.request.id for seq in self.seqs]

    def take(self, seq: Sequence, n: int) -> None:
        """Adds a row of n tokens and advances the sequence as if the step were done."""
        seq.num_computed += n
        sample = seq.num_left == 0
        self.seqs.append(seq)
        self.num_new.append(n)
        self.computed.append(seq.num_computed)
        self.preemptions.append(seq.num_preemptions)
        self.first_page.append(seq.num_sent_pages)
        self.new_pages.append(seq.pages[seq.num_sent_pages :])
        seq.num_sent_pages = len(seq.pages)
        self.sample.append(sample)
        self.from_device.append(sample and n == 1 and seq.row_holds_last)
        if not seq.row_started:
            self.new_rows.append(seq)
            seq.row_started = True
        if sample:
            seq.num_pending += 1
            seq.row_holds_last = True

    def is_void(self, i: int) -> bool:
        """Whether row i has ended or was preempted since: its results are of no use."""
        return self.seqs[i].finished or self.seqs[i].num_preemptions != self.preemptions[i]

    def plan(self) -> StepPlan:
        slots, slot_rows = self._slots()
        ids: list[int] = []
        for i, from_device in enumerate(self.from_device):
            if from_device:
                ids.append(-1)
            else:
                ids.extend(self._input_ids(i))
        return StepPlan(
            is_decode=all(n == 1 for n in self.num_new),
            rows=[seq.row for seq in self.seqs],
            num_new=self.num_new,
            seq_lens=self.computed,
            ids=ids,
            first_page=self.first_page,
            new_pages=self.new_pages,
            slots=slots,
            slot_rows=slot_rows,
            sample=self.sample,
            prompt_logprobs=[
                seq.sampling.prompt_logprobs
                if seq.sampling.prompt_logprobs is not None and _prompt_targets(seq, n)
                else -1
                for seq, n in zip(self.seqs, self.num_new)
            ],
        )

    def sampling_plan(self) -> SamplingPlan:
        return SamplingPlan(
            rows=[
                SampleRow(seq.row, seq.sampling, seq.seed, seq.num_outputs - 1)
                for seq, sample in zip(self.seqs, self.sample)
                if sample
            ],
            prompt_targets=[
                _prompt_targets(seq, n) if seq.sampling.prompt_logprobs is not None else []
                for seq, n in zip(self.seqs, self.num_new)
            ],
            new_rows=[
                NewRow(seq.row, seq.sampling, seq.request.prompt_ids, seq.tokens[seq.num_prompt :])
                for seq in self.new_rows
            ],
        )

    def _slots(self) -> tuple[list[int], list[int]]:
        """Step-local slot of each row (−1 = base) and the table row behind each slot, in order of first use."""
        slot_of: dict[int, int] = {}
        slots = []
        for seq in self.seqs:
            slots.append(-1 if seq.adapter is None else slot_of.setdefault(seq.adapter.row, len(slot_of)))
        return slots, list(slot_of)

    def _input_ids(self, i: int) -> list[int]:
        """Ids of the row's tokens, which the host knows."""
        seq = self.seqs[i]
        return seq.tokens[seq.num_computed - self.num_new[i] : seq.num_computed]


def _prompt_targets(seq: Sequence, n: int) -> list[int]:
    start = seq.num_computed - n
    return seq.tokens[start + 1 : min(start + n + 1, seq.num_prompt)]
