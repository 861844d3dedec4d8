"""The future that `submit` returns here: it leaves no lock held when its waiter is interrupted.

`concurrent.futures.Future` takes a `threading.Condition` by `with`, which runs Python code. A signal handler
may raise between the acquisition and the `with` block, and then the lock stays held. The thread that sets the
result would wait for the lock for ever, and so would all other callers.

One case is not prevented: if a handler raises while `Condition.wait` has released the lock, the interrupted
wait raises `RuntimeError`, with the handler's exception as its context.
"""

from __future__ import annotations

import concurrent.futures
import operator
import threading
from typing import Any, TypeVar

__all__ = ["Promise"]

T = TypeVar("T")


class _Condition(threading.Condition):
    """A condition that is entered and left by the lock's own methods, which are C, where no handler runs."""

    __enter__: Any = property(operator.attrgetter("_lock.__enter__"))
    __exit__: Any = property(operator.attrgetter("_lock.__exit__"))


class Promise(concurrent.futures.Future[T]):
    """A future of the standard library; see the module's docstring."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = _Condition()
