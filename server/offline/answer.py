"""One request of an `LLM`, from the engine's stream to a RequestOutput."""

from typing import Any

from tqdm import tqdm

from loraplex.engine.request import Request
from loraplex.server.choice import Choice, Piece, Shape
from loraplex.server.front import Front
from loraplex.server.generation import Run
from loraplex.server.offline.outputs import CompletionOutput, Logprobs, RequestOutput, named, of_prompt
from loraplex.server.offline.params import OfflineFields
from loraplex.server.text import Prompt
from loraplex.server.vocabulary import Vocabulary


async def answer(
    front: Front, request: Request, prompt: Prompt, text: str | None, fields: OfflineFields, bar: "tqdm[Any]"
) -> RequestOutput:
    """Raises EngineError or ApiError. However it ends, the request does not go on running."""
    shape = Shape.of(fields, logprobs=fields.logprobs is not None)
    choices = [Choice(i, prompt, shape, front.vocabulary) for i in range(request.n)]
    pieces = [Piece(i) for i in range(request.n)]
    prompt_logprobs: list[Logprobs | None] | None = None
    stream = front.engine.submit(request)
    try:
        run = Run(stream, choices)
        while not run.finished:
            outputs = await run.next()
            for piece in run.advance(outputs):
                pieces[piece.index].extend(piece)
            for out in outputs:
                if out.prompt_logprobs is not None and prompt_logprobs is None:
                    prompt_logprobs = of_prompt(front.vocabulary, out.prompt_logprobs)
    finally:
        stream.abort()
    bar.update()
    return RequestOutput(
        prompt=text,
        prompt_token_ids=prompt.ids,
        prompt_logprobs=prompt_logprobs,
        outputs=[_completion(piece, front.vocabulary, logprobs=fields.logprobs is not None) for piece in pieces],
        adapter=request.adapter,
        num_cached_tokens=run.cached_tokens,
    )


def _completion(piece: Piece, vocabulary: Vocabulary, *, logprobs: bool) -> CompletionOutput:
    assert piece.finish_reason is not None
    values = [entry.logprob for entry in piece.entries if entry.logprob is not None]
    return CompletionOutput(
        index=piece.index,
        text=piece.text,
        token_ids=piece.token_ids,
        cumulative_logprob=sum(values) if logprobs else None,
        logprobs=[named(vocabulary, e.token, e.logprob or 0.0, e.top) for e in piece.entries] if logprobs else None,
        finish_reason=piece.finish_reason,
        stop_reason=piece.stop_reason,
    )
