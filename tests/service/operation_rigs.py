"""Requests for every operation, with their results; and an engine that dies in the middle of one.

A worker imports this by name, so nothing is imported here that a worker has not.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cudnn_actor import BufferRef, ConvSpec, CudnnRef, TensorSpec
from cudnn_actor.engines.base import StickyError
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.protocol import OperationGraph
from cudnn_actor.protocol.operations import (
    AvgPool,
    AvgPoolBackward,
    ConvolutionForward,
    MaxPool,
    MaxPoolBackward,
    Pointwise,
    PointwiseMode,
    Window,
)

__all__ = ["ALL", "IMAGE", "INDEX", "LARGEST", "POOL", "DyingEngine", "Operands", "dying_in_worker"]

POOL = Window.symmetric(1, size=2)
IMAGE = np.array([[[1, 5, 4, 3, 2, 2]]], np.float32)
LARGEST, INDEX = [5, 4, 2], [1, 2, 4]
ALL: dict[str, list[float]] = {
    "MaxPool": [5, 4, 2],
    "MaxPoolBackward": [0, 10, 20, 0, 30, 0],
    "AvgPool": [3, 3.5, 2],
    "AvgPoolBackward": [5, 5, 10, 10, 15, 15],
    "Pointwise": [2, 10, 8, 6, 4, 4],
    "ConvolutionForward": [3, 15, 12, 9, 6, 6],
}
"""For each operation, the values of its first output if it reads what `Operands` holds."""


class Operands:
    """Buffers for one request of each operation. All outputs hold 77."""

    x: BufferRef
    """(1, 1, 6), as `IMAGE`."""
    w: BufferRef
    """(1, 1, 1), holds 3."""
    dy: BufferRef
    """(1, 1, 3), holds 10, 20, 30."""
    found: BufferRef
    """(1, 1, 3) of int64, as `INDEX`: read, not written."""
    y: BufferRef
    """(1, 1, 3): an output."""
    index: BufferRef
    """(1, 1, 3) of int64: an output."""
    whole: BufferRef
    """(1, 1, 6): an output."""
    whole64: BufferRef
    """(1, 1, 6) of int64, for what does not fit."""

    @classmethod
    async def on(cls, gpu: CudnnRef) -> Operands:
        self = cls()
        self.x = await gpu.upload(IMAGE)
        self.w = await gpu.upload(np.full((1, 1, 1), 3, np.float32))
        self.dy = await gpu.upload(np.array([[[10, 20, 30]]], np.float32))
        self.found = await gpu.upload(np.array([[INDEX]]))
        self.y = await gpu.upload(np.full((1, 1, 3), 77, np.float32))
        self.index = await gpu.upload(np.full((1, 1, 3), 77))
        self.whole = await gpu.upload(np.full((1, 1, 6), 77, np.float32))
        self.whole64 = await gpu.upload(np.full((1, 1, 6), 77))
        return self

    @classmethod
    def unplaced(cls) -> Operands:
        """References to no service's buffers, in slots 1 to 8."""
        self, narrow = cls(), ("w", "dy", "found", "y", "index")
        wide_integers = ("found", "index", "whole64")
        for slot, name in enumerate(("x", *narrow, "whole", "whole64"), 1):
            dims = (1, 1, 1) if name == "w" else (1, 1, 3) if name in narrow else (1, 1, 6)
            spec = TensorSpec.packed(dims, "int64" if name in wide_integers else "float32")
            setattr(self, name, BufferRef(slot=slot, generation=1, spec=spec, device="cpu"))
        return self

    def max_pool(self, **fields: Any) -> MaxPool[BufferRef]:
        return MaxPool(**{"x": self.x, "y": self.y, "index": self.index, "window": POOL, **fields})

    def max_pool_backward(self, **fields: Any) -> MaxPoolBackward[BufferRef]:
        return MaxPoolBackward(
            **{"dy": self.dy, "index": self.found, "dx": self.whole, "window": POOL, **fields}
        )

    def avg_pool(self, **fields: Any) -> AvgPool[BufferRef]:
        return AvgPool(**{"x": self.x, "y": self.y, "window": POOL, **fields})

    def avg_pool_backward(self, **fields: Any) -> AvgPoolBackward[BufferRef]:
        return AvgPoolBackward(**{"dy": self.dy, "dx": self.whole, "window": POOL, **fields})

    def pointwise(self, **fields: Any) -> Pointwise[BufferRef]:
        given = {"mode": PointwiseMode.ADD, "operands": (self.x, self.x), "result": self.whole}
        return Pointwise(**{**given, **fields})

    def convolution(self, **fields: Any) -> ConvolutionForward[BufferRef]:
        conv = ConvSpec.symmetric(1)
        return ConvolutionForward(**{"x": self.x, "w": self.w, "y": self.whole, "conv": conv, **fields})

    def all(self) -> dict[str, Any]:
        """One request of each operation, by the names in `ALL`."""
        requests = (
            self.max_pool(),
            self.max_pool_backward(),
            self.avg_pool(),
            self.avg_pool_backward(),
            self.pointwise(),
            self.convolution(),
        )
        return {type(request).__name__: request for request in requests}


class DyingEngine(CpuEngine):
    """Half-writes what an operation gives, over all its outputs, and then dies: so many times.

    Each death leaves a byte in a file, because its successor is another engine, or in another process.

    Parameters
    ----------
    tally
        The path of that file.
    kind
        The operation, as plan tags name it.
    deaths
        How many engines die.
    after
        How many of these operations each engine runs before.
    in_worker
        Whether it dies by SIGKILL, with its process.
    """

    def __init__(self, tally: str, kind: str, deaths: int, after: int, *, in_worker: bool) -> None:
        super().__init__()
        self._tally, self._kind, self._deaths, self._in_worker = Path(tally), kind, deaths, in_worker
        self._before = after
        self._written: dict[str, list[bool]] = {}
        """Which of a plan's buffers it writes, by its tag."""

    def build(self, graph: OperationGraph, *, workspace_limit: int | None) -> Any:
        plan = super().build(graph, workspace_limit=workspace_limit)
        self._written[plan.tag] = [uid in graph.written for uid in graph.bound]
        return plan

    def execute(self, plan: Any, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> None:
        if f"/{self._kind}/" not in plan.tag or not self._dies_now():
            super().execute(plan, buffers, scalars)
            return
        for buffer, written in zip(buffers, self._written[plan.tag], strict=True):
            if written:
                buffer[..., : (buffer.shape[-1] + 1) // 2] = -1
        if self._in_worker:
            os.kill(os.getpid(), signal.SIGKILL)
        raise StickyError("DEAD", "the test killed the context")

    def _dies_now(self) -> bool:
        self._before -= 1
        if self._before >= 0 or self._tally.stat().st_size >= self._deaths:
            return False
        with self._tally.open("ab") as tally:
            tally.write(b"x")
        return True


def dying_in_worker(tally: str, kind: str, deaths: int, after: int) -> DyingEngine:
    """The engine of a worker."""
    return DyingEngine(tally, kind, deaths, after, in_worker=True)
