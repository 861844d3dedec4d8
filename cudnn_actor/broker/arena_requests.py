"""Arenas of a service: allocations and imports wait for one, and empty ones are given back.

The host makes or imports one arena at a time. Until it is there, the messages that need one wait here, in
order; then the host starts them again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from cudnn_actor.actors import Envelope
from cudnn_actor.broker.host import Host
from cudnn_actor.broker.recovery import QUARANTINED_AT
from cudnn_actor.broker.service_state import Import
from cudnn_actor.broker.work import Work
from cudnn_actor.memory import MemoryTable
from cudnn_actor.protocol.errors import OutOfMemory, QuarantinedRequest
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["ArenaRequests"]

_IDLE_ARENAS = 1
"""How many empty arenas are kept for the next allocation. The others are returned to the system."""


class Answering(Protocol):
    """The part of a broker that is used here."""

    def begins(self, envelope: Envelope) -> bool:
        """Begin a message that is answered at once. False if its caller was already told that it expired."""

    def succeed(self, envelope: Envelope, value: Any) -> None:
        """Answer with a value."""

    def fail(self, envelope: Envelope, error: BaseException) -> None:
        """Answer with an error."""


class ArenaRequests:
    """The arena that the host is making or importing, and the messages that wait for it.

    Parameters
    ----------
    memory
        The service's memory table.
    host
        The host, which makes, imports and drops arenas.
    broker
        The broker, which answers messages.
    """

    def __init__(self, memory: MemoryTable, host: Host, broker: Answering) -> None:
        self.wanted: tuple[int, int] | None = None
        """Number and bytes of the arena that the host is making or importing; None for none."""
        self.importing = False
        """Whether the host imports `wanted`, for the first message of `waiting`, and does not make it."""
        self.waiting: deque[Envelope] = deque()
        """Allocations and imports that wait for this arena, in order."""
        self._memory = memory
        self._host = host
        self._broker = broker

    # Allocations.

    def wait(self, envelope: Envelope, spec: TensorSpec) -> None:
        """Let an allocation wait until an arena is made. Raises `OutOfMemory` if the limit allows none."""
        if self.wanted is not None:
            self.waiting.append(envelope)
            return
        if self._memory.device == "cpu":
            self._memory.count_staging(self._host.lent_bytes)
        number, nbytes = self._memory.next_arena(spec)
        self.drop_idle(nbytes)
        self.waiting.append(envelope)
        self.wanted = number, nbytes
        self._host.create_arena(number, nbytes)

    def note_made(self, descriptor: int) -> None:
        """Take over the arena that the host has made.

        The caller must then start the waiting messages again, with `injected`.
        """
        assert self.wanted is not None
        self._memory.add_arena(*self.wanted, descriptor)
        self.wanted = None

    def note_refused(self, error: Exception) -> None:
        """Fail the first waiting message, unless a smaller arena, or one without the empty ones, can be tried
        for it.

        The caller must then start the waiting ones again.
        """
        (arena, self.wanted), (imports, self.importing) = (self.wanted, None), (self.importing, False)
        if self.waiting and (imports or not self._may_try_again(arena, error)):
            envelope = self.waiting.popleft()
            if isinstance(error, OutOfMemory):  # it is about the arena, which is larger than the buffer
                error = OutOfMemory(
                    requested=envelope.message.spec.nbytes,
                    in_use=self._memory.live_bytes,
                    arena_bytes=self._memory.arena_bytes,
                    limit=None,
                    most=error.most,
                    largest=error.largest,
                    ulimit=error.ulimit,
                )
            self._broker.fail(envelope, error)

    def _may_try_again(self, arena: tuple[int, int] | None, error: Exception) -> bool:
        if arena is None or not isinstance(error, OutOfMemory):
            return False
        if self._memory.try_smaller(arena[1], self.waiting[0].message.spec):
            return True
        empty = self._memory.idle_arenas()
        for number in empty:
            self._drop(number)
        return bool(empty)

    # Imports.

    def start_import(self, envelope: Envelope, message: Import) -> None:
        """Let the host map another service's arena, or wait until it may. Raises `OSError`."""
        if self.wanted is not None:
            self.waiting.append(envelope)
            return
        self.drop_imports()
        memory = message.memory
        self.wanted, self.importing = (self._memory.next_number, memory.arena_bytes), True
        self.waiting.append(envelope)
        try:
            self._host.import_arena(*self.wanted, memory.descriptor)
        except OSError:
            self.wanted, self.importing = None, False
            self.waiting.clear()
            raise

    def note_imported(self) -> None:
        """Answer the first waiting message, whose arena the host has mapped.

        The caller must then start the other waiting ones again.
        """
        assert self.wanted is not None
        assert self.importing
        (number, nbytes), self.wanted, self.importing = self.wanted, None, False
        envelope = self.waiting.popleft()
        message: Import = envelope.message
        try:
            ref = self._memory.seat_import(number, nbytes, message.memory.offset, message.spec)
        except OutOfMemory as error:
            self._broker.fail(envelope, error)
        else:
            if self._broker.begins(envelope):
                self._broker.succeed(envelope, ref)
            else:
                self._memory.free(ref)
        self.drop_imports()

    def count_crash(self, begun: Sequence[Work], cause: str) -> None:
        """Count a crash for the import under way, and refuse it at the second: no worker after that maps it.

        Where the host imports on its own thread, the import is in `begun`, and gets a verdict instead.
        """
        if not self.importing or any(work.envelope is self.waiting[0] for work in begun):
            return
        envelope = self.waiting[0]
        envelope.crashes += 1
        if envelope.crashes >= QUARANTINED_AT:
            self.waiting.popleft()
            kind = type(envelope.message).__name__
            error = QuarantinedRequest(request_id=envelope.number, digest="", cause=cause, message=kind)
            self._broker.fail(envelope, error)

    # Both.

    def is_awaited(self, number: int) -> bool:
        """Whether any message waits that has a lower number than this one."""
        return any(envelope.number < number for envelope in self.waiting)

    def take_waiting(self) -> list[Envelope]:
        """Remove and return the messages that wait for an arena, in order."""
        self.wanted, self.importing = None, False
        waiting = list(self.waiting)
        self.waiting.clear()
        return waiting

    # Empty arenas.

    def drop_imports(self) -> None:
        """Let the host unmap each imported arena whose buffer has ended."""
        for number in self._memory.take_idle_imports():
            self._host.drop_import(number)

    def drop_spare(self) -> None:
        """Release the empty arenas but one, and unmap the imported ones."""
        self.drop_imports()
        for number in self._memory.idle_arenas()[_IDLE_ARENAS:]:
            self._drop(number)

    def drop_idle(self, nbytes: int) -> None:
        """Drop empty arenas until the limit allows `nbytes` bytes more."""
        for idle in self._memory.arenas_to_drop(nbytes):
            self._drop(idle)

    def _drop(self, number: int) -> None:
        self._host.drop_arena(number)
        self._memory.drop_arena(number)
