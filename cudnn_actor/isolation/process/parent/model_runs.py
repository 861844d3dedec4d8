"""Runs of models: their inputs go to the worker, and their outputs come back, in staging memory.

A run has a piece of staging memory with a place for each input and each output of its graph. Large inputs are
copied there after the run has been sent (`late_copies`). It keeps that piece until it is complete, so after a
crash it is sent again as it is. Small outputs are copied out, and the piece serves the next run. Large ones
are lent to the caller where they are, without a copy, and the piece serves another run after the last array
that uses it has been collected.

So a lent piece is in no run: nothing but the caller's arrays can reach it, even if the worker dies. As in
`memory.lending`, the end of a loan may come on any thread and in the middle of any operation, so it does
one thing only: it appends the piece to the end of a list, from whose head the holder of the host takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cudnn_actor.actors import Envelope
from cudnn_actor.broker import Broker
from cudnn_actor.broker.deployments import Deployed, ModelRun
from cudnn_actor.engines.cpu.arenas import keeping
from cudnn_actor.engines.cpu.transfer import store
from cudnn_actor.isolation.process.arrivals import LATE_BYTES, Arrival
from cudnn_actor.isolation.process.parent.in_flight import RunStaging, WorkerRequest
from cudnn_actor.isolation.process.parent.late_copies import LateCopy, as_bytes, may_be_late, weigh
from cudnn_actor.isolation.process.parent.sender import Sender
from cudnn_actor.isolation.process.wire import RunPlaced, Staged, encode_message
from cudnn_actor.isolation.staging import (
    COPY_BYTES,
    HEAVY_RUN_BYTES,
    NOTE_BYTES,
    SEGMENT_BYTES,
    Block,
    Staging,
)
from cudnn_actor.memory.free_list import round_up
from cudnn_actor.protocol.errors import CudnnActorError
from cudnn_actor.protocol.messages.messages import RunModel
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import packed_nbytes

__all__ = ["Loan", "ModelRuns", "Pieces", "Results"]

Named = tuple[tuple[str, BufferRef], ...]

_ALIGNMENT = 256
"""Values in a block begin at multiples of it, as the device reads them fastest."""
_MOST_SPARE = 4
"""How many unused pieces are kept for each graph, in addition to those that callers give back."""
_FEW_LENT, _MOST_LENT = 2, 8
"""How many pieces of a graph callers may have at a time: `_MOST_LENT` as long as they take at most
`_MOST_LENT_BYTES` together, else `_FEW_LENT`. Further outputs are copied out."""
_MOST_LENT_BYTES = 256 << 20
_MOST_SPARE_BYTES = 256 << 20
"""If all graphs together have more unused staging memory than this, the next run that needs more frees it."""


class Pieces:
    """The staging memory of one graph that is in no run.

    Attributes
    ----------
    spare
        Unused pieces. The holder of the host takes the first one; pieces that come back are appended.
    lent
        Pieces that were lent to callers, and that no run has taken since.
    """

    __slots__ = ("lent", "spare")

    def __init__(self) -> None:
        self.spare: list[RunStaging] = []
        self.lent: list[RunStaging] = []

    def may_lend(self, piece: RunStaging) -> bool:
        """Whether one more piece may be lent."""
        out = [each for each in self.lent if each not in self.spare]
        small = (len(out) + 1) * piece.nbytes <= _MOST_LENT_BYTES
        return len(out) < (_MOST_LENT if small else _FEW_LENT)


class Loan:
    """The hold of a caller's arrays on a piece. It ends when this object is collected.

    Parameters
    ----------
    spare
        The list to which the piece is appended then.
    """

    __slots__ = ("__weakref__", "_spare", "pieces")

    def __init__(self, spare: list[RunStaging]) -> None:
        self._spare = spare
        self.pieces: tuple[RunStaging, ...] = ()
        """The piece, from the step on in which the request gives it up. Until then, the request has it, and
        an exception may drop the arrays."""

    def __del__(self) -> None:
        self._spare += self.pieces


class Results(NamedTuple):
    """The outputs of a finished run, by name; and the loan of its piece, None if they were copied out."""

    outputs: dict[str, np.ndarray]
    loan: Loan | None


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
    _pieces: dict[int, Pieces] = field(default_factory=dict, init=False)
    """The staging memory of each graph that the sender knows, by the graph's number."""
    _leaving: list[Pieces] = field(default_factory=list, init=False)
    """The staging memory of graphs that have ended while callers had pieces of it."""
    _latest: dict[int, tuple[Named, Named, bytes]] = field(default_factory=dict, init=False)
    """The latest run of each graph that had all its values in buffers, by the graph's number: its inputs and
    outputs, and how it was encoded. The next run has often the same."""

    # Starting.

    def start(self, request: WorkerRequest) -> None:
        """Copy the inputs of a run to staging memory, all but the large ones, and dispatch it.

        Raises `InvalidRequest`, `OutOfMemory`, `OutOfDescriptors`, `MemoryError`. The caller then discharges
        the request.
        """
        run, message = request.run, request.message
        assert run is not None
        deployed = run.deployed
        assert deployed is not None
        if needs_staging(run, message):
            pieces = self.pieces_of(deployed)
            request.staged = pieces.spare.pop(0) if pieces.spare else self._make(deployed)
            _take_back(pieces, request.staged)
            if not pieces.spare and COPY_BYTES < request.staged.output_bytes <= SEGMENT_BYTES:
                self._make_spare(deployed, pieces)
        self.fill(request, run, message)
        if request.alone:
            self.sender.dispatch_alone(request)
        else:
            self.sender.dispatch(request)

    def prepare(self, envelope: Envelope) -> WorkerRequest | None:
        """A run ready to be dispatched by the fast path; None if it must take the slow one.

        Changes only the unused staging memory that it fills. The caller takes that in its step, as the first
        of `pieces_of(...).spare`. Raises an error if the message is not valid.
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
            or (envelope.future is None and envelope.reply_to is None)
            or message.crashes
        ):
            return None
        epoch, slots = run.found
        if epoch != memory.epoch:
            slots = self.broker.state.models.slots(run)
        request = WorkerRequest(envelope, envelope.number, message, slots)
        request.run = run
        if run.body and not message.arrays:
            request.body = run.body
            return request
        if needs_staging(run, message):
            pieces = self._pieces.get(deployed.number)
            if pieces is None or not pieces.spare:
                return None
            request.staged = pieces.spare[0]
            _take_back(pieces, request.staged)
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
                    self._copy(request, staged, place, array)
                    written[place] = staged.write[place]
                else:
                    copied = False
                    written[place] = Staged(*at)
            if len(request.copies) > 1:
                weigh(request.copies)
            if copied and not run.buffers and not run.into:
                request.body = staged.body
                return
        else:
            known = self._latest.get(deployed.number)
            if known is not None and known[0] == run.buffers and known[1] == run.into:
                request.body = run.body = known[2]
                return
        places = frozenset(run.returned_outputs.values())
        placed = RunPlaced(
            run=deployed.number,
            write=tuple(written.items()),
            read=tuple((place, at) for place, at in staged.read.items() if place in places) if staged else (),
            copy_in=run.copy_in,
            copy_out=run.copy_out,
        )
        request.body = encode_message(placed)
        if staged is None:
            run.body = request.body
            if not deployed.ended:
                self._latest[deployed.number] = run.buffers, run.into, request.body

    def _copy(self, request: WorkerRequest, staged: RunStaging, place: int, array: np.ndarray) -> None:
        """Copy an input to its place, now or behind the request."""
        values, arrival = staged.inputs[place], staged.arrivals.get(place)
        if arrival is not None and may_be_late(array):
            alone = not self.sender.in_flight.requests
            request.copies = (*request.copies, LateCopy(array, as_bytes(values), arrival, alone=alone))
            return
        store(values, array)
        if arrival is not None:
            arrival.note_all()

    # Results.

    def results(self, request: WorkerRequest) -> Results:
        """The outputs of a finished run. Raises `MemoryError` if this process has no room to copy them.

        Changes nothing else: the caller sets `Loan.pieces`, in the step in which the request gives up its
        piece.
        """
        run, staged = request.run, request.staged
        assert run is not None
        deployed = run.deployed
        assert deployed is not None
        if staged is None:
            return Results(deployed.finish({}), None)
        places = run.returned_outputs
        if staged.output_bytes > COPY_BYTES and (pieces := self._lending(deployed)).may_lend(staged):
            loan = Loan(pieces.spare)
            outputs: dict[str, np.ndarray] = {}
            for name, place in places.items():
                array = staged.outputs[place]
                again = any(places[other] == place for other in outputs)  # it has two names
                outputs[name] = array.copy() if again else keeping(array, loan)
            if staged not in pieces.lent:
                pieces.lent.append(staged)
            return Results(deployed.finish(outputs), loan)
        return Results(
            deployed.finish({name: staged.outputs[place].copy() for name, place in places.items()}), None
        )

    def is_heavy(self, request: WorkerRequest) -> bool:
        """Whether many bytes of the outputs of a finished run have to be copied."""
        run, staged = request.run, request.staged
        assert run is not None
        assert run.deployed is not None
        if staged is None or staged.output_bytes <= HEAVY_RUN_BYTES:
            return False
        return not self._lending(run.deployed).may_lend(staged)

    def _lending(self, deployed: Deployed) -> Pieces:
        """The `Pieces` to which a piece belongs that is lent to the caller of a run."""
        if not deployed.ended:
            return self.pieces_of(deployed)
        pieces = Pieces()
        self._leaving.append(pieces)
        return pieces

    def discharge(self, request: WorkerRequest) -> None:
        """Take back the staging memory of a run that has ended."""
        staged, request.staged = request.staged, None
        if staged is None:
            return
        assert request.run is not None
        deployed = request.run.deployed
        assert deployed is not None
        if self.has_room(deployed):
            self.pieces_of(deployed).spare.append(staged)
        else:
            self._give_back(staged)

    def has_room(self, deployed: Deployed) -> bool:
        """Whether more of a graph's staging memory may be kept unused."""
        return not deployed.ended and len(self.pieces_of(deployed).spare) < _MOST_SPARE

    # Staging memory.

    def pieces_of(self, deployed: Deployed) -> Pieces:
        """The staging memory of a graph. The fast path takes the first spare piece, and adds to these."""
        pieces = self._pieces.get(deployed.number)
        if pieces is None:
            pieces = self._pieces[deployed.number] = Pieces()
        return pieces

    def forget(self, deployed: Deployed) -> None:
        """Free the staging memory of a graph that has ended; pieces that callers have are freed once the
        callers drop them."""
        self._latest.pop(deployed.number, None)
        pieces = self._pieces.pop(deployed.number, None)
        if pieces is not None:
            self._leaving.append(pieces)
            self.take_back()

    @property
    def has_returned(self) -> bool:
        """Whether pieces of graphs that have ended have come back, so that there is something to
        `take_back`."""
        return bool(self._leaving) and any(pieces.spare for pieces in self._leaving)

    def take_back(self) -> None:
        """Free the pieces of graphs that have ended."""
        for pieces in tuple(self._leaving):
            self._free(pieces)
            if not pieces.lent:
                self._leaving.remove(pieces)

    def close(self) -> None:
        """Drop all staging memory: the arrays on it keep its segments mapped."""
        self._pieces.clear()
        self._leaving.clear()
        self._latest.clear()

    def _free(self, pieces: Pieces) -> None:
        """Free the unused pieces of a graph."""
        while pieces.spare:
            staged = pieces.spare.pop(0)
            _take_back(pieces, staged)
            self._give_back(staged)

    def _give_back(self, staged: RunStaging) -> None:
        for block in staged.blocks:
            self.staging.give_back(block)

    def _make(self, deployed: Deployed) -> RunStaging:
        """New staging memory for a run. If much is unused, that is freed first."""
        unused = [staged.nbytes for pieces in self._pieces.values() for staged in pieces.spare]
        if sum(unused) > _MOST_SPARE_BYTES:
            for pieces in self._pieces.values():
                self._free(pieces)
        inputs = [*deployed.inputs.values()]
        if deployed.state is not None:
            inputs.append(deployed.state)
        outputs = [*dict.fromkeys(deployed.outputs.values())]
        given, write, _ = self._place(deployed, inputs, late=True)
        try:
            returned, read, offsets = self._place(deployed, outputs, late=False)
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
            arrivals={
                place: Arrival(self.staging.memory(at.segment), at.arrival)
                for place, at in write.items()
                if at.arrival
            },
            write=write,
            read=read,
            offsets=offsets,
            body=encode_message(whole),
        )

    def _make_spare(self, deployed: Deployed, pieces: Pieces) -> None:
        """Make one more piece, if there is memory for it.

        asyncio keeps an answer until its task waits for the next. A caller that sends run after run has the
        results of the last one when it sends the next, so with one piece, each would take the slow path.
        """
        with contextlib.suppress(CudnnActorError, MemoryError):
            pieces.spare.append(self._make(deployed))

    def _place(
        self, deployed: Deployed, places: Iterable[int], *, late: bool
    ) -> tuple[Block | None, dict[int, Staged], dict[int, int]]:
        """A block with room for the values of these buffers, the place of each in it, and their offsets.
        `late`: whether large ones may be copied there late."""
        offsets, notes, end = {}, {}, 0
        for place in places:
            offsets[place] = end
            nbytes = packed_nbytes(deployed.spec_at(place))
            end += round_up(nbytes, _ALIGNMENT)
            if late and nbytes > LATE_BYTES:
                notes[place] = end
                end += NOTE_BYTES
        if not offsets:
            return None, {}, {}
        block = self.staging.take(end)
        at = block.offset
        staged = {
            place: Staged(block.segment, at + offset, at + notes[place] if place in notes else 0)
            for place, offset in offsets.items()
        }
        return block, staged, offsets

    def _views(self, deployed: Deployed, places: Mapping[int, Staged]) -> dict[int, np.ndarray]:
        specs = {place: deployed.spec_at(place) for place in places}
        return {
            place: self.staging.array_at(at.segment, at.offset, specs[place].dims, specs[place].dtype.numpy)
            for place, at in places.items()
        }


def needs_staging(run: ModelRun, message: RunModel) -> bool:
    """Whether any value of a run is on the host."""
    deployed = run.deployed
    assert deployed is not None
    return bool(message.arrays) or len(run.into) < len(deployed.outputs) or deployed.state is not None


def _take_back(pieces: Pieces, staged: RunStaging) -> None:
    """Note that a piece is not lent any more."""
    if staged in pieces.lent:
        pieces.lent.remove(staged)
