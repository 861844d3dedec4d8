"""An engine that waits at a gate of the test (`rigs.Gate`), in this process or in a worker.

A worker imports this by name, so this module imports only what a worker has.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cudnn_actor.engines.base import EngineFailure, StickyError
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

__all__ = [
    "FAULTY",
    "POISON",
    "ExecutingEngine",
    "GatedEngine",
    "LaggingEngine",
    "MortalEngine",
    "Passage",
    "PoisonedEngine",
    "RemoteGate",
    "gated_in_worker",
]


class Passage(Protocol):
    """The part of a gate that an engine uses."""

    def go_through(self) -> None:
        """Wait while the gate is shut."""


class RemoteGate:
    """The gate of another process (`rigs.GateServer`): connects to it, and waits for the connection's end.

    If nobody accepts connections any more (`rigs.remove_gate`), the gate is open for good.
    """

    def __init__(self, address: str) -> None:
        self._address = address.encode("latin-1")
        self._exists = True

    def go_through(self) -> None:
        if not self._exists:
            return
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(self._address)
                connection.recv(1)
            except ConnectionError:
                self._exists = False


class ExecutingEngine(CpuEngine):
    """The CPU engine whose runs of models go by `execute`, too: what is behind it is behind all runs."""

    def expect(
        self,
        plan: Any,
        buffers: Sequence[np.ndarray],
        scalars: Sequence[float],
        constant: Collection[int] = (),
    ) -> Callable[[], None]:
        return functools.partial(self.execute, plan, buffers, scalars)


class GatedEngine(ExecutingEngine):
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


class LaggingEngine(ExecutingEngine):
    """A CPU engine that reports its work as unfinished until there is a file `done` in a folder, and that
    notes each run of a plan in the file `runs`. A file `dead` ends its context, once."""

    synchronous = False

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)

    def execute(self, plan: Any, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> None:
        super().execute(plan, buffers, scalars)
        with (self._folder / "runs").open("a") as file:
            file.write(".")

    def fence(self) -> Any:
        return object()

    def has_passed(self, fence: Any) -> bool:
        dead = self._folder / "dead"
        if dead.exists():
            dead.unlink()
            raise StickyError("DEAD", "the test killed the context")
        return (self._folder / "done").exists()


def gated_in_worker(address: str, at: str) -> GatedEngine:
    """The engine of a worker whose gate is in the test's process."""
    return GatedEngine(RemoteGate(address), at)


POISON = 1234.5
"""A value at which a `PoisonedEngine` ends its worker, or kills its context."""
FAULTY = 77.25
"""A value at which it fails, and does no harm."""


class PoisonedEngine(ExecutingEngine):
    """The CPU engine, for which one value of an input is fatal.

    Parameters
    ----------
    in_worker
        Whether it ends its whole process. Else it reports that its context has died.
    """

    def __init__(self, in_worker: bool) -> None:
        super().__init__()
        self._in_worker = in_worker

    def execute(self, plan: Any, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> None:
        if any((buffer == FAULTY).any() for buffer in buffers):
            raise EngineFailure("FAULTY", "a value that fails")
        if any((buffer == POISON).any() for buffer in buffers):
            if self._in_worker:
                os.kill(os.getpid(), signal.SIGKILL)
            raise StickyError("POISONED", "a value that kills")
        super().execute(plan, buffers, scalars)


class MortalEngine(ExecutingEngine):
    """The CPU engine of a worker that dies instead of making its last call.

    Parameters
    ----------
    calls
        How many calls that read or write buffers it makes in its life.
    """

    def __init__(self, calls: int) -> None:
        super().__init__()
        self._left = calls

    def execute(self, plan: Any, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> None:
        self._live()
        super().execute(plan, buffers, scalars)

    def write(self, dst: np.ndarray, array: np.ndarray) -> None:
        self._live()
        super().write(dst, array)

    def read(self, src: np.ndarray, into: np.ndarray | None = None) -> np.ndarray:
        self._live()
        return super().read(src, into)

    def copy(self, src: np.ndarray, dst: np.ndarray) -> None:
        self._live()
        super().copy(src, dst)

    def direct_copy(self, src: np.ndarray, dst: np.ndarray) -> Callable[[], object]:
        copy = super().direct_copy(src, dst)

        def copy_if_alive() -> object:
            self._live()
            return copy()

        return copy_if_alive

    def part_copy(self, src: np.ndarray, dst: np.ndarray) -> Callable[[int, int], object] | None:
        copy = super().part_copy(src, dst)

        def copy_if_alive(begin: int, end: int) -> object:
            self._live()
            return copy and copy(begin, end)

        return copy and copy_if_alive

    def fill(self, dst: np.ndarray, value: float) -> None:
        self._live()
        super().fill(dst, value)

    def _live(self) -> None:
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
