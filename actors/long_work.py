"""Long work beside an event loop, which ends soon after nobody waits for it any more."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from cudnn_actor.actors.threads import start_thread

__all__ = ["check_wanted", "in_own_thread"]

T = TypeVar("T")
_given_up: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("given_up", default=None)
"""An event of the work that runs in this thread: set once nobody waits for that work."""


class _Abandoned(BaseException):
    """Raised in work that nobody waits for. It is no `Exception`, so that nothing on its way takes it."""


def check_wanted() -> None:
    """End the work of this thread if nobody waits for it any more. Called between the steps of long work."""
    given_up = _given_up.get()
    if given_up is not None and given_up.is_set():
        raise _Abandoned


async def in_own_thread(work: Callable[..., T], *args: Any) -> T:
    """The result of blocking work. Cancelled, it returns at once, and the work ends at its next step.

    It has a thread of its own, which neither the end of the loop nor that of the program waits for: those of
    `asyncio.to_thread` are joined by both. Raises `ThreadRefused` if the system gives none.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    given_up = threading.Event()

    def settle(outcome: Callable[[], None]) -> None:
        if not done.done():  # it may have been cancelled since
            outcome()

    def run() -> None:
        _given_up.set(given_up)
        try:
            result = work(*args)
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            # `error` itself is gone when the loop calls; and no future takes a `StopIteration`.
            reason = RuntimeError(repr(error)) if isinstance(error, StopIteration) else error
            outcome: Callable[[], None] = lambda: done.set_exception(reason)  # noqa: E731
        else:
            outcome = lambda: done.set_result(result)  # noqa: E731
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, outcome)

    context = contextvars.copy_context()  # where `run` sets its variable, and no other work does
    name = getattr(work, "__name__", None)  # a `functools.partial` has none
    start_thread(threading.Thread(target=context.run, args=(run,), name=name, daemon=True))
    try:
        return await done
    finally:
        given_up.set()
