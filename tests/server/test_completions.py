"""/v1/completions with a scripted engine: text, stops, logprobs, batches, n, echo, usage."""

import pytest
from openai.types import Completion

FULL = "bc 🌶xyz"


def joined(chunks, index=0):
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def lists_of(chunks, index=0):
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return {key: [item for part in parts for item in part[key]] for key in keys}


def test_answer_has_openai_shape(server):
    answer = server.complete()
    Completion.model_validate(answer)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "m"
    assert answer["choices"] == [
        {"index": 0, "text": FULL, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    usage = {"prompt_tokens": 1, "completion_tokens": 11, "total_tokens": 12}
    assert answer["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}


@pytest.mark.parametrize("max_join", [1, 2, 5, 20])
@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [(["c 🌶x"], "b", 8), (["🌶"], "bc ", 7), ("zz", FULL, 11), (["yz", "xy"], "bc 🌶", 9), (None, FULL, 11)],
)
def test_stop_strings_across_tokens(make_server, max_join, stop, text, tokens):
    server = make_server(max_join=max_join)
    whole = server.complete(stop=stop)
    chunks = server.stream("/v1/completions", stop=stop, stream_options={"include_usage": True})
    assert whole["choices"][0]["text"] == joined(chunks) == text
    assert whole["choices"][0]["finish_reason"] == "stop"
    matched = None if text == FULL else stop[1] if stop == ["yz", "xy"] else stop[0]
    assert whole["choices"][0]["stop_reason"] == matched
    assert whole["usage"] == chunks[-1]["usage"]
    assert whole["usage"]["completion_tokens"] == tokens
    assert all(text.startswith(joined(chunks[:i])) for i in range(len(chunks)))
    assert server.engine.live == set()


def test_include_stop_str_in_output(server):
    assert server.complete(stop="🌶", include_stop_str_in_output=True)["choices"][0]["text"] == "bc 🌶"


def test_stop_string_waits_for_min_tokens(server):
    assert server.complete(stop=["b", "y"], min_tokens=1)["choices"][0]["text"] == "bc 🌶x"


def test_stop_token_is_not_shown_but_counted(server):
    choice = (answer := server.complete(stop_token_ids=[120]))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("bc 🌶", "stop", 120)
    assert answer["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("options", "count"), [(None, 0), ({}, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 1)]
)
def test_usage_only_when_asked(server, options, count):
    chunks = server.stream("/v1/completions", stream_options=options)
    assert sum(chunk.get("usage") is not None for chunk in chunks) == count
    if count:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == server.complete()["usage"]


def test_cut_inside_a_character(server):
    whole = server.complete(max_tokens=5)["choices"][0]
    chunks = server.stream("/v1/completions", max_tokens=5)
    assert whole["text"] == joined(chunks) == "bc \ufffd"
    assert whole["finish_reason"] == "length"
    assert not any("\ufffd" in joined([chunk]) for chunk in chunks[:-1])


@pytest.mark.parametrize("seed", range(8))
def test_stream_equals_whole_on_random_tokens(make_server, scripts, seed):
    server = make_server(script=scripts[1], seed=seed)
    fields = {"n": 3, "seed": seed, "max_tokens": 20, "logprobs": 3, "echo": seed % 2 == 0, "prompt": "hé"}
    fields |= {"return_token_ids": True, "stop": ["aa"]}
    whole = server.complete(**fields)
    chunks = server.stream("/v1/completions", **fields)
    for choice in whole["choices"]:
        i = choice["index"]
        assert joined(chunks, i) == choice["text"]
        assert lists_of(chunks, i) == choice["logprobs"]
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == i]
        assert [t for c in mine for t in c["token_ids"]] == choice["token_ids"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        assert mine[-1]["finish_reason"]
    assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_echo_offsets(make_server, scripts, stream):
    server = make_server(script=scripts[1])
    fields = {"prompt": "hello", "echo": True, "logprobs": 2, "max_tokens": 6}
    if stream:
        chunks = server.stream("/v1/completions", **fields)
        lists, text = lists_of(chunks), joined(chunks)
    else:
        choice = server.complete(**fields)["choices"][0]
        lists, text = choice["logprobs"], choice["text"]
    assert text.startswith("hello")
    assert lists["text_offset"][:6] == [0, 1, 2, 3, 4, 5]
    assert lists["token_logprobs"][0] is None
    assert lists["top_logprobs"][0] is None
    assert len(lists["tokens"]) == 11
    assert all(len(top) in (2, 3) for top in lists["top_logprobs"][1:])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_echo_of_the_prompt_only(server, stream, logprobs):
    fields = {"prompt": "a🌶", "echo": True, "max_tokens": 0, "logprobs": logprobs, "n": 2}
    if stream:
        chunks = server.stream("/v1/completions", **fields, stream_options={"include_usage": True})
        assert [joined(chunks, i) for i in (0, 1)] == ["a🌶", "a🌶"]
        usage = chunks[-1]["usage"]
    else:
        answer = server.complete(**fields)
        assert [(c["text"], c["finish_reason"]) for c in answer["choices"]] == [("a🌶", "length")] * 2
        if logprobs is not None:
            assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 1, 1, 1, 1]
        usage = answer["usage"]
    assert usage["completion_tokens"] == 0
    assert [request.sampling.max_tokens for request in server.engine.requests] == ([] if logprobs is None else [1])


def test_echo_leaves_out_bos_and_keeps_written_specials(make_server, make_text):
    server = make_server(text=make_text(bos=True))
    answer = server.complete("<|im_end|>a", echo=True, max_tokens=1)
    assert answer["choices"][0]["text"] == "<|im_end|>ab"
    assert answer["usage"]["prompt_tokens"] == 3


def test_half_a_character_at_the_end_of_an_echoed_prompt(make_server, scripts):
    server = make_server(script=scripts[0]({0x9F: 0x8C, 0x8C: 0xB6}))
    assert server.complete([0xF0, 0x9F], echo=True)["choices"][0]["text"] == "🌶"


def test_batch_keeps_order(server):
    answer = server.complete(["x", "a", "y"], max_tokens=20)
    assert [c["text"] for c in answer["choices"]] == ["yz", FULL, "z"]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 3 + 11 + 2
    twice = server.complete([[120], [97], [121]], n=2)
    assert [c["text"] for c in twice["choices"]] == ["yz", "yz", FULL, FULL, "z", "z"]
    assert twice["usage"]["prompt_tokens"] == 3
    chunks = server.stream("/v1/completions", prompt=["x", "a", "y"], n=2)
    assert [joined(chunks, i) for i in range(6)] == ["yz", "yz", FULL, FULL, "z", "z"]


NULLS = [
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "best_of",
    "seed",
    "stop",
    "stop_token_ids",
    "logprobs",
    "echo",
    "logit_bias",
    "stream",
    "stream_options",
    "suffix",
    "user",
    "lora_path",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "cache_salt",
    "response_format",
    "tools",
    "add_special_tokens",
    "include_stop_str_in_output",
]


def test_null_is_the_default(server):
    answer = server.complete(**dict.fromkeys(NULLS))
    assert answer["choices"][0]["text"] == FULL
    assert server.engine.requests[0].sampling.max_tokens == 16


def test_default_max_tokens_shrinks_to_what_is_left(make_server):
    server = make_server(context_length=10)
    server.complete("x" * 8)
    assert server.engine.requests[0].sampling.max_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("length", "max_tokens", "param"),
    [(60, 4, None), (60, 5, "max_tokens"), (64, 1, "prompt"), (64, None, "prompt")],
)
def test_context_limit(make_server, stream, length, max_tokens, param):
    server = make_server(context_length=64)
    body = {"model": "m", "prompt": "a" * length, "max_tokens": max_tokens, "stream": stream}
    answer = server.post("/v1/completions", body)
    if param is None:
        assert answer.status_code == 200
        return
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert all(str(number) in error["message"] for number in (64, length, max_tokens or ""))
    assert ("no room for an answer" in error["message"]) == (max_tokens is None)


