"""`actors.waking`: a batch of results, and the tasks that wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dis
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

import pytest

from cudnn_actor.actors.waking import Waking

from ..instructions import functions_in, instructions
from ..patience import PATIENCE_S

_name: contextvars.ContextVar[str] = contextvars.ContextVar("_name")


def nothing(*_: object) -> None:
    """A callback that does nothing."""


def waking_with(*, before: Callable[[], None] = nothing, after: Callable[[], None] = nothing) -> Waking:
    """A `Waking` of the running loop."""
    return Waking(asyncio.get_running_loop(), before=before, after=after)


async def woken_by(waking: Waking) -> None:
    """Have a callback of the loop wake those who wait."""
    asyncio.get_running_loop().call_soon(waking.wake)
    await asyncio.sleep(0)


async def turns() -> None:
    """Let the loop run what is ready, and what that makes ready."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("debug", [False, True])
async def test_tasks_run_in_order_in_their_contexts_between_before_and_after(debug: bool) -> None:
    loop, ran = asyncio.get_running_loop(), list[Any]()
    loop.set_debug(debug)
    waking = waking_with(before=lambda: ran.append("before"), after=lambda: ran.append("after"))
    futures = [loop.create_future() for _ in range(3)]

    async def waits(future: asyncio.Future[int]) -> None:
        ran.append((await future, _name.get()))

    tasks = []
    for number, future in enumerate(futures):
        _name.set(f"task {number}")
        tasks.append(asyncio.ensure_future(waits(future)))
    await turns()
    waking.set_results(futures, range(3))
    assert all(future.done() for future in futures)
    assert not ran
    assert bool(waking) is not debug
    await woken_by(waking)
    assert not waking
    woken = [(0, "task 0"), (1, "task 1"), (2, "task 2")]
    assert ran == ([*woken, "before", "after"] if debug else ["before", *woken, "after"])
    await asyncio.gather(*tasks)


async def test_a_future_that_is_done_keeps_its_outcome() -> None:
    loop, waking = asyncio.get_running_loop(), waking_with()
    cancelled, other, done = (loop.create_future() for _ in range(3))
    cancelled.cancel()
    done.set_result(0)
    waking.set_results([cancelled, other, done], [1, 2, 3])
    await woken_by(waking)
    assert cancelled.cancelled()
    assert (await other, await done) == (2, 0)


@pytest.mark.parametrize("others", [0, 3], ids=["alone", "beside futures of one task each"])
async def test_all_who_wait_for_one_future_are_woken(others: int) -> None:
    loop, waking = asyncio.get_running_loop(), waking_with()
    futures = [loop.create_future() for _ in range(1 + others)]
    tasks = [asyncio.ensure_future(asyncio.wait_for(asyncio.shield(futures[0]), None)) for _ in range(3)]
    tasks += [asyncio.ensure_future(asyncio.wait_for(future, None)) for future in futures[1:]]
    await turns()
    waking.set_results(futures, range(7, 8 + others))
    await woken_by(waking)
    assert await asyncio.gather(*tasks) == [7, 7, 7, *range(8, 8 + others)]


@pytest.mark.parametrize("awaited", [False, True])
async def test_the_callback_for_a_cancelled_future_is_not_called_with_a_result(awaited: bool) -> None:
    loop, called = asyncio.get_running_loop(), list[Any]()
    callback = called.append
    waking = waking_with()
    waking.if_cancelled = callback
    futures = [loop.create_future() for _ in range(2)]
    for future in futures:
        future.add_done_callback(callback)
    tasks = [asyncio.ensure_future(asyncio.wait_for(each, None)) for each in futures if awaited]
    await turns()
    waking.set_results(futures, [1, 2])
    await woken_by(waking)
    assert await asyncio.gather(*tasks) == ([1, 2] if awaited else [])
    await turns()
    assert not called


