"""Programs of one plan: it stays bound to the buffers that it ran on lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.plan import FastProgram

__all__ = ["BoundPrograms"]

_MOST_CALLS = 4096
"""Of all programs of a plan together. A call takes about 1 kB."""
_BYTES_OF_CALL = 4096
"""Of buffers, which count as a call: a kernel may keep copies of them in another order or dtype."""
_MOST_SEEN = 1024
"""Sets of buffers that are known by their objects alone."""


class BoundPrograms:
    """Binding takes up to a third of the time of a run. So programs are kept, and found by their memory.

    A program keeps the memory of its buffers mapped. So while it is kept, no other memory can have its
    addresses.
    """

    def __init__(self) -> None:
        self._programs: OrderedDict[object, FastProgram] = OrderedDict()
        """The latest last."""
        self._seen: dict[tuple[int, ...], tuple[FastProgram, tuple[object, ...]]] = {}
        """By the ids of the buffers, which it keeps, so that no other objects can have these ids."""
        self._calls = 0

    def of(self, buffers: Sequence[npt.NDArray[Any]], bind: Callable[[], FastProgram]) -> FastProgram:
        """The program on these buffers, which `bind` makes if there is none."""
        ids = tuple(map(id, buffers))
        seen = self._seen.get(ids)
        if seen is not None:
            return seen[0]
        program = self._on_memory(tuple(map(_memory, buffers)), bind)
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen[ids] = program, tuple(buffers)
        return program

    def _on_memory(self, key: object, bind: Callable[[], FastProgram]) -> FastProgram:
        program = self._programs.get(key)
        if program is not None:
            self._programs.move_to_end(key)
            return program
        program = self._programs[key] = bind()
        self._calls += _weight(program)
        while self._calls > _MOST_CALLS and len(self._programs) > 1:
            _, oldest = self._programs.popitem(last=False)
            self._calls -= _weight(oldest)
            self._seen.clear()
        return program


def _weight(program: FastProgram) -> int:
    return program.calls + sum(buffer.nbytes for buffer in program.buffers) // _BYTES_OF_CALL


def _memory(buffer: npt.NDArray[Any]) -> object:
    """Where a buffer's elements lie, and of what type they are."""
    seen = buffer.__array_interface__
    return seen["data"][0], seen["shape"], seen["strides"], buffer.dtype