def test_pool_smaller_than_context_is_named(make_server):
    server = make_server(context_length=64, max_total_tokens=32)
    answer = server.post("/v1/completions", {"model": "m", "prompt": "a" * 30, "max_tokens": 3})
    assert "KV pool" in answer.json()["error"]["message"]


def test_sampling_fields_reach_the_engine(make_server):
    from loraplex.server.sampling import GenerationDefaults

    server = make_server(defaults=GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20))
    server.post("/v1/completions", {"model": "m", "prompt": "a"})
    server.complete(temperature=1e-12, top_p=0.5, top_k=-1, seed=2**63 - 1, logit_bias={"319": 100}, cache_salt="s")
    default, asked = server.engine.requests
    assert (default.sampling.temperature, default.sampling.top_p, default.sampling.top_k) == (0.6, 0.9, 20)
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k) == (0.0, 0.5, 0)
    assert asked.sampling.seed == 2**63 - 1
    assert asked.sampling.logit_bias == {319: 100.0}
    assert asked.cache_salt == "s"


def test_logprob_floor_is_finite_json(make_server, monkeypatch):
    server = make_server(max_join=1)
    answer = server.complete(logprobs=5)
    tops = answer["choices"][0]["logprobs"]["top_logprobs"]
    assert all(isinstance(value, float) for top in tops for value in top.values())


def test_bos_is_added_to_text_only(make_server, make_text):
    server = make_server(text=make_text(bos=True))
    assert server.complete("a")["usage"]["prompt_tokens"] == 2
    assert server.complete([97])["usage"]["prompt_tokens"] == 1
    assert server.complete("a", add_special_tokens=False)["usage"]["prompt_tokens"] == 1
    assert server.complete("", max_tokens=2)["usage"]["prompt_tokens"] == 1


def test_without_tokenizer(make_server):
    server = make_server(text=None)
    answer = server.complete([97], logprobs=1, echo=True)
    choice = answer["choices"][0]
    assert choice["text"] == ""
    assert choice["token_ids"][:2] == [98, 99]
    assert choice["logprobs"]["tokens"][:2] == ["token_id:97", "token_id:98"]
    for path, body in [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": [97], "stop": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [97]}),
    ]:
        answer = server.post(path, {"model": "m"} | body)
        assert answer.status_code == 400
        assert "--skip-tokenizer-init" in answer.json()["error"]["message"]


def test_cached_tokens_are_reported(make_server):
    server = make_server(cached_tokens=7)
    assert server.complete(n=2)["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}
