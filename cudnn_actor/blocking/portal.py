"""An event loop on a thread of its own, to which other threads hand calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from cudnn_actor.actors import forks
from cudnn_actor.actors.event_loop import tolerating_closed
from cudnn_actor.actors.pykka_future import ReplyFuture
from cudnn_actor.actors.threads import start_thread
from cudnn_actor.blocking.promise import Promise
from cudnn_actor.protocol.errors import ReentrantAsk, ServiceStopped, Words

__all__ = ["Portal"]

T = TypeVar("T")


class Portal:
    """Runs calls from any number of threads on one event loop. The calls of a thread begin in its order.

    Parameters
    ----------
    name
        The thread's name.

    Raises
    ------
    ThreadRefused
        The system cannot start a thread.
    """

    def __init__(self, name: str) -> None:
        self._lock = threading.RLock()
        """A lock that is held while a call is handed to the loop, so that none is handed to a loop that ends.
        It is re-entrant, since the collector may run another portal's `close_soon` at any place. It is a C
        lock, so that a signal handler that raises leaves it released."""
        self._open, self._forked = True, False
        self._calls: set[_Call] = set()
        """The calls that have begun and not ended. Only the loop's thread uses it."""
        self.ending: _Call | None = None
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            start_thread(self._thread)
        except BaseException:
            self.loop.close()
            raise
        forks.watch(self)

    def forget_parent(self) -> None:
        """Refuse calls in a forked child, which has no such thread."""
        self._open, self._forked, self._lock = False, True, threading.RLock()

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the loop, in the context of this thread, and wait for its result. Blocks.

        If a signal handler raises meanwhile (Ctrl-C), the coroutine is cancelled; a result is dropped.

        Raises
        ------
        ServiceStopped
            The portal is closed, or this is a forked child.
        ReentrantAsk
            This is the loop's own thread, which cannot wait for itself.
        BaseException
            The coroutine has raised it.
        """
        self.require_other_thread()
        reply = ReplyFuture()
        call = _Call(lambda: self.loop.create_task(work()), _Waiting(reply))
        try:
            self._hand_over(call)
            result: T = reply.get()
        except BaseException:
            if not call.failed:  # else it has ended
                self._cancel(call)
            raise
        finally:
            del call, reply  # an error refers to this frame, and these refer to the error
        return result

    def submit(
        self, send: Callable[[], asyncio.Future[T]], undo: Callable[[], None]
    ) -> concurrent.futures.Future[T]:
        """Call `send` on the loop, and return a future with the outcome of its future. Never blocks.

        If the returned future is cancelled, so is that of `send`, and `undo` is called. Raises
        `ServiceStopped`; the future raises all other errors of `send`.
        """
        future: Promise[T] = Promise()
        call = _Call(send, _Promised(future))

        def withdraw(done: concurrent.futures.Future[T]) -> None:
            if done.cancelled():
                undo()
                self._cancel(call)

        future.add_done_callback(withdraw)
        try:
            self._hand_over(call)
        except BaseException:  # a signal handler may have raised after the call was handed over
            future.cancel()
            raise
        return future

    def begin(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run a coroutine on the loop, whose outcome nobody is told, unless the portal is closed. Never
        blocks."""
        with contextlib.suppress(ServiceStopped):
            self._hand_over(_Call(lambda: self.loop.create_task(work()), _Dropped()))

    def close_soon(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Refuse further calls, run `end`, and then end the thread once all calls have ended.

        Idempotent: the first `end` counts. Any thread, also within a finalizer; never blocks.
        """
        with self._lock:
            if self._open and self.ending is None:
                self.ending = _Call(lambda: self.loop.create_task(self._finish(end)), _Dropped())
            if self._open and self.ending is not None:
                with tolerating_closed(self.loop):  # an interrupted call of this method has begun it
                    self.loop.call_soon_threadsafe(self.ending.begin, self._calls)
                # Last: if a signal handler raises before it, the next call of this method begins again, which
                # `begin` allows.
                self._open = False

    def close(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`close_soon`, and wait until the thread has ended. Idempotent. Blocks.

        If a signal handler raises meanwhile, `end` is cancelled, and its error is raised once the thread has
        ended. In a forked child it does nothing.
        """
        if self._forked:
            return
        self.require_other_thread()
        try:
            self.close_soon(end)
            self._thread.join()
        except BaseException:
            self.close_soon(end)
            with tolerating_closed(self.loop):  # then it has ended
                self.loop.call_soon_threadsafe(self._cancel_end)
            self._thread.join()
            raise

    def require_other_thread(self) -> None:
        """Raise `ReentrantAsk` if this is the loop's own thread."""
        if threading.get_ident() == self._thread.ident and not self._forked:
            raise ReentrantAsk(
                field="gpu",
                value=Words("a blocking call"),
                problem="came from a callback of one of its futures, whose thread must not wait",
                fix="make the call on another thread, as by concurrent.futures.ThreadPoolExecutor",
            )

    def _hand_over(self, call: _Call) -> None:
        with self._lock:
            if not self._open:
                raise ServiceStopped(reason="closed", forked=self._forked)
            self.loop.call_soon_threadsafe(call.begin, self._calls)

    def _cancel(self, call: _Call) -> None:
        """Cancel a call, or keep it from beginning. Any thread; never blocks."""
        call.wanted = False  # first: the call may not have begun
        if self._forked:
            return  # the loop is the parent's
        with tolerating_closed(self.loop):  # then it has ended
            self.loop.call_soon_threadsafe(call.cancel)

    def _cancel_end(self) -> None:
        """Cancel the end behind its first step: a task that is cancelled before that runs nothing at all.

        On the loop, behind `begin`, which `close_soon` has scheduled, and which schedules the first step.
        """
        if self.ending is not None:
            self.loop.call_soon(self.ending.cancel)

    async def _finish(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await end()
        finally:
            self.loop.stop()

    def _run(self) -> None:
        """Run the thread. Calls that are left after the end fail soon, since the service has ended."""
        loop = self.loop
        loop.run_forever()
        while left := [*(call.inner for call in self._calls if call.inner), *asyncio.all_tasks(loop)]:
            loop.run_until_complete(asyncio.wait(left))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class _Call:
    """One call: the work for the loop, and the receiver of the outcome. Only the loop's thread uses anything
    but `wanted`."""

    def __init__(self, start: Callable[[], asyncio.Future[Any]], told: _Told) -> None:
        self._start = start
        self._told = told
        self._calls: set[_Call] = set()
        self.inner: asyncio.Future[Any] | None = None
        self.wanted = True
        """Whether anybody waits for the call. Any thread may set it to False."""
        self.failed = False
        """Whether the outcome is an error."""

    def begin(self, calls: set[_Call]) -> None:
        """Start it, unless nobody waits any more, or it has begun."""
        if not self.wanted or self.inner is not None:
            return
        try:
            inner = self.inner = self._start()
        except Exception as error:  # noqa: BLE001 - whoever waits gets it
            self._tell(None, error)
            return
        self._calls = calls
        calls.add(self)
        inner.add_done_callback(self._end)

    def cancel(self) -> None:
        """Cancel it, if it has begun and not ended."""
        if self.inner is not None:
            self.inner.cancel()

    def _end(self, inner: asyncio.Future[Any]) -> None:
        self._calls.discard(self)
        error = concurrent.futures.CancelledError() if inner.cancelled() else inner.exception()
        self._tell(None if error is not None else inner.result(), error)

    def _tell(self, value: Any, error: BaseException | None) -> None:
        told, self._told = self._told, _Dropped()  # a future refers to this call, and would be in a cycle
        if error is None:
            told.value(value)
        else:
            self.failed = True  # first: the receiver reads it
            told.error(error)


class _Dropped:
    """Nobody is told the outcome."""

    def value(self, value: Any) -> None:
        """Take a result."""

    def error(self, error: BaseException) -> None:
        """Take an error."""


class _Waiting:
    """A thread that waits is told the outcome. Interrupted, it leaves no lock held, as `ReplyFuture` says."""

    def __init__(self, reply: ReplyFuture) -> None:
        self._reply = reply

    def value(self, value: Any) -> None:
        """Give it the result."""
        self._reply.set(value)

    def error(self, error: BaseException) -> None:
        """Give it the error."""
        self._reply.set_exception((type(error), error, error.__traceback__))


class _Promised:
    """A receiver that sets the caller's future, unless that was cancelled."""

    def __init__(self, future: concurrent.futures.Future[Any]) -> None:
        self._future = future

    def value(self, value: Any) -> None:
        """Give it the result."""
        if self._future.set_running_or_notify_cancel():  # from now on it cannot be cancelled
            self._future.set_result(value)

    def error(self, error: BaseException) -> None:
        """Give it the error."""
        if isinstance(error, concurrent.futures.CancelledError):
            self._future.cancel()
        if self._future.set_running_or_notify_cancel():
            self._future.set_exception(error)


_Told = _Dropped | _Waiting | _Promised
