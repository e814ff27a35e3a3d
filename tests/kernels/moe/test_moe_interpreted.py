"""Runs `interpreted_moe.py` with TRITON_INTERPRET=1."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("interpreted_moe.py")


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("marker", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_moe_kernels(marker: str) -> None:
    pytest.importorskip("triton")
    # exp(-gate) overflows to inf for a very negative gate, and silu's limit, 0, comes out: right, but numpy warns.
    quiet = ["-W", "ignore:overflow encountered in exp:RuntimeWarning"]
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "--timeout=1500", *quiet, "-m", marker, str(CASES)]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
