"""`loraplex bench serve` as a command: what it sends, what it reports, how it fails."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.bench_target import Target

Run = Callable[..., tuple[int, dict[str, Any]]]
SMALL = ("--vocab-size", "5000", "--num-prompts", "12", "--input-len", "9", "--output-len", "4")


def test_counts_times_and_adapters(bench: Run, capsys: pytest.CaptureFixture[str]) -> None:
    target = Target(pace=0.02)
    flags = ("--adapters", "a,b", "--popularity", "distinct", "--concurrency", "5", "--ignore-eos")
    status, result = bench(target, *SMALL, *flags)
    assert status == 0
    assert (result["completed"], result["failed"]) == (12, 0)
    assert (result["prompt_tokens"], result["output_tokens"]) == (12 * 9, 12 * 4)
    assert target.most_at_once == 5
    assert target.connections <= 1 + 5, "connections are used again"
    sent = target.bodies[1:]  # without the warm-up
    assert Counter(body["model"] for body in sent) == {"a": 6, "b": 6}
    assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for body in sent)
    assert all(body["ignore_eos"] and body["max_tokens"] == 4 and len(body["prompt"]) == 9 for body in sent)
    assert all(100 <= token < 5000 for body in sent for token in body["prompt"])
    assert 15 < result["ttft_ms"]["p50"] < 200
    assert 15 < result["itl_ms"]["p50"] < 100
    assert result["e2e_ms"]["p50"] >= 4 * 20
    assert result["itl_ms"]["p50"] <= result["itl_ms"]["p99"]
    assert set(result["adapters"]) == {"a", "b"}
    assert result["adapters"]["a"]["output_tokens"] == 24
    assert result["output_tokens_per_s"] == pytest.approx(48 / result["duration_s"])
    shown = capsys.readouterr().out
    assert "12 of 12 requests" in shown
    assert "FAILED" not in shown


def test_the_same_seed_sends_the_same(bench: Run) -> None:
    runs = [Target(), Target(), Target()]
    for target, seed in zip(runs, ("3", "3", "4")):
        flags = ("--seed", seed, "--range-ratio", "0.5", "--adapters-from-server", "--base-share", "0.3")
        assert bench(target, *SMALL, *flags, "--concurrency", "1")[0] == 0
    assert runs[0].bodies == runs[1].bodies != runs[2].bodies
    lengths = {len(body["prompt"]) for body in runs[0].bodies}
    assert len(lengths) > 2
    assert lengths <= set(range(4, 15))
    assert {body["model"] for body in runs[0].bodies} == {"base", "a", "b"}


def test_shared_prefixes_take_turns(bench: Run) -> None:
    target = Target()
    flags = ("--shared-prefix-len", "6", "--num-prefixes", "3", "--concurrency", "1", "--warmup", "0")
    assert bench(target, *SMALL, *flags)[0] == 0
    prefixes = [tuple(body["prompt"][:6]) for body in target.bodies]
    assert len(set(prefixes)) == 3
    assert prefixes[:3] == prefixes[3:6]
    assert len({tuple(body["prompt"][6:]) for body in target.bodies}) == 12
    assert {len(body["prompt"]) for body in target.bodies} == {6 + 9}


def test_chat_sends_text_and_leaves_its_opening_out(bench: Run) -> None:
    target = Target(pace=0.03)
    status, result = bench(target, *SMALL, "--endpoint", "chat", "--adapters", "a", "--adapter-by", "lora_path")
    assert status == 0
    body = target.bodies[-1]
    assert (body["model"], body["lora_path"]) == ("base", "a")
    [message] = body["messages"]
    assert (message["role"], len(message["content"].split())) == ("user", 9)
    assert result["ttft_ms"]["p50"] > 25, "the role alone is no token"


def test_text_of_a_tokenizer(bench: Run, tok_dir: Path) -> None:
    target = Target()
    assert bench(target, *SMALL, "--prompt-format", "text", "--tokenizer", str(tok_dir))[0] == 0
    assert all(isinstance(body["prompt"], str) and body["prompt"] for body in target.bodies)


def test_open_loop_sends_at_its_rate(bench: Run) -> None:
    target = Target(pace=0.05)
    _, result = bench(target, *SMALL, "--num-prompts", "30", "--request-rate", "60")
    assert 0.2 < result["duration_s"] - 0.2 < 1.5
    assert 2 <= target.most_at_once < 30


@pytest.mark.parametrize("fault", ["429", "503", "event", "cut", "no_usage", "short"])
def test_a_failed_request_is_said_and_exits_with_1(bench: Run, capsys: pytest.CaptureFixture[str], fault: str) -> None:
    target = Target(fault=lambda body, number: fault if number in (3, 7) else None)
    status, result = bench(target, *SMALL, "--ignore-eos", "--concurrency", "3")
    assert status == 1
    kind = {"event": "stream", "no_usage": "usage", "short": "length"}.get(fault, fault)
    assert (result["completed"], result["failed"]) == (10, 2)
    assert result["failures"][kind]["count"] == 2
    assert result["failures"][kind]["first"]
    assert result["output_tokens"] == 40
    assert "2 requests FAILED" in capsys.readouterr().out


def test_a_server_that_closes_its_connections(bench: Run) -> None:
    target = Target(fault=lambda body, number: "close")
    assert bench(target, *SMALL, "--concurrency", "2")[0] == 0


def test_a_server_too_slow(bench: Run) -> None:
    target = Target(fault=lambda body, number: None)
    target.pace = 0.3
    status, result = bench(target, *SMALL, "--warmup", "0", "--timeout", "0.5")
    assert status == 1
    assert result["failures"]["timeout"]["count"] == 12
    assert result["ttft_ms"] is None


def test_a_failing_warm_up_ends_it(bench: Run, capsys: pytest.CaptureFixture[str]) -> None:
    target = Target(fault=lambda body, number: "404")
    status, result = bench(target, *SMALL)
    assert (status, result, len(target.bodies)) == (1, {}, 1)
    assert "404: no, 404" in capsys.readouterr().err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    from loraplex.server.cli import main

    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9"]) == 1
    assert "error" in capsys.readouterr().err


def test_an_unknown_vocabulary_names_the_flags(bench: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(Target(), "--num-prompts", "2")[0] == 1
    assert "--tokenizer DIR, --vocab-size N" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ("--popularity", "zipf:-1"),
        ("--popularity", "even"),
        ("--base-share", "1.5"),
        ("--request-rate", "0"),
        ("--concurrency", "0"),
        ("--adapters", "a,,b"),
        ("--adapters", "a", "--adapters-from-server"),
        ("--extra-body", "[1]"),
        ("--extra-body", '{"x": NaN}'),
        ("--temperature", "nan"),
        ("--temperature", "-1"),
        ("--model", "\udcff"),
        ("--adapters", "a,\udcff"),
        ("--output", "/dev/null/report.json"),
        ("--output", "/"),
    ],
)
def test_wrong_usage_exits_with_2(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    from loraplex.server.cli import main

    with pytest.raises(SystemExit) as caught:
        main(["bench", "serve", *flags])
    assert caught.value.code == 2
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:99999", "Port out of range"),
        ("http://127.0.0.1:x", "Port"),
        ("http://[::1", "IPv6"),
        ("ftp://127.0.0.1", "expected something like"),
        ("http://127.0.0.1:9/?v=1", "expected something like"),
        ("http://a b", "expected something like"),
        ("http://127.0.0.1:9", "Connect call failed"),
        (f"http://{'x' * 70}.test", "label"),
    ],
)
def test_a_wrong_url_is_named(url: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    from loraplex.server.cli import main

    assert main(["bench", "serve", "--base-url", url]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert f"--base-url {url}: " in line
    assert words in line


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "no answer after 0.3 s (--timeout)"),
        (b"<html>", "answered no JSON"),
        (b"[" * 9000, "answered no JSON"),
        (b'{"data": 5}', "not the OpenAI API"),
    ],
)
def test_a_server_of_something_else(
    bench: Run, capsys: pytest.CaptureFixture[str], answer: bytes | None, words: str
) -> None:
    status, result = bench(Target(models=answer), *SMALL, "--timeout", "0.3")
    assert (status, result) == (1, {})
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("count", [None, "7", -1, 1.5, True])
def test_a_usage_that_counts_nothing(bench: Run, count: Any) -> None:
    status, result = bench(Target(usage=count), *SMALL, "--warmup", "0")
    assert status == 1
    assert result["failures"]["stream"]["count"] == 12
    assert f"usage.prompt_tokens is {count!r}" in result["failures"]["stream"]["first"]


def test_a_key_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from loraplex.server.cli import main

    assert main(["bench", "serve", "--api-key", "a\r\nX: y"]) == 1
    assert "--api-key" in capsys.readouterr().err


def test_a_broken_tokenizer_is_named(bench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    assert bench(Target(), "--tokenizer", str(tmp_path))[0] == 1
    assert f"--tokenizer: {tmp_path}/tokenizer.json" in capsys.readouterr().err


def test_steep_popularity(bench: Run) -> None:
    target = Target()
    assert bench(target, *SMALL, "--adapters", "a,b", "--popularity", "zipf:1e9")[0] == 0
    assert {body["model"] for body in target.bodies} == {"a"}


def test_a_missing_dataset_names_its_flag(bench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(Target(), "--dataset", str(tmp_path / "none"))[0] == 1
    assert f"--dataset {tmp_path / 'none'}: " in capsys.readouterr().err


def test_dataset(bench: Run, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    rows = [{"prompt": "one", "max_tokens": 2}, {"prompt": [5, 6], "adapter": "b"}, {"prompt": "x", "adapter": None}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    target = Target()
    flags = ("--num-prompts", "5", "--output-len", "3", "--concurrency", "1", "--warmup", "0", "--adapters", "a")
    status, result = bench(target, "--dataset", str(path), *flags)
    assert (status, result["output_tokens"]) == (0, 2 + 3 + 3 + 2 + 3)
    assert [body["prompt"] for body in target.bodies] == ["one", [5, 6], "x", "one", [5, 6]]
    assert [body["model"] for body in target.bodies] == ["a", "b", "base", "a", "b"]


def test_a_wrong_dataset_names_its_line(bench: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "x"}\n\n{"prompt": "y", "max_tokens": 0}\n')
    assert bench(Target(), "--dataset", str(path))[0] == 1
    assert f"{path}:3: 'max_tokens'" in capsys.readouterr().err
