"""Field cases over HTTP on T1 with adapters, against the oracle."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from kit import models
from kit.adapters import make_a, make_adapter
from kit.oracle import Oracle
from kit.server import Server, assert_idle, serve

from loraplex.engine.lora.packed import lay_out
from loraplex.engine.lora.reader import read_adapter
from loraplex.engine.model_config import read_model_spec
from loraplex.engine.models import build_model
from loraplex.engine.models.sites import lora_sites
from loraplex.engine.parallel import Parallel

PROMPT = "The quick brown fox"
IDS = list(PROMPT.encode())


@pytest.fixture(scope="module")
def adapters(t1: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Links under one root, as a deployment has them."""
    root = tmp_path_factory.mktemp("adapters")
    folders = {f"A{i}": make_a(i, t1) for i in (1, 2, 3)} | {
        "exp": make_adapter(t1, "EXP", r=3, seed=7),
        "fused": make_adapter(t1, "FUSED", r=3, seed=8),
        "rs": make_adapter(t1, "ATT", r=16, alpha=8, use_rslora=True),
        "plain": make_adapter(t1, "ATT", r=16, alpha=8, use_rslora=False),
    }
    for name, folder in folders.items():
        target = root / name
        target.mkdir()
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (target / file).write_bytes((folder / file).read_bytes())
    return {name: root / name for name in folders}


@pytest.fixture(scope="module")
def server(t1: Path, adapters: dict[str, Path]) -> Iterator[Server]:
    loaded = [f"{name}={path}" for name, path in adapters.items() if name not in ("rs", "plain")]
    root = str(adapters["A1"].parent)
    with serve(
        t1, "--served-model-name", "t1", "--context-length", "256", "--adapter-root", root, "--lora-paths", *loaded
    ) as s:
        yield s


@pytest.fixture(autouse=True)
def idle_after(server: Server) -> Iterator[None]:
    yield
    assert_idle(server)


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server}{path}", json=body, timeout=120, trust_env=False)


def complete(server: Server, **body: Any) -> dict[str, Any]:
    answer = post(server, "/v1/completions", {"model": "t1", "temperature": 0, "max_tokens": 6} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check_against(oracle: Oracle, choice: dict[str, Any], ids: list[int], adapter: Path | None) -> None:
    """The choice was asked with echo, logprobs and return_token_ids."""
    tokens = ids + choice["token_ids"]
    table = oracle.logprobs(tokens, adapter)
    got = choice["logprobs"]["token_logprobs"]
    assert got[0] is None
    assert len(got) == len(tokens)
    for position, value in enumerate(got[1:]):
        assert value == pytest.approx(table[position, tokens[position + 1]].item(), abs=1e-4)
    start = len(ids) - 1
    assert choice["token_ids"] == table[start : len(tokens) - 1].argmax(-1).tolist()


def ask(server: Server, model: str, prompt: Any = PROMPT, **body: Any) -> dict[str, Any]:
    answer = complete(server, model=model, prompt=prompt, echo=True, logprobs=1, return_token_ids=True, **body)
    return answer["choices"][0]


def test_g24_base_and_adapters_at_once(server: Server, t1_oracle: Oracle, adapters: dict[str, Path]) -> None:
    names = ["t1", "A1", "t1", "t1:A2", "A1", "t1", "A3", "A2"]
    for turn in range(8):
        order = names[turn:] + names[:turn]
        with ThreadPoolExecutor(8) as pool:
            choices = list(pool.map(lambda job: ask(server, job[1], PROMPT[: 8 + job[0]]), enumerate(order)))
        for i, (name, choice) in enumerate(zip(order, choices, strict=True)):
            folder = adapters.get(name.removeprefix("t1:"))
            check_against(t1_oracle, choice, IDS[: 8 + i], folder)


@pytest.mark.parametrize("name", ["exp", "fused"])
def test_g26_expert_layouts(server: Server, t1_oracle: Oracle, adapters: dict[str, Path], name: str) -> None:
    check_against(t1_oracle, ask(server, name), IDS, adapters[name])


def test_g20_rslora_by_runtime_load(server: Server, t1_oracle: Oracle, adapters: dict[str, Path]) -> None:
    for name in ("rs", "plain"):
        answer = post(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(adapters[name])})
        assert answer.status_code == 200, answer.text
        check_against(t1_oracle, ask(server, name), IDS, adapters[name])
    rs, plain = (ask(server, name)["logprobs"]["token_logprobs"][1:20] for name in ("rs", "plain"))
    assert max(abs(a - b) for a, b in zip(rs, plain)) > 0.1
    for name in ("rs", "plain"):
        assert post(server, "/v1/unload_lora_adapter", {"lora_name": name}).status_code == 200
        assert post(server, "/v1/completions", {"model": name, "prompt": "a"}).status_code == 404


