"""Loops: the plan of a body, run many times on two sets of addresses.

A carried value lies in two places, the buffer of its output and a part of the loop's scratch buffer. A turn
reads it in one and writes it in the other, so the turns alternate between two sets of buffers, which the
engine expects: on CUDA each is captured once. Rows are copied from and to fixed places, because a graph that
was captured runs at its own addresses alone, and a copy costs less than to bind a plan anew on the CPU, too.

With turns in order on one stream, a row's place in scratch is free again when the next row is copied there.

The device may be `_AHEAD` turns behind. Each turn that it has finished is progress. Without that bound, the
watchdog would see no progress until the device had finished them all.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.engines.base import Binding, Fence, Plan
from cudnn_actor.execution.executor import Executor
from cudnn_actor.memory import Slot
from cudnn_actor.protocol.messages.lowering import Lowered
from cudnn_actor.protocol.messages.run_loop import SCRATCH, Loop
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Loops"]

_AHEAD = 32
"""Turns that may be enqueued and not finished. A fence costs less than 1 us, so each turn has one."""


class _Rows(NamedTuple):
    """A buffer with a row for each turn, and the place of one row in the scratch buffer."""

    slot: Slot
    spec: TensorSpec
    """Of a row, with the strides that it has in the buffer."""
    step: int
    """Bytes from one row to the next."""
    place: Binding


class _Bindings(NamedTuple):
    """What a loop runs on. Turns with even numbers run `runs[0]`, and read `values[...][0]`."""

    initial: Sequence[tuple[Binding, Binding]]
    """Initial values, and where the first turn reads them."""
    values: dict[str, tuple[Binding, Binding]]
    """Carried inputs → where even turns read their values, and where odd ones do."""
    results: dict[str, Binding]
    """Carried inputs → the buffers of their outputs."""
    scanned: Sequence[_Rows]
    stacked: Sequence[_Rows]
    runs: tuple[Callable[[], None], Callable[[], None]]


class Loops:
    """Runs loops on one engine. Used by its thread.

    Parameters
    ----------
    executor
        Has the engine.
    note_progress
        Called after each turn that has finished.
    wait
        Called while the device is behind, with the seconds that it was waited for already. It may answer
        earlier work, and sleeps for a moment. Raises `Crash` if the host is given up.
    """

    def __init__(
        self, executor: Executor[Any], note_progress: Callable[[], None], wait: Callable[[float], None]
    ) -> None:
        self._executor = executor
        self._engine = executor.engine
        self._note_progress = note_progress
        self._wait = wait
        self._page: mmap.mmap | None = None
        """Memory to which the device writes conditions. It is mapped as long as the engine is open."""

    def run(self, plan: Plan, lowered: Lowered, slots: Sequence[Slot]) -> None:
        """Run a loop on these buffers. On an asynchronous engine, the last turn may not have finished.

        Raises what the engine raises. Then turns may be enqueued that have not finished.
        """
        assert lowered.loop is not None
        loop, most = lowered.loop
        bindings = self._bindings(plan, lowered, slots)
        for source, place in bindings.initial:
            self._engine.copy(source, place)
        fences: deque[Fence] = deque()
        turn = 0
        while turn < most and self._goes_on(loop, bindings, turn):
            for rows in bindings.scanned:
                self._engine.copy(self._row(rows, turn), rows.place)
            bindings.runs[turn % 2]()
            for rows in bindings.stacked:
                self._engine.copy(rows.place, self._row(rows, turn))
            turn += 1
            self._end_turn(fences)
        if (most - turn) % 2:  # the last turn has written to the scratch buffer
            for name, places in bindings.values.items():
                self._engine.copy(places[turn % 2], bindings.results[name])
        self._outlast(fences, 1)

    # Bindings.

    def _bindings(self, plan: Plan, lowered: Lowered, slots: Sequence[Slot]) -> _Bindings:
        assert lowered.loop is not None
        loop, most = lowered.loop
        slot_of = dict(zip(lowered.buffers, slots, strict=True))
        own = {name: self._in_scratch(loop, name, slot_of[SCRATCH]) for name in loop.working}
        bind = self._executor.binding
        results = {name: bind(slot_of[output]) for name, output in loop.carried.items()}
        # With all of its turns, a loop ends in the outputs' buffers: the last turn, number `most - 1`, writes
        # where one more turn would read.
        first = results if most % 2 == 0 else own
        other = own if most % 2 == 0 else results
        values = {name: (first[name], other[name]) for name in loop.carried}
        return _Bindings(
            initial=[(bind(slot_of[name]), first[name]) for name in loop.carried],
            values=values,
            results=results,
            scanned=[_rows(slot_of[name], own[name]) for name in loop.scanned],
            stacked=[_rows(slot_of[name], own[name]) for name in loop.stacked],
            runs=(
                self._expected(plan, lowered, self._turn_on(loop, slot_of, own, values, 0)),
                self._expected(plan, lowered, self._turn_on(loop, slot_of, own, values, 1)),
            ),
        )

    def _in_scratch(self, loop: Loop, name: str, scratch: Slot) -> Binding:
        offset, spec = loop.working[name]
        return self._engine.bind(scratch.arena.number, scratch.offset + offset, spec)

    def _turn_on(
        self,
        loop: Loop,
        slot_of: dict[str, Slot],
        own: dict[str, Binding],
        values: dict[str, tuple[Binding, Binding]],
        parity: int,
    ) -> dict[str, Binding]:
        """What the body's ports are bound to, in turns of even or of odd numbers."""
        ports = {name: places[parity] for name, places in values.items()}
        ports |= {output: values[name][1 - parity] for name, output in loop.carried.items()}
        ports |= {name: own[name] for name in (*loop.scanned, *loop.stacked)}
        for port in loop.body.inputs:
            if port.name not in ports:
                ports[port.name] = self._executor.binding(slot_of[port.name])
        return ports

    def _expected(self, plan: Plan, lowered: Lowered, ports: dict[str, Binding]) -> Callable[[], None]:
        assert lowered.loop is not None
        names = lowered.loop.loop.body.names_of
        return self._engine.expect(plan, [ports[names[uid]] for uid in lowered.graph.bound], ())

    def _row(self, rows: _Rows, turn: int) -> Binding:
        slot = rows.slot
        return self._engine.bind(slot.arena.number, slot.offset + turn * rows.step, rows.spec)

    # Turns.

    def _goes_on(self, loop: Loop, bindings: _Bindings, turn: int) -> bool:
        """Whether the condition is true before a turn. Blocks until the turns before it have finished."""
        if loop.condition is None:
            return True
        page = self._page
        if page is None:
            page = self._page = mmap.mmap(-1, mmap.PAGESIZE)
            self._engine.pin(memoryview(page))
        place = bindings.values[loop.condition][turn % 2]
        spec = loop.working[loop.condition].spec
        into = np.frombuffer(page, DType.BOOL.numpy, 1).reshape(spec.dims)
        found = self._engine.read(place, into)
        return bool(found.all())

    def _end_turn(self, fences: deque[Fence]) -> None:
        if self._engine.synchronous:
            self._note_progress()
            return
        fences.append(self._engine.fence())
        self._outlast(fences, _AHEAD)

    def _outlast(self, fences: deque[Fence], most: int) -> None:
        """Note the turns that have finished, and wait until `most` or fewer have not."""
        since = time.monotonic()
        while fences:
            if self._engine.finished(fences[0]):
                fences.popleft()
                self._note_progress()
                since = time.monotonic()
            elif len(fences) <= most:
                return
            else:
                self._wait(time.monotonic() - since)


def _rows(slot: Slot, place: Binding) -> _Rows:
    """The rows of a buffer, of which the first dim is the turn."""
    spec = slot.spec
    row = TensorSpec.strided(spec.dims[1:], spec.strides[1:], spec.dtype)
    return _Rows(slot, row, spec.strides[0] * spec.dtype.itemsize, place)
