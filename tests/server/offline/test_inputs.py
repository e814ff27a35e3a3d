"""Shapes of prompts, messages and parameters that LLM takes."""

from typing import Any

import pytest

from loraplex.server.errors import InvalidRequestError
from loraplex.server.offline.inputs import conversation_list, one_each, prompt_list
from loraplex.server.offline.params import SamplingParams, read_params


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("x", ["x"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        (["x", [1], {"prompt": "y"}, {"prompt_token_ids": [3]}], ["x", [1], "y", [3]]),
        ({"prompt": "x"}, ["x"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts(given: Any, expected: list[Any]) -> None:
    assert prompt_list(given) == expected


@pytest.mark.parametrize(
    "given",
    [
        [],
        3,
        None,
        [[]],
        ["x", 3],
        [[1, -2]],
        [[True]],
        {"text": "x"},
        [{"prompt": 3}],
        b"x",
        [b"x"],
        bytearray(b"x"),
        {"prompt_token_ids": "x"},
        {"prompt": [1]},
        "\ud800",
    ],
)
def test_wrong_prompts(given: Any) -> None:
    with pytest.raises(ValueError, match="prompt"):
        prompt_list(given)


USER = {"role": "user", "content": "x"}


def test_conversations() -> None:
    assert conversation_list([USER]) == [[USER]]
    assert conversation_list([[USER], [USER, USER]]) == [[USER], [USER, USER]]


@pytest.mark.parametrize("given", ["x", [], ["x"], [USER, [USER]], USER])
def test_wrong_conversations(given: Any) -> None:
    with pytest.raises(ValueError, match="messages"):
        conversation_list(given)


def test_one_each() -> None:
    assert one_each("adapter", "a", 3) == ["a", "a", "a"]
    assert one_each("adapter", None, 2) == [None, None]
    assert one_each("adapter", ["a", None], 2) == ["a", None]
    with pytest.raises(ValueError, match="adapter: 1 items for 2 prompts"):
        one_each("adapter", ["a"], 2)


def test_params_are_those_of_the_api() -> None:
    params = SamplingParams(
        n=2, max_tokens=None, temperature=0, top_p=0.5, top_k=-1, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.5, seed=3, stop="x", stop_token_ids=(4,), min_tokens=5, ignore_eos=True, logprobs=0,
        prompt_logprobs=1, logit_bias={7: -3}, skip_special_tokens=False, include_stop_str_in_output=True,
    )  # fmt: skip
    fields = read_params(params)
    for name in ("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "seed", "ignore_eos"):
        assert getattr(fields, name) == getattr(params, name)
    assert (fields.stop, fields.stop_token_ids, fields.logit_bias) == (("x",), [4], {7: -3.0})
    assert (fields.logprobs, fields.prompt_logprobs) == (0, 1)
    assert not fields.skip_special_tokens
    assert fields.include_stop_str_in_output


def test_no_params_are_the_models() -> None:
    fields = read_params(None)
    assert (fields.temperature, fields.top_p, fields.top_k) == (None, None, None)
    assert fields.max_tokens == SamplingParams().max_tokens == 16


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"top_p": 0}, "top_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {-1: 0}}, "logit_bias"),
        ({"max_tokens": 2.0}, "max_tokens"),
    ],
)
def test_wrong_params(wrong: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_params(SamplingParams(**wrong))
    assert caught.value.param == name


def test_another_class_of_params() -> None:
    with pytest.raises(ValueError, match="SamplingParams"):
        read_params({"temperature": 0})  # type: ignore[arg-type]
