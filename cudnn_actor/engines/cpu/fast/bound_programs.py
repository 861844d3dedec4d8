"""The programs of a plan: it stays bound to the sets of buffers that it ran on lately."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.plan import FastProgram
from cudnn_actor.memory.least_recent import LeastRecent

__all__ = ["AT_A_TIME", "BoundPrograms", "several_fit"]

_MOST_BYTES = 4 << 20
"""Bytes that all programs of a plan may keep together."""
AT_A_TIME = 8
"""The most sets of callers' arrays to which a plan stays bound at a time."""
_BYTES_OF_CALL = 1 << 10
"""The memory that a bound call takes, about."""
_MOST_SEEN = 1024
"""The most sets of buffers that are found by the ids of their objects."""


class BoundPrograms:
    """The programs of a plan, found by the memory of their buffers. To bind a plan anew takes up to a third
    of the time of a run.

    A program of buffers keeps their memory mapped, so no other memory can have its addresses meanwhile. A
    program of callers' arrays (`FastLaunch`) has their addresses alone, and runs on the arrays that lie there
    when it is found.
    """

    def __init__(self) -> None:
        self._programs: LeastRecent[FastProgram, object] = LeastRecent(most=_MOST_SEEN, nbytes=_MOST_BYTES)
        """The programs that are kept, and the memory that each is bound to."""
        self._by_memory: WeakValueDictionary[object, FastProgram] = WeakValueDictionary()
        self._seen: dict[tuple[int, ...], tuple[FastProgram, tuple[object, ...]]] = {}
        """Programs by the ids of their buffers. It keeps these, so that no other objects get their ids."""

    def find_known(self, buffers: Sequence[npt.NDArray[Any]]) -> FastProgram | None:
        """The program on these objects, if it was found for them before. Its buffers have been checked."""
        seen = self._seen.get(tuple(map(id, buffers)))
        if seen is None:
            return None
        self._programs.get(seen[0])  # it counts as used
        return seen[0]

    def of(self, buffers: Sequence[npt.NDArray[Any]], bind: Callable[[], FastProgram]) -> FastProgram:
        """The program on these buffers, which `bind` makes if there is none."""
        if (seen := self.find_known(buffers)) is not None:
            return seen
        program = self._on_memory(tuple(map(_memory, buffers)), bind)
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen[tuple(map(id, buffers))] = program, tuple(buffers)
        return program

    def _on_memory(self, memory: object, bind: Callable[[], FastProgram]) -> FastProgram:
        program = self._by_memory.get(memory)
        if program is None or self._programs.get(program) is None:
            program, dropped = bind(), self._programs.evictions
            self._by_memory[memory] = program
            self._programs.put(program, memory, _nbytes(program))
            if self._programs.evictions > dropped:
                self._seen.clear()
        return program


def several_fit(program: FastProgram) -> bool:
    """Whether `AT_A_TIME` programs of this size fit into the bytes that a plan's programs may keep."""
    return AT_A_TIME * _nbytes(program) <= _MOST_BYTES


def _nbytes(program: FastProgram) -> int:
    return program.calls * _BYTES_OF_CALL + program.kept_bytes


def _memory(buffer: npt.NDArray[Any]) -> object:
    """A key of a buffer's memory: the place of its elements, and their type."""
    seen = buffer.__array_interface__
    return seen["data"][0], seen["shape"], seen["strides"], buffer.dtype
