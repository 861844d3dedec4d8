"""Copies of values that a client wants to share. Their digest is checked, and their bytes are bounded.

The client could change its own memory after the check. So values that other clients will use are copied
first, and the copy waits in the queue. While a client's copies take as many bytes as they may, further values
stay in the client's own memory, and are copied later.
"""

from __future__ import annotations

import asyncio

import numpy as np

from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.attached.server.asked import Known
from cudnn_actor.attached.wire import digest_of
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.messages.messages import Allocate

__all__ = ["Copies", "other_digest"]

_SHORT_BYTES = 1 << 20
"""Values of up to this many bytes are copied and checked on the loop, which takes up to 2 ms."""


class Copies:
    """The copies of one client. Used on the server's loop only.

    Parameters
    ----------
    limit
        The bytes that the copies may take together. A copy of more bytes is made when there is no other.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.nbytes = 0
        """The bytes of all copies that exist now."""
        self._turn = asyncio.Lock()
        """A lock that the request whose copy is made next holds. So copies are made in the order of the
        requests."""
        self.waiting = 0
        self._freed = asyncio.Event()

    def at_once(self, known: Known) -> bool:
        """Whether an `Allocate` can be checked without waiting."""
        nbytes = _nbytes(known)
        return not nbytes or (nbytes <= _SHORT_BYTES and not self.waiting and self._has_room(nbytes))

    def copy_and_check(self, known: Known, share: str) -> Known:
        """The message, with a copy of its values, which counts until `release`. Call it only if `at_once` is
        True.

        Raises `InvalidRequest` if `share` is not the values' digest.
        """
        copied = _copy_and_check(known, share)
        self.nbytes += _nbytes(copied)
        return copied

    async def checked_in_turn(self, known: Known, share: str) -> Known:
        """Do what `copy_and_check` does on a thread, once there is room for the copy."""
        nbytes = _nbytes(known)
        self.waiting += 1
        try:
            async with self._turn:
                while not self._has_room(nbytes):
                    self._freed.clear()
                    await self._freed.wait()
                self.nbytes += nbytes
                try:
                    return await in_own_thread(_copy_and_check, known, share)
                except BaseException:
                    self.release(nbytes)
                    raise
        finally:
            self.waiting -= 1

    def release(self, nbytes: int) -> None:
        """Stop counting the bytes of a copy whose request was answered."""
        self.nbytes -= nbytes
        self._freed.set()

    def _has_room(self, nbytes: int) -> bool:
        return not self.nbytes or self.nbytes + nbytes <= self._limit


def _nbytes(known: Known) -> int:
    data = known.message.data
    return 0 if data is None else int(data.nbytes)


def _copy_and_check(known: Known, share: str) -> Known:
    """Copy a message's values and check their digest. Takes some 2 ms for each MB. Any thread may call it."""
    message = known.message
    values = None if message.data is None else np.array(message.data)
    if values is not None and digest_of(values) != share:
        raise other_digest(share)
    return Known(Allocate(spec=message.spec, data=values), known.named)


def other_digest(share: str) -> InvalidRequest:
    """The error for values whose digest is not the one that their client has sent."""
    return InvalidRequest(
        field="share", value=share, problem="is not the digest of the values", fix="send their SHA-256"
    )
