"""Two and three gloo ranks against one, adapters included."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("tp_rank.py")


def run_ranks(folder, size, out):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                str(SCRIPT),
                str(folder),
                str(r),
                str(size),
                str(out / f"meet{size}"),
                str(out / f"{size}.{r}"),
            ],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(size)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    return [torch.load(out / f"{size}.{r}") for r in range(size)]


@pytest.mark.parametrize(
    "architecture", ["Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM", "MixtralForCausalLM", "LlamaForCausalLM"]
)
def test_two_ranks_equal_one(harness, checkpoints, tmp_path, architecture):
    _, folder = checkpoints(architecture)
    compare(run_ranks(folder, 1, tmp_path)[0], run_ranks(folder, 2, tmp_path))


def test_padded_vocabulary_replicated_kv_heads_and_tied_head(harness, tmp_path):
    """Four ranks, two key/value heads, a vocabulary that four does not divide."""
    hf = harness.hf_model("Qwen3MoeForCausalLM", vocab_size=321, tie_word_embeddings=True)
    folder = harness.save(hf, tmp_path / "model")
    compare(run_ranks(folder, 1, tmp_path)[0], run_ranks(folder, 4, tmp_path))


def compare(alone, ranks):
    assert (alone["base"][2] - alone["lora, virtual True"][2]).abs().max() > 0.1
    for name, expected in alone.items():
        for found in ranks:
            for a, b in zip(expected, found[name], strict=True):
                assert (a - b).abs().max() < 5e-5, name


def test_heads_that_cannot_be_split(harness, checkpoints):
    from loraplex.engine.models import build_model
    from loraplex.engine.parallel import Parallel

    spec = harness.load(checkpoints("Qwen3ForCausalLM")[1]).spec
    with pytest.raises(ValueError, match="--tp-size 3"):
        build_model(spec, Parallel(0, 3), torch.float32, torch.device("meta"))
