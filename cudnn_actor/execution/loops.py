"""Loops: the plan of a body, run many times on two sets of addresses.

A carried value lies in two places, the buffer of its output and a part of the loop's scratch buffer. A turn
reads it in one and writes it in the other, so the turns alternate between two sets of buffers, which the
engine expects: on CUDA each is captured once. Rows are copied from and to fixed places, because a graph that
was captured runs at its own addresses alone, and on the CPU, too, a copy costs less than binding a plan
again. A row's place is free again when the next row is copied there, because the engine works in order.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.actors import Crash
from cudnn_actor.engines.base import Binding, Engine, Fence, Plan
from cudnn_actor.execution.executor import Executor
from cudnn_actor.memory import Slot
from cudnn_actor.protocol.errors import CudnnActorError, DeadlineExceeded
from cudnn_actor.protocol.messages.lowering import Lowered
from cudnn_actor.protocol.messages.run_loop import SCRATCH, Loop
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["Loops"]

_AHEAD = 32
"""Turns that may be enqueued and not finished. A fence costs less than 1 us, so each turn has one."""


class Loops:
    """Runs loops on one engine. Used by its thread.

    Parameters
    ----------
    executor
        The executor, which has the engine.
    note_turn
        This is called after each turn that has finished. It raises `Crash` if the host is given up.
    wait
        This is called while the device is behind, with the seconds of the wait so far. It may answer earlier
        work, and sleeps for a moment. It raises `Crash` if the host is given up.
    """

    def __init__(
        self, executor: Executor[Any], note_turn: Callable[[], None], wait: Callable[[float], None]
    ) -> None:
        self._executor = executor
        self._engine = executor.engine
        self._note_turn = note_turn
        self._wait = wait
        self._page: mmap.mmap | None = None
        """Memory to which the device writes conditions. It is mapped as long as the engine is open."""

    def run(self, plan: Plan, lowered: Lowered, slots: Sequence[Slot], unwanted: Callable[[], bool]) -> None:
        """Run a loop on these buffers. On an asynchronous engine, the last turn may not have finished.

        `unwanted` says whether the loop's caller has left. It is asked before each turn.

        Raises the engine's errors, with a note that names the turn, and `DeadlineExceeded` if the caller has
        left. Then turns may be enqueued that have not finished.
        """
        assert lowered.loop is not None
        pace = _Pace(self._engine, self._note_turn, self._wait)
        steps = self._steps(plan, lowered, slots, pace)
        try:
            self._run(steps, lowered.loop.turns, pace, unwanted)
        except (CudnnActorError, Crash):
            raise
        except Exception as error:
            error.add_note(
                f"in {_turn_name(pace.turn - pace.unfinished_turns, pace.turn, lowered.loop.turns)}"
            )
            raise

    def _run(self, steps: _Steps, most: int, pace: _Pace, unwanted: Callable[[], bool]) -> None:
        for source, place in steps.initial:
            self._engine.copy(source, place)
        while (turn := pace.turn) < most and (not steps.ask or steps.ask[turn % 2]()):
            if unwanted():
                # Nobody reads this error: the caller has left with its own, which knows the timeout.
                raise DeadlineExceeded(timeout_s=0.0, started=True)
            for load in steps.load:
                load(turn)
            steps.run[turn % 2]()
            for store in steps.store:
                store(turn)
            pace.turn += 1
            pace.end_turn()
        if (most - pace.turn) % 2:  # the last turn has written to the scratch buffer
            for source, place in steps.final:
                self._engine.copy(source, place)
        pace.outlast(1)

    def _steps(self, plan: Plan, lowered: Lowered, slots: Sequence[Slot], pace: _Pace) -> _Steps:
        assert lowered.loop is not None
        loop, most = lowered.loop
        bind, row_copy = self._executor.binding, self._engine.row_copy
        slot_of = dict(zip(lowered.buffers, slots, strict=True))
        ports = {name: bind(slot) for name, slot in slot_of.items()}
        own = {name: self._in_scratch(loop, name, slot_of[SCRATCH]) for name in loop.working}
        results = {name: ports[output] for name, output in loop.carried.items()}
        # With all of its turns, a loop ends in the outputs' buffers: its last turn, number `most - 1`, writes
        # where one more turn would read.
        even, odd = (results, own) if most % 2 == 0 else (own, results)
        rows = {name: own[name] for name in (*loop.scanned, *loop.stacked)}
        asks = () if loop.condition is None else (even[loop.condition], odd[loop.condition])
        return _Steps(
            initial=[(ports[name], even[name]) for name in loop.carried],
            ask=[self._condition_reader(loop, place, pace) for place in asks],
            load=[row_copy(ports[name], rows[name], store=False) for name in loop.scanned],
            run=[
                self._expect(plan, lowered, ports | rows | _carried_bindings(loop, before, after))
                for before, after in ((even, odd), (odd, even))
            ],
            store=[row_copy(ports[name], rows[name], store=True) for name in loop.stacked],
            final=[(own[name], results[name]) for name in loop.carried],
        )

    def _in_scratch(self, loop: Loop, name: str, scratch: Slot) -> Binding:
        offset, spec = loop.working[name]
        return self._engine.bind(scratch.arena.number, scratch.offset + offset, spec)

    def _expect(self, plan: Plan, lowered: Lowered, ports: Mapping[str, Binding]) -> Callable[[], None]:
        assert lowered.loop is not None
        names = lowered.loop.loop.body.names_of
        return self._engine.expect(plan, [ports[names[uid]] for uid in lowered.graph.bound], ())

    def _condition_reader(self, loop: Loop, place: Binding, pace: _Pace) -> Callable[[], bool]:
        """A function that reads a condition. It waits for the turns before it."""
        if self._page is None:
            self._page = mmap.mmap(-1, mmap.PAGESIZE)
            self._engine.pin(memoryview(self._page))
        page = self._page
        assert loop.condition is not None
        into = np.frombuffer(page, DType.BOOL.numpy, 1).reshape(loop.working[loop.condition].spec.dims)
        copy = self._engine.direct_copy(place, into)
        if copy is None:  # the system has refused to lock the page
            return lambda: bool(self._engine.read(place, into).all())

        def ask() -> bool:
            copy()
            pace.end_turn(behind=0)
            return page[0] != 0

        return ask


class _Steps(NamedTuple):
    """The functions that a loop calls. If there are two, turns with even numbers call the first."""

    initial: Sequence[tuple[Binding, Binding]]
    """The places of initial values, and those where the first turn reads them."""
    ask: Sequence[Callable[[], bool]]
    """Reads the condition before a turn. Empty if there is none."""
    load: Sequence[Callable[[int], object]]
    """Copies the row of a turn to its place in the scratch buffer."""
    run: Sequence[Callable[[], None]]
    store: Sequence[Callable[[int], object]]
    """Copies it from there."""
    final: Sequence[tuple[Binding, Binding]]
    """The parts of the scratch buffer, and the buffers of the outputs."""


def _carried_bindings(
    loop: Loop, before: Mapping[str, Binding], after: Mapping[str, Binding]
) -> dict[str, Binding]:
    """The bindings from which the body reads the carried values, and those to which it writes them."""
    outputs = {output: after[name] for name, output in loop.carried.items()}
    return {**{name: before[name] for name in loop.carried}, **outputs}


def _turn_name(first: int, last: int, turns: int) -> str:
    """The text by which a failure names its turn, or the turns in which it may have occurred.

    `last`: the turn that was being enqueued; `turns` after the last one.
    """
    last = max(0, min(last, turns - 1))
    return f"turn {last}" if first >= last else f"one of turns {first} to {last}"


class _Pace:
    """Keeps the host from being many turns ahead of the device, and notes each turn that the device has
    finished.

    Without such notes, the watchdog would see no progress between the first turn and the last.
    """

    def __init__(self, engine: Engine, note_turn: Callable[[], None], wait: Callable[[float], None]) -> None:
        self._engine = engine
        self._note_turn = note_turn
        self._wait = wait
        self._fences: deque[Fence] = deque()
        self.turn = 0
        """The turn that is being enqueued."""

    @property
    def unfinished_turns(self) -> int:
        """How many turns before that one may not have finished, at least."""
        return len(self._fences)

    def end_turn(self, behind: int = _AHEAD) -> None:
        """Set a fence after a turn, and wait until at most `behind` fences have not passed."""
        if self._engine.synchronous:
            self._note_turn()
        else:
            self._fences.append(self._engine.fence())
            self.outlast(behind)

    def outlast(self, behind: int) -> None:
        """Wait until at most `behind` fences have not passed."""
        since = time.monotonic()
        while self._fences:
            if self._engine.has_passed(self._fences[0]):
                self._fences.popleft()
                self._note_turn()
                since = time.monotonic()
            elif len(self._fences) <= behind:
                return
            else:
                self._wait(time.monotonic() - since)