async def test_a_callback_that_raises_is_reported_and_the_others_run() -> None:
    loop, reported, ran = asyncio.get_running_loop(), list[Any](), list[Any]()
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    waking = waking_with(after=lambda: ran.append("after"))

    def fail(error: type[Exception]) -> Callable[[object], None]:
        def raises(_: object) -> None:
            raise error

        return raises

    futures = [loop.create_future() for _ in range(4)]
    callbacks = (fail(LookupError), fail(StopIteration), ran.append, ran.append)
    for future, callback in zip(futures, callbacks, strict=True):
        future.add_done_callback(callback)
    waking.set_results(futures, range(4))
    await woken_by(waking)
    await turns()
    assert [type(error) for error in reported] == [LookupError, StopIteration]
    assert [each for each in ran if each != "after"] == futures[2:]
    assert ran[-1] == "after"
    assert not waking


async def test_a_stop_iteration_of_the_last_callback_is_reported_too() -> None:
    loop, reported = asyncio.get_running_loop(), list[Any]()
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    waking = waking_with()
    futures = [loop.create_future() for _ in range(2)]

    def raises(_: object) -> None:
        raise StopIteration

    futures[0].add_done_callback(nothing)
    futures[1].add_done_callback(raises)
    waking.set_results(futures, range(2))
    await woken_by(waking)
    await turns()
    assert [type(error) for error in reported] == [StopIteration]
    assert not waking


async def test_an_interrupt_before_anybody_was_woken_loses_nobody() -> None:
    """As of a signal handler. Whoever has called `wake` may have it called again."""
    loop, ran = asyncio.get_running_loop(), list[Any]()
    interrupts = iter([KeyboardInterrupt])

    def before() -> None:
        for interrupt in interrupts:
            raise interrupt

    waking = waking_with(before=before)
    futures = [loop.create_future() for _ in range(2)]
    for future in futures:
        future.add_done_callback(ran.append)
    waking.set_results(futures, range(2))
    with pytest.raises(KeyboardInterrupt):
        waking.wake()
    assert not ran
    await turns()
    assert ran == futures


async def test_those_whose_results_are_set_are_woken_if_a_later_one_fails() -> None:
    """The other futures still have those who wait for them, in their contexts."""
    loop, ran = asyncio.get_running_loop(), list[Any]()
    waking = waking_with(after=lambda: ran.append("after"))
    futures = [loop.create_future() for _ in range(4)]
    for number, future in enumerate(futures):
        _name.set(f"task {number}")
        future.add_done_callback(lambda future: ran.append((future, _name.get())))

    def results() -> Iterator[int]:
        yield from range(2)
        raise MemoryError

    with pytest.raises(MemoryError):
        waking.set_results(futures, results())
    assert [future.done() for future in futures] == [True, True, False, False]
    waking.wake_soon()
    await turns()
    assert ran == [(futures[0], "task 0"), (futures[1], "task 1"), "after"]
    for future in futures[2:]:
        future.set_exception(LookupError())
        assert isinstance(future.exception(), LookupError)
    await turns()
    assert ran[3:] == [(futures[2], "task 2"), (futures[3], "task 3")]
    assert [type(future.exception()) for future in futures[2:]] == [LookupError, LookupError]


async def test_a_task_that_is_cancelled_after_the_result_is_cancelled() -> None:
    waking, future = waking_with(), asyncio.get_running_loop().create_future()

    async def waits() -> None:
        await future

    task = asyncio.ensure_future(waits())
    await turns()
    waking.set_results([future], [None])
    task.cancel()
    await woken_by(waking)
    with pytest.raises(asyncio.CancelledError):
        await task


