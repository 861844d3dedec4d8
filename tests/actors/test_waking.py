"""`actors.waking`: a batch of results, and the tasks that wait for them."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterator
from typing import Any

import pytest

from cudnn_actor.actors.waking import Waking

_name: contextvars.ContextVar[str] = contextvars.ContextVar("_name")


def nothing(*_: object) -> None:
    """A callback that does nothing."""


async def turns() -> None:
    """Let the loop run what is ready, and what that makes ready."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("debug", [False, True])
async def test_tasks_run_in_order_in_their_contexts_and_then_comes_last(debug: bool) -> None:
    loop, ran = asyncio.get_running_loop(), list[Any]()
    loop.set_debug(debug)
    waking = Waking(loop, nothing, lambda: ran.append("then"))
    futures = [loop.create_future() for _ in range(3)]

    async def waits(future: asyncio.Future[int]) -> None:
        ran.append((await future, _name.get()))

    tasks = []
    for number, future in enumerate(futures):
        _name.set(f"task {number}")
        tasks.append(asyncio.ensure_future(waits(future)))
    await turns()
    waking.set_results(zip(futures, range(3), strict=True))
    assert all(future.done() for future in futures)
    assert not ran
    await asyncio.gather(*tasks)
    assert ran == [(0, "task 0"), (1, "task 1"), (2, "task 2"), "then"]


async def test_a_future_that_is_done_keeps_its_outcome() -> None:
    loop = asyncio.get_running_loop()
    waking = Waking(loop, nothing, nothing)
    cancelled, other, single = (loop.create_future() for _ in range(3))
    cancelled.cancel()
    waking.set_results([(cancelled, 1), (other, 2)])
    waking.set_result(cancelled, 1)
    waking.set_result(single, 3)
    assert cancelled.cancelled()
    assert (await other, await single) == (2, 3)


async def test_all_who_wait_for_one_future_are_woken() -> None:
    loop = asyncio.get_running_loop()
    waking, future = Waking(loop, nothing, nothing), loop.create_future()
    tasks = [asyncio.ensure_future(asyncio.wait_for(asyncio.shield(future), None)) for _ in range(3)]
    await turns()
    waking.set_results([(future, 7)])
    assert await asyncio.gather(*tasks) == [7, 7, 7]


async def test_the_callback_for_a_cancelled_future_is_not_called_with_a_result() -> None:
    loop, called = asyncio.get_running_loop(), list[Any]()
    callback = called.append
    waking = Waking(loop, callback, nothing)
    one, other = loop.create_future(), loop.create_future()
    for future in (one, other):
        future.add_done_callback(callback)
    waking.set_results([(one, 1)])
    waking.set_result(other, 2)
    await turns()
    assert not called


async def test_a_callback_that_raises_is_reported_and_the_others_run() -> None:
    loop, reported, ran = asyncio.get_running_loop(), list[Any](), list[Any]()
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    waking = Waking(loop, nothing, lambda: ran.append("then"))

    def fail(_: object) -> None:
        raise LookupError

    futures = [loop.create_future() for _ in range(3)]
    for future, callback in zip(futures, (fail, fail, ran.append), strict=True):
        future.add_done_callback(callback)
    waking.set_results((future, None) for future in futures)
    await turns()
    assert [type(error) for error in reported] == [LookupError, LookupError]
    assert ran == [futures[2], "then"]


async def test_those_whose_results_are_set_are_woken_if_a_later_one_fails() -> None:
    loop, ran = asyncio.get_running_loop(), list[Any]()
    waking = Waking(loop, nothing, lambda: ran.append("then"))
    futures = [loop.create_future() for _ in range(2)]
    for future in futures:
        future.add_done_callback(ran.append)

    def results() -> Iterator[tuple[asyncio.Future[Any], Any]]:
        yield from ((future, None) for future in futures)
        raise MemoryError

    with pytest.raises(MemoryError):
        waking.set_results(results())
    await turns()
    assert ran == [*futures, "then"]


async def test_a_task_that_is_cancelled_after_the_result_is_cancelled() -> None:
    loop = asyncio.get_running_loop()
    waking, future = Waking(loop, nothing, nothing), loop.create_future()

    async def waits() -> None:
        await future

    task = asyncio.ensure_future(waits())
    await turns()
    waking.set_results([(future, None)])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_it_tells_the_thread_only_while_it_wakes() -> None:
    loop, seen = asyncio.get_running_loop(), list[int]()
    waking, future = Waking(loop, nothing, nothing), loop.create_future()
    future.add_done_callback(lambda _: seen.append(waking.thread))
    waking.set_results([(future, None)])
    await turns()
    assert waking.thread == 0
    assert seen[0] != 0
