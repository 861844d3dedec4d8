"""Runs of models: their inputs go to the worker, and their outputs come back, in staging memory.

A run has staging memory with a place for each input and each output of its graph. It keeps that until it is
complete, so after a crash it is sent again as it is. Small outputs are copied out, and the staging memory
serves the next run; large ones are given to the caller where they are, without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from cudnn_actor.actors import Envelope
from cudnn_actor.broker import Broker
from cudnn_actor.broker.deployments import Deployed, ModelRun
from cudnn_actor.engines.cpu import transfer
from cudnn_actor.isolation.process.parent.in_flight import RunStaging, WorkerRequest
from cudnn_actor.isolation.process.parent.sender import Sender
from cudnn_actor.isolation.process.wire import RunPlaced, Staged, encode_message
from cudnn_actor.isolation.staging import COPY_BYTES, Block, Staging
from cudnn_actor.memory.free_list import rounded
from cudnn_actor.protocol.messages.messages import RunModel
from cudnn_actor.protocol.types.tensor import packed_nbytes

__all__ = ["ModelRuns"]

_ALIGNMENT = 256
"""Values in a block begin at multiples of it, as the device reads them fastest."""
_MOST_SPARE = 4
"""How many pieces of unused staging memory are kept for each graph."""
_MOST_SPARE_BYTES = 256 << 20
"""If all graphs together have more unused staging memory than this, the next run that needs more frees it."""


@dataclass(frozen=True, eq=False, repr=False)
class ModelRuns:
    """Sends runs of models, and makes their results. Used with the host held.

    Parameters
    ----------
    broker, staging, sender
        The host's own.
    """

    broker: Broker[WorkerRequest]
    staging: Staging
    sender: Sender
    _spare: dict[int, list[RunStaging]] = field(default_factory=dict, init=False)
    """The unused staging memory of each graph that the sender knows, by the graph's number."""

    # Starting.

    def start(self, request: WorkerRequest) -> None:
        """Copy the inputs of a run to staging memory, and dispatch it.

        Raises `InvalidRequest`, `OutOfMemory`, `OutOfDescriptors`, `MemoryError`. The caller then discharges
        the request.
        """
        run, message = request.run, request.message
        assert run is not None
        deployed = run.deployed
        assert deployed is not None
        if needs_staging(deployed, message):
            spare = self.spare_of(deployed)
            request.staged = spare.pop() if spare else self._make(deployed)
        self.fill(request, run, message)
        if request.alone:
            self.sender.dispatch_alone(request)
        else:
            self.sender.dispatch(request)

    def prepared(self, envelope: Envelope) -> WorkerRequest | None:
        """A run ready to be dispatched by the fast path; None if it must take the slow one.

        Changes nothing but the unused staging memory that it fills: the caller takes that in its step, as the
        last of `spare_of`. Raises what is wrong with the message.
        """
        run, message = envelope.found, envelope.message
        if type(run) is not ModelRun or run.deployed is None:
            return None
        deployed, memory = run.deployed, self.broker.memory
        if (
            deployed.ended
            or deployed.of.draws is not None
            or deployed.checked_losses != memory.losses
            or not self.sender.knows_run(deployed)
            or not envelope.wants_reply
            or message.crashes
        ):
            return None
        request = WorkerRequest(
            envelope, envelope.number, message, self.broker.state.models.slots(run, message)
        )
        request.run = run
        if needs_staging(deployed, message):
            spare = self._spare.get(deployed.number)
            if not spare:
                return None
            request.staged = spare[-1]
        self.fill(request, run, message)
        return request

    def fill(self, request: WorkerRequest, run: ModelRun, message: RunModel) -> None:
        """Copy the inputs of a run to its staging memory, and encode it. Raises `InvalidRequest`."""
        deployed, staged = run.deployed, request.staged
        assert deployed is not None
        written: dict[int, Staged] = {}
        copied = True
        if staged is not None:
            for place, array in deployed.arrays_of(message, run.drawn):
                at = self.staging.locate(array)
                if at is None:
                    transfer.store(staged.inputs[place], array)
                    written[place] = staged.write[place]
                else:
                    copied = False
                    written[place] = Staged(*at)
            if copied and not message.buffers and not message.into:
                request.body = staged.body
                return
        into = tuple((deployed.outputs[name], ref) for name, ref in message.into.items())
        places = {place for name, place in deployed.outputs.items() if name not in message.into}
        placed = RunPlaced(
            run=deployed.number,
            write=tuple(written.items()),
            read=tuple((place, at) for place, at in staged.read.items() if place in places) if staged else (),
            copy_in=deployed.buffers_of(message),
            copy_out=into,
        )
        request.body = encode_message(placed)

    # Results.

    def results(self, request: WorkerRequest) -> dict[str, np.ndarray]:
        """The outputs of a finished run, by name. Raises `MemoryError` if this process has no room.

        Large ones take their staging memory from the request.
        """
        run, staged = request.run, request.staged
        assert run is not None
        deployed = run.deployed
        assert deployed is not None
        if staged is None or staged.output_bytes <= COPY_BYTES:
            return self.copied(request, deployed)
        request.staged = None
        into = request.message.into
        if staged.given is not None:
            self.staging.give_back(staged.given)
        places = {name: place for name, place in deployed.outputs.items() if name not in into}
        views = [(staged.offsets[place], deployed.spec_at(place)) for place in places.values()]
        assert staged.returned is not None
        arrays = self.staging.results(
            staged.returned, [(offset, spec.dims, spec.dtype.numpy) for offset, spec in views]
        )
        return deployed.finish(dict(zip(places, arrays, strict=True)))

    def copied(self, request: WorkerRequest, deployed: Deployed) -> dict[str, np.ndarray]:
        """The outputs of a finished run, copied out of its staging memory. Changes nothing else."""
        into, staged = request.message.into, request.staged
        if staged is None:
            return deployed.finish({})
        computed = {
            name: staged.outputs[place].copy() for name, place in deployed.outputs.items() if name not in into
        }
        return deployed.finish(computed)

    def discharge(self, request: WorkerRequest) -> None:
        """Take back the staging memory of a run that has ended."""
        staged, request.staged = request.staged, None
        if staged is None:
            return
        assert request.run is not None
        deployed = request.run.deployed
        assert deployed is not None
        if self.has_room(deployed):
            self.spare_of(deployed).append(staged)
        else:
            self._give_back(staged)

    def has_room(self, deployed: Deployed) -> bool:
        """Whether more of a graph's staging memory may be kept unused."""
        return not deployed.ended and len(self.spare_of(deployed)) < _MOST_SPARE

    # Staging memory.

    def spare_of(self, deployed: Deployed) -> list[RunStaging]:
        """The unused staging memory of a graph. The fast path takes the last piece, and adds to it."""
        return self._spare.setdefault(deployed.number, [])

    def forget(self, deployed: Deployed) -> None:
        """Free the unused staging memory of a graph that has ended."""
        for staged in self._spare.pop(deployed.number, ()):
            self._give_back(staged)

    def close(self) -> None:
        """Drop all unused staging memory: the arrays on it keep its segments mapped."""
        self._spare.clear()

    def _give_back(self, staged: RunStaging) -> None:
        for block in staged.blocks:
            self.staging.give_back(block)

    def _make(self, deployed: Deployed) -> RunStaging:
        """New staging memory for a run. If much is unused, that is freed first."""
        unused = [
            block.nbytes for spare in self._spare.values() for staged in spare for block in staged.blocks
        ]
        if sum(unused) > _MOST_SPARE_BYTES:
            for spare in self._spare.values():
                while spare:
                    self._give_back(spare.pop())
        inputs = [*deployed.inputs.values()]
        if deployed.state is not None:
            inputs.append(deployed.state)
        outputs = [*dict.fromkeys(deployed.outputs.values())]
        given, write, _ = self._placed(deployed, inputs)
        try:
            returned, read, offsets = self._placed(deployed, outputs)
        except BaseException:
            if given is not None:
                self.staging.give_back(given)
            raise
        whole = RunPlaced(run=deployed.number, write=tuple(write.items()), read=tuple(read.items()))
        return RunStaging(
            given=given,
            returned=returned,
            inputs=self._views(deployed, write),
            outputs=self._views(deployed, read),
            write=write,
            read=read,
            offsets=offsets,
            body=encode_message(whole),
        )

    def _placed(
        self, deployed: Deployed, places: Iterable[int]
    ) -> tuple[Block | None, dict[int, Staged], dict[int, int]]:
        """A block with room for the values of these buffers, where each is in it, and their offsets."""
        offsets, end = {}, 0
        for place in places:
            offsets[place] = end
            end += rounded(packed_nbytes(deployed.spec_at(place)), _ALIGNMENT)
        if not offsets:
            return None, {}, {}
        block = self.staging.take(end)
        staged = {place: Staged(block.segment, block.offset + offset) for place, offset in offsets.items()}
        return block, staged, offsets

    def _views(self, deployed: Deployed, places: Mapping[int, Staged]) -> dict[int, np.ndarray]:
        specs = {place: deployed.spec_at(place) for place in places}
        return {
            place: self.staging.array_at(at.segment, at.offset, specs[place].dims, specs[place].dtype.numpy)
            for place, at in places.items()
        }


def needs_staging(deployed: Deployed, message: RunModel) -> bool:
    """Whether any value of a run is on the host."""
    return bool(message.arrays) or len(message.into) < len(deployed.outputs) or deployed.state is not None
