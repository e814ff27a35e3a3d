"""`loraplex.LLM`: the server's engine in a Python program, for batches of prompts without HTTP."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from loraplex.engine.config import Config
from loraplex.engine.messages import AdapterInfo
from loraplex.engine.request import Request
from loraplex.server.chat_protocol import TemplateFields
from loraplex.server.errors import ApiError
from loraplex.server.flags import from_keywords
from loraplex.server.front import Front
from loraplex.server.model_choice import check_adapter_name
from loraplex.server.offline.answer import answer
from loraplex.server.offline.background import BackgroundEngine
from loraplex.server.offline.errors import RequestError, as_python_errors
from loraplex.server.offline.inputs import (
    Message,
    PromptInput,
    check_text,
    conversation_list,
    one_each,
    prompt_list,
)
from loraplex.server.offline.outputs import RequestOutput
from loraplex.server.offline.params import OfflineFields, SamplingParams, read_params
from loraplex.server.prompts import prepare, prepare_chat
from loraplex.server.sampling import TokenBudget, check_ids, fit, sampling_params
from loraplex.server.setting_sources import FlagError
from loraplex.server.text import Prompt

Adapters = Mapping[str, str | Path] | Sequence[str | Path | Mapping[str, str]]
Params = SamplingParams | None


class LLM:
    """A model with its LoRA adapters, in engine processes of its own.

        with LLM("/models/m", adapters={"sql": "/adapters/sql"}, tp_size=2) as llm:
            [output] = llm.generate("SELECT", SamplingParams(max_tokens=20), adapter="sql")
            print(output.outputs[0].text)

    Calls may come from several threads. Wrong arguments are ValueErrors (`RequestError` where the server would answer
    with 4xx); an engine that does not start, fails or has ended is a RuntimeError.
    """

    def __init__(self, model: str | Path, *, adapters: Adapters = (), **flags: Any) -> None:
        """
        model: folder of the model.
        adapters: name → folder, or a list of what `--lora-paths` takes.
        flags: every flag of `loraplex serve` that is not about HTTP, with underscores; its aliases too. Neither a
        configuration file nor `LORAPLEX_*` variables are read.
        """
        self._config = _config(model, adapters, flags)
        self._engine = BackgroundEngine(self._config)

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        """What is loaded now, by name."""
        return dict(self._engine.client.adapters)

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: Params | Sequence[Params] = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues each prompt; answers come in the order of the prompts.

        prompts: text, token ids, or a list of prompts.
        sampling_params, adapter: one for all prompts, or a list with one for each. None: the model's defaults, the
        base model.

        Everything is checked before anything is computed. All prompts are given to the engine at once.
        """
        given = prompt_list(prompts)

        async def prepared() -> list[Prompt]:
            return await prepare(self._front, given, add_special_tokens=True)

        texts = [prompt if isinstance(prompt, str) else None for prompt in given]
        return self._answer_all(prepared, texts, sampling_params, adapter, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of a list, through the model's chat template."""
        conversations = conversation_list(messages)

        async def prepared() -> list[Prompt]:
            shared = {"add_generation_prompt": add_generation_prompt, "chat_template_kwargs": chat_template_kwargs}
            fields = []
            for i, one in enumerate(conversations):
                with _naming(i, len(conversations)):
                    fields.append(TemplateFields.read({"messages": _plain(one), **shared}))
            return [await prepare_chat(self._front, each) for each in fields]

        texts: list[str | None] = [None] * len(conversations)
        return self._answer_all(prepared, texts, sampling_params, adapter, use_tqdm)

    def load_adapter(self, name: str, path: str | Path, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        """Returns when `name` answers. Needs `adapters`, or `enable_lora=True`, at the start."""
        if not self._config.lora.enable_lora:
            raise ValueError("adapters are off: make the LLM with enable_lora=True")
        _check_name(name)
        check_adapter_name(name, self._config.model.served_names)
        if not isinstance(path, str | Path):
            raise ValueError(f"adapter {name}: its path must be text or a Path, not {type(path).__name__}")
        for flag, value in (("replace", replace), ("pinned", pinned)):
            if not isinstance(value, bool):
                raise ValueError(f"{flag} must be True or False, not {value!r}")
        folder = os.path.abspath(path)
        if not os.path.isdir(folder):
            raise ValueError(f"adapter {name}: {folder} is not a folder")
        with as_python_errors():
            return self._engine.run(self._engine.client.load_adapter(name, folder, replace=replace, pinned=pinned))

    def unload_adapter(self, name: str) -> None:
        _check_name(name)
        with as_python_errors():
            self._engine.run(self._engine.client.unload_adapter(name))

    def close(self) -> None:
        """Ends the engine's processes; the end of the program does too. Harmless twice."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # from arguments to requests

    @property
    def _front(self) -> Front:
        return self._engine.front

    def _answer_all(
        self,
        prepared: Callable[[], Coroutine[Any, Any, list[Prompt]]],
        texts: list[str | None],
        params: Params | Sequence[Params],
        adapter: str | Sequence[str | None] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        async def work() -> list[RequestOutput]:
            prompts = await prepared()
            requests = []
            for i, each in enumerate(zip(prompts, fields, adapters)):
                with _naming(i, len(prompts)):
                    requests.append(self._request(*each))
            with _progress(len(requests), use_tqdm) as bar:
                answers = [
                    answer(self._front, request, prompt, text, each, bar)
                    for request, prompt, text, each in zip(requests, prompts, texts, fields)
                ]
                return await _all_or_none(answers)

        with as_python_errors():
            fields = _fields(one_each("sampling_params", params, len(texts)))
            adapters = one_each("adapter", adapter, len(texts))
            for name in adapters:
                self._check_adapter(name)
            return self._engine.run(work())

    def _check_adapter(self, name: str | None) -> None:
        known = self._engine.client.adapters
        if name is not None and (not isinstance(name, str) or name not in known):
            loaded = ", ".join(known) or "none"
            raise RequestError(f"adapter {name!r} is not loaded; loaded: {loaded}", status=404, param="adapter")

    def _request(self, prompt: Prompt, fields: OfflineFields, adapter: str | None) -> Request:
        info = self._front.engine.info
        check_ids(fields, info)
        if fields.stop:
            self._front.need_text("A stop string", "stop")
        budget = TokenBudget(fields.max_tokens, None, asked_in="max_tokens", prompt_in="prompt")
        sampling = sampling_params(
            fields,
            self._front.defaults,
            max_tokens=fit(budget, len(prompt.ids), info),
            logprobs=fields.logprobs,
            prompt_logprobs=fields.prompt_logprobs,
        )
        id = self._front.engine.new_id()
        return Request(id=id, prompt_ids=prompt.ids, sampling=sampling, adapter=adapter, n=fields.n)


def _config(model: str | Path, adapters: Adapters, flags: Mapping[str, Any]) -> Config:
    http = {"host", "port", "api_key"} & flags.keys()
    if http:
        raise ValueError(f"{', '.join(sorted(http))}: an LLM has no HTTP side")
    given = {"log_level": "warning"} | dict(flags)
    for alias in ("model_path", "lora_paths", "lora_modules"):
        if alias in flags:
            raise ValueError(f"{alias}: give it as {'model' if alias == 'model_path' else 'adapters'}")
    if adapters:
        given["lora_paths"] = _lora_paths(adapters)
    try:
        return from_keywords(_plain(given) | {"model_path": str(model)})
    except FlagError as error:
        raise ValueError(str(error)) from None


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise ValueError(f"an adapter's name must be text, not {type(name).__name__}")
    check_text("adapter name", name)


def _lora_paths(adapters: Adapters) -> list[Any]:
    if isinstance(adapters, Mapping):
        return [{"lora_name": name, "lora_path": str(path)} for name, path in adapters.items()]
    if isinstance(adapters, str | bytes) or not isinstance(adapters, Sequence):
        raise ValueError("adapters must be a dict of names and folders, or a list")
    return list(adapters)


def _plain(value: Any) -> Any:
    """The same of the types that JSON has: paths are text, sequences lists, mappings dicts."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str):
        check_text("text", value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def _fields(params: list[Params]) -> list[OfflineFields]:
    """Each distinct object is read once."""
    distinct = {id(one): one for one in params}
    read = {key: read_params(one) for key, one in distinct.items()}
    return [read[id(one)] for one in params]


@contextlib.contextmanager
def _naming(i: int, count: int) -> Iterator[None]:
    """An error of one prompt of several says which."""
    try:
        yield
    except ApiError as error:
        if count > 1:
            error.message = f"prompt {i}: {error.message}"
        raise


@contextlib.contextmanager
def _progress(count: int, use_tqdm: bool) -> Iterator["tqdm[Any]"]:
    with tqdm(total=count, unit="prompt", dynamic_ncols=True, disable=not use_tqdm or count < 2) as bar:
        yield bar


async def _all_or_none(answers: list[Coroutine[Any, Any, RequestOutput]]) -> list[RequestOutput]:
    """The first failure ends all others."""
    tasks = [asyncio.create_task(one) for one in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