def test_g25_reload_under_one_name(server: Server, t1_oracle: Oracle, adapters: dict[str, Path]) -> None:
    prompt = (PROMPT * 8)[:150]
    ids = list(prompt.encode())

    def load(folder: Path, **more: Any) -> int:
        body = {"lora_name": "x", "lora_path": str(folder)} | more
        return post(server, "/v1/load_lora_adapter", body).status_code

    def answer(folder: Path, cached: bool) -> None:
        check_against(t1_oracle, ask(server, "x", prompt), ids, folder)
        body = complete(server, model="x", prompt=prompt)
        again = complete(server, model="x", prompt=prompt)
        assert (body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == cached
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert body["choices"] == again["choices"]

    assert load(adapters["A1"]) == 200
    answer(adapters["A1"], cached=True)  # the echo request before named its pages
    assert load(adapters["A2"]) == 409
    assert load(adapters["A2"], load_inplace=True) == 200
    body = complete(server, model="x", prompt=prompt)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    answer(adapters["A2"], cached=True)
    assert post(server, "/v1/unload_lora_adapter", {"lora_name": "x"}).status_code == 200
    assert load(adapters["A3"]) == 200
    body = complete(server, model="x", prompt=prompt)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    answer(adapters["A3"], cached=True)
    assert post(server, "/v1/unload_lora_adapter", {"lora_name": "x"}).status_code == 200


def test_lora_path_per_prompt(server: Server, t1_oracle: Oracle, adapters: dict[str, Path]) -> None:
    answer = complete(
        server, prompt=[PROMPT] * 3, lora_path=["A1", None, "A2"], echo=True, logprobs=1, return_token_ids=True
    )
    for choice, name in zip(answer["choices"], ["A1", None, "A2"], strict=True):
        check_against(t1_oracle, choice, IDS, adapters.get(name or ""))
    for body in ({"model": "A1", "lora_path": "A2"}, {"model": "t1", "lora_path": "nope"}):
        refused = post(server, "/v1/completions", {"prompt": "a"} | body)
        assert refused.status_code in (400, 404)


def test_g03_every_choice_ends_once(server: Server) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{server}/v1", api_key="none")
    body: dict[str, Any] = {
        "model": "t1", "messages": [{"role": "user", "content": "hi"}], "n": 3, "temperature": 1, "seed": 1,
        "max_tokens": 5,
    }  # fmt: skip
    whole = client.chat.completions.create(**body)
    texts = {0: "", 1: "", 2: ""}
    ends = []
    for chunk in client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends.append(choice.index)
    assert sorted(ends) == [0, 1, 2]
    assert [texts[i] for i in range(3)] == [c.message.content for c in whole.choices]


def test_g04_offsets_with_echo(server: Server) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{server}/v1", api_key="none")
    body: dict[str, Any] = {"model": "t1", "prompt": "hello", "echo": True, "logprobs": 2, "max_tokens": 6, "seed": 3}
    whole = client.completions.create(**body).choices[0]
    joined: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    text = ""
    for chunk in client.completions.create(**body, stream=True):
        text += chunk.choices[0].text
        if chunk.choices[0].logprobs:
            for key, values in joined.items():
                values += getattr(chunk.choices[0].logprobs, key)
    assert whole.logprobs is not None
    assert text == whole.text
    for key, values in joined.items():
        assert values == getattr(whole.logprobs, key), key
    assert whole.logprobs.text_offset is not None
    assert whole.logprobs.text_offset[5] == 5


def test_g06_context_limit(server: Server) -> None:
    long = "a" * 250
    assert post(server, "/v1/completions", {"model": "t1", "prompt": long, "max_tokens": 6}).status_code == 200
    for body in ({"prompt": long, "max_tokens": 7}, {"prompt": "a" * 256}, {"prompt": "a" * 300}):
        answer = post(server, "/v1/completions", {"model": "t1", "stream": True} | body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "256" in error["message"]
        assert str(len(body["prompt"])) in error["message"]


def test_g07_chat_logprobs(server: Server) -> None:
    body = {"model": "t1", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    body |= {"logprobs": True, "ignore_eos": True}
    content = post(server, "/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    assert all(entry["top_logprobs"] == [] for entry in content)
    content = post(server, "/v1/chat/completions", body | {"top_logprobs": 3}).json()["choices"][0]["logprobs"][
        "content"
    ]
    for entry in content:
        values = [t["logprob"] for t in entry["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
    del body["logprobs"]
    assert post(server, "/v1/chat/completions", body | {"top_logprobs": 3}).status_code == 400


def test_g10_seed_whatever_the_company(server: Server) -> None:
    def draw(seed: int | None) -> str:
        body = {"prompt": PROMPT, "temperature": 0.8, "max_tokens": 16, "seed": seed, "ignore_eos": True}
        return str(complete(server, **body, return_token_ids=True)["choices"][0]["token_ids"])

    alone = draw(42)
    for company in range(1, 6):
        with ThreadPoolExecutor(8) as pool:
            others = [pool.submit(draw, i if i % 2 else None) for i in range(company)]
            assert pool.submit(draw, 42).result() == alone
            [other.result() for other in others]
    assert len({draw(None) for _ in range(5)}) >= 2


def test_g41_requests_that_end_in_their_first_step(server: Server) -> None:
    def one(i: int) -> None:
        complete(server, model=["t1", "A1", "A2"][i % 3], prompt="a" * (5 + i % 96), max_tokens=1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(100)))


def test_thirty_two_mixed_requests_by_the_openai_client(server: Server) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{server}/v1", api_key="none")
    assert {m.id for m in client.models.list()} >= {"t1", "A1", "A2", "A3", "exp", "fused"}
    assert client.models.retrieve("A1").id == "A1"
    names = ["t1", "A1", "A2", "A3"]

    def one(i: int) -> str:
        answer = client.completions.create(model=names[i % 4], prompt=PROMPT, max_tokens=8, temperature=0)
        return answer.choices[0].text

    with ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(one, range(32)))
    assert all(texts[i] == texts[i % 4] for i in range(32))
    assert len(set(texts)) == 4


def test_adapter_loads_are_confined_and_refusals_named(
    server: Server, adapters: dict[str, Path], tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for file in adapters["A1"].iterdir():
        (outside / file.name).write_bytes(file.read_bytes())
    body = {"lora_name": "o", "lora_path": str(outside)}
    assert post(server, "/v1/load_lora_adapter", body).status_code in (400, 403)
    broken = adapters["A1"].parent / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_bytes((adapters["A1"] / "adapter_config.json").read_bytes())
    (broken / "adapter_model.safetensors").write_bytes(
        (adapters["A1"] / "adapter_model.safetensors").read_bytes()[:500]
    )
    for path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
        answer = post(server, path, {"lora_name": "b", "lora_path": str(broken)})
        assert 400 <= answer.status_code < 500
        assert "adapter_model.safetensors" in answer.text
        assert str(broken.parent) not in answer.text
    assert "b" not in [m["id"] for m in httpx.get(f"{server}/v1/models", trust_env=False).json()["data"]]


def test_g15_bos_is_not_doubled() -> None:
    model = models.make_t1(tokenizer={"add_bos": True})
    with serve(model, "--served-model-name", "t1") as bos:
        chat = {"model": "t1", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        usage = post(bos, "/v1/chat/completions", chat).json()["usage"]
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        rendered = tokenizer.apply_chat_template(chat["messages"], tokenize=False, add_generation_prompt=True)
        assert usage["prompt_tokens"] == len(tokenizer.encode(rendered, add_special_tokens=False))
        assert post(bos, "/v1/completions", {"model": "t1", "prompt": "a"}).json()["usage"]["prompt_tokens"] == 2
        assert post(bos, "/v1/completions", {"model": "t1", "prompt": [97]}).json()["usage"]["prompt_tokens"] == 1


def bytes_of_two_ranks(model_dir: Path, folder: Path) -> int:
    """What an adapter takes on each of two ranks."""
    model = build_model(read_model_spec(model_dir), Parallel(0, 2), torch.float32, torch.device("meta"))
    sites = lora_sites(model)
    return 4 * lay_out(read_adapter(folder, sites, max_rank=64), sites)[0].numel


@pytest.mark.parametrize("like_cuda", ["0", "1"])
def test_two_ranks_serve_adapters(t1: Path, t1_oracle: Oracle, adapters: dict[str, Path], like_cuda: str) -> None:
    """In memory for two of the three: every rank evicts and restores alike. Also with steps overlapped and in static
    buffers, where the ranks keep page tables, and count missing buckets, by themselves."""
    env = {"LORAPLEX_TEST_OVERLAP": like_cuda, "LORAPLEX_TEST_STATIC_STEPS": like_cuda}
    room = sum(bytes_of_two_ranks(t1, adapters[name]) for name in ("A1", "exp"))
    device = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
    flags = ["--served-model-name", "t1", "--tp-size", "2", "--device", device]
    flags += ["--adapter-root", str(adapters["A1"].parent)]
    flags += ["--lora-memory", str(room)]
    with serve(t1, *flags, "--lora-paths", f"A1={adapters['A1']}", f"exp={adapters['exp']}", env=env) as tp:
        for name in ("t1", "A1", "exp"):
            check_against(t1_oracle, ask(tp, name), IDS, adapters.get(name))
        load = {"lora_name": "late", "lora_path": str(adapters["A2"])}
        assert post(tp, "/v1/load_lora_adapter", load).status_code == 200
        with ThreadPoolExecutor(4) as pool:
            names = ["late", "A1", "t1", "late", "exp", "A1", "late"]
            for name, choice in zip(names, pool.map(lambda n: ask(tp, n), names), strict=True):
                check_against(t1_oracle, choice, IDS, adapters.get("A2" if name == "late" else name))
        assert post(tp, "/v1/unload_lora_adapter", {"lora_name": "late"}).status_code == 200
        check_against(t1_oracle, ask(tp, "A1"), IDS, adapters["A1"])
        assert_idle(tp)
