"""A scripted engine, a byte-level tokenizer and an HTTP client over the application itself."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from loraplex.engine.config import Config, LoRAConfig, ModelConfig, ServerConfig
from loraplex.engine.messages import (
    AdapterInfo,
    EngineState,
    ErrorInfo,
    Heartbeat,
    Ready,
    TokenLogprobs,
    TokenOut,
)
from loraplex.engine.request import Request
from loraplex.server.app import create_app
from loraplex.server.engine_api import EngineError
from loraplex.server.sampling import GenerationDefaults
from loraplex.server.text import TextProcessor

EOS, IM_START, IM_END = 256, 257, 258
VOCAB = 320
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CH0 = dict(zip(b"abc \xf0\x9f\x8c\xb6xyz", [*b"bc \xf0\x9f\x8c\xb6xyz", EOS]))
"""Last token → next token: "a" is answered by "bc 🌶xyz" and eos."""


def _alphabet() -> dict[str, int]:
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(others)}


def save_tokenizer(folder: Path, *, bos: bool = False, template: str | None = CHATML) -> Path:
    """Token id == byte value; 256 to 258 are special."""
    tokenizer = Tokenizer(models.BPE(vocab=_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", IM_START)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


NUMBERS_WENT_WRONG = ErrorInfo(status=500, message="numbers went wrong", code="numerical_error", type="server_error")
LORA_ON = LoRAConfig(enable_lora=True)
OPENAI_DEFAULTS = GenerationDefaults()

Script = Callable[[Request, int], list[int]]
"""(request, choice) → its tokens if nothing but max_tokens ended it."""


def chain_script(successors: dict[int, int] = CH0) -> Script:
    def script(request: Request, choice: int) -> list[int]:
        tokens, last = [], request.prompt_ids[-1]
        while len(tokens) < request.sampling.max_tokens and last != EOS:
            last = successors.get(last, EOS)
            tokens.append(last)
        return tokens

    return script


def random_script(request: Request, choice: int) -> list[int]:
    """Depends on seed, choice and prompt; parts of characters and unknown ids. Never eos."""
    rng = random.Random(f"{request.sampling.seed} {choice} {request.prompt_ids}")
    return [rng.choice([rng.randrange(256), 97, 0xF0, 300]) for _ in range(request.sampling.max_tokens)]


def scripted_logprobs(token: int, k: int) -> TokenLogprobs:
    ranked = [token, *(i for i in range(k + 1) if i != token)]
    return TokenLogprobs(token, -0.25, [(t, -0.25 - 2.0 * i) for i, t in enumerate(ranked[:k])])


@dataclass
class ScriptedStream:
    engine: "ScriptedEngine"
    request: Request
    aborted: bool = False

    def abort(self) -> None:
        self.aborted = True
        self.engine.live.discard(self.request.id)

    async def __aiter__(self) -> AsyncIterator[list[TokenOut]]:
        rng = random.Random(self.request.id * 7919 + self.engine.seed)
        waiting = {choice: self._outputs(choice, rng) for choice in range(self.request.n)}
        step = 0
        while waiting and not self.aborted:
            await self.engine.before_step(self.request, step)
            turn = []
            for choice in rng.sample(sorted(waiting), rng.randint(1, len(waiting))):
                turn.append(waiting[choice].pop(0))
                if not waiting[choice]:
                    del waiting[choice]
            yield turn
            step += 1
        self.engine.live.discard(self.request.id)

    def _outputs(self, choice: int, rng: random.Random) -> list[TokenOut]:
        tokens = self.engine.script(self.request, choice)
        s = self.request.sampling
        ends = (() if s.ignore_eos else (EOS, IM_END)) + s.stop_token_ids
        end = next((i for i, t in enumerate(tokens) if t in ends and i >= s.min_tokens), None)
        tokens = tokens[: s.max_tokens if end is None else end + 1]
        outputs = []
        while tokens:
            size = rng.randint(1, self.engine.max_join)
            part, tokens = tokens[:size], tokens[size:]
            first = not outputs
            prompt_logprobs = None
            if first and s.prompt_logprobs is not None:
                rest = [scripted_logprobs(t, s.prompt_logprobs) for t in self.request.prompt_ids[1:]]
                prompt_logprobs = [None, *rest]
            outputs.append(
                TokenOut(
                    id=self.request.id,
                    index=choice,
                    tokens=part,
                    logprobs=[] if s.logprobs is None else [scripted_logprobs(t, s.logprobs) for t in part],
                    prompt_logprobs=prompt_logprobs,
                    cached_tokens=self.engine.cached_tokens if first else 0,
                    finish_reason=None if tokens else ("stop" if end is not None else "length"),
                    stop_token=part[-1] if not tokens and end is not None else None,
                )
            )
        return outputs


@dataclass
class ScriptedEngine:
    """An Engine without a model. `live` holds the requests that neither ended nor were aborted."""

    script: Script = field(default_factory=chain_script)
    context_length: int = 512
    max_total_tokens: int = 4096
    max_join: int = 3
    seed: int = 0
    cached_tokens: int = 0
    fail_step: int | None = None
    fail_with: ErrorInfo | None = NUMBERS_WENT_WRONG
    dead: bool = False
    hang: asyncio.Event | None = None
    adapters: dict[str, AdapterInfo] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    streams: list[ScriptedStream] = field(default_factory=list)
    live: set[int] = field(default_factory=set)
    loads: list[tuple[str, str, bool]] = field(default_factory=list)
    last_heartbeat: Heartbeat | None = None

    def __post_init__(self) -> None:
        self.info = Ready(
            vocab_size=VOCAB,
            context_length=self.context_length,
            max_total_tokens=self.max_total_tokens,
            page_size=16,
            eos_token_ids=[EOS, IM_END],
            model_type="scripted",
            dtype="float32",
            device="cpu",
        )

    @property
    def healthy(self) -> bool:
        return not self.dead

    def new_id(self) -> int:
        return len(self.requests) + 1

    def submit(self, request: Request) -> ScriptedStream:
        if self.dead:
            raise EngineError(ErrorInfo(status=503, message="The engine is gone", type="service_unavailable"))
        self.requests.append(request)
        self.live.add(request.id)
        self.streams.append(ScriptedStream(self, request))
        return self.streams[-1]

    async def before_step(self, request: Request, step: int) -> None:
        await asyncio.sleep(0)
        if self.fail_step == step:
            raise EngineError(self.fail_with)
        if self.hang is not None and step == 1:
            await self.hang.wait()

    def add_adapter(self, name: str, path: str = "x") -> AdapterInfo:
        info = AdapterInfo(
            name=name,
            path=path,
            digest="d",
            version=1,
            rank_min=4,
            rank_max=4,
            layout="peft",
            bytes=1,
            num_tensors=2,
        )
        self.adapters[name] = info
        return info

    async def load_adapter(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        if name in self.adapters and not replace:
            raise EngineError(ErrorInfo(status=409, message=f"{name} is loaded", param="lora_name"))
        self.loads.append((name, path, replace, pinned))
        return self.add_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        if name not in self.adapters:
            raise EngineError(ErrorInfo(status=404, message=f"{name} is not loaded", param="lora_name"))
        del self.adapters[name]

    async def state(self) -> EngineState:
        return EngineState(
            total=8,
            free=8,
            cached=0,
            held=0,
            adapter_refs={},
            live_requests=len(self.live),
            waiting=0,
            running=0,
            preemptions=0,
        )


class Server:
    """One application with its engine; every call is one HTTP exchange."""

    raise_app = True
    """Off: an exception nobody handled is a 500, as on a socket."""

    def __init__(
        self, engine: ScriptedEngine, text: TextProcessor | None, config: Config, defaults: GenerationDefaults
    ):
        self.engine = engine
        self.app = create_app(engine, text, config, defaults)

    def call(self, method: str, path: str, *, client: tuple[str, int] = ("127.0.0.1", 1), **kwargs) -> httpx.Response:
        async def exchange() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=self.raise_app, client=client)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                return await http.request(method, path, **kwargs)

        return asyncio.run(exchange())

    def get(self, path: str, **kwargs) -> httpx.Response:
        return self.call("GET", path, **kwargs)

    def post(self, path: str, body: object = None, **kwargs) -> httpx.Response:
        return self.call("POST", path, **({"json": body} if "content" not in kwargs else {}), **kwargs)

    def complete(self, prompt: object = "a", **fields) -> dict:
        answer = self.post("/v1/completions", {"model": "m", "prompt": prompt, "temperature": 0} | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, content: object = "a", **fields) -> dict:
        messages = [{"role": "user", "content": content}]
        answer = self.post("/v1/chat/completions", {"model": "m", "messages": messages} | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path: str, **fields) -> list[dict]:
        """Chunks of a stream that ends well: exactly one [DONE], last."""
        start = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
        answer = self.post(path, {"model": "m", "stream": True} | start | fields)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        frames = events(answer.text)
        assert frames.count("[DONE]") == 1
        assert frames[-1] == "[DONE]"
        return [json.loads(frame) for frame in frames[:-1]]


def events(text: str) -> list[str]:
    assert text.endswith("\n\n")
    frames = text[:-2].split("\n\n")
    assert all(frame.startswith("data: ") for frame in frames)
    return [frame.removeprefix("data: ") for frame in frames]


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def text_processor(tokenizer_dir: Path) -> TextProcessor:
    return TextProcessor(str(tokenizer_dir), None, VOCAB)


@pytest.fixture
def make_text(tmp_path: Path) -> Callable[..., TextProcessor]:
    return lambda **kwargs: TextProcessor(str(save_tokenizer(tmp_path / "tok", **kwargs)), None, VOCAB)


@pytest.fixture
def make_server(text_processor: TextProcessor) -> Callable[..., Server]:
    """make_server(engine fields…, text=…, api_key=…, lora=…, defaults=…)"""

    def make(
        *,
        text=text_processor,
        api_key=(),
        lora=LORA_ON,
        defaults=OPENAI_DEFAULTS,
        **engine,
    ):
        config = Config(
            model=ModelConfig(model_path="/models/secret", served_model_name=("m", "m2")),
            lora=lora,
            server=ServerConfig(api_key=api_key),
        )
        return Server(ScriptedEngine(**engine), text, config, defaults)

    return make


@pytest.fixture
def server(make_server: Callable[..., Server]) -> Server:
    return make_server()


@pytest.fixture
def scripts():
    """(chain_script, random_script)"""
    return chain_script, random_script
