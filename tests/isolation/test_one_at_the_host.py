"""Of the owning loop and the monitor one has the host, wherever the interpreter changes threads."""

from __future__ import annotations

import asyncio
import dis
import itertools
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

import pytest

from cudnn_actor import CudnnRef, CudnnService, start
from cudnn_actor.actors import Envelope, LoopBridge
from cudnn_actor.broker.request_checks import check_message
from cudnn_actor.isolation.process.parent.dispatcher import Dispatcher
from cudnn_actor.isolation.process.parent.straight_path import send_alone
from cudnn_actor.messages import Ping
from tests.service.rigs import Trio

from ..inside import host_is_awaited
from ..instructions import Hear, instructions
from ..patience import PATIENCE_S

LOOKS = 2000
"""A thread that has waited for so many looks at it is stuck."""
WITH_THE_HOST = [Dispatcher.serve.__code__, send_alone.__code__]
"""The functions that have the host."""
RETURNS = {
    (code, step.offset)
    for code in WITH_THE_HOST
    for step in dis.get_instructions(code)
    if step.opname.startswith("RETURN")
}
STEPS = [Dispatcher.await_host, Dispatcher.hold.__wrapped__, Dispatcher.turn]  # type: ignore[attr-defined]


def hearing(hear: Hear) -> AbstractContextManager[None]:
    return instructions([*WITH_THE_HOST, *(each.__code__ for each in STEPS)], hear)


def deaf(_code: CodeType, _offset: int) -> None:
    """Hear of nothing."""


