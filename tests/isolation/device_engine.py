"""The CPU engine with the manners of a GPU: calls return at once, and one thread works on them in order.

So several requests have begun at the same time, and a worker that is killed leaves the first of them done,
the last untouched, and one of them half done.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu import CpuEngine
from tests.service.worker_rigs import ExecutingEngine

__all__ = ["DeviceEngine"]

_LONGEST_S = 0.0001


class DeviceEngine(ExecutingEngine):
    """Each call is worked on for up to a tenth of a millisecond more than it takes, decided by chance."""

    synchronous = False

    def __init__(self) -> None:
        super().__init__()
        self._stream: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._enqueued = self._done = 0
        self._thread = threading.Thread(target=self._work, name="device", daemon=True)

    def open(self) -> None:
        super().open()
        self._thread.start()

    def close(self) -> None:
        self._stream.put(None)
        self._thread.join()
        super().close()

    def prepare(self, plan: Any) -> None:
        self._await()
        super().prepare(plan)

    def execute(self, plan: Any, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> None:
        self._enqueue(lambda: CpuEngine.execute(self, plan, buffers, scalars))

    def write(self, dst: np.ndarray, array: np.ndarray) -> None:
        self._enqueue(lambda: CpuEngine.write(self, dst, array))

    def copy(self, src: np.ndarray, dst: np.ndarray) -> None:
        self._enqueue(lambda: CpuEngine.copy(self, src, dst))

    def direct_copy(self, src: np.ndarray, dst: np.ndarray) -> Callable[[], object]:
        copy = super().direct_copy(src, dst)
        return lambda: self._enqueue(copy)

    def fill(self, dst: np.ndarray, value: float) -> None:
        self._enqueue(lambda: CpuEngine.fill(self, dst, value))

    def fetch(self, src: np.ndarray, into: np.ndarray | None = None) -> Callable[[], np.ndarray]:
        fetched: list[np.ndarray] = []
        self._enqueue(lambda: fetched.append(CpuEngine.read(self, src, into)))
        return fetched.pop

    def read(self, src: np.ndarray, into: np.ndarray | None = None) -> np.ndarray:
        self._await()
        return super().read(src, into)

    def fence(self) -> Any:
        return self._enqueued

    def finished(self, fence: Any) -> bool:
        return bool(self._done >= fence)

    def _enqueue(self, call: Callable[[], object]) -> None:
        self._enqueued += 1
        self._stream.put(call)

    def _await(self) -> None:
        while not self.finished(self._enqueued):
            time.sleep(_LONGEST_S / 10)

    def _work(self) -> None:
        while (call := self._stream.get()) is not None:
            time.sleep(random.random() * _LONGEST_S)
            call()
            self._done += 1
