"""The messages about buffers, where the actor is in another process.

Taking and freeing buffers is bookkeeping, so it is done here; only an arena has to be asked for, since it is
the device's memory. Host data is copied once on this side, into or out of memory that both sides map:

=====================  ========================================================================
arenas are             values go
=====================  ========================================================================
device memory          through staging memory (`staging`), which the engine reads and writes
host memory            straight into the buffer, or out of it, when no unfinished request uses
                       it; else through staging memory, in their turn
=====================  ========================================================================
"""

from __future__ import annotations

import numbers
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from cudnn_actor.actors import Envelope
from cudnn_actor.engines.cpu import transfer
from cudnn_actor.engines.cpu.arenas import is_whole
from cudnn_actor.exhaustion import exhaustion
from cudnn_actor.memory import Slot
from cudnn_actor.protocol.buffers import BufferRef
from cudnn_actor.protocol.errors import InvalidRequest, MalformedMessage, OutOfMemory, Words
from cudnn_actor.protocol.messages import Allocate, Copy, Download, Fill, Free, Upload, View
from cudnn_actor.protocol.receipts import Receipt
from cudnn_actor.protocol.tensor import TensorSpec
from cudnn_actor.request_checks import (
    check_copy,
    check_fits_float,
    check_values,
    require_asker,
    require_type,
)
from cudnn_actor.state import ServiceState
from cudnn_actor.workers.desk import WINDOW, Desk
from cudnn_actor.workers.ledger import Flight, Violation
from cudnn_actor.workers.wire import (
    ArenaMade,
    ArenaRefused,
    CreateArena,
    MapArena,
    ReadStaged,
    Staged,
    UnmapArena,
    WriteStaged,
    encode_message,
)

__all__ = ["HEAVY_BYTES", "MemoryDesk"]

HEAVY_BYTES = 256 << 10
"""A copy of more is not made on an event loop's thread: it takes some 50 us."""
_IDLE_ARENAS = 1
"""Empty arenas kept for the next allocation; the others go back to the system."""


_CARRIERS = frozenset({Upload, Allocate, Download})
"""Messages that values go with."""


