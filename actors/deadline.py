"""The end of a call that sends several requests, or waits for other work too.

The deadline of a single request is its envelope's: `Envelope.expire` says what happens when it passes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType

from cudnn_actor.protocol.errors import DeadlineExceeded, InvalidRequest
from cudnn_actor.protocol.types.checks import is_finite

__all__ = ["Deadline", "require_timeout", "within"]


class Deadline:
    """When a call ends, which may send any number of requests.

    Each request gets `left_s` as its timeout. Other work is awaited in `limiting`.

    Parameters
    ----------
    timeout
        Seconds from now; None for no end.
    """

    __slots__ = ("_at", "_timeout")

    def __init__(self, timeout: float | None = None) -> None:
        require_timeout(timeout)
        self._timeout = timeout
        self._at = None if timeout is None else time.monotonic() + timeout

    @property
    def left_s(self) -> float | None:
        """Seconds that are left, at least 0; None without an end."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    @asynccontextmanager
    async def limiting(self) -> AsyncIterator[None]:
        """Cancel the body when the deadline passes, and raise `DeadlineExceeded` in its place."""
        try:
            async with asyncio.timeout(self.left_s) as limit:
                yield
        except TimeoutError as error:
            # A `DeadlineExceeded` of the body is a `TimeoutError`, too: it knows whether its request started.
            if self._timeout is None or not limit.expired() or isinstance(error, DeadlineExceeded):
                raise
            raise DeadlineExceeded(timeout_s=self._timeout, started=False) from None


class _Within(Deadline):
    """See `within`. A class, since a generator costs each call two microseconds."""

    __slots__ = ()

    def __enter__(self) -> Deadline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timeout = self._timeout
        if isinstance(error, DeadlineExceeded) and timeout is not None and error.timeout_s != timeout:
            raise DeadlineExceeded(timeout_s=timeout, started=error.started) from None


def within(timeout: float | None) -> _Within:
    """The deadline of a call: a `DeadlineExceeded` of one of its requests names the call's own timeout.

    Raises `InvalidRequest` if `timeout` is no number of seconds, before anything is sent.
    """
    return _ENDLESS if timeout is None else _Within(timeout)


def require_timeout(timeout: object) -> None:
    """Raise `InvalidRequest` unless this is a number of seconds, at least 0, or None."""
    if timeout is not None and (not is_finite(timeout) or timeout < 0):
        raise InvalidRequest(
            field="timeout",
            value=timeout,
            problem="must be a number of seconds ≥ 0, or None",
            fix="use None to wait forever",
        )


_ENDLESS = _Within()
"""The deadline of all calls without a timeout: nothing in it changes."""
