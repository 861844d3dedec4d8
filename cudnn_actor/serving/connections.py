"""HTTP connections of uvicorn, with limits for requests that clients leave unfinished, and one write for each
answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

__all__ = ["MOST_HEADERS", "BoundedConnection"]

MOST_HEADERS = 64 << 10
"""The most bytes of a request's first line and headers."""
_HEADERS_S = 30.0
"""Seconds within which the headers of a request must arrive: of the first one from the connection's start on,
of a later one from its first bytes on. (Between requests, a connection may be silent for longer.) The rest of
a body whose request was answered early has as much time."""


class _OneWrite:
    """A transport that collects the writes of one iteration of the event loop, and sends them together.

    uvicorn writes the head of an answer and its body separately. If small parts are sent one by one, each
    costs a system call, and a client may wait up to 40 ms for the second packet.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Send the data at the end of this iteration of the event loop."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        """Send the collected data, and close."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts:
            self._transport.write(b"".join(parts))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedConnection(H11Protocol):
    """A connection that is closed if the headers of a request have not arrived in time. A request finds it as
    `state.connection`."""

    lost = False
    """Whether the connection has ended."""
    _opening: asyncio.TimerHandle | None = None
    """The timer that closes the connection if the headers for which it waits do not arrive."""
    on_lost: Callable[[], object] | None = None
    """This is called when the connection ends."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the connection: uvicorn gets a transport that joins its writes."""
        self.app_state = {"connection": self}
        super().connection_made(_OneWrite(transport, self.loop))  # type: ignore[arg-type]
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request."""
        super().data_received(data)
        if self._opening is None:
            if self._is_between:  # the data are the first bytes of headers, or of the rest of a body
                self._wait_for_headers()
        elif not self._is_between:
            self._opening.cancel()
            self._opening = None

    def on_response_complete(self) -> None:
        """Go on with what has arrived behind the request that was answered."""
        super().on_response_complete()
        if self._opening is None and self._is_between and self.conn.trailing_data[0]:
            self._wait_for_headers()

    @property
    def _is_between(self) -> bool:
        """Whether no request has begun since the last one was answered."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    def _wait_for_headers(self) -> None:
        self._opening = self.loop.call_later(_HEADERS_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection."""
        if self._opening is not None:
            self._opening.cancel()
        super().connection_lost(exc)
        self.lost = True
        if self.on_lost is not None:
            self.on_lost()
