"""How our objects behave in a forked child.

A forked child has a copy of everything but the other threads. A lock that another thread held stays locked
for ever. Descriptors and shared mappings still belong to the parent: one read of a socket in the child takes
the parent's answer. So each object that has a lock or a shared resource is told that it is in a child. From
then on it refuses its callers before it takes a lock or touches a resource.

One hook serves all objects. The interpreter runs it in the child before `fork` returns there. It costs a
request nothing: an object changes fields that a request reads in any case.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

__all__ = ["Forkable", "call_in_child", "finalize", "watch"]


class Forkable(Protocol):
    """An object that is told that it is in a forked child."""

    def forget_parent(self) -> None:
        """Drop everything that belongs to the parent, without waiting. In the child, on its only thread.

        Called once in each child, in no particular order: it must not rely on other objects having been told.
        """


_T = TypeVar("_T", bound=Forkable)

_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_calls: list[Callable[[], None]] = []


def watch(one: _T) -> _T:
    """Register an object to be told of forks while it lives. Returns it. Any thread; never blocks."""
    _watched.add(one)
    return one


def call_in_child(call: Callable[[], None]) -> None:
    """Register a function to call in every child before objects are told: for module and class state."""
    _calls.append(call)


def finalize(owner: object, call: Callable[..., object], *args: Any) -> weakref.finalize[..., Any]:
    """`weakref.finalize` for a resource outside the process: in a forked child nothing is called.

    It compares process ids instead of using the hook: the collector may run before the hook does.
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
        except Exception as error:  # noqa: BLE001 - the other objects must still be told
            failures.append(error)
    if failures:  # the interpreter writes it to stderr, then `fork` returns
        raise ExceptionGroup("some objects did not drop what belongs to the parent process", failures)


os.register_at_fork(after_in_child=_in_child)
