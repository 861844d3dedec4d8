"""The CPU engine with the manners of a GPU: calls return at once, and one thread works on them in order.

So several requests have begun at the same time, and a worker that is killed leaves the first of them done,
the last untouched, and one of them half done.
"""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cpu import CpuEngine
from tests.service.worker_rigs import ExecutingEngine

__all__ = ["DeviceEngine", "FrugalEngine"]

_LONGEST_S = 0.0001
_MOST_SETS = 9


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

    def part_copy(self, src: np.ndarray, dst: np.ndarray) -> Callable[[int, int], object] | None:
        copy = super().part_copy(src, dst)
        return copy and (lambda begin, end: self._enqueue(lambda: copy(begin, end)))

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

    def has_passed(self, fence: Any) -> bool:
        return bool(self._done >= fence)

    def _enqueue(self, call: Callable[[], object]) -> None:
        self._enqueued += 1
        self._stream.put(call)

    def _await(self) -> None:
        while not self.has_passed(self._enqueued):
            time.sleep(_LONGEST_S / 10)

    def _work(self) -> None:
        while (call := self._stream.get()) is not None:
            time.sleep(random.random() * _LONGEST_S)
            call()
            del call  # it keeps the memory that it has worked on
            self._done += 1


class FrugalEngine(DeviceEngine):
    """Makes so many copies for runs of models, and fails at the next.

    It keeps the values of their weights. If it is `rigid`, it fails to prepare runs on more than one set of
    buffers. Runs fail that are expected on more than nine sets, or on others that are laid out otherwise.
    """

    def __init__(self, copies: int, rigid: bool) -> None:
        super().__init__()
        self._copies_left, self._rigid = itertools.count(copies, -1), rigid
        self._expected: set[tuple[int, ...]] = set()
        self._strides: dict[str, list[tuple[int, ...]]] = {}

    def keeps(self, plan: Any, constant: Collection[int]) -> frozenset[int]:
        return frozenset(constant)

    def expect(
        self,
        plan: Any,
        buffers: Sequence[np.ndarray],
        scalars: Sequence[float],
        constant: Collection[int] = (),
    ) -> Callable[[], None]:
        self._await()
        self._expected.add(tuple(_address_of(each) for each in buffers))
        if self._rigid and len(self._expected) > 1:
            raise EngineFailure("RIGID", "no other buffers")
        strides = [each.strides for each in buffers]
        if len(self._expected) > _MOST_SETS or strides != self._strides.setdefault(plan.tag, strides):
            return self._fail
        kept = [each.copy() if place in constant else each for place, each in enumerate(buffers)]
        return super().expect(plan, kept, scalars)

    @staticmethod
    def _fail() -> None:
        raise EngineFailure("ELSEWHERE", "too many sets of buffers, or other strides")

    def direct_copy(self, src: np.ndarray, dst: np.ndarray) -> Callable[[], object]:
        copy = super().direct_copy(src, dst)

        def counted() -> None:
            if next(self._copies_left) <= 0:
                raise EngineFailure("COPIED", "one copy too many")
            copy()

        return counted


def _address_of(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