class MemoryDesk(Desk):
    """Answers, or hands over, the messages that run no plan. Parameters as of `Desk`."""

    def __init__(
        self,
        state: ServiceState,
        reply: Callable[[Envelope, Any, BaseException | None], None],
        *,
        host_arenas: bool,
        window: int = WINDOW,
    ) -> None:
        super().__init__(state, reply, host_arenas=host_arenas, window=window)
        self._roomless: deque[Envelope] = deque()
        """Allocations that wait for an arena, in order."""
        self._creating: tuple[int, int] | None = None
        """Number and bytes of the arena that the worker has been asked for."""

    def is_heavy(self, message: Any) -> bool:
        """Whether taking a message up copies so much that an event loop should leave it to a thread."""
        if type(message) not in _CARRIERS:
            return False
        match message:
            case Upload(data=data) | Allocate(data=data):
                return getattr(data, "nbytes", 0) > HEAVY_BYTES
            case Download(src=src):
                spec = getattr(src, "spec", None)
                return self.host is not None and isinstance(spec, TensorSpec) and _nbytes(spec) > HEAVY_BYTES
        return False

    @property
    def has_foreign(self) -> bool:
        """See `Desk`; also where an allocation waits for an arena."""
        return super().has_foreign or bool(self._roomless)

    @property
    def room(self) -> int:
        """How many new messages may be taken up: those that wait for an arena will need a place each."""
        return max(0, super().room - len(self._roomless))

    # Buffers.

    def _allocate(self, envelope: Envelope, message: Allocate) -> None:
        require_type("spec", message.spec, TensorSpec)
        require_asker(envelope, "buffer")
        if message.data is not None:
            check_values(message.data, message.spec, self.memory.device)
        if self._roomless or not self.memory.room_for(message.spec):
            self._ask_for_room(envelope, message.spec)
        elif message.data is None:
            if self._begins(envelope):
                self._succeed(envelope, self.memory.allocate(message.spec))
        else:
            self._allocate_filled(envelope, message)

    def _allocate_filled(self, envelope: Envelope, message: Allocate) -> None:
        ref = self.memory.allocate(message.spec)
        slot = self.memory.resolve(ref)
        try:
            if self.host is None:
                self._write_staged(envelope, ref, slot, message.data, fills=ref)
                return
            assert isinstance(message.data, np.ndarray)  # there is no other kind on the host
            self._write_here(slot, message.data)
            begins = self._begins(envelope)
        except BaseException:
            self._end(ref)
            raise
        if begins:
            self._succeed(envelope, ref)
        else:
            self._end(ref)

    def _free(self, envelope: Envelope, message: Free) -> None:
        self.memory.resolve(message.buffer)
        if self._begins(envelope):
            self._end(message.buffer)
            self._succeed(envelope, None)

    def _end(self, ref: BufferRef) -> None:
        """Free a buffer, and give back what arenas that leaves empty, but for one."""
        self.memory.free(ref)
        for number in self.memory.idle_arenas()[_IDLE_ARENAS:]:
            self._drop_arena(number)

    # Arenas.

    def _ask_for_room(self, envelope: Envelope, spec: TensorSpec) -> None:
        """Let an allocation wait for an arena. Raises `OutOfMemory` when there may be none."""
        if self._creating is None:
            number, nbytes = self.memory.next_arena(spec)
            for idle in self.memory.arenas_to_drop(nbytes):
                self._drop_arena(idle)
            self._creating = number, nbytes
            assert self.worker is not None
            self.worker.send(CreateArena(number, nbytes))
        self._roomless.append(envelope)

    def take_arena(self, frame: ArenaMade | ArenaRefused) -> None:
        """Own an arena that the worker has made, and go on with those who waited; or refuse the first."""
        if self._creating is None or frame.number != self._creating[0]:
            raise Violation(f"it speaks of arena {frame.number}, which it was not asked for")
        (number, nbytes), self._creating = self._creating, None
        if isinstance(frame, ArenaRefused):
            self._refuse_first(frame, nbytes)
        else:
            self._own_arena(number, nbytes)
        self.retry_roomless()

    def _own_arena(self, number: int, nbytes: int) -> None:
        """Take an arena over; where this process has no room for it, the first that waits is refused."""
        assert self.worker is not None
        try:
            descriptor = self.worker.take_descriptor()
        except OSError as error:
            self._refuse_arena(number, nbytes, error)
            return
        try:
            self._map_arena(number, nbytes, descriptor)
        except OSError as error:
            os.close(descriptor)
            self._refuse_arena(number, nbytes, error)
        except BaseException:
            os.close(descriptor)
            raise
        else:
            self.memory.add_arena(number, nbytes, descriptor)

    def _map_arena(self, number: int, nbytes: int, descriptor: int) -> None:
        """Map a worker's arena here and in the standby, or nowhere. Raises `OSError`, `Violation`."""
        if self.host is not None:
            if not is_whole(descriptor, nbytes):
                raise Violation(f"its arena {number} is not sealed memory of {nbytes:,} bytes")
            try:
                self.host.map(number, descriptor, nbytes)
            except ValueError as error:
                raise Violation(f"its arena {number} cannot be mapped: {error}") from error
        try:
            self._have_mapped(MapArena(number, nbytes), descriptor, UnmapArena(number))
        except OSError:
            if self.host is not None:
                self.host.unmap(number)
            raise

    def _refuse_arena(self, number: int, nbytes: int, error: OSError) -> None:
        """Do without an arena that the worker has made: it is this process that has no room for it.

        Raises `Violation` where the worker is to blame after all.
        """
        refusal = exhaustion(error, requested=nbytes, in_use=self.memory.arena_bytes)
        if refusal is None:
            raise Violation(f"its arena {number} cannot be mapped: {error}") from error
        assert self.worker is not None
        self.worker.send(UnmapArena(number))
        if self._roomless:
            self.fail(self._roomless.popleft(), refusal)

    def _refuse_first(self, frame: ArenaRefused, nbytes: int) -> None:
        try:
            error = frame.error.to_error()
        except MalformedMessage as odd:
            raise Violation(
                f"its answer about arena {frame.number} is not an error of this package: {odd}"
            ) from odd
        if isinstance(error, OutOfMemory):
            in_use, limit = self.memory.arena_bytes, self.memory.limit
            error = OutOfMemory(requested=nbytes, in_use=in_use, limit=limit)
        if self._roomless:
            self.fail(self._roomless.popleft(), error)

    def retry_roomless(self) -> None:
        """Take up again, in order, those that waited for room."""
        waiting, self._roomless = self._roomless, deque()
        for envelope in waiting:
            self.take_up(envelope, struck=True)
        if waiting:
            self.settle_drains()

    def _drop_arena(self, number: int) -> None:
        """Give an idle arena back: nothing that is unfinished lies in it."""
        self._tell_all(UnmapArena(number))
        if self.host is not None:
            self.host.unmap(number)
        self.memory.drop_arena(number)

    def is_awaited(self, number: int) -> bool:
        """Whether anything is unanswered that was sent before this number."""
        return super().is_awaited(number) or any(envelope.number < number for envelope in self._roomless)

    # Values.

    def _upload(self, envelope: Envelope, message: Upload) -> None:
        slot = self.memory.resolve(message.dst, "dst")
        check_values(message.data, slot.spec, self.memory.device)
        if self._goes_here(slot):
            if self._begins(envelope):
                assert isinstance(message.data, np.ndarray)  # there is no other kind on the host
                self._write_here(slot, message.data)
                self._succeed(envelope, self._done_here(envelope, "upload"))
        else:
            self._write_staged(envelope, message.dst, slot, message.data)

    def _write_here(self, slot: Slot, data: np.ndarray) -> None:
        values = self._bytes_of(slot)
        if self.checksums is not None:
            self.checksums.note_writes([slot.index])
        transfer.write(values, data)
        if self.checksums is not None:
            self.checksums.keep(slot, self.checksums.of(slot, values))

    def _write_staged(
        self, envelope: Envelope, ref: BufferRef, slot: Slot, data: Any, *, fills: BufferRef | None = None
    ) -> None:
        spec = slot.spec
        transfer.check_values(spec.dims, spec.dtype.numpy, data)
        block = self.staging.take(_nbytes(spec))
        values = self.staging.array(block, spec.dims, spec.dtype.numpy)
        try:
            transfer.store(values, data)
        except BaseException:
            self.staging.give_back(block)
            raise
        body = encode_message(WriteStaged(dst=ref, values=Staged(block.segment, block.offset)))
        flight = Flight(envelope, body, (slot,), ref=fills, block=block)
        self.hand(flight)
        if self.checksums is not None:
            flight.sum = self.checksums.of(slot, values)

    def _download(self, envelope: Envelope, message: Download) -> None:
        slot = self.memory.resolve(message.src, "src")
        if self._goes_here(slot):
            if self._begins(envelope):
                self._succeed(envelope, transfer.read(self._bytes_of(slot)))
            return
        block = self.staging.take(_nbytes(slot.spec))
        body = encode_message(ReadStaged(src=message.src, values=Staged(block.segment, block.offset)))
        self.hand(Flight(envelope, body, (slot,), block=block))

    def _goes_here(self, slot: Slot) -> bool:
        """Whether values go straight into a buffer, or out of it.

        Not where a fault is to befall them: it does so in the worker, in their turn.
        """
        return self.host is not None and not slot.users and self.rule is None

    def _bytes_of(self, slot: Slot) -> np.ndarray:
        assert self.host is not None
        return self.host.bind(slot.arena.number, slot.offset, slot.spec)

    def _view(self, _envelope: Envelope, message: View) -> None:
        self.memory.resolve(message.buffer, "buffer")
        raise InvalidRequest(
            field="message",
            value=Words("View"),
            problem="asks for memory of another process",
            fix='download the buffer, or spawn with isolation="thread"',
        )

    def _copy(self, envelope: Envelope, message: Copy) -> None:
        src, dst = self.memory.resolve(message.src, "src"), self.memory.resolve(message.dst, "dst")
        check_copy(message, src, dst)
        self.hand(Flight(envelope, encode_message(message), (src, dst)))

    def _fill(self, envelope: Envelope, message: Fill) -> None:
        slot = self.memory.resolve(message.dst, "dst")
        require_type("value", message.value, numbers.Real)
        check_fits_float(message.value)
        self.hand(Flight(envelope, encode_message(message), (slot,)))

    # Messages that are answered here.

    def _begins(self, envelope: Envelope) -> bool:
        """Start a message that is answered here, unless its caller has been told that it never will be."""
        if envelope.begin():
            return True
        self.expire(envelope)
        return False

    def _done_here(self, envelope: Envelope, plan: str) -> Receipt:
        now_ns = time.perf_counter_ns()
        return Receipt(
            request_id=envelope.number,
            generation=self.state.generation,
            plan=plan,
            queue_us=(envelope.started_ns - envelope.admitted_ns) / 1e3,
            run_us=(now_ns - envelope.started_ns) / 1e3,
        )

    def ground_roomless(self) -> list[Envelope]:
        """Take out those that wait for an arena: whoever was asked for it has gone."""
        self._creating = None
        waiting, self._roomless = list(self._roomless), deque()
        return waiting


def _nbytes(spec: TensorSpec) -> int:
    """Bytes of the values, without what lies between them."""
    return spec.size * spec.dtype.itemsize
