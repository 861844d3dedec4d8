"""Threads that are kept for the short work of an event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from cudnn_actor.actors import kept_threads
from cudnn_actor.actors.kept_threads import KeptThreads
from cudnn_actor.actors.threads import ThreadRefused, start_thread

from ..patience import PATIENCE_S

NAME = "kept for a test"


@pytest.fixture
def kept() -> Iterator[KeptThreads]:
    threads = KeptThreads(2, NAME)
    yield threads
    threads.end()
    for each in mine():
        each.join(PATIENCE_S)
    assert not mine()


def mine() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == NAME]


async def test_the_same_threads_do_all_work(kept: KeptThreads) -> None:
    ran_by = await asyncio.gather(*(kept.run(threading.get_ident) for _ in range(20)))
    assert set(ran_by) <= {each.ident for each in mine()}
    assert len(mine()) == 2


async def test_none_is_started_before_there_is_work(kept: KeptThreads) -> None:
    assert not mine()
    assert await kept.run(divmod, 7, 3) == (2, 1)


async def test_those_that_the_system_gives_do_all_work(
    kept: KeptThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = 0

    def start_some(thread: threading.Thread) -> None:
        if len(mine()) == given:
            raise ThreadRefused("there are enough")
        start_thread(thread)

    monkeypatch.setattr(kept_threads, "start_thread", start_some)
    with pytest.raises(ThreadRefused):
        await kept.run(divmod, 7, 3)
    given = 1
    assert await kept.run(divmod, 7, 3) == (2, 1)
    given = 2
    assert await kept.run(divmod, 7, 3) == (2, 1)
    assert len(mine()) == 2


async def test_two_works_are_done_at_a_time(kept: KeptThreads) -> None:
    both = threading.Barrier(2)
    await asyncio.gather(kept.run(both.wait, PATIENCE_S), kept.run(both.wait, PATIENCE_S))


async def test_whoever_waits_gets_the_error(kept: KeptThreads) -> None:
    with pytest.raises(ZeroDivisionError):
        await kept.run(divmod, 1, 0)
    assert await kept.run(divmod, 7, 3) == (2, 1)


async def test_a_wait_that_is_cancelled_ends_at_once_and_the_work_goes_on(kept: KeptThreads) -> None:
    begun, go_on, gone_on = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(PATIENCE_S)
        gone_on.set()

    waiting = asyncio.ensure_future(kept.run(work))
    await kept.run(begun.wait, PATIENCE_S)
    assert kept.under_way == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert kept.under_way == 0
    assert not gone_on.is_set()
    go_on.set()
    assert await kept.run(gone_on.wait, PATIENCE_S)


async def test_work_that_no_thread_has_begun_is_left_out_if_it_is_cancelled(kept: KeptThreads) -> None:
    go_on, done = threading.Event(), list[int]()
    under_way = [asyncio.ensure_future(kept.run(go_on.wait, PATIENCE_S)) for _ in range(2)]
    waiting = [asyncio.ensure_future(kept.run(done.append, k)) for k in range(8)]
    await asyncio.sleep(0)
    for task in waiting[:-1]:
        task.cancel()
    await asyncio.gather(*waiting[:-1], return_exceptions=True)
    go_on.set()
    await asyncio.gather(*under_way, waiting[-1])
    assert done == [7]


async def test_nothing_of_a_work_is_kept_while_the_threads_wait(kept: KeptThreads) -> None:
    class Large:
        def __call__(self) -> None:
            pass

    large = Large()
    gone = weakref.ref(large, lambda _: collected.set())
    collected = threading.Event()
    await kept.run(large)
    del large
    assert await kept.run(collected.wait, PATIENCE_S)
    assert gone() is None


async def test_the_threads_keep_no_owner_alive() -> None:
    class Owner:
        def __init__(self) -> None:
            self.threads = KeptThreads(1, NAME)
            weakref.finalize(self, self.threads.end)

    owner = Owner()
    await owner.threads.run(int)
    (thread,) = mine()
    del owner
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