def places_of(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions before which the interpreter runs signal handlers."""
    steps = list(dis.get_instructions(code))
    return frozenset(
        step.offset for last, step in itertools.pairwise(steps) if last.opname.startswith(("CALL", "RESUME"))
    )


@functools.cache
def places() -> dict[CodeType, frozenset[int]]:
    """Of each function of `actors.waking`. Looked for among all objects: once, and not for each handler."""
    return {code: places_of(code) for code in functions_in("/actors/waking.py")}


class Handler:
    """A signal handler that runs at one place of `actors.waking`, if there are so many."""

    def __init__(self, at: int, act: Callable[[], object]) -> None:
        self._left, self._act, self.has_run = at, act, False

    def armed(self) -> AbstractContextManager[None]:
        """Have it run in the block."""
        return instructions(places(), self._hear)

    def _hear(self, code: CodeType, offset: int) -> None:
        if offset in places()[code]:
            self._left -= 1
            if self._left == 0:
                self.has_run = True
                self._act()


async def waits(future: asyncio.Future[int], ran: list[Any]) -> None:
    """Note the result of a future, and what comes when it is awaited no more."""
    try:
        ran.append(await future)
        await asyncio.sleep(0)  # a task that is woken twice ends here too early, or with an error
        ran.append("went on")
    except asyncio.CancelledError:
        ran.append("cancelled")


@pytest.mark.parametrize("callback", ["", "for cancellation", "other"])
async def test_whoever_is_cancelled_at_any_place_is_woken_once_and_so_are_the_others(callback: str) -> None:
    """As by asyncio's own handler of SIGINT."""
    loop = asyncio.get_running_loop()
    waking = waking_with()
    if callback == "for cancellation":
        waking.if_cancelled = nothing
    for at in itertools.count(1):
        futures, ran = [loop.create_future() for _ in range(4)], [list[Any]() for _ in range(4)]
        if callback:
            futures[1].add_done_callback(nothing)
        tasks = [loop.create_task(waits(*each)) for each in zip(futures, ran, strict=True)]
        await asyncio.sleep(0)
        handler = Handler(at, tasks[2].cancel)
        with handler.armed():
            try:
                waking.set_results(futures, range(4))
                tries = 1
            except asyncio.InvalidStateError:
                tries = 2
        if tries == 2:
            waking.set_results(futures, range(4))
        await woken_by(waking)
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
        assert [ran[number] for number in (0, 1, 3)] == [[number, "went on"] for number in (0, 1, 3)]
        assert ran[2] == (["cancelled"] if handler.has_run else [2, "went on"])
        if not handler.has_run:
            break
    assert at > 5


async def test_all_get_their_results_but_whoever_is_cancelled_at_any_place() -> None:
    loop = asyncio.get_running_loop()
    waking = waking_with()
    for at in itertools.count(1):
        futures = [loop.create_future() for _ in range(4)]
        handler = Handler(at, futures[2].cancel)
        with handler.armed():
            waking.set_all_results(futures, range(4))
        await woken_by(waking)
        assert futures[2].cancelled() or futures[2].result() == 2
        assert [futures[number].result() for number in (0, 1, 3)] == [0, 1, 3]
        if not handler.has_run:
            break
    assert at > 5


class Interrupt(BaseException):
    """Of a signal handler."""


async def test_an_interrupt_at_any_place_loses_nobody_and_wakes_nobody_twice() -> None:
    loop = asyncio.get_running_loop()
    waking = waking_with()

    def interrupt() -> None:
        raise Interrupt

    for at in itertools.count(1):
        futures, ran = [loop.create_future() for _ in range(4)], [list[Any]() for _ in range(4)]
        tasks = [loop.create_task(waits(*each)) for each in zip(futures, ran, strict=True)]
        await asyncio.sleep(0)
        handler = Handler(at, interrupt)
        with contextlib.suppress(Interrupt), handler.armed():
            waking.set_results(futures, range(4))
        waking.wake_soon()
        for number, future in enumerate(futures):
            if not future.done():
                future.set_result(number)
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
        assert ran == [[number, "went on"] for number in range(4)]
        if not handler.has_run:
            break
    assert at > 5
