"""`loraplex bench offline`: the flags, the run on a tiny model, and no numbers when a check fails."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.engine.messages import ErrorInfo, Ready, TokenLogprobs, TokenOut
from loraplex.engine.request import Request
from loraplex.server.bench.offline_flags import parse
from loraplex.server.bench.offline_run import CheckError, Engine, run_plan
from loraplex.server.cli import main
from loraplex.server.engine_api import EngineError
from loraplex.server.setting_sources import FlagError

TINY = ["--prompt-len", "8", "--short", "2", "--long", "12", "--prefill-prompts", "2", "--prefill-len", "20"]


def test_a_table_of_a_tiny_model(t1: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.json"
    flags = ["--dummy-adapters", "2", "--dummy-rank", "3", "--batches", "1,5", "--no-progress", "--device", "cpu"]
    assert main(["bench", "offline", str(t1), *TINY, *flags, "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert [(r["mode"], r["test"], r["batch"]) for r in result["results"]] == [
        (mode, test, batch)
        for mode in ("none", "lora1", "lora2")
        for test, batch in (("decode", 1), ("decode", 5), ("prefill", 2), ("ttft", 1))
    ]
    for entry in result["results"]:
        if entry["test"] == "decode":
            assert entry["ms_per_step"] == pytest.approx(100 * (entry["long_s"] - entry["short_s"]))
            assert entry["decode_tokens_per_s"] == pytest.approx(1000 * entry["batch"] / entry["ms_per_step"])
    assert result["config"]["cache"]["disable_radix_cache"] is True
    shown = capsys.readouterr().out.splitlines()
    assert shown[-4].split() == ["N=1", "ms", "N=5", "ms", "prefill", "tok/s", "ttft", "ms"]
    assert [line.split()[0] for line in shown[-3:]] == ["none", "lora1", "lora2"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--modes", "lora2", "--dummy-adapters", "1"], "--modes lora2 needs 2 adapters, there are 1"),
        (["--modes", "lora"], "neither none nor lora with a number"),
        (["--short", "9", "--long", "9"], "--short 9 must be below --long 9"),
        (["--batches", "1,0"], "'0' is not an integer from 1 up"),
        (["--tests", "decod"], "none of decode, prefill, ttft"),
        (["--batches", "300"], "needs --max-running-requests 300"),
        (["--dummy-adapters", "9"], "needs --max-loras-per-batch 9"),
        (["--dummy-adapters", "10000000"], "--dummy-adapters 10000000 is more than 9999"),
        (["--dummy-rank", "4"], "--dummy-rank needs --dummy-adapters"),
        (["--output", "/"], "argument --output: '/' is a folder"),
        (["--page-sise", "4"], "did you mean --page-size?"),
    ],
)
def test_wrong_flags(flags: list[str], words: str) -> None:
    with pytest.raises(FlagError) as caught:
        parse(["model", *flags])
    assert words in str(caught.value)


class FakeClient:
    """Answers at once; `tokens` of an answer may not be what was asked."""

    def __init__(self, tokens: int | None = None, error: ErrorInfo | None = None, adapters_act: bool = True) -> None:
        self.info = Ready(
            vocab_size=1000, context_length=4096, max_total_tokens=4096, page_size=16, eos_token_ids=[],
            model_type="fake", dtype="float32", device="cpu",
        )  # fmt: skip
        self.tokens, self.error, self.adapters_act = tokens, error, adapters_act

    def new_id(self) -> int:
        return 1

    def submit(self, request: Request) -> Any:
        async def outputs() -> Any:
            count = request.sampling.max_tokens if self.tokens is None else self.tokens
            await asyncio.sleep(count / 2000)
            logprob = -2.0 if request.adapter and self.adapters_act else -1.0
            logprobs = [TokenLogprobs(7, logprob)] * count
            yield [TokenOut(id=1, tokens=[7] * count, logprobs=logprobs, finish_reason="length", error=self.error)]

        return outputs()


def measured(client: FakeClient, *flags: str) -> list[dict[str, Any]]:
    _, plan = parse(["model", *TINY, "--batches", "2", "--dummy-adapters", "1", *flags])

    class Bar:
        def update(self) -> None: ...

    return asyncio.run(run_plan(Engine(client, 0), plan, Bar()))  # type: ignore[arg-type]


def test_the_step_is_the_difference() -> None:
    [result] = measured(FakeClient(), "--tests", "decode", "--modes", "none", "--long", "102")
    assert result["ms_per_step"] == pytest.approx(0.5, rel=0.3)


@pytest.mark.parametrize(
    ("client", "flags", "words"),
    [
        (FakeClient(tokens=3), ("--tests", "decode"), "got \\[3\\]"),
        (FakeClient(adapters_act=False), (), "adapter d0 changes nothing"),
        (FakeClient(), ("--prefill-len", "4000"), "8002 tokens of KV, there are 4096"),
        (FakeClient(), ("--prefill-len", "5000"), "5001 tokens, the model's context 4096"),
    ],
)
def test_no_numbers_when_a_check_fails(client: FakeClient, flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(CheckError, match=words):
        measured(client, *flags)


def test_no_numbers_when_the_engine_fails() -> None:
    with pytest.raises(EngineError, match="went wrong"):
        measured(FakeClient(error=ErrorInfo(status=500, message="it went wrong")))
