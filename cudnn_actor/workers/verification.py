"""After a crash: is what was uploaded still what there is?

Only buffers are looked at that nothing has been written to since; where others' bytes lie wrong, nobody can
know. A buffer that does not hold what was uploaded is torn, and a line in the log says so.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cudnn_actor.actors.logs import Log
from cudnn_actor.memory import Slot
from cudnn_actor.protocol.buffers import BufferRef
from cudnn_actor.workers.checksums import checksum
from cudnn_actor.workers.cudnn_desk import CudnnDesk
from cudnn_actor.workers.staging import Block
from cudnn_actor.workers.wire import ReadStaged, Staged, encode_message

__all__ = ["compare", "verification"]

log = Log("cudnn_actor")


def verification(desk: CudnnDesk) -> Iterator[tuple[Slot, bytes, Block | None]]:
    """For each buffer to be looked at: its slot, and what to ask a worker so that its values are there.

    A message as bytes, and the block where the values will lie; no block where this process sees the buffer
    itself. The block is `compare`'s to give back. Raises `OutOfMemory`.
    """
    assert desk.checksums is not None
    for slot, _ in desk.checksums.held():
        if desk.host is not None:
            yield slot, b"", None
            continue
        spec = slot.spec
        block = desk.staging.take(spec.size * spec.dtype.itemsize)
        ref = BufferRef(slot=slot.index, generation=slot.generation, spec=spec, device=desk.memory.device)
        staged = Staged(block.segment, block.offset)
        yield slot, encode_message(ReadStaged(src=ref, values=staged)), block


def compare(desk: CudnnDesk, slot: Slot, block: Block | None) -> None:
    """Tear a buffer whose values are not those that were uploaded."""
    assert desk.checksums is not None
    spec = slot.spec
    values: np.ndarray
    if block is None:
        assert desk.host is not None
        values = desk.host.bind(slot.arena.number, slot.offset, spec)
    else:
        values = desk.staging.array(block, spec.dims, spec.dtype.numpy)
    found = checksum(values)
    if block is not None:
        desk.staging.give_back(block)
    known = {held.index: value for held, value in desk.checksums.held()}
    if found != known[slot.index]:
        log.error("buffer.corrupted", slot=slot.index, spec=str(spec))
        desk.checksums.forget(slot)
        desk.memory.tear(slot)
