"""The messages that the server keeps, so that the client may send each of them again by its number."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

from cudnn_actor.attached.wire import KEPT_BYTES, MOST_KEPT, Request
from cudnn_actor.broker.message_cache import CachedMessage
from cudnn_actor.isolation.known_graphs import GRAPH_RUNS

__all__ = ["KeptMessages"]

_MOST, _BYTES = MOST_KEPT - MOST_KEPT // 8, KEPT_BYTES - KEPT_BYTES // 8
"""This client's own limits. While a message gets its number, a finalizer may send other messages, which get
numbers, too: the rest is for these."""
_LONGEST = _BYTES // 64
"""The bytes of the longest message that gets a number."""


_Entry = tuple[int, Any, weakref.ref[CachedMessage]]
"""The number of a message, the message, and its record."""


class KeptMessages:
    """The numbers of messages, as the server has been told of them. Used on the owning loop only.

    An entry goes with its message's record, on any thread. The server keeps the message until `none_kept`.
    """

    def __init__(self) -> None:
        self.again: dict[int, int] = {}
        """Ids of messages → numbers, of messages that may be sent without being checked: none of their
        buffers has ended. The number n of a message that runs a graph stands here as -n. Each is also in
        `_numbers`."""
        self._numbers: dict[int, _Entry] = {}
        """Ids of messages → entries. An entry keeps its message, so no other message has its id, not even if
        the entry could not be dropped with the record."""
        self._last = self._count = self._nbytes = 0
        self.times = 0
        """How often all numbers were taken back."""
        self._pauses = 0
        """How many calls of `none_kept` are under way. Meanwhile, no message gets a number."""

    def request_by_number(self, request: Request, cached: CachedMessage) -> Request | None:
        """A request that names a message by its number, or gives it one, if it is not too long for that. None
        if all numbers have to be taken back first.

        The caller sends the request, and calls `note` then, unless `times` has changed.
        """
        body = request.body
        assert isinstance(body, bytes)
        if (known := self._numbers.get(id(cached.message))) is not None:
            return Request(known[0], None, 0, request.timeout_s, "", request.headers)
        nbytes = len(body)
        if nbytes > _LONGEST or self._pauses:
            return request
        if self._count >= _MOST or self._nbytes + nbytes > _BYTES:
            return None
        self._count += 1
        self._nbytes += nbytes
        self._last += 1
        return Request(body, None, 0, request.timeout_s, "", request.headers, self._last)

    def note(self, request: Request, cached: CachedMessage, epoch: int, times: int) -> None:
        """Note that a request of `request_by_number` is sent before all later ones. `epoch`: that of the
        buffers. `times`: as it was then."""
        number = request.body if request.keep is None else request.keep
        if isinstance(number, bytes):
            return
        message, bound = cached.message, cached.bound
        identity, numbers, again = id(message), self._numbers, self.again
        entry = numbers.get(identity)
        if request.keep is not None:
            gone = functools.partial(_drop, identity, numbers, again)
            entry = number, message, weakref.ref(cached, gone)
        if entry is None:
            return
        value = -number if type(message) in GRAPH_RUNS else number
        is_checked = bound is not None and bound.epoch == epoch
        if times == self.times:
            # One step: a finalizer that sends messages may have taken all numbers back before it.
            numbers[identity] = entry
            if is_checked:
                again[identity] = value

    def check_all(self) -> None:
        """Have all messages checked before they are sent again, because a buffer has ended."""
        self.again.clear()

    @contextlib.contextmanager
    def none_kept(self) -> Iterator[None]:
        """Take all numbers back, because the server is told to do so here. Meanwhile, no message gets one.

        A finalizer may call this while another call is under way. If the server could not be told, its
        messages count still.
        """
        self._pauses += 1
        try:
            self.again.clear()
            self._numbers.clear()
            self.times += 1
            yield
            self._count = self._nbytes = 0
        finally:
            self._pauses -= 1


def _drop(
    identity: int,
    numbers: dict[int, _Entry],
    again: dict[int, int],
    reference: weakref.ref[CachedMessage],
) -> None:
    """Drop the entry of a message whose record has gone."""
    entry = numbers.get(identity)
    if entry is not None and entry[2] is reference:
        again.pop(identity, None)  # first: while it is there, the message keeps its id
        numbers.pop(identity, None)