def behind_calls(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions that stand behind a call."""
    steps = list(dis.get_instructions(code))
    return frozenset(
        step.offset for last, step in itertools.pairwise(steps) if last.opname.startswith("CALL")
    )


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


class Loop:
    """The event loop that owns the socket, on a thread of its own."""

    def __init__(self, service: CudnnService) -> None:
        self._gpu = CudnnRef(service)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._asked: list[asyncio.Future[int]] = []

    def start_a_turn(self, hear: Hear) -> Mark:
        """Have it send a request, and be told of what it does meanwhile; made when it has been sent."""

        async def send() -> None:
            with hearing(hear):
                self._asked.append(self.send())

        sent = Mark()
        asyncio.run_coroutine_threadsafe(send(), self._loop).add_done_callback(sent.make)
        return sent

    def send(self) -> asyncio.Future[int]:
        """Send a ping. On the loop."""
        return self._gpu.submit(Ping())

    def answers(self) -> list[int]:
        """What has been asked, all of it answered."""

        async def gather() -> list[int]:
            return await asyncio.wait_for(asyncio.gather(*self._asked), PATIENCE_S)

        got = asyncio.run_coroutine_threadsafe(gather(), self._loop).result(PATIENCE_S)
        self._asked.clear()
        return got

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()


class StraightLoop(Loop):
    """Such a loop, whose requests take the straight path where they may."""

    def __init__(self, service: CudnnService) -> None:
        super().__init__(service)
        self._state = service.state
        self.went_straight = 0
        trio = asyncio.run_coroutine_threadsafe(Trio.on(self._gpu), self._loop).result(PATIENCE_S)
        self._message = trio.product()

    def send(self) -> asyncio.Future[int]:
        answer, answered = self._loop.create_future(), self._loop.create_future()
        answer.add_done_callback(lambda _: answered.set_result(1))
        found, mailbox = check_message(self._state, self._message, {}), self._state.mailbox
        envelope = Envelope(self._message, future=answer, bridge=LoopBridge.of_running_loop(), found=found)
        if mailbox.admit_alone(envelope):
            self.went_straight += 1
        else:
            mailbox.admit(envelope)
        return answered


class Monitor:
    """A thread that takes the turns of a monitor: it waits until the host is free."""

    def __init__(self, service: CudnnService) -> None:
        mailbox = service.state.mailbox
        assert isinstance(mailbox, Dispatcher)
        self._dispatcher = mailbox

    def start_a_turn(self, hear: Hear) -> Mark:
        done = Mark()

        def take_it() -> None:
            try:
                with hearing(hear), self._dispatcher.monitors_turn():
                    pass
            finally:
                done.make()

        threading.Thread(target=take_it, daemon=True).start()
        return done

    @property
    def waits(self) -> bool:
        return host_is_awaited(self._dispatcher)


class Encounter:
    """One takes a turn, and at its n-th place, where the interpreter may go to another thread, another comes.

    Parameters
    ----------
    steps
        The function in which places are counted.
    place
        Which one it is.
    comes
        Begins the other's turn.
    goes_away
        Whether the other is done, or waits, without having had the host.
    """

    def __init__(
        self,
        steps: CodeType,
        place: int,
        comes: Callable[[Hear], Mark],
        goes_away: Callable[[Mark], bool],
    ) -> None:
        self._steps, self._place = steps, place
        self._places = behind_calls(steps)
        self._comes, self._goes_away = comes, goes_away
        self._at = -1
        self._visit: Mark | None = None
        self._came, self._go_on = Mark(), Mark()
        self._inside = False
        self.passed = 0
        self.met = False

    def happen(self, start: Callable[[Hear], Mark], is_stuck: Callable[[], bool]) -> None:
        """Have one begin, and both end. The other keeps the host until the one is done, or is stuck."""
        done, stuck = start(self._hear_one), 0
        while not done.is_there and stuck < LOOKS:
            stuck = stuck + 1 if is_stuck() else 0
        self._go_on.make()
        done.wait()
        if self._visit is not None:
            self._visit.wait()

    def _hear_one(self, code: CodeType, offset: int) -> None:
        if code in WITH_THE_HOST:
            self.met |= self._inside
        if code is not self._steps:
            return
        # Behind a call, and after a jump back, the interpreter may go to another thread.
        before, self._at = self._at, offset
        if self._at in self._places or self._at < before:
            self.passed += 1
            if self.passed == self._place:
                self._visit = self._comes(self._hear_other)
                while not (self._came.is_there or self._goes_away(self._visit)):
                    pass

    def _hear_other(self, code: CodeType, offset: int) -> None:
        if code not in WITH_THE_HOST:
            return
        if not self._came.is_there:
            self._inside = True
            self._came.make()
            self._go_on.wait()
        self._inside = (code, offset) not in RETURNS


@pytest.fixture
def service() -> Iterator[CudnnService]:
    service = start(device="cpu", isolation="process")
    yield service
    service.stop(PATIENCE_S)


def met_at(loop: Loop, encounter_at: Callable[[int], Encounter]) -> list[int]:
    """The places at which both had the host, of encounters at one place after another."""
    met, place, clean = [], 0, 0
    while clean < 3:
        loop.start_a_turn(deaf).wait()
        assert loop.answers() == [1]  # it reads the socket, and nothing is in flight
        place += 1
        encounter = encounter_at(place)
        assert {*loop.answers()} <= {1}
        met += [place] if encounter.met else []
        clean = clean + 1 if encounter.passed < place else 0  # in a row: a turn may find nothing to do
    assert place > 4
    return met


def test_a_monitor_that_comes_amid_a_turn_of_the_loop_waits_for_its_end(service: CudnnService) -> None:
    loop, monitor = Loop(service), Monitor(service)

    def encounter_at(place: int) -> Encounter:
        steps = Dispatcher.turn.__code__
        encounter = Encounter(
            steps, place, monitor.start_a_turn, lambda visit: visit.is_there or monitor.waits
        )
        encounter.happen(loop.start_a_turn, lambda: False)
        return encounter

    assert not met_at(loop, encounter_at)
    loop.close()
    assert service.health().restarts == 0


def test_a_monitor_that_comes_amid_a_straight_request_waits_for_its_end(service: CudnnService) -> None:
    loop, monitor = StraightLoop(service), Monitor(service)

    def encounter_at(place: int) -> Encounter:
        encounter = Encounter(
            send_alone.__code__, place, monitor.start_a_turn, lambda visit: visit.is_there or monitor.waits
        )
        encounter.happen(loop.start_a_turn, lambda: False)
        return encounter

    assert not met_at(loop, encounter_at)
    assert loop.went_straight > 4
    loop.close()
    assert service.health().restarts == 0


@pytest.mark.parametrize("steps", STEPS)
def test_a_straight_request_that_comes_amid_a_turn_of_the_monitor_leaves_it_to_him(
    service: CudnnService, steps: Callable[..., Any]
) -> None:
    loop, monitor = StraightLoop(service), Monitor(service)

    def encounter_at(place: int) -> Encounter:
        encounter = Encounter(steps.__code__, place, loop.start_a_turn, lambda visit: visit.is_there)
        encounter.happen(monitor.start_a_turn, lambda: monitor.waits)
        return encounter

    assert not met_at(loop, encounter_at)
    assert loop.went_straight > 4
    loop.close()
    assert service.health().restarts == 0


@pytest.mark.parametrize("steps", STEPS)
def test_a_loop_that_comes_amid_a_turn_of_the_monitor_leaves_it_to_him(
    service: CudnnService, steps: Callable[..., Any]
) -> None:
    loop, monitor = Loop(service), Monitor(service)

    def encounter_at(place: int) -> Encounter:
        encounter = Encounter(steps.__code__, place, loop.start_a_turn, lambda visit: visit.is_there)
        encounter.happen(monitor.start_a_turn, lambda: monitor.waits)
        return encounter

    assert not met_at(loop, encounter_at)
    loop.close()
    assert service.health().restarts == 0
