"""Replies for event loops: coalesced, in chunks, and no trouble when the loop has closed."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from cudnn_actor.actors import Envelope, LoopBridge, Mailbox, ask, submit
from cudnn_actor.protocol import NoEventLoop

from ..patience import PATIENCE_S
from .actor_fixtures import Caller, Gate, in_threads, running


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts the wake-ups asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.wake_ups = 0

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        self.wake_ups += 1
        return super().call_soon_threadsafe(callback, *args, context=context)


def run_on(loop: asyncio.AbstractEventLoop, main: Callable[[], Any]) -> Any:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main())


def posted(bridge: LoopBridge, count: int) -> list[asyncio.Future[Any]]:
    envelopes = [Envelope(n, future=bridge.loop.create_future(), bridge=bridge) for n in range(count)]
    for number, envelope in enumerate(envelopes):
        assert envelope.settle(number) is bridge
    futures = [envelope.future for envelope in envelopes]
    return [future for future in futures if future is not None]


def test_a_batch_of_replies_wakes_the_loop_once() -> None:
    loop = CountingLoop()

    async def main() -> None:
        bridge = LoopBridge.of_running_loop()
        futures = posted(bridge, 100)
        in_threads(*[bridge.wake] * 8)
        assert loop.wake_ups == 1
        assert await asyncio.gather(*futures) == list(range(100))
        more = posted(bridge, 1)
        bridge.wake()
        assert loop.wake_ups == 2
        assert await more[0] == 0

    run_on(loop, main)


async def test_the_loop_runs_other_callbacks_between_chunks_of_replies() -> None:
    bridge = LoopBridge.of_running_loop()
    futures = posted(bridge, 2_000)
    done_when_others_ran: list[int] = []

    def other() -> None:
        done_when_others_ran.append(sum(future.done() for future in futures))
        if not futures[-1].done():
            bridge.loop.call_soon(other)

    bridge.wake()
    bridge.loop.call_soon(other)
    await asyncio.gather(*futures)
    assert len(done_when_others_ran) > 4
    steps = [b - a for a, b in zip([0, *done_when_others_ran], done_when_others_ran, strict=False)]
    assert max(steps) <= 512


async def test_replies_posted_by_many_threads_all_arrive() -> None:
    bridge = LoopBridge.of_running_loop()
    envelopes = [Envelope(n, future=bridge.loop.create_future(), bridge=bridge) for n in range(2_000)]

    def post(part: list[Envelope]) -> None:
        for envelope in part:
            envelope.settle(envelope.message)
            bridge.wake()

    waiting = asyncio.gather(*[envelope.future for envelope in envelopes if envelope.future is not None])
    in_threads(*[lambda start=start: post(envelopes[start::4]) for start in range(4)])
    assert await asyncio.wait_for(waiting, PATIENCE_S) == list(range(2_000))


async def test_a_loop_has_one_bridge() -> None:
    assert LoopBridge.of_running_loop() is LoopBridge.of_running_loop()


def test_each_loop_has_its_own_bridge() -> None:
    async def bridge() -> LoopBridge:
        return LoopBridge.of_running_loop()

    assert asyncio.run(bridge()) is not asyncio.run(bridge())


def test_there_is_no_bridge_without_a_running_loop() -> None:
    with pytest.raises(NoEventLoop):
        LoopBridge.of_running_loop()


# Loops that close first.


def asked_and_left(actor: Caller, gate: Gate, discard: Callable[[Any], None] | None = None) -> None:
    """Ask from a loop that is gone before the reply comes."""

    async def main() -> None:
        submit(actor.mailbox, gate, discard=discard)
        gate.await_entry()

    asyncio.run(main())


def test_a_reply_to_a_closed_loop_is_counted_and_never_raised() -> None:
    with running(Caller()) as actor:
        asked_and_left(actor, gate := Gate())
        gate.open()
        assert actor.actor_ref.ask("alive", timeout=PATIENCE_S) == "alive"
        assert actor.mailbox.dropped == 1


def test_a_result_for_a_closed_loop_is_discarded_once() -> None:
    discarded: list[str] = []
    with running(Caller()) as actor:
        asked_and_left(actor, gate := Gate("an allocation"), discarded.append)
        gate.open()
        assert actor.actor_ref.ask("alive", timeout=PATIENCE_S) == "alive"
    assert discarded == ["an allocation"]


def test_of_many_threads_that_find_the_loop_closed_each_result_is_discarded_once() -> None:
    discarded: list[int] = []
    mailbox = Mailbox()

    async def main() -> list[Envelope]:
        bridge = LoopBridge.of_running_loop()
        for number in range(400):
            submit(mailbox, number, discard=discarded.append)
        assert bridge.awaited == 400
        return mailbox.take(400, 0.0)

    envelopes = asyncio.run(main())

    def answer(part: list[Envelope]) -> None:
        for envelope in part:
            bridge = envelope.settle(envelope.message)
            assert bridge is not None
            bridge.wake()

    in_threads(*[lambda start=start: answer(envelopes[start::4]) for start in range(4)])
    assert sorted(discarded) == list(range(400))
    assert mailbox.dropped == 400


def test_a_result_whose_wake_up_the_loop_did_not_live_to_see_is_discarded() -> None:
    """The wake-up was accepted, then the loop stopped and closed: its callback never runs."""
    discarded: list[str] = []
    loop, gate = asyncio.new_event_loop(), Gate("an allocation")
    with running(Caller()) as actor:

        async def main() -> None:
            submit(actor.mailbox, gate, discard=discarded.append)

        loop.run_until_complete(main())
        gate.open()
        assert actor.actor_ref.ask("behind it", timeout=PATIENCE_S) == "behind it"
        loop.close()
        assert asyncio.run(answered(actor)) == "another loop"
        assert actor.mailbox.dropped == 1
    assert discarded == ["an allocation"]


class WatchingLoop(asyncio.SelectorEventLoop):
    """Notes what had been discarded each time it was woken."""

    def __init__(self, discarded: list[str]) -> None:
        super().__init__()
        self.discarded = discarded
        self.seen: list[list[str]] = []

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        self.seen.append(list(self.discarded))
        return super().call_soon_threadsafe(callback, *args, context=context)


def test_what_a_closed_loop_left_is_discarded_before_another_loop_sees_its_reply() -> None:
    """So that what is discarded is in the mailbox before the next message of a caller that was answered."""
    discarded: list[str] = []
    left = asyncio.new_event_loop()
    mailbox = Mailbox()

    async def main() -> Envelope:
        submit(mailbox, "left", discard=discarded.append)
        return mailbox.take(1, 0.0)[0]

    envelope = left.run_until_complete(main())
    bridge = envelope.settle("an allocation")
    assert bridge is not None
    bridge.wake()
    loop = WatchingLoop(discarded)

    async def another() -> None:
        bridge = LoopBridge.of_running_loop()  # it finds the first loop open
        futures = posted(bridge, 1)
        left.close()
        bridge.wake()
        assert await futures[0] == 0

    run_on(loop, another)
    assert loop.seen[0] == ["an allocation"]


def test_a_loop_is_woken_though_what_a_closed_one_left_cannot_be_discarded() -> None:
    left, mailbox = asyncio.new_event_loop(), Mailbox()

    def refuse(_: object) -> None:
        raise MemoryError("no room to discard it")

    async def main() -> Envelope:
        submit(mailbox, "left", discard=refuse)
        return mailbox.take(1, 0.0)[0]

    envelope = left.run_until_complete(main())
    first = envelope.settle("an allocation")
    assert first is not None
    first.wake()

    async def another() -> None:
        bridge = LoopBridge.of_running_loop()
        futures = posted(bridge, 1)
        left.close()
        with pytest.raises(MemoryError):
            bridge.wake()
        async with asyncio.timeout(PATIENCE_S):
            assert await futures[0] == 0

    asyncio.run(another())


def test_a_collection_of_garbage_may_wake_other_loops_while_closed_ones_are_looked_for() -> None:
    """Other threads may run in it. Before Python 3.12, any new container may bring one."""
    loops = [asyncio.new_event_loop() for _ in range(40)]

    async def bridge_of() -> LoopBridge:
        return LoopBridge.of_running_loop()

    first, *others = [loop.run_until_complete(bridge_of()) for loop in loops]
    first.wake()

    def wake_another(*_: object) -> None:
        if others:
            others.pop().wake()

    before = gc.get_threshold()
    gc.callbacks.append(wake_another)
    gc.set_threshold(1)
    try:
        for _ in range(40):
            LoopBridge.drop_closed()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(wake_another)
    for loop in loops:
        loop.close()
    LoopBridge.drop_closed()


def test_a_reply_behind_a_wake_up_that_never_ran_is_counted_too() -> None:
    mailbox, loop = Mailbox(), asyncio.new_event_loop()

    async def main() -> list[Envelope]:
        submit(mailbox, "first")
        submit(mailbox, "second")
        return mailbox.take(2, 0.0)

    first, second = loop.run_until_complete(main())
    for envelope in (first, second):
        bridge = envelope.settle("too late")
        assert bridge is not None
        bridge.wake()
        loop.close()
    assert mailbox.dropped == 2


class ClosingLoop(asyncio.SelectorEventLoop):
    """Closes in the very moment in which it is woken."""

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        self.close()
        return super().call_soon_threadsafe(callback, *args, context=context)


def test_a_loop_that_closes_between_the_question_and_the_wake_up_raises_nothing() -> None:
    mailbox, loop = Mailbox(), ClosingLoop()

    async def main() -> Envelope:
        submit(mailbox, "message")
        return mailbox.take(1, 0.0)[0]

    envelope = loop.run_until_complete(main())
    bridge = envelope.settle("too late")
    assert bridge is not None
    bridge.wake()
    assert mailbox.dropped == 1


async def answered(actor: Caller) -> Any:
    return await ask(actor.mailbox, "another loop")
