"""POST /v1/completions and /v1/chat/completions."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from loraplex.engine.request import Request as EngineRequest
from loraplex.engine.request import SamplingParams
from loraplex.server.answers import AnswerFormat, ChatFormat, CompletionFormat
from loraplex.server.body import read_json
from loraplex.server.chat_protocol import ChatRequest
from loraplex.server.choice import Shape
from loraplex.server.front import Front
from loraplex.server.generation import Generation, Job
from loraplex.server.model_choice import choose_adapters
from loraplex.server.openapi import documented
from loraplex.server.prompts import prepare, prepare_chat
from loraplex.server.protocol import CompletionRequest, GenerationFields
from loraplex.server.sampling import TokenBudget, check_ids, fit, sampling_params
from loraplex.server.streaming import stream, whole
from loraplex.server.text import Prompt

DEFAULT_MAX_TOKENS = 16


def router(front: Front) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", openapi_extra=documented(CompletionRequest))
    async def completions(request: Request) -> Response:
        fields = CompletionRequest.read(await read_json(request))
        return await _complete(front, request, fields)

    @routes.post("/v1/chat/completions", openapi_extra=documented(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        fields = ChatRequest.read(await read_json(request))
        return await _chat(front, request, fields)

    return routes


async def _complete(front: Front, request: Request, fields: CompletionRequest) -> Response:
    adapters = _adapters(front, fields, len(fields.prompt))
    _check(front, fields)
    prompts = await prepare(front, fields.prompt, add_special_tokens=fields.add_special_tokens)
    only_echo = fields.max_tokens == 0
    jobs = [
        Job(
            prompt,
            _engine_request(front, fields, prompt, adapter, _completion_sampling(front, fields, prompt)),
        )
        if not only_echo or fields.logprobs is not None
        else _echo_job(front, prompt)
        for prompt, adapter in zip(prompts, adapters)
    ]
    shape = Shape.of(fields, logprobs=fields.logprobs is not None, echo=fields.echo, only_echo=only_echo)
    form = CompletionFormat(
        fields.model,
        front.vocabulary,
        logprobs=fields.logprobs,
        token_ids=fields.return_token_ids or not front.text,
    )
    return await _answer(request, fields, Generation(front, jobs, shape, fields.n), form)


def _completion_sampling(front: Front, fields: CompletionRequest, prompt: Prompt) -> SamplingParams:
    # Prompt logprobs come from a run of the model, and the engine runs for at least one token: it is dropped.
    asked = 1 if fields.max_tokens == 0 else fields.max_tokens
    budget = TokenBudget(asked, DEFAULT_MAX_TOKENS, asked_in="max_tokens", prompt_in="prompt")
    return sampling_params(
        fields,
        front.defaults,
        max_tokens=fit(budget, len(prompt.ids), front.engine.info),
        logprobs=fields.logprobs,
        prompt_logprobs=fields.logprobs if fields.echo else None,
    )


def _echo_job(front: Front, prompt: Prompt) -> Job:
    budget = TokenBudget(0, None, asked_in="max_tokens", prompt_in="prompt")
    fit(budget, len(prompt.ids), front.engine.info)
    return Job(prompt, None)


async def _chat(front: Front, request: Request, fields: ChatRequest) -> Response:
    [adapter] = _adapters(front, fields, 1)
    _check(front, fields)
    prompt = await prepare_chat(front, fields)
    asked_in = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    budget = TokenBudget(getattr(fields, asked_in), None, asked_in=asked_in, prompt_in="messages")
    sampling = sampling_params(
        fields,
        front.defaults,
        max_tokens=fit(budget, len(prompt.ids), front.engine.info),
        logprobs=fields.top_logprobs if fields.logprobs else None,
    )
    job = Job(prompt, _engine_request(front, fields, prompt, adapter, sampling))
    form = ChatFormat(fields.model, front.vocabulary, logprobs=fields.logprobs, token_ids=fields.return_token_ids)
    shape = Shape.of(fields, logprobs=fields.logprobs)
    return await _answer(request, fields, Generation(front, [job], shape, fields.n), form)


def _adapters(front: Front, fields: GenerationFields, num_prompts: int) -> list[str | None]:
    return choose_adapters(
        fields.model,
        fields.lora_path,
        num_prompts,
        served_names=front.served_names,
        adapters=front.engine.adapters,
    )


def _check(front: Front, fields: GenerationFields) -> None:
    check_ids(fields, front.engine.info)
    if fields.stop:
        front.need_text("A stop string", "stop")


def _engine_request(
    front: Front,
    fields: GenerationFields,
    prompt: Prompt,
    adapter: str | None,
    sampling: SamplingParams,
) -> EngineRequest:
    return EngineRequest(
        id=front.engine.new_id(),
        prompt_ids=prompt.ids,
        sampling=sampling,
        adapter=adapter,
        n=fields.n,
        cache_salt=fields.cache_salt,
    )


async def _answer(
    request: Request,
    fields: GenerationFields,
    generation: Generation,
    form: AnswerFormat,
) -> Response:
    if fields.stream:
        return await stream(request, generation, form, include_usage=fields.include_usage)
    return await whole(request, generation, form)
