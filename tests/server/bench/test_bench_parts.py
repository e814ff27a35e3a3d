"""Framing, workload, percentiles and arrival times of the load generator."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from loraplex.server.bench.dataset import read_dataset
from loraplex.server.bench.http_client import Dechunker, HTTPClient, ProtocolError
from loraplex.server.bench.load import arrival_times
from loraplex.server.bench.report import percentile
from loraplex.server.bench.workload import choose_adapters


@pytest.mark.parametrize("seed", range(20))
def test_chunks_however_they_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    parts = [rng.randbytes(rng.choice([1, 2, 3, 50, 5000])) + b"\r\n" * rng.randrange(2) for _ in range(30)]
    trailer = b"X: y\r\n" if seed % 2 else b""
    wire = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n" + trailer + b"\r\n"
    chunked, got = Dechunker(), b""
    while wire:
        assert not chunked.done
        size = rng.choice([1, 2, 7, 1000])
        got += chunked.feed(wire[:size])
        wire = wire[size:]
    assert chunked.done
    assert got == b"".join(parts)


def test_a_bad_chunk_size() -> None:
    with pytest.raises(ProtocolError, match="bad chunk size"):
        Dechunker().feed(b"hello\r\nworld")


@pytest.mark.parametrize("url", ["ftp://x", "http://", "://"])
def test_a_bad_url(url: str) -> None:
    with pytest.raises(ValueError, match="--base-url"):
        HTTPClient(url, None)


NAMES = [f"a{i}" for i in range(8)]


@pytest.mark.parametrize(
    ("popularity", "first", "last"),
    [("uniform", 1 / 8, 1 / 8), ("zipf", 0.368, 0.046), ("zipf:2", 0.655, 0.010), ("skewed", 0.9, 0.1 / 7)],
)
def test_popularity(popularity: str, first: float, last: float) -> None:
    counts = Counter(choose_adapters(20_000, NAMES, popularity, 0.0, seed=1))
    assert counts["a0"] / 20_000 == pytest.approx(first, abs=0.02)
    assert counts["a7"] / 20_000 == pytest.approx(last, abs=0.01)


def test_in_turn_identical_and_base() -> None:
    assert choose_adapters(9, NAMES, "distinct", 0.0, seed=1) == [*NAMES, "a0"]
    assert choose_adapters(3, NAMES, "identical", 0.0, seed=1) == ["a0"] * 3
    assert choose_adapters(3, [], "zipf", 0.0, seed=1) == [None] * 3
    mixed = choose_adapters(10_000, NAMES, "uniform", 0.25, seed=1)
    assert mixed.count(None) == pytest.approx(2500, abs=200)


def test_arrivals_are_a_poisson_process() -> None:
    times = np.array(arrival_times(20_000, 50.0, seed=2))
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.05)
    assert arrival_times(3, float("inf"), seed=2) == [0, 0, 0]


def test_percentiles_are_those_of_numpy() -> None:
    values = sorted(random.Random(3).expovariate(1) for _ in range(37))
    for share in (0.5, 0.9, 0.99, 1.0):
        assert percentile(values, share) == pytest.approx(np.quantile(values, share))
    assert percentile([2.0], 0.99) == 2.0


@pytest.mark.parametrize(
    ("line", "chat", "words"),
    [
        ("{", False, ":2: "),
        ("[1]", False, "expected a JSON object"),
        ('{"prompt": "x", "messages": []}', True, "either 'prompt' or 'messages'"),
        ('{"prmpt": "x"}', False, "unknown key 'prmpt'"),
        ('{"messages": [{"role": "user", "content": "x"}]}', False, "need --endpoint chat"),
        ('{"messages": "x"}', True, "must be a list"),
        ('{"prompt": [1, 2]}', True, "'prompt' must be text"),
        ('{"prompt": [1, "2"]}', False, "'prompt' must be text or"),
        ('{"prompt": "x", "max_tokens": true}', False, "'max_tokens'"),
        ('{"prompt": "x", "adapter": 3}', False, "'adapter'"),
    ],
)
def test_a_wrong_line(tmp_path: Path, line: str, chat: bool, words: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "good"}\n' + line)
    with pytest.raises(ValueError) as caught:
        read_dataset(path, chat=chat)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert words in str(caught.value)
