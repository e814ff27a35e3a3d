"""What the front asks of the engine: one Request, with its SamplingParams. Host data only: ints, floats, lists."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request's tokens are chosen and when it ends. Bounds are checked by the front; the engine trusts them.

    Order of application (the one users of vLLM know): raw logits → logprobs are read → logit_bias → min_tokens mask →
    penalties → temperature → min_p → top_k → top_p → draw.
    """

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """None: the engine draws one when the request is admitted."""
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    """Until this many tokens are out, eos and stop_token_ids are masked."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: none. k: the chosen token's logprob and the k most likely alternatives (0 = the chosen one only)."""
    prompt_logprobs: int | None = None
    """The same for every prompt position; the request then reads nothing from the prefix cache."""


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt, `n` choices. `id` is made by the server, never by a client."""

    id: int
    prompt_ids: list[int]
    sampling: SamplingParams
    adapter: str | None = None
    """Adapter name; None is the base model. Resolved by the engine at admission: the version of that moment serves
    the request to its end."""
    n: int = 1
    cache_salt: str = ""
    """Prefix-cache namespace; requests share cached prompt tokens only within one salt."""
