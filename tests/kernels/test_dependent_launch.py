"""Kernels that start before their predecessor has ended do not read what it writes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).with_name("compile_dependent.py")
READ_OLDER_DATA = {"expert_gemm"}
"""With `overlaps` its copies are of inputs that were complete before the predecessor began."""


def test_no_copy_before_the_wait() -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-P", str(CHECK)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert {name for _, name in kernels} >= {"shrink_rows", "activate_chunks", "expand_chunks", "shrink_segments"}
    assert {name for verdict, name in kernels if verdict == "early"} <= READ_OLDER_DATA
