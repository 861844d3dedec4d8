"""Times plans of one graph against each other, each as a captured CUDA graph of the whole.

So a plan is timed as it will run: without waiting for launches, and after other pieces have pushed its
weights out of the caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from cudnn_actor.engines.base import no_progress
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.engines.cuda.running.timing import operands, replay_of
from cudnn_actor.engines.timing import medians, without_overhead
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

__all__ = ["Contest", "Entered"]

Entered = Callable[[], float]
"""Runs a plan once, and returns microseconds of device time. Blocks."""

_LEAST_TURNS, _MOST_TURNS, _LONGEST_S = 9, 60, 0.5


class Contest:
    """A second set of a graph's buffers, on which plans for it run. The maker must call `close`.

    Parameters
    ----------
    graph
        The graph that the plans compute.
    handle, stream
        A cuDNN handle, and the CuPy stream set on it.

    Raises
    ------
    OutOfMemory
        A second set does not fit on the device.
    """

    def __init__(self, graph: OperationGraph, handle: Any, stream: Any) -> None:
        self._handle, self._stream = handle, stream
        self._pool = libraries().cupy.cuda.MemoryPool()
        self._held: dict[int, Any] = {}
        self._scalars = [1.0] * len(graph.scalars)
        try:
            with stream:
                self._pointers = operands(graph, self._pool, self._held)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Wait for running work, and free the memory."""
        self._stream.synchronize()
        self._held.clear()
        self._pool.free_all_blocks()

    def enter(self, plan: CudaPlan) -> Entered:
        """A function that runs a plan once, and returns microseconds. Blocks.

        Raises `MemoryError` if its workspace does not fit, and whatever the libraries raise.
        """
        run = self._runner_of(plan)
        run()
        return lambda: run()[0]

    def pieces_us(self, plan: CudaPlan) -> tuple[float, ...]:
        """Microseconds of each piece in a run of the whole. Blocks. Raises as `enter`."""
        whole, pieces = self._runner_of(plan), self._runner_of(plan, pieces=True)
        run_us, *found = medians(lambda: (*whole(), *pieces()))
        return without_overhead(run_us, found)

    @staticmethod
    def turns(entered: Sequence[Entered]) -> list[tuple[float, ...]]:
        """Microseconds of the plans' runs, by turns: in each turn, each plan runs once.

        Blocks for at most half a second for each plan, or for as long as nine turns take. Raises whatever the
        libraries raise.
        """
        began, longest_s = time.monotonic(), _LONGEST_S * len(entered)
        found: list[tuple[float, ...]] = []
        while len(found) < _LEAST_TURNS or (
            len(found) < _MOST_TURNS and time.monotonic() - began < longest_s
        ):
            found.append(tuple(run() for run in entered))
        return found

    def _runner_of(self, plan: CudaPlan, *, pieces: bool = False) -> Callable[[], Sequence[float]]:
        """A function that runs a plan once, and returns the microseconds: of each piece, or of the whole."""
        with self._stream:
            workspace = self._pool.malloc(max(plan.workspace, 1))
            program = Program(plan, self._handle, self._stream)
            given = self._pointers, self._scalars, int(workspace.ptr)
            program.launch(*given, no_progress)  # what a library loads at its first launch cannot be captured
            self._stream.synchronize()
            run = replay_of(program, *given, pieces=pieces)

        def once() -> Sequence[float]:
            assert workspace.ptr, "it lives as long as this function"
            return run()

        return once
