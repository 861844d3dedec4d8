"""Late copies: the parent copies large arrays to staging memory after it has sent their requests.

They are made with the host held, in the turn that has sent the requests, or in one soon after it. An event
loop's thread makes only the light ones, and leaves the others to the monitor's thread. On the main thread, a
signal handler may raise an exception in the middle of a copy: then another turn goes on with it, from the
first part that is not noted as there.

While a copy waits, its request is in flight, so its array must not change and its block is not given back. If
the request ends first (it failed, or was withdrawn), the copy is dropped with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from cudnn_actor.engines.cpu.transfer import copy_parts
from cudnn_actor.isolation.process.arrivals import LATE_BYTES, Arrival, parts_of
from cudnn_actor.isolation.staging import HEAVY_RUN_BYTES

__all__ = ["LateCopies", "LateCopy", "as_bytes", "may_be_late", "weigh"]


_ROUNDS = 2
"""Threads that copy an array together do so in this many rounds."""
_SHORT_S = 10e-3
"""Seconds between two attempts to make all copies, while there is too little memory."""


def may_be_late(array: object) -> bool:
    """Whether an array of a buffer's dims and dtype may be copied after the request that fills the buffer
    with it was sent: the copy must take some time, and must not be able to fail."""
    return type(array) is np.ndarray and array.nbytes > LATE_BYTES and bool(array.flags.c_contiguous)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of a C-contiguous array."""
    return array.reshape(-1).view(np.uint8)


class LateCopy(msgspec.Struct, eq=False):
    """The copy of one array.

    Parameters
    ----------
    array
        The caller's array, for which `may_be_late` is True; None once the copy has been made.
    target
        Bytes in staging memory, at least as many as the array has.
    arrival
        The array's words. They are cleared.
    alone
        Whether its request has the device to itself, which then idles until values arrive.
    note
        Notes that a part is there, if one thread copies the array; None for `Arrival.note`.
    """

    array: np.ndarray | None
    target: np.ndarray
    arrival: Arrival
    alone: bool
    note: Callable[[int], object] | None = None
    begun: bool = False
    """Whether some parts may be there."""
    with_others: bool = False
    """Whether it is heavy because others belong to the same request."""

    def __post_init__(self) -> None:
        self.arrival.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the array; 0 once the copy has been made."""
        return 0 if self.array is None else self.array.nbytes

    @property
    def is_heavy(self) -> bool:
        """Whether an event loop's thread leaves it to the monitor."""
        return self.with_others or self.nbytes > HEAVY_RUN_BYTES

    def make(self) -> None:
        """Copy the parts that are not there, in order. Blocks.

        Raises `MemoryError` if a thread that copied had no memory to note that: the next call goes on. Else
        the worker, whose waiting counts as progress, would wait for ever.
        """
        array, arrival = self.array, self.arrival
        if array is None:
            return
        src = as_bytes(array)
        missing = parts_of(src.nbytes)
        if self.begun:
            missing = tuple([part for part in missing if not arrival.is_there(part[0])])
        self.begun = True
        if missing:
            note, rounds = self.note or arrival.note, _ROUNDS if self.alone else 1
            here = copy_parts(self.target, src, missing, note, rounds=rounds)
            if not here and not all(arrival.is_there(number) for number, _, _ in missing):
                raise MemoryError("a thread could not note what it has copied")
        self.array = None


def weigh(copies: Sequence[LateCopy]) -> None:
    """Leave the copies of one request to the monitor, if they are heavy together."""
    if sum(copy.nbytes for copy in copies) > HEAVY_RUN_BYTES:
        for copy in copies:
            copy.with_others = True


class LateCopies:
    """The copies that requests in flight wait for. Used with the host held."""

    def __init__(self) -> None:
        self.pending: list[LateCopy] = []
        """The copies that have not been made, in order. The fast path adds to them in its step."""

    @property
    def has_heavy(self) -> bool:
        """Whether any that has not been made is heavy."""
        return any(copy.is_heavy for copy in self.pending)

    def make_light(self) -> bool:
        """Make all that are light. Returns whether any is left."""
        for copy in tuple(self.pending):
            if not copy.is_heavy:
                self._make(copy)
        return bool(self.pending)

    def make_first(self) -> None:
        """Make the first. Blocks."""
        self._make(self.pending[0])

    def make_all(self) -> None:
        """Make all. Blocks, also for as long as this process has too little memory."""
        while self.pending:
            try:
                self.make_first()
            except MemoryError:
                time.sleep(_SHORT_S)

    def has_any(self, copies: Iterable[LateCopy]) -> bool:
        """Whether any of these has not been made."""
        return not set(self.pending).isdisjoint(copies)

    def drop(self, copies: Iterable[LateCopy]) -> None:
        """Do not make the copies of a request that has ended."""
        for copy in copies:
            if copy in self.pending:
                self.pending.remove(copy)

    def _make(self, copy: LateCopy) -> None:
        copy.make()
        self.pending.remove(copy)  # if this is not reached, the next call finds that all parts are there
