"""Times of kernels whose data are not in L2."""

import statistics
from collections.abc import Callable

import torch


class ColdTimer:
    """CUDA graph replay; before each call the L2 cache is flushed by zeroing 192 MB, whose time is subtracted."""

    def __init__(self, calls: int = 6) -> None:
        """calls: of a graph, where nothing else is asked for."""
        self.calls = calls
        self.flush = torch.zeros(192 << 20, dtype=torch.uint8, device="cuda")
        self.flushes: dict[int, float] = {}

    def __call__(self, call: Callable[[], object], *, calls: int | None = None) -> float:
        """µs per call, median over replays of a graph of several calls."""
        calls = calls or self.calls
        if calls not in self.flushes:
            self.flushes[calls] = self._replay(lambda: None, calls)
        return (self._replay(call, calls) - self.flushes[calls]) / calls

    def _replay(self, call: Callable[[], object], calls: int) -> float:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                self.flush.zero_()
                call()
        graph.replay()
        times = []
        for _ in range(7):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(times)
