"""Runs of models: their inputs go to the worker, and their outputs come back, in staging memory.

A request has a block for all its inputs and one for all its outputs. It keeps both until it is complete, so
after a crash it is sent again as it is. Small outputs are copied out of their block; large ones are given to
the caller in it, without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cudnn_actor.engines.cpu import transfer
from cudnn_actor.isolation.process.parent.in_flight import WorkerRequest
from cudnn_actor.isolation.process.parent.sender import Sender
from cudnn_actor.isolation.process.staging import Block, Staging
from cudnn_actor.isolation.process.wire import RunPlaced, Staged, encode_message
from cudnn_actor.protocol.messages.messages import RunModel
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["ModelRuns"]

_ALIGNMENT = 256
"""Values in a block begin at multiples of it, as the device reads them fastest."""


@dataclass(frozen=True, eq=False, repr=False)
class ModelRuns:
    """Sends runs of models, and makes their results. Used with the host held.

    Parameters
    ----------
    staging, sender
        The host's own.
    """

    staging: Staging
    sender: Sender

    def start(self, request: WorkerRequest) -> None:
        """Copy the inputs of a run to staging memory, and dispatch it.

        Raises `OutOfMemory`, `OutOfDescriptors`, `MemoryError`. The caller then discharges the request.
        """
        message: RunModel = request.message
        run = request.run
        assert run is not None
        deployed = run.deployed
        assert deployed is not None
        arrays = deployed.arrays_of(message, run.drawn)
        _, written = self._place((array.nbytes for _, array in arrays), request)
        for (_, array), staged in zip(arrays, written, strict=True):
            transfer.store(
                self.staging.array_at(staged.segment, staged.offset, array.shape, array.dtype), array
            )
        outputs = [place for name, place in deployed.outputs.items() if name not in message.into]
        specs = [deployed.spec_at(place) for place in outputs]
        request.results, read = self._place(map(_nbytes, specs), request)
        placed = RunPlaced(
            run=deployed.number,
            write=tuple((place, staged) for (place, _), staged in zip(arrays, written, strict=True)),
            read=tuple(zip(outputs, read, strict=True)),
            copy_in=deployed.buffers_of(message),
            copy_out=tuple((deployed.outputs[name], ref) for name, ref in message.into.items()),
        )
        request.body = encode_message(placed)
        self.sender.dispatch(request)

    def results(self, request: WorkerRequest) -> dict[str, np.ndarray]:
        """The outputs of a finished run, by name. Raises `MemoryError` if this process has no room."""
        message: RunModel = request.message
        run = request.run
        assert run is not None
        deployed = run.deployed
        assert deployed is not None
        names = [name for name in deployed.outputs if name not in message.into]
        specs = [deployed.spec_at(deployed.outputs[name]) for name in names]
        block = request.results
        if block is None:
            return deployed.results({})
        offsets = _offsets(map(_nbytes, specs))
        request.blocks = tuple(each for each in request.blocks if each is not block)
        request.results = None  # the arrays have it from now on, or `results` gives it back
        arrays = self.staging.results(
            block,
            [(offset, spec.dims, spec.dtype.numpy) for offset, spec in zip(offsets, specs, strict=True)],
        )
        return deployed.results(dict(zip(names, arrays, strict=True)))

    def _place(self, sizes: Iterable[int], request: WorkerRequest) -> tuple[Block | None, list[Staged]]:
        """A block of the request with a place for values of each of these sizes; None if there are none."""
        sizes = list(sizes)
        if not sizes:
            return None, []
        offsets = _offsets(sizes)
        block = self.staging.take(offsets[-1] + sizes[-1])
        request.blocks = (*request.blocks, block)
        return block, [Staged(block.segment, block.offset + offset) for offset in offsets]


def _nbytes(spec: TensorSpec) -> int:
    return spec.size * spec.dtype.itemsize


def _offsets(sizes: Iterable[int]) -> list[int]:
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets
