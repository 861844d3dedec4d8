"""HTTP connections of uvicorn, with bounds on what a client may leave half done, and one write an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["MOST_HEADERS", "BoundedConnection"]

MOST_HEADERS = 64 << 10
"""The most bytes of a request's first line and headers."""
_HEADERS_S = 30.0
"""Seconds in which the headers of a connection's first request must have come."""


class _OneWrite:
    """A transport that sends what is written in one turn of the loop at once.

    uvicorn writes the head of an answer and its body apart, and small parts that leave one by one cost each
    a system call, and a client that waits for a second packet up to 40 ms.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Send it at the end of this turn of the loop."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        """Send what is written, and close."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts:
            self._transport.write(b"".join(parts))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedConnection(H11Protocol):
    """A connection that is closed if no request has begun in time. Requests have it as `state.connection`."""

    lost = False
    """Whether it has ended."""
    on_lost: Callable[[], object] | None = None
    """Called when it ends."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin: uvicorn writes through a transport that joins what it writes."""
        self.app_state = {"connection": self}
        super().connection_made(_OneWrite(transport, self.loop))  # type: ignore[arg-type]
        self._opening = self.loop.call_later(_HEADERS_S, self._check_begun)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._opening.cancel()
        super().connection_lost(exc)
        self.lost = True
        if self.on_lost is not None:
            self.on_lost()

    def _check_begun(self) -> None:
        begun: object = self.cycle
        if begun is None:
            self.transport.close()
