"""One rank of the tensor-parallel test: python tp_rank.py FOLDER RANK SIZE RENDEZVOUS OUT."""

import sys
from pathlib import Path

import harness
import torch

from loraplex.engine.parallel import init_parallel


def main(folder, rank, size, rendezvous, out):
    parallel = init_parallel(int(rank), int(size), rendezvous, harness.CPU)
    broadcast = parallel.broadcast_(torch.full((2,), float(rank)))
    assert broadcast.tolist() == [0.0, 0.0]
    model = harness.load(Path(folder), parallel)
    logprobs = {"base": harness.Driver(model).run(harness.TP_PROMPTS, harness.TP_CHUNKS)}
    harness.install(model, harness.tp_adapters(model))
    for virtual in (True, False):
        harness.use_virtual_experts(model, virtual)
        logprobs[f"lora, virtual {virtual}"] = harness.Driver(model).run(
            harness.TP_PROMPTS, harness.TP_CHUNKS, slots=[0, -1, 1], slot_rows=[1, 0]
        )
    harness.init_dummy(model, 3)
    logprobs["dummy"] = harness.Driver(model).run(harness.TP_PROMPTS, harness.TP_CHUNKS)
    torch.save(logprobs, out)
    parallel.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
