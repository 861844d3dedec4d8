"""What becomes of our objects in a forked child.

A forked child has a copy of everything but the other threads. Locks that those held stay locked for ever, and
whatever goes through a descriptor or a shared mapping is its parent's still: one read of a socket there takes
the parent's answer. So each object that has a lock, or something that is shared, is told when it finds itself
in a child. From then on it refuses its callers, before it takes a lock or touches anything.

There is one hook for all, which the interpreter runs in the child before `fork` returns there. It costs a
request nothing: objects change what a request looks at in any case.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

__all__ = ["Forkable", "call_in_child", "finalize", "watch"]


class Forkable(Protocol):
    """What is told that it is in a forked child."""

    def forget_parent(self) -> None:
        """Let go of all that is the parent's, and wait for nobody. In the child, on its only thread.

        Called once in each child, in no order among objects: so it relies on no other having been told.
        """


_T = TypeVar("_T", bound=Forkable)

_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_calls: list[Callable[[], None]] = []


def watch(one: _T) -> _T:
    """Have an object told of forks for as long as it lives. Returns it. Any thread; never blocks."""
    _watched.add(one)
    return one


def call_in_child(call: Callable[[], None]) -> None:
    """Have a function called in every child, before objects are told: for what a module or a class has."""
    _calls.append(call)


def finalize(owner: object, call: Callable[..., object], *args: Any) -> weakref.finalize[..., Any]:
    """`weakref.finalize` for what is outside the process: in a forked child nothing is called.

    It looks at the process's id, which needs no hook: the collector may run before that does.
    """
    return weakref.finalize(owner, _unless_forked, os.getpid(), call, *args)


def _unless_forked(process: int, call: Callable[..., object], *args: Any) -> None:
    if os.getpid() == process:
        call(*args)


def _in_child() -> None:
    failures = []
    for call in (*_calls, *[one.forget_parent for one in _watched]):
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the others are told all the same
            failures.append(error)
    if failures:  # the interpreter writes it to stderr, and `fork` returns
        raise ExceptionGroup("not everything has let go of what belongs to the parent process", failures)


os.register_at_fork(after_in_child=_in_child)
