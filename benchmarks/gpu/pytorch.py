"""The same convolutions as PyTorch runs them, eagerly, in its inference mode, `benchmark=True`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.gpu.problems import Direction, Problem
from benchmarks.gpu.setting import torch
from benchmarks.gpu.stage import Call

__all__ = ["Eager", "eager"]


class Eager:
    """PyTorch on one GPU. Enqueues on its current stream."""

    def __init__(self, ordinal: int) -> None:
        self.torch = torch()
        self.device = f"cuda:{ordinal}"

    def wait(self) -> None:
        """Wait until the device has done everything. Blocks."""
        self.torch.cuda.synchronize()

    def call(self, problem: Problem) -> Call:
        """Runs a problem, having tried PyTorch's candidates for it. Blocks."""
        self.torch.backends.cudnn.allow_tf32 = problem.tf32
        x, w, y = (self._random(spec.dims, problem) for spec in (problem.x, problem.w, problem.y))
        run = (
            self._forward(problem, x, w)
            if problem.direction is Direction.FWD
            else self._backward(problem, x, w, y)
        )
        for _ in range(3):
            run()
        self.wait()
        return run

    def _forward(self, problem: Problem, x: Any, w: Any) -> Call:
        conv2d, stride, pad = self.torch.nn.functional.conv2d, problem.conv.stride, problem.conv.pad
        return lambda: conv2d(x, w, None, stride, pad)

    def _backward(self, problem: Problem, x: Any, w: Any, dy: Any) -> Call:
        backward = self.torch.ops.aten.convolution_backward
        stride, pad = [problem.conv.stride] * 2, [problem.conv.pad] * 2
        wanted = [problem.direction is Direction.DGRAD, problem.direction is Direction.WGRAD, False]
        return lambda: backward(dy, x, w, None, stride, pad, [1, 1], False, [0, 0], 1, wanted)

    def _random(self, dims: tuple[int, ...], problem: Problem) -> Any:
        values = self.torch.randn(dims, device=self.device, dtype=getattr(self.torch, problem.dtype))
        last = self.torch.channels_last if problem.layout == "NHWC" else self.torch.contiguous_format
        return values.contiguous(memory_format=last)

    def microseconds(self, call: Call, count: int) -> float:
        """The microseconds of one of `count` calls, by events around them all. Blocks."""
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return 1e3 * float(start.elapsed_time(end)) / count

    def captured(self, call: Call, count: int) -> Call:
        """`count` calls as one CUDA graph: what launches it."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(count):
                call()
        return graph.replay  # type: ignore[no-any-return]

    def forget(self) -> None:
        """Give memory back that PyTorch keeps for later."""
        self.torch.cuda.empty_cache()


@contextmanager
def eager(ordinal: int) -> Iterator[Eager]:
    """PyTorch without autograd, on a device that is its current one for as long."""
    found = Eager(ordinal)
    with found.torch.inference_mode(), found.torch.cuda.device(ordinal):
        yield found
        found.wait()
