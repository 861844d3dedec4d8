"""The messages about buffers: taking, writing, reading, copying, freeing them."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from cudnn_actor.actors import DEFERRED, Crash
from cudnn_actor.broker.checks import (
    check_copy,
    check_fits_float,
    check_values,
    require_asker,
    require_type,
)
from cudnn_actor.memory import Slot
from cudnn_actor.protocol.buffers import BufferRef
from cudnn_actor.protocol.errors import OutOfMemory
from cudnn_actor.protocol.messages import Allocate, Copy, Download, Fill, Free, Upload, View
from cudnn_actor.protocol.tensor import TensorSpec
from cudnn_actor.worker.executing import ExecutingActor
from cudnn_actor.worker.executor import RECEIPT, Work

__all__ = ["MemoryActor"]


class MemoryActor(ExecutingActor):
    """Answers the messages that run no plan. Parameters as of `ExecutingActor`."""

    _filling: BufferRef | None = None
    """The buffer that is being allocated: nobody has received its reference."""

    def _allocate(self, message: Allocate) -> Any:
        require_type("spec", message.spec, TensorSpec)
        assert self.current is not None
        require_asker(self.current, "buffer")
        if message.data is None:
            self._faults.strike("allocate")
            return self._engine.allocate(message.spec)
        self._filling = ref = self._engine.allocate(message.spec)
        try:
            answer = self._write("data", ref, message.data, reply=ref)
        except Crash:
            raise  # the last act ends the buffer
        except Exception:
            self._engine.free(ref)
            self._filling = None
            raise
        self._filling = None
        return answer

    def _upload(self, message: Upload) -> Any:
        return self._write("dst", message.dst, message.data)

    def _write(self, field: str, ref: BufferRef, data: Any, reply: Any = RECEIPT) -> Any:
        slot = self._memory.resolve(ref, field)
        check_values(data, slot.spec, self._memory.device)
        place = self._engine.binding(slot)
        return self._run_engine("upload", [slot], self._engine.engine.write, place, data, reply=reply)

    def _download(self, message: Download) -> Any:
        return self._read(self._memory.resolve(message.src, "src"))

    def _read(self, slot: Slot, into: np.ndarray | None = None) -> Any:
        """A buffer's values, in `into` where that is given: now, or when all before it has run."""
        self._faults.strike("download")
        executor, place = self._engine, self._engine.binding(slot)
        if not executor.synchronous and self._fetches(slot, place, into):
            return DEFERRED
        self.flush()  # this takes as long as all that was enqueued before it
        executor.fence()
        try:
            array = executor.call("download", executor.engine.read, place, into)
        except OutOfMemory as error:  # of the array: only here is it known how large that was to be
            in_use = self._memory.arena_bytes
            raise OutOfMemory(requested=slot.spec.nbytes, in_use=in_use, limit=None) from error
        self._settle_finished(executor)  # all of it: what has written the buffer is answered before
        return array

    def _fetches(self, slot: Slot, place: Any, into: np.ndarray | None) -> bool:
        """Enqueue a copy to the host, which is answered when it has run; whether the engine could."""
        envelope, executor = self.current, self._engine
        assert envelope is not None
        late = executor.call("download", executor.engine.fetch, place, into)
        if late is None:
            return False
        executor.defer(Work(envelope, "download", [slot], late=late))
        return True

    def _view(self, message: View) -> Any:
        envelope, executor = self.current, self._engine
        assert envelope is not None
        require_asker(envelope, "array")
        slot = self._memory.resolve(message.buffer, "buffer")
        self._faults.strike("view")
        place = executor.binding(slot)
        keeper = self._memory.lend(slot)
        array = executor.call("view", executor.engine.view, place, keeper)
        if not executor.busy:
            return array
        executor.defer(Work(envelope, "view", [slot], array))
        return DEFERRED

    def _copy(self, message: Copy) -> Any:
        src, dst = self._memory.resolve(message.src, "src"), self._memory.resolve(message.dst, "dst")
        check_copy(message, src, dst)
        places = self._engine.binding(src), self._engine.binding(dst)
        return self._run_engine("copy", [src, dst], self._engine.engine.copy, *places)

    def _fill(self, message: Fill) -> Any:
        slot = self._memory.resolve(message.dst, "dst")
        require_type("value", message.value, numbers.Real)
        check_fits_float(message.value)
        place = self._engine.binding(slot)
        return self._run_engine("fill", [slot], self._engine.engine.fill, place, message.value)

    def _free(self, message: Free) -> None:
        self._faults.strike("free")
        self._engine.free(message.buffer)
