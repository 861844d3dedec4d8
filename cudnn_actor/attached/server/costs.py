"""Estimates of how long requests take, from earlier requests. Fair share counts with them."""

from __future__ import annotations

from typing import Any

from cudnn_actor.attached.server.asked import Asked, Known
from cudnn_actor.memory.least_recent import LeastRecent
from cudnn_actor.protocol.messages.messages import Allocate, Download, RunModel, Upload, WriteWeights
from cudnn_actor.protocol.messages.receipts import Receipt

__all__ = ["Costs"]

_FIRST_US, _EACH_US = 200.0, 15.0
"""The estimate in microseconds for a message that has not run yet, and the time that each message takes in
addition to its run."""
_US_PER_BYTE = 1e-4
"""Microseconds to copy a byte: 10 GB in a second."""
_NEW = 0.25
"""The weight of the latest run in the average."""
_KINDS = 1024


class _Average:
    __slots__ = ("us",)

    def __init__(self, us: float) -> None:
        self.us = us


class Costs:
    """Estimates of device time in microseconds: by message if the same message came before, else by kind."""

    def __init__(self) -> None:
        self._by_kind: LeastRecent[Any, _Average] = LeastRecent(most=_KINDS, nbytes=_KINDS)
        self._last_ns = 0

    def estimate(self, known: Known) -> float:
        """The time that a message will take."""
        if known.cost_us is not None:
            return known.cost_us
        message = known.message
        if isinstance(message, Allocate | Download | Upload):
            return _EACH_US + _US_PER_BYTE * _bytes_of(message)
        average = self._by_kind.get(_kind(message))
        return _FIRST_US if average is None else average.us

    def note(self, asked: Asked, value: Any, now_ns: int) -> float:
        """Note that a request has ended. Returns the time that it has taken, in microseconds.

        That is the time in its receipt. Without a receipt, it is the time since the request was sent or since
        the request before it ended, whichever is later, because a device runs one request after the other.
        """
        known = asked.known
        if type(value) is Receipt:
            taken_us = value.run_us + _EACH_US
        elif isinstance(known.message, RunModel | WriteWeights):
            taken_us = max(_EACH_US, (now_ns - max(self._last_ns, asked.sent_ns)) / 1e3)
        else:
            taken_us = asked.cost_us
        self._last_ns = now_ns
        average: _Average | None = known.average
        if average is None:
            average = self._average_of(known, taken_us)
        average.us += _NEW * (taken_us - average.us)
        before = known.cost_us
        known.cost_us = average.us if before is None else before + _NEW * (taken_us - before)
        return taken_us

    def _average_of(self, known: Known, taken_us: float) -> _Average:
        """The average of a message's kind. It is kept with the message, which then uses it even if the kind
        is dropped."""
        kind = _kind(known.message)
        average = self._by_kind.get(kind)
        if average is None:
            average = _Average(taken_us)
            self._by_kind.put(kind, average, 1)
        known.average = average
        return average


def _kind(message: Any) -> Any:
    if isinstance(message, RunModel):
        dims = tuple(array.shape for array in message.arrays.values())
        return RunModel, message.model, dims, tuple(ref.spec.dims for ref in message.buffers.values())
    return type(message)


def _bytes_of(message: Allocate | Download | Upload) -> int:
    if isinstance(message, Allocate):
        return 0 if message.data is None else message.spec.nbytes
    return (message.src if isinstance(message, Download) else message.dst).nbytes
