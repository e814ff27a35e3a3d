"""LLM on T1 in real engine processes, against the oracle."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.adapters import make_a
from kit.oracle import Oracle

from loraplex import LLM, RequestError, SamplingParams

PROMPTS = ["The quick brown fox", "Hello", "x" * 40, "adapters"]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(t1: Path) -> dict[str, Path]:
    return {f"A{i}": make_a(i, t1) for i in (1, 2, 3)}


@pytest.fixture(scope="module")
def llm(t1: Path, folders: dict[str, Path]) -> Iterator[LLM]:
    first = {name: folders[name] for name in ("A1", "A2")}
    with LLM(t1, adapters=first, max_model_len=128, max_total_tokens=2048, device="cpu") as llm:
        yield llm


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def generate_forever(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> None:
    while True:
        llm.generate(prompts, params, use_tqdm=False)


def test_adapters_mixed_in_one_call_equal_the_oracle(llm: LLM, t1_oracle: Oracle, folders: dict[str, Path]) -> None:
    names = [None, "A1", "A2", "A1"]
    outputs = llm.generate(PROMPTS, GREEDY, adapter=names)
    assert [output.adapter for output in outputs] == names
    for prompt, name, output in zip(PROMPTS, names, outputs, strict=True):
        assert (output.prompt, output.prompt_token_ids) == (prompt, list(prompt.encode()))
        [choice] = output.outputs
        expected = t1_oracle.greedy(list(prompt.encode()), 6, folders[name] if name else None)
        assert choice.token_ids == expected
        assert choice.finish_reason == "length"
    assert (
        len({tuple(output.outputs[0].token_ids) for output in llm.generate(["a"] * 3, GREEDY, adapter=names[:3])}) > 1
    )


def test_logprobs_and_prompt_logprobs(llm: LLM, t1_oracle: Oracle) -> None:
    ids = list(b"some prompt")
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    [output] = llm.generate(ids, params)
    [choice] = output.outputs
    assert output.prompt is None
    table = t1_oracle.logprobs(ids + choice.token_ids)
    assert choice.logprobs is not None
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for position, (token, entry) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True), len(ids) - 1):
        assert entry[token].logprob == pytest.approx(table[position, token].item(), abs=1e-4)
        assert entry[token].rank == 1
        assert len(entry) == 2
    for position, entry_or_none in enumerate(output.prompt_logprobs[1:]):
        assert entry_or_none is not None
        token = ids[position + 1]
        assert entry_or_none[token].logprob == pytest.approx(table[position, token].item(), abs=1e-4)
        assert entry_or_none[token].decoded_token == chr(token)
    assert choice.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(choice.token_ids, choice.logprobs))
    )


def test_params_per_prompt_and_n(llm: LLM) -> None:
    params = [GREEDY, SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True)]
    first, second = llm.generate(["a", "b"], params)
    assert len(first.outputs[0].token_ids) == 6
    assert [choice.index for choice in second.outputs] == [0, 1, 2]
    assert all(len(choice.token_ids) == 4 for choice in second.outputs)
    again = llm.generate("b", params[1])[0]
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in second.outputs]


def test_chat_is_the_rendered_prompt(llm: LLM) -> None:
    rendered = [257, *b"user\nhi", 258, *b"\n", 257, *b"assistant\n"]
    [chat] = llm.chat([{"role": "user", "content": "hi"}], GREEDY, adapter="A1")
    [plain] = llm.generate(rendered, GREEDY, adapter="A1")
    assert chat.prompt_token_ids == rendered
    assert chat.outputs == plain.outputs
    assert len(llm.chat([[{"role": "user", "content": text}] for text in "abc"], GREEDY)) == 3


def test_more_prompts_than_run_at_once(llm: LLM) -> None:
    prompts = [[i % 200 + 1, i // 200 + 1] for i in range(400)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(len(output.outputs[0].token_ids) == 2 for output in outputs)


def test_the_bar_is_for_many_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate("a", GREEDY)
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], GREEDY)
    assert "2/2" in capsys.readouterr().err


def test_load_and_unload(llm: LLM, t1_oracle: Oracle, folders: dict[str, Path]) -> None:
    info = llm.load_adapter("late", folders["A3"])
    assert (info.name, set(llm.adapters)) == ("late", {"A1", "A2", "late"})
    [output] = llm.generate("Hello", GREEDY, adapter="late")
    assert output.outputs[0].token_ids == t1_oracle.greedy(list(b"Hello"), 6, folders["A3"])
    with pytest.raises(RequestError) as caught:
        llm.load_adapter("late", folders["A1"])
    assert caught.value.status == 409
    llm.unload_adapter("late")
    with pytest.raises(RequestError, match="adapter 'late' is not loaded; loaded: A1, A2"):
        llm.generate("Hello", GREEDY, adapter="late")
    with pytest.raises(ValueError, match="is not a folder"):
        llm.load_adapter("other", "/not/here")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": 5}, "name must be text, not int"),
        ({"path": b"/x"}, "path must be text or a Path, not bytes"),
        ({"path": None}, "path must be text or a Path, not NoneType"),
        ({"replace": "yes"}, "replace must be True or False, not 'yes'"),
        ({"pinned": 1}, "pinned must be True or False, not 1"),
    ],
)
def test_wrong_loads_never_reach_the_engine(
    llm: LLM, folders: dict[str, Path], arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        llm.load_adapter(**{"name": "new", "path": folders["A3"], **arguments})
    with pytest.raises(ValueError, match="name must be text"):
        llm.unload_adapter(None)  # type: ignore[arg-type]
    assert len(llm.generate("x", GREEDY)) == 1


def test_a_wrong_conversation_says_which(llm: LLM) -> None:
    good = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError, match=r"prompt 1: messages\.0"):
        llm.chat([good, [{"role": "user"}]], GREEDY)
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        llm.chat([{"role": "user", "content": "\udc00"}], GREEDY)


@pytest.mark.parametrize(
    ("prompts", "params", "adapter", "words"),
    [
        ("x", SamplingParams(temperature=3), None, "temperature"),
        (["x", [400]], None, None, "prompt: item 1: token ids must be below 320"),
        (["x", "y"], [GREEDY, SamplingParams(max_tokens=128)], None, "prompt 1: .* holds 128 tokens"),
        (["x", "y"], [GREEDY], None, "sampling_params: 1 items for 2 prompts"),
        (["x", "y"], None, ["A1", "nope"], "adapter 'nope' is not loaded"),
        (["x", ""], None, None, "prompt: item 1: an empty prompt"),
        ("x", SamplingParams(stop_token_ids=[999]), None, "stop_token_ids"),
        ("x", SamplingParams(max_tokens=0), None, "max_tokens"),
        (["x", "\ud800"], None, None, "prompt 1: half of a surrogate pair"),
        (b"x", None, None, "prompts must be a text"),
        ("x", {"max_tokens": 3}, None, "must be a loraplex.SamplingParams, not dict"),
        ("x", None, {"A1": 1}, "adapter {'A1': 1} is not loaded"),
        ("x", None, b"A", "adapter b'A' is not loaded"),
    ],
)
def test_wrong_requests_are_value_errors(llm: LLM, prompts: Any, params: Any, adapter: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.generate(prompts, params, adapter=adapter)
    assert len(llm.generate("x", GREEDY)) == 1


def test_calls_from_threads(llm: LLM) -> None:
    expected = [llm.generate(prompt, GREEDY)[0].outputs for prompt in PROMPTS]
    got: dict[int, Any] = {}

    def call(i: int) -> None:
        got[i] = llm.generate(PROMPTS[i], GREEDY)[0].outputs

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(len(PROMPTS))] == expected


def test_ctrl_c_ends_the_call_and_leaves_the_llm(llm: LLM) -> None:
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    long = SamplingParams(max_tokens=100, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        generate_forever(llm, [[i + 1] for i in range(50)], long)
    deadline = time.monotonic() + 10
    while (state := llm._engine.run(llm._engine.client.state())).live_requests:
        assert time.monotonic() < deadline
    assert state.held == 0
    assert len(llm.generate("x", GREEDY)) == 1


def test_close_leaves_nothing_and_a_dead_engine_is_an_error(t1: Path) -> None:
    before = children()
    llm = LLM(t1, max_total_tokens=512, device="cpu")
    assert children() > before
    with pytest.raises(ValueError, match="enable_lora=True"):
        llm.load_adapter("a", t1)
    llm.close()
    llm.close()
    assert children() <= before | _trackers()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("x")

    with LLM(t1, max_total_tokens=512, device="cpu") as llm:
        for rank in children() - before - _trackers():
            os.kill(rank, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="engine has stopped"):
            generate_forever(llm, [[1]], GREEDY)


def _trackers() -> set[int]:
    """multiprocessing's own helper, which lives as long as this process."""
    family = psutil.Process().children(recursive=True)
    return {process.pid for process in family if "resource_tracker" in " ".join(process.cmdline())}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_modl_len": 3}, "max_modl_len is unknown; did you mean max_model_len"),
        ({"tp_size": "2"}, "tp_size: '2' is not an integer"),
        ({"port": 3}, "port: an LLM has no HTTP side"),
        ({"page_size": 0}, "--page-size must be at least 1"),
        ({"adapters": {"a:b": "x"}}, "may not contain ':'"),
        ({"adapters": ["x"], "enable_lora": False}, "contradicts"),
        ({"adapters": 5}, "adapters must be a dict"),
        ({"adapters": Path("x")}, "adapters must be a dict"),
        ({"lora_paths": ["x"]}, "lora_paths: give it as adapters"),
        ({"model_path": "x"}, "model_path: give it as model"),
    ],
)
def test_wrong_flags_are_value_errors(t1: Path, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LLM(t1, **flags)


def test_a_failed_start_is_an_error_and_leaves_nothing(t1: Path, tmp_path: Path) -> None:
    before, threads = children(), threading.active_count()
    with pytest.raises(RuntimeError, match="does not exist"):
        LLM(tmp_path / "nothing")
    with pytest.raises(RuntimeError, match=r"--lora-paths bad=.*adapter_config\.json"):
        LLM(t1, adapters={"bad": t1}, device="cpu")
    assert children() <= before | _trackers()
    assert threading.active_count() == threads


def test_a_script_without_a_main_guard(t1: Path, tmp_path: Path) -> None:
    """Spawned ranks do not run it again, and its end ends them, however it came."""
    script = tmp_path / "script.py"
    script.write_text(
        "from loraplex import LLM, SamplingParams\n"
        f"llm = LLM({str(t1)!r}, max_total_tokens=512, device='cpu')\n"
        "print('made once', flush=True)\n"
        "print(llm.generate('x', SamplingParams(temperature=0, max_tokens=2))[0].prompt)\n"
        "raise SystemExit(3)\n"
    )
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-P", str(script)],
        capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, "made once\nx\n"), done.stderr
