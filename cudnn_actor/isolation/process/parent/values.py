"""Host data on its way into buffers and out of them. It is copied once on this side.

The copy is made into or out of memory that this process and the worker both map:

=====================  ========================================================================
arenas are             values go
=====================  ========================================================================
device memory          through staging memory (`staging`), which the engine reads and writes
host memory            straight into the buffer, or out of it, if no unfinished request uses it;
                       else through staging memory, in their turn
=====================  ========================================================================

A copy straight into a buffer needs no lock. The host is held, so nothing is dispatched meanwhile, and only a
request in flight could use the buffer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.actors import Envelope
from cudnn_actor.broker import Broker
from cudnn_actor.broker.request_checks import check_allocate, slots_of
from cudnn_actor.engines.cpu import transfer
from cudnn_actor.engines.cpu.arenas import Arenas
from cudnn_actor.isolation.process.arrivals import Arrival
from cudnn_actor.isolation.process.parent.checksums import Checksums
from cudnn_actor.isolation.process.parent.in_flight import WorkerRequest
from cudnn_actor.isolation.process.parent.late_copies import LateCopy, as_bytes, may_be_late
from cudnn_actor.isolation.process.parent.sender import Sender
from cudnn_actor.isolation.process.wire import (
    Done,
    ReadStaged,
    Staged,
    WriteAllStaged,
    WriteStaged,
    encode_message,
)
from cudnn_actor.isolation.staging import HEAVY_RUN_BYTES, NOTE_BYTES, PIECE_BYTES, Block, Staging
from cudnn_actor.memory import Slot
from cudnn_actor.memory.free_list import round_up
from cudnn_actor.protocol.messages.messages import Allocate, Download, RunModel, Upload, WriteWeights
from cudnn_actor.protocol.messages.receipts import Receipt
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec, packed_nbytes

__all__ = ["HEAVY_BYTES", "WITH_VALUES", "PieceNotes", "Values"]

HEAVY_BYTES = 256 << 10
"""A larger copy is not made on an event loop's thread, unless the copy is made behind its request
(`late_copies`) and has at most `PIECE_BYTES`. A copy of this size takes some 50 us."""
WITH_VALUES = frozenset({Upload, Allocate, Download})
"""The messages that carry values, or ask for them."""
_MOST_BODIES = 16
"""How many requests are kept for a piece."""


class PieceNotes(NamedTuple):
    """What is kept about a piece of staging memory for uploads by it.

    Attributes
    ----------
    memory
        Its bytes, without the words behind the values.
    arrival
        These words.
    note
        Notes that a part is there. Only one thread copies to the piece.
    bodies
        Requests to write the piece to a buffer as its values arrive, by the buffer's slot and generation.
    """

    memory: np.ndarray
    arrival: Arrival
    note: Callable[[int], None]
    bodies: dict[tuple[int, int], bytes]


@dataclass(frozen=True, eq=False, repr=False)
class Values:
    """Writes the values of requests, and reads them. Used with the host held.

    Parameters
    ----------
    broker, staging, sender
        The host's own.
    arenas
        The arenas, mapped in this process; None where they are device memory.
    checksums
        Checksums of uploads; None if none are kept.
    """

    broker: Broker[WorkerRequest]
    staging: Staging
    sender: Sender
    arenas: Arenas | None
    checksums: Checksums | None

    def is_heavy(self, message: Any) -> bool:
        """Whether starting a message copies so much that an event loop leaves it to the monitor's thread."""
        match message:
            case RunModel():
                return self._is_heavy_run(message)
            case WriteWeights(values=values):
                return sum(array.nbytes for array in values) > HEAVY_BYTES
            case Upload(data=data, dst=dst):
                return self._is_heavy_upload(data, getattr(dst, "spec", None))
            case Allocate(data=data, spec=spec):
                return self._is_heavy_upload(data, spec)
            case Download(src=src):
                read = getattr(src, "spec", None)
                return (
                    self.arenas is not None
                    and isinstance(read, TensorSpec)
                    and packed_nbytes(read) > HEAVY_BYTES
                )
        return False

    @property
    def are_answered_soon(self) -> bool:
        """Whether all that is in flight is one copy to a device, or from it, of up to `PIECE_BYTES`. Also
        without the host."""
        requests = self.sender.in_flight.requests
        if self.arenas is not None or len(requests) != 1:
            return False
        for request in requests.copy().values():  # one step: another thread may have the host
            match request.message:
                case Upload(dst=buffer) | Download(src=buffer):
                    return packed_nbytes(buffer.spec) <= PIECE_BYTES
                case Allocate(spec=spec):
                    return packed_nbytes(spec) <= PIECE_BYTES
        return False

    def rouse_worker_for(self, message: Any) -> None:
        """Wake the worker if a message that waits for the monitor's thread has values for a device, and
        nothing is in flight, so that the worker may be asleep."""
        has_values = type(message) in (Allocate, Upload) and message.data is not None
        if self.arenas is None and has_values and not self.sender.in_flight.requests:
            self.sender.rouse_worker()

    def _is_heavy_upload(self, data: Any, spec: object) -> bool:
        """Whether values are many bytes to copy before their request is sent. To convert them takes up to
        twenty times as long as to copy them, and to copy a strided array up to fifty times."""
        if getattr(data, "nbytes", 0) <= HEAVY_BYTES:
            return False
        if self.arenas is not None or not isinstance(data, np.ndarray) or not isinstance(spec, TensorSpec):
            return True
        if data.dtype != spec.dtype.numpy:
            return True
        may_wait = may_be_late(data) and data.nbytes <= PIECE_BYTES
        return not may_wait and self.staging.locate(data) is None

    def _is_heavy_run(self, message: RunModel) -> bool:
        """Whether a run of a model copies many bytes before it is sent. Late copies do not count."""
        if not message.arrays:
            return False
        arrays = message.arrays.values()
        if sum([getattr(array, "nbytes", 0) for array in arrays]) <= HEAVY_RUN_BYTES:
            return False
        copied = [each for each in arrays if not may_be_late(each) and self.staging.locate(each) is None]
        return sum([getattr(array, "nbytes", 0) for array in copied]) > HEAVY_RUN_BYTES

    def prepared_upload(self, envelope: Envelope) -> WorkerRequest | None:
        """An upload ready to be dispatched by the fast path; None if it must take the slow one.

        Changes only the piece of staging memory that it fills. The caller takes that in its step, as the last
        of `Staging.pieces`; for a new buffer, it also takes the last slot of `MemoryTable.ready`. Raises an
        error if the message is not valid.
        """
        message: Any = envelope.message
        memory, data = self.broker.memory, message.data
        if self.arenas is not None or not isinstance(data, np.ndarray):
            return None
        if type(message) is Allocate:
            check_allocate(memory, message)
            slots = tuple(memory.ready(message.spec)[-1:])
            if not slots or not envelope.wants_reply:
                return None
            (slot,) = slots
            ref = BufferRef(slot=slot.index, generation=slot.generation, spec=slot.spec, device=memory.device)
            request = WorkerRequest(envelope, envelope.number, message, slots, ref=ref)
        else:
            ref = message.dst
            request = WorkerRequest(envelope, envelope.number, message, slots_of(memory, message))
        spec = ref.spec
        if data.dtype != spec.dtype.numpy:
            return None
        transfer.check_values(spec.dims, spec.dtype.numpy, data)
        at = self.staging.locate(data)
        if at is None:
            pieces, late = self.staging.pieces, may_be_late(data)
            if not pieces or data.nbytes > (PIECE_BYTES if late else HEAVY_BYTES):  # see `_is_heavy_upload`
                return None
            request.blocks = (block,) = (pieces[-1],)  # that was used last: it may still be in the cache
            if self.checksums is None and late:
                alone = not self.sender.in_flight.requests
                request.body, copy = self.prepared_late(block, ref, data, alone=alone)
                request.copies = (copy,)
                return request
            staged = self._fill(request, block, spec, data)
        else:
            staged = Staged(*at)
        request.body = encode_message(WriteStaged(dst=ref, values=staged))
        return request

    def prepared_late(
        self, block: Block, ref: BufferRef, data: np.ndarray, *, alone: bool
    ) -> tuple[bytes, LateCopy]:
        """The request to write an array to a buffer by a piece, and the copy that is made behind it.

        The array is as `may_be_late` wants it, and has the buffer's dims and dtype. The buffer is live.
        """
        notes = self.staging.notes.get(block)
        if notes is None:
            notes = self.staging.notes[block] = self._notes_of(block)
        key = ref.slot, ref.generation
        body = notes.bodies.get(key)
        if body is None:
            behind = block.offset + block.nbytes - NOTE_BYTES
            values = Staged(block.segment, block.offset, behind)
            body = encode_message(WriteStaged(dst=ref, values=values))
            if len(notes.bodies) >= _MOST_BODIES:
                del notes.bodies[next(iter(notes.bodies))]
            notes.bodies[key] = body
        return body, LateCopy(data, notes.memory, notes.arrival, alone, notes.note)

    def _notes_of(self, block: Block) -> PieceNotes:
        nbytes = block.nbytes - NOTE_BYTES
        arrival = Arrival(self.staging.memory(block.segment), block.offset + nbytes)
        arrival.forget_answer()
        return PieceNotes(self.staging.array(block, (nbytes,), np.uint8), arrival, arrival.quick_note(), {})

    def _fill(self, request: WorkerRequest, block: Block, spec: TensorSpec, data: np.ndarray) -> Staged:
        """Copy an array to a block, now or behind its request. Returns where it is for the worker."""
        values = self.staging.array(block, spec.dims, spec.dtype.numpy)
        same = data.dtype == values.dtype and self.checksums is None
        if not (same and may_be_late(data)):
            transfer.store(values, data)
            return Staged(block.segment, block.offset)
        behind = block.offset + block.nbytes - NOTE_BYTES
        arrival = Arrival(self.staging.memory(block.segment), behind)
        alone = not self.sender.in_flight.requests
        request.copies = (LateCopy(data, as_bytes(values), arrival, alone=alone),)
        return Staged(block.segment, block.offset, behind)

    def prepared_download(self, envelope: Envelope) -> WorkerRequest | None:
        """A download that fits into a piece, ready to be dispatched by the fast path; None if it must take
        the slow one.

        The caller takes the last of `Staging.pieces` in its step. Changes nothing. Raises an error if the
        message is not valid.
        """
        message: Download = envelope.message
        pieces = self.staging.pieces
        if self.arenas is not None or not pieces:
            return None
        slots = slots_of(self.broker.memory, message)
        if packed_nbytes(message.src.spec) > PIECE_BYTES:
            return None
        request = WorkerRequest(envelope, envelope.number, message, slots)
        request.blocks = (block,) = (pieces[-1],)
        values = Staged(block.segment, block.offset)
        request.body = encode_message(ReadStaged(src=message.src, values=values))
        return request

    def result_of_copy(self, request: WorkerRequest, done: Done) -> BufferRef | Receipt | np.ndarray | None:
        """The result of a finished copy for its caller; None if it needs the slow path. Changes nothing."""
        if self.checksums is not None:
            return None
        if type(request.message) is Download:
            return self._downloaded_array(request)
        return self.result_of_upload(request, done)

    def _downloaded_array(self, request: WorkerRequest) -> np.ndarray | None:
        """The array of a download; None if its memory is no piece, or if there is none for the array."""
        block, spec = request.blocks[0], request.message.src.spec
        if not self.staging.is_piece(block):
            return None
        try:
            return self.staging.array(block, spec.dims, spec.dtype.numpy).copy()
        except MemoryError:
            return None

    def result_of_upload(self, request: WorkerRequest, done: Done) -> BufferRef | Receipt:
        """The result of a finished upload for its caller. Changes nothing."""
        if request.ref is not None:
            return request.ref
        return request.receipt(self.broker.state.generation, done.plan, done.started_ns, done.run_us)

    def write(self, request: WorkerRequest) -> None:
        """Write an array to a buffer: in this process, or in the worker through staging memory.

        Raises `OutOfMemory`, `OutOfDescriptors` or `MemoryError`, and an error of the array if that is not
        valid. The caller then discharges the request.
        """
        (slot,) = request.slots
        data, envelope, broker = request.message.data, request.envelope, self.broker
        if request.ref is not None and self.arenas is None and self.checksums is None:
            broker.memory.want_ready(slot.spec)  # others of the same shape may follow
        if not self._goes_here(request):
            self._write_staged(request, slot, data)
        elif request.ref is not None:
            self._write_here(slot, data)  # no caller has the buffer yet
            if broker.begins(envelope):
                broker.succeed(envelope, request.ref)
            else:
                broker.end_unreceived(request)
        elif broker.begins(envelope):
            self._write_here(slot, data)
            broker.succeed(envelope, self._upload_receipt(request))

    def write_all(self, request: WorkerRequest) -> None:
        """Write arrays to buffers, in the worker, in one request that keeps its values until it is answered.

        Raises `OutOfMemory`, `OutOfDescriptors`, `MemoryError`. The caller then discharges the request.
        """
        message: WriteWeights = request.message
        staged = []
        for slot, data in zip(request.slots, message.values, strict=True):
            block = self.staging.take(packed_nbytes(slot.spec))
            request.blocks = (*request.blocks, block)
            transfer.store(self.staging.array(block, slot.spec.dims, slot.spec.dtype.numpy), data)
            staged.append(Staged(block.segment, block.offset))
        request.body = encode_message(WriteAllStaged(buffers=message.buffers, values=tuple(staged)))
        self.sender.dispatch(request)

    def read(self, request: WorkerRequest) -> None:
        """Read a buffer's values: in this process, or in the worker through staging memory. Raises as
        `write`."""
        (slot,) = request.slots
        envelope = request.envelope
        if self._goes_here(request):
            if self.broker.begins(envelope):
                self.broker.succeed(envelope, transfer.read(self.bytes_of(slot)))
            return
        nbytes = packed_nbytes(slot.spec)
        if nbytes <= PIECE_BYTES:
            self.staging.stock()  # for those that follow
        request.blocks = (block,) = (self.staging.take(nbytes),)
        values = Staged(block.segment, block.offset)
        request.body = encode_message(ReadStaged(src=request.message.src, values=values))
        self.sender.dispatch(request)

    def result(self, request: WorkerRequest, done: Done) -> Any:
        """The result of a finished request for its caller: a reference, an array, or a receipt.

        Raises `MemoryError` if this process has no room for the array.
        """
        if self.checksums is not None and request.sum is not None:
            self.checksums.keep(request.slots[0], request.sum)
        if request.ref is None and type(request.message) is Download and request.blocks:
            spec = request.message.src.spec
            (block,), request.blocks = request.blocks, ()  # the array has it from now on
            return self.staging.result(block, spec.dims, spec.dtype.numpy)
        self.sender.discharge(request, end_ref=False)
        return self.result_of_upload(request, done)

    def bytes_of(self, slot: Slot) -> np.ndarray:
        """A buffer's memory as an array, where the arenas are mapped in this process."""
        assert self.arenas is not None
        return self.arenas.bind(slot.arena.number, slot.offset, slot.spec)

    def _goes_here(self, request: WorkerRequest) -> bool:
        """Whether values are copied straight into the buffer, or out of it, in this process.

        They are not if the request has a fault, because that is injected in the worker, in the request's
        turn.
        """
        return self.arenas is not None and not request.slots[0].users and request.fault is None

    def _write_here(self, slot: Slot, data: Any) -> None:
        assert isinstance(data, np.ndarray)  # host memory takes no device arrays
        values = self.bytes_of(slot)
        if self.checksums is not None:
            self.checksums.note_writes([slot.index])
        transfer.write(values, data)
        if self.checksums is not None:
            self.checksums.keep(slot, self.checksums.of(slot, values))

    def _write_staged(self, request: WorkerRequest, slot: Slot, data: Any) -> None:
        spec = slot.spec
        transfer.check_values(spec.dims, spec.dtype.numpy, data)
        at = self.staging.locate(data) if data.dtype == spec.dtype.numpy else None
        if at is not None:
            staged = Staged(*at)
        else:
            request.blocks = (block,) = (self._block_for(packed_nbytes(spec)),)
            staged = self._fill(request, block, spec, data)
        ref = request.message.dst if request.ref is None else request.ref
        request.body = encode_message(WriteStaged(dst=ref, values=staged))
        self.sender.dispatch(request)
        if self.checksums is not None:
            there = self.staging.array_at(staged.segment, staged.offset, spec.dims, spec.dtype.numpy)
            request.sum = self.checksums.of(slot, there)

    def _block_for(self, nbytes: int) -> Block:
        """A block for values on their way to a device, and for the words behind them.

        A piece, if there is one for so many bytes: it goes back in the step that completes its request,
        without the monitor's thread, and may still be in the cache. Raises as `Staging.take`.
        """
        if nbytes <= PIECE_BYTES:
            self.staging.stock()
            if self.staging.pieces:
                return self.staging.pieces.pop()
        return self.staging.take(round_up(nbytes, NOTE_BYTES) + NOTE_BYTES)

    def _upload_receipt(self, request: WorkerRequest) -> Receipt:
        """The receipt for an upload that this process has copied, from its start until now."""
        started_ns = request.envelope.started_ns
        run_us = (time.perf_counter_ns() - started_ns) / 1e3
        return request.receipt(self.broker.state.generation, "upload", started_ns, run_us)
