"""The scheduler's record of one choice of one request."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from loraplex.engine.messages import TokenLogprobs
from loraplex.engine.request import Request, SamplingParams

if TYPE_CHECKING:
    from loraplex.engine.lora.registry import AdapterVersion


@dataclass(eq=False)
class Ticket:
    """What all choices of a request share: the adapter lease, taken once and released once."""

    request: Request
    adapter: "AdapterVersion | None"
    cache_root: bytes
    open_choices: int


@dataclass(eq=False, slots=True)
class Sequence:
    ticket: Ticket
    index: int
    arrival: int
    """Order of arrival: the highest running one is preempted first, so the oldest always finishes."""
    seed: int
    tokens: list[int]
    """Prompt and the outputs known on the host."""
    queued_at: float
    row: int = -1
    """Row in the device-side state while running."""
    row_started: bool = False
    """A step has run for it in this row, so the row's penalty counts are its own."""
    row_holds_last: bool = False
    """The row's last-token buffer holds the token this sequence sampled last."""
    num_computed: int = 0
    """Tokens whose KV is written once the steps scheduled so far are done."""
    num_pending: int = 0
    """Tokens sampled by scheduled steps whose ids have not come back."""
    pages: list[int] = field(default_factory=list)
    num_sent_pages: int = 0
    """Pages that a step's plan has told the ranks for this row."""
    page_names: list[bytes] = field(default_factory=list)
    num_named: int = 0
    num_cached: int | None = None
    """Prompt tokens taken from the prefix cache at first admission."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    reported: bool = False
    """The first output (with cached_tokens and prompt logprobs) has been sent."""
    finished: bool = False
    num_preemptions: int = 0
    """A step that was scheduled at a lower count is void for this sequence: it is computed again."""

    request: Request = field(init=False)
    sampling: SamplingParams = field(init=False)
    adapter: "AdapterVersion | None" = field(init=False)
    num_prompt: int = field(init=False)
    """These four are of the ticket; every step reads them, row by row."""

    def __post_init__(self) -> None:
        self.request = self.ticket.request
        self.sampling = self.request.sampling
        self.adapter = self.ticket.adapter
        self.num_prompt = len(self.request.prompt_ids)

    @property
    def num_outputs(self) -> int:
        """Outputs scheduled so far, pending ones included."""
        return len(self.tokens) + self.num_pending - self.num_prompt

    @property
    def num_left(self) -> int:
        """Known or pending tokens whose KV no step has been scheduled to compute."""
        return len(self.tokens) + self.num_pending - self.num_computed
