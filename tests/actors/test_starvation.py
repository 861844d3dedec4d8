"""A loop that never idles lets go of the GIL, but only where somebody seems to need it."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudnn_actor.actors import LoopBridge, Mailbox, ask, submit
from cudnn_actor.actors.starvation import FIRST_LOOK_S, LET_GO_S, StarvationWatch

from ..patience import PATIENCE_S
from .actor_fixtures import Caller, Gate, running

LOOK = FIRST_LOOK_S


class Clockwork:
    """A loop as the watch sees it: how much of each look it computed, and when its last reply came."""

    def __init__(self) -> None:
        self.now, self.computed, self.last_reply = 100.0, 0.0, 0.0
        self.watch = StarvationWatch(self.now, self.computed)
        self.pause = LOOK

    def look(self, *, busy: float, silent_s: float = 10.0) -> bool:
        self.now += self.pause
        self.computed += self.pause * busy
        self.last_reply = self.now - silent_s
        starving, self.pause = self.watch.look(self.now, self.computed, self.last_reply)
        return starving


def test_a_busy_loop_without_replies_lets_go() -> None:
    assert Clockwork().look(busy=1.0)


@pytest.mark.parametrize("busy", [0.0, 0.25, 0.7])
def test_a_loop_that_idles_a_quarter_of_the_time_never_does(busy: float) -> None:
    loop = Clockwork()
    assert not any(loop.look(busy=busy) for _ in range(100))


def test_a_busy_loop_whose_replies_keep_coming_never_does() -> None:
    loop = Clockwork()
    assert not any(loop.look(busy=1.0, silent_s=LOOK / 4) for _ in range(100))


def test_each_look_lets_go_as_long_as_that_brings_replies() -> None:
    loop = Clockwork()
    for _ in range(20):  # a reply came just after the last look, and none since
        assert loop.look(busy=1.0, silent_s=loop.pause * 0.9)
        assert loop.pause <= 2 * LOOK


def test_letting_go_that_brings_no_reply_becomes_rarer() -> None:
    loop = Clockwork()
    for _ in range(20):
        loop.look(busy=1.0)
    assert LET_GO_S / loop.pause <= 0.05


def test_an_idle_loop_is_looked_at_rarely() -> None:
    loop = Clockwork()
    for _ in range(20):
        loop.look(busy=0.0)
    assert loop.pause >= 10 * LOOK


def test_a_loop_that_gets_busy_is_looked_at_often_again() -> None:
    loop = Clockwork()
    for _ in range(20):
        loop.look(busy=0.0)
    loop.look(busy=1.0, silent_s=0.0)
    assert loop.pause == LOOK


def test_a_loop_whose_callers_send_one_message_after_the_other_is_looked_at_as_rarely_as_any() -> None:
    loop = Clockwork()
    for _ in range(20):
        loop.look(busy=0.0)
    pause = loop.pause
    loop.now += 3 * pause
    loop.computed += 3 * pause  # it was busy with what nobody waited for
    assert loop.watch.resume(loop.now, loop.computed)
    assert loop.watch.pause == pause
    assert not loop.look(busy=0.7)
    assert loop.pause == pause


def test_what_was_seen_of_a_loop_is_forgotten_soon() -> None:
    loop = Clockwork()
    assert loop.watch.resume(loop.now + 0.09, 0.0)
    assert not loop.watch.resume(loop.now + 0.2, 0.0)


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)), max_size=50))
def test_looks_are_never_too_often_nor_too_rare(history: list[tuple[float, float]]) -> None:
    loop = Clockwork()
    for busy, silent_s in history:
        loop.look(busy=busy, silent_s=silent_s)
        assert LOOK <= loop.pause <= 0.016


# The real thing.


async def test_a_real_busy_loop_lets_go_while_a_reply_is_due() -> None:
    bridge, gate = LoopBridge.of_running_loop(), Gate()
    before = bridge.let_go
    with running(Caller()) as actor:
        asked = asyncio.ensure_future(ask(actor.mailbox, gate))
        while bridge.let_go == before:  # noqa: ASYNC110 - it is to be busy
            await asyncio.sleep(0)
        gate.open()
        assert await asyncio.wait_for(asked, PATIENCE_S) == "opened"


async def test_a_real_busy_loop_with_nothing_due_is_left_alone() -> None:
    bridge = LoopBridge.of_running_loop()
    with running(Caller()) as actor:
        await ask(actor.mailbox, "hello")
    await no_look_is_left()
    before = bridge.let_go
    until = bridge.loop.time() + 20 * LOOK
    while bridge.loop.time() < until:  # noqa: ASYNC110 - it is to be busy
        await asyncio.sleep(0)
    assert bridge.let_go == before


async def test_a_real_loop_that_computes_nothing_never_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its own clock: any real loop computes for a while now and then, the longer the slower the machine.
    clocks = SimpleNamespace(monotonic=time.monotonic, thread_time=lambda: 0.0)
    monkeypatch.setattr("cudnn_actor.actors.bridge.time", clocks)
    bridge, opening = LoopBridge.of_running_loop(), asyncio.Event()
    gate = Gate()
    before = bridge.let_go
    with running(Caller()) as actor:
        asked = asyncio.ensure_future(ask(actor.mailbox, gate))
        bridge.loop.call_later(40 * LOOK, opening.set)
        await opening.wait()
        gate.open()
        await asked
    assert bridge.let_go == before


async def test_no_look_outlives_the_last_reply() -> None:
    with running(Caller()) as actor:
        for number in range(10):
            await ask(actor.mailbox, number)
    await no_look_is_left()


async def no_look_is_left() -> None:
    bridge = LoopBridge.of_running_loop()
    async with asyncio.timeout(PATIENCE_S):
        while bridge.watch is not None:  # noqa: ASYNC110 - it is nobody's event
            await asyncio.sleep(LOOK)


async def test_a_withdrawn_message_is_not_waited_for() -> None:
    mailbox, bridge = Mailbox(2), LoopBridge.of_running_loop()
    futures = [submit(mailbox, number) for number in range(2)]
    assert bridge.awaited == 2
    for future in futures:
        future.cancel()
    with running(Caller(mailbox=mailbox)) as actor:
        await ask(actor.mailbox, "behind them")
        assert bridge.awaited == 0


async def test_a_message_withdrawn_from_a_full_mailbox_is_not_waited_for() -> None:
    mailbox, bridge = Mailbox(2), LoopBridge.of_running_loop()
    for number in range(2):
        submit(mailbox, number).cancel()
    kept = submit(mailbox, "takes their place")
    with running(Caller(mailbox=mailbox)):
        assert await kept == "takes their place"
    assert bridge.awaited == 0


def test_a_loop_may_close_between_two_looks() -> None:
    with running(Caller()) as actor:
        for _ in range(3):
            asyncio.run(answered(actor))


async def answered(actor: Caller) -> None:
    assert await ask(actor.mailbox, "hello") == "hello"
    last = submit(actor.mailbox, "hello")  # the look that it asks for comes when the loop has closed
    assert LoopBridge.of_running_loop().watch is not None
    last.cancel()
