"""Of several threads that send one has the host, wherever the interpreter goes from one to the other."""

from __future__ import annotations

import asyncio
import dis
import itertools
import os
import select
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import pytest

from cudnn_actor import CudnnRef, CudnnService, Ping, start
from cudnn_actor.workers.dispatcher import Dispatcher

PATIENCE_S = 30.0
TURN, SERVE, EXCHANGE = (one.__code__ for one in (Dispatcher.turn, Dispatcher._serve, Dispatcher._exchange))
ENOUGH = 4
"""Messages that a loop sends together without waiting for more."""


def behind_calls(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions that stand behind a call."""
    steps = list(dis.get_instructions(code))
    return frozenset(
        step.offset for last, step in itertools.pairwise(steps) if last.opname.startswith("CALL")
    )


BEHIND_CALLS = behind_calls(TURN)


class Mark:
    """Something that happens once. Waiting for it is no use of a lock, which tests refuse event loops."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC)

    def make(self, *_: object) -> None:
        os.eventfd_write(self._descriptor, 1)

    @property
    def is_there(self) -> bool:
        return self._polled(0.0)

    def wait(self) -> None:
        assert self._polled(PATIENCE_S)

    def _polled(self, within_s: float) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(1000 * within_s))

    def __del__(self) -> None:
        os.close(self._descriptor)


class Sender:
    """A thread with an event loop that sends."""

    def __init__(self, service: CudnnService) -> None:
        self._gpu = CudnnRef(service)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.asked: list[asyncio.Future[int]] = []

    def start_sending(self, messages: int, trace: Any = None) -> Mark:
        """Have it send so many pings together, traced; made when they are sent."""

        async def send() -> None:
            sys.settrace(trace)
            try:
                self.asked += [self._gpu.submit(Ping()) for _ in range(messages)]
            finally:
                sys.settrace(None)

        sent = Mark()
        asyncio.run_coroutine_threadsafe(send(), self._loop).add_done_callback(sent.make)
        return sent

    def answers(self) -> list[int]:
        async def gather() -> list[int]:
            return await asyncio.wait_for(asyncio.gather(*self.asked), PATIENCE_S)

        got = asyncio.run_coroutine_threadsafe(gather(), self._loop).result(PATIENCE_S)
        self.asked.clear()
        return got

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()


class Encounter:
    """One sends; while it has the host the other wishes for a turn, and at its n-th place comes for one."""

    def __init__(self, one: Sender, other: Sender, place: int) -> None:
        self._one, self._other, self._place = one, other, place
        self._wished = False
        self._at = -1
        self._visit: Mark | None = None
        self._came, self._go_on = Mark(), Mark()
        self._inside = False
        self.passed = 0
        self.met = False

    def happen(self) -> None:
        self._one.start_sending(1, self._trace_one).wait()
        self._go_on.make()
        if self._visit is not None:
            self._visit.wait()

    def _trace_one(self, frame: FrameType, _event: str, _: Any) -> Any:
        if frame.f_code is SERVE:
            self.met |= self._inside
        if frame.f_code is EXCHANGE and not (self._wished or self._inside):
            self._wished = True
            self._other.start_sending(1).wait()
        if frame.f_code is not TURN:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        # Behind a call, and after a jump back, the interpreter may go to another thread.
        before, self._at = self._at, frame.f_lasti
        if event == "opcode" and (self._at in BEHIND_CALLS or self._at < before):
            self.passed += 1
            if self.passed == self._place:
                self._visit = self._other.start_sending(ENOUGH, self._trace_other)
                while not (self._came.is_there or self._visit.is_there):
                    pass  # at the host, or without having found it free
        return self._step

    def _trace_other(self, frame: FrameType, _event: str, _: Any) -> Any:
        return self._stay if frame.f_code is SERVE else None

    def _stay(self, _frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and not self._came.is_there:
            self._inside = True
            self._came.make()
            self._go_on.wait()
        if event == "return":
            self._inside = False
        return self._stay


@pytest.fixture
def service() -> Iterator[CudnnService]:
    service = start(device="cpu", isolation="process")
    yield service
    service.stop(PATIENCE_S)


def test_wherever_a_turn_is_left_for_another_thread_one_of_both_has_the_desk(service: CudnnService) -> None:
    one, other = Sender(service), Sender(service)
    met, place, clean = [], 0, 0
    while clean < 3:
        for sender in (one, other):  # both read the socket, and nothing is in flight
            sender.start_sending(1).wait()
            assert sender.answers() == [1]
        place += 1
        encounter = Encounter(one, other, place)
        encounter.happen()
        assert {*one.answers(), *other.answers()} == {1}
        met += [place] if encounter.met else []
        clean += encounter.passed < place
    one.close()
    other.close()
    assert place > 4
    assert not met
    assert service.health().restarts == 0
