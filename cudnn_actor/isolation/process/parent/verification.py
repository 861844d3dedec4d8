"""Verification after a crash: do the buffers still hold the values that were uploaded?

Only buffers that nothing has written since their upload are checked; for others, the right values are not
known. A buffer that holds other values is marked as torn, and a log line says so.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cudnn_actor.actors.logs import Log
from cudnn_actor.isolation.process.parent.worker_host import WorkerHost
from cudnn_actor.isolation.process.wire import ReadStaged, Staged, encode_message
from cudnn_actor.isolation.staging import Block
from cudnn_actor.memory import Slot
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import packed_nbytes

__all__ = ["compare", "verification"]

log = Log("cudnn_actor")


def verification(host: WorkerHost) -> Iterator[tuple[Slot, bytes, Block | None]]:
    """Yield, for each buffer to check, its slot, the encoded message by which a worker copies it, and the
    copy's block.

    If this process has the buffer mapped itself, the message is empty and the block is None. `compare` frees
    the block. Raises `OutOfMemory`.
    """
    assert host.checksums is not None
    for slot in host.checksums.slots():
        if host.values.arenas is not None:
            yield slot, b"", None
            continue
        spec, device = slot.spec, host.state.memory.device
        block = host.staging.take(packed_nbytes(spec))
        ref = BufferRef(slot=slot.index, generation=slot.generation, spec=spec, device=device)
        staged = Staged(block.segment, block.offset)
        yield slot, encode_message(ReadStaged(src=ref, values=staged)), block


def compare(host: WorkerHost, slot: Slot, block: Block | None) -> None:
    """Mark a buffer as torn if its values differ from the uploaded ones."""
    assert host.checksums is not None
    spec = slot.spec
    values: np.ndarray
    if block is None:
        values = host.values.bytes_of(slot)
    else:
        values = host.staging.array(block, spec.dims, spec.dtype.numpy)
    intact = host.checksums.matches(slot, values)
    if block is not None:
        host.staging.give_back(block)
    if not intact:
        log.error("buffer.corrupted", slot=slot.index, spec=str(spec))
        host.checksums.forget(slot)
        host.state.memory.tear(slot)
