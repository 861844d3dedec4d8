"""Threads that wait for short work of an event loop: to start one each time takes longer than such work."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from cudnn_actor.actors.threads import ThreadRefused, start_thread

__all__ = ["KeptThreads"]

T = TypeVar("T")


class _Job(NamedTuple):
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]
    work: Callable[[], Any]


class KeptThreads:
    """A few daemon threads, which neither the end of a loop nor that of the program waits for.

    Used on one event loop at a time. They refer to nothing of this object's owner, so that its finalizer may
    call `end`.

    Parameters
    ----------
    count
        How many threads there are, from the first work on.
    name
        The name of each of them.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._started = 0
        self.under_way = 0
        """How many works are waited for."""

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """The result of blocking work, once a thread has done it. Cancelled, it returns at once. Work that a
        thread has begun goes on, and other work is left out.

        Raises what the work raises, and `ThreadRefused` if the system gives not one thread. Not after `end`.
        """
        while self._started < self._count:
            target = partial(_work, self._jobs)
            try:
                start_thread(threading.Thread(target=target, name=self._name, daemon=True))
            except ThreadRefused:
                if not self._started:
                    raise
                break  # those that there are do the work of all
            self._started += 1
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._jobs.put(_Job(loop, done, partial(work, *args)))
        self.under_way += 1
        try:
            return await done
        finally:
            self.under_way -= 1

    def end(self) -> None:
        """End the threads once they have done their present work. Any thread; never blocks. Idempotent."""
        while self._started:
            self._started -= 1
            self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while _do_next(jobs):
        pass


def _do_next(jobs: queue.SimpleQueue[_Job | None]) -> bool:
    """Do one job. A function of its own: while the thread waits, nothing of the job before is kept."""
    if (job := jobs.get()) is None:
        return False
    if job.done.cancelled():  # nobody waits. A cancellation that comes now is as one of work that has begun
        return True
    try:
        result = job.work()
    except BaseException as error:  # noqa: BLE001 - whoever waits gets it
        outcome = partial(job.done.set_exception, error)
    else:
        outcome = partial(job.done.set_result, result)
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
        job.loop.call_soon_threadsafe(_settle, job.done, outcome)
    return True


def _settle(done: asyncio.Future[Any], outcome: Callable[[], None]) -> None:
    if not done.done():  # it may have been cancelled since
        outcome()
