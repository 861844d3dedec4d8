"""Blocking methods, made from methods for asyncio, with the same parameters and results."""

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
        """The object whose coroutine method runs, and a function that frees its result if the caller does not
        get it. The function never blocks."""


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Make a method of a `Blocks` that runs a coroutine method, and waits for its result.

    Type checkers, `help` and `inspect.signature` show the parameters and the result of the coroutine method.
    """

    @functools.wraps(method)
    def call(self: Blocks, /, *args: P.args, **kwargs: P.kwargs) -> T:
        target, undo = self._for_a_call()
        # The method is looked up by its name: the target's class may override it.
        work = functools.partial(getattr(target, method.__name__), *args, **kwargs)
        # `undo` is called here, and not in the portal: a signal handler may raise after the portal's `call`
        # has returned.
        try:
            result: T = self._portal.call(work)
        except BaseException:
            undo()
            raise
        return result

    return call


def nothing() -> None:
    """Do nothing: a result of these calls needs no freeing."""
