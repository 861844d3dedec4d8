"""Promises of a service: futures that several threads wait for, and that its supervisor resolves."""

from __future__ import annotations

import concurrent.futures
import contextlib
from typing import Any, TypeVar

__all__ = ["kept_promise", "promise", "resolve"]

T = TypeVar("T")


def promise() -> concurrent.futures.Future[Any]:
    """A future that one waiter cannot cancel for the others."""
    found: concurrent.futures.Future[Any] = concurrent.futures.Future()
    found.set_running_or_notify_cancel()
    return found


def kept_promise(outcome: T) -> concurrent.futures.Future[T]:
    """A promise that is resolved already."""
    found = promise()
    found.set_result(outcome)
    return found


def resolve(of: concurrent.futures.Future[T], outcome: T | Exception) -> None:
    """Resolve a promise, unless it is resolved already. Its callbacks run on this thread."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        if isinstance(outcome, Exception):
            of.set_exception(outcome)
        else:
            of.set_result(outcome)
