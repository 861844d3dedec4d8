"""Blocking methods, made of those for asyncio: each has the same parameters and gives the same result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from cudnn_actor.blocking.portal import Portal

__all__ = ["Blocks", "blocking", "nothing"]

P = ParamSpec("P")
T = TypeVar("T")


class Blocks(Protocol):
    """An object whose methods block."""

    _portal: Portal

    def _for_a_call(self) -> tuple[Any, Callable[[], None]]:
        """The object whose coroutine method is to run, and what frees its result if the caller does not get
        it: never blocks."""


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """The method of a `Blocks` that runs a coroutine method, and waits for its result.

    Type checkers, `help` and `inspect.signature` show the parameters and the result of that one.
    """

    @functools.wraps(method)
    def call(self: Blocks, /, *args: P.args, **kwargs: P.kwargs) -> T:
        target, undo = self._for_a_call()
        # By its name: the target's class may have a method of its own.
        work = functools.partial(getattr(target, method.__name__), *args, **kwargs)
        # Here, and not in the portal: a signal handler may raise as late as that has returned.
        try:
            result: T = self._portal.call(work)
        except BaseException:
            undo()
            raise
        return result

    return call


def nothing() -> None:
    """Free nothing: the result needs it not."""
