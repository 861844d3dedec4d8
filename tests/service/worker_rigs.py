"""What stands behind a gate of the test's: an engine in this process, or in a worker.

A worker imports this by name, so nothing is imported here that a worker has not.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.protocol.graph import OperationGraph

__all__ = ["DistantGate", "GatedEngine", "Passage", "gated_in_worker"]


class Passage(Protocol):
    """A gate, as an engine sees it."""

    def go_through(self) -> None:
        """Wait until the test lets this one go on."""


class DistantGate:
    """A gate in another process: whoever connects has arrived, and goes on when he is hung up on.

    When nobody is there any more, it has been taken away (`rigs.take_away`), and all go on.
    """

    def __init__(self, address: str) -> None:
        self._address = address.encode("latin-1")
        self._is_there = True

    def go_through(self) -> None:
        if not self._is_there:
            return
        with socket.socket(socket.AF_UNIX) as visit:
            try:
                visit.connect(self._address)
                visit.recv(1)
            except ConnectionError:
                self._is_there = False


class GatedEngine(CpuEngine):
    """The CPU engine with a gate before each run of a plan, or before other calls."""

    def __init__(self, gate: Passage, at: str = "execute") -> None:
        super().__init__()
        self._gate = gate
        self._at = at
        self.closed = False

    def open(self) -> None:
        self._pause("open")
        super().open()

    def execute(self, plan: Any, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> None:
        self._pause("execute")
        super().execute(plan, buffers, scalars)

    def build(self, graph: OperationGraph, *, workspace_limit: int | None) -> Any:
        self._pause("build")
        return super().build(graph, workspace_limit=workspace_limit)

    def write(self, dst: np.ndarray, array: np.ndarray) -> None:
        self._pause("write")
        super().write(dst, array)

    def read(self, src: np.ndarray, into: np.ndarray | None = None) -> np.ndarray:
        self._pause("read")
        return super().read(src, into)

    def view(self, src: np.ndarray, owner: object) -> np.ndarray:
        self._pause("view")
        return super().view(src, owner)

    def create_arena(self, arena: int, nbytes: int) -> int:
        self._pause("create_arena")
        return super().create_arena(arena, nbytes)

    def close(self) -> None:
        self._pause("close")
        super().close()
        self.closed = True

    def _pause(self, at: str) -> None:
        if at == self._at:
            self._gate.go_through()


def gated_in_worker(address: str, at: str) -> GatedEngine:
    """The engine of a worker whose gate is in the test's process."""
    return GatedEngine(DistantGate(address), at)
