"""Messages between the HTTP front and the engine process, as msgpack bytes over an anonymous pipe (no pickle).

front → engine: `FrontMessage`; engine → front: `EngineMessage`. A step's tokens travel in one `StepOutput`.
"""

from typing import Any

import msgspec

from loraplex.engine.request import Request


class _Message(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    pass


# front → engine


class Submit(_Message, frozen=True):
    request: Request


class Abort(_Message, frozen=True):
    """Ends a request wherever it is. Unknown and finished ids are ignored, so aborting twice is harmless."""

    id: int


class LoadAdapter(_Message, frozen=True):
    op: int
    """Operation number; the `Reply` carries it back."""
    name: str
    path: str
    """Folder with adapter_config.json and adapter_model.safetensors, already checked against the allowed roots, or
    `dummy:rank=R[,seed=S]` for random weights (start-up only)."""
    replace: bool = False
    pinned: bool = False
    """Stays on the device once it is there."""


class UnloadAdapter(_Message, frozen=True):
    op: int
    name: str


class GetState(_Message, frozen=True):
    """Asks for the accounting counters (`Reply.result` = `EngineState` as a dict)."""

    op: int


class Shutdown(_Message, frozen=True):
    pass


FrontMessage = Submit | Abort | LoadAdapter | UnloadAdapter | GetState | Shutdown


# engine → front


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error a client can see; becomes OpenAI's error body. Its text holds no paths of the process, no addresses."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    type: str = "invalid_request_error"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprob of one token and its most likely alternatives, sorted descending. −inf travels as −9999.0."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class TokenOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step gave one choice of one request: usually one token; none with an error or an abort."""

    id: int
    index: int = 0
    """Choice, 0…n−1."""
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    """One per token when asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """With the choice's first output only: one per prompt token, the first None."""
    finish_reason: str | None = None
    """stop | length | abort | error. The choice ends with the message that carries one."""
    stop_token: int | None = None
    """The id that ended the choice when finish_reason is stop: an eos or stop_token_ids member. It is the last of
    `tokens`, is counted in usage, and its text is not shown."""
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache; with the first output."""
    error: ErrorInfo | None = None


class StepOutput(_Message, frozen=True):
    outputs: list[TokenOut]


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A loaded adapter, as /v1/models and the load endpoints report it."""

    name: str
    path: str
    digest: str
    """SHA-256 over config and tensors: the adapter's identity for the prefix cache."""
    version: int
    """Counts loads under any name in this process; a replacement gets a new one."""
    rank_min: int
    rank_max: int
    layout: str
    bytes: int
    """On each rank: of device memory while it is resident, of host memory while it is loaded."""
    pinned: bool = False
    num_tensors: int
    ignored_tensors: list[str] = []
    modules: dict[str, int] = {}
    """Module name (q_proj, experts.gate_proj …) → number of layers it is adapted in."""
    notes: list[str] = []


class Reply(_Message, frozen=True):
    """Answer to an operation: `error` or `result`."""

    op: int
    result: dict[str, Any] | None = None
    error: ErrorInfo | None = None


class Ready(_Message, frozen=True):
    """Sent once by rank 0 when the first real forward has succeeded."""

    vocab_size: int
    context_length: int
    max_total_tokens: int
    """KV pool in tokens; one request's prompt + max_tokens must fit it."""
    page_size: int
    eos_token_ids: list[int]
    model_type: str
    dtype: str
    device: str
    memory_table: list[tuple[str, int]] = []
    """(what, bytes) in the order it was allocated; printed by the front at start-up."""
    adapters: list[AdapterInfo] = []


class Progress(_Message, frozen=True):
    """Start-up progress in words, for stderr and /ready."""

    text: str


class Heartbeat(_Message, frozen=True):
    """From the step loop itself, at least every half second while it turns: a hung step stops it."""

    step: int
    num_running: int
    num_waiting: int
    kv_used_tokens: int
    kv_cached_tokens: int
    preemptions: int = 0


class Fatal(_Message, frozen=True):
    """The engine process is about to exit; `text` is for the operator's log, never for clients."""

    text: str


EngineMessage = StepOutput | Reply | Ready | Progress | Heartbeat | Fatal


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """Exact accounting. Invariant: free + cached + held = total pages; when idle, held = 0 and every lease is 0."""

    total: int
    free: int
    cached: int
    held: int
    adapter_refs: dict[str, int]
    """`name@version` → requests holding a lease."""
    live_requests: int
    waiting: int
    running: int
    preemptions: int


_front_decoder = msgspec.msgpack.Decoder(FrontMessage)
_engine_decoder = msgspec.msgpack.Decoder(EngineMessage)
encode = msgspec.msgpack.Encoder().encode
decode_front = _front_decoder.decode
decode_engine = _engine_decoder.decode
