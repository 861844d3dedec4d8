"""The worker host: the broker's host in process isolation. It keeps the parent's state of its workers.

It puts its parts together and passes each message, and each frame of the worker, to the part that handles it:

==================  ==================================================================================
part                what it does
==================  ==================================================================================
`sender`            encodes requests, sends them, and holds their buffers until they are complete
`answers`           checks the worker's answers, and completes the requests
`values`            copies host data into buffers and out of them
`models`            sends runs of models, and makes their results
`arenas`            has arenas made, and mapped in every worker
`recovery`          takes over, at a worker's end, its requests and their memory
`workers`           knows the worker that serves, the one that starts, and the standby
`recent`            knows the plans with which a standby is warmed
==================  ==================================================================================

There is one caller at a time: a thread that uses the host or one of its parts holds the host
(`dispatcher.Dispatcher` makes sure of that). The host knows no threads, loops or processes, and does no I/O
itself, so its behaviour is a function of the calls made to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cudnn_actor.actors import Envelope
from cudnn_actor.actors.diverting import LEVELS, Line, write_line
from cudnn_actor.broker import Broker
from cudnn_actor.broker.deployments import Deployed
from cudnn_actor.broker.service_state import Forget, ServiceState
from cudnn_actor.engines.cpu.arenas import Arenas
from cudnn_actor.isolation.process.parent.answers import AnswerTaker
from cudnn_actor.isolation.process.parent.checksums import Checksums
from cudnn_actor.isolation.process.parent.crash import CrashRecovery
from cudnn_actor.isolation.process.parent.in_flight import WINDOW, InFlightTable, Violation, WorkerRequest
from cudnn_actor.isolation.process.parent.model_runs import ModelRuns
from cudnn_actor.isolation.process.parent.recent_plans import RecentPlans
from cudnn_actor.isolation.process.parent.sender import Sender
from cudnn_actor.isolation.process.parent.service_arenas import ServiceArenas
from cudnn_actor.isolation.process.parent.values import WITH_VALUES, Values
from cudnn_actor.isolation.process.parent.workers import WorkerEnd, Workers
from cudnn_actor.isolation.process.wire import (
    Answers,
    ArenaImported,
    ArenaMade,
    ArenaRefused,
    Dying,
    ForgetPlans,
    FromWorker,
    InjectFault,
    InternalDone,
    Logged,
    MapArena,
    MapStage,
    Nearing,
    encode_message,
)
from cudnn_actor.isolation.staging import Staging
from cudnn_actor.protocol.messages.messages import Download, RunModel, WriteWeights
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["WorkerHost"]


class WorkerHost:
    """A service in process isolation: its broker, and the state of its workers.

    Parameters
    ----------
    state
        The service's state. Only this object and its broker write its memory table and counters.
    reply
        Called with an envelope, a value and an error: exactly once for each envelope that was started.
    host_arenas
        Whether arenas are host memory, which this process maps too.
    window
        Requests that a worker may have at once.
    verifies
        Whether checksums of uploads are kept, to verify buffers after a crash.
    keeps_recent
        Whether the plans that have run lately are noted: there is a standby, which is warmed with them.
    """

    has_views = False

    def __init__(
        self,
        state: ServiceState,
        reply: Callable[[Envelope, Any, BaseException | None], None],
        *,
        host_arenas: bool,
        window: int = WINDOW,
        verifies: bool = False,
        keeps_recent: bool = False,
    ) -> None:
        mapped = Arenas() if host_arenas else None
        self.state = state
        self.broker: Broker[WorkerRequest] = Broker(state, reply, self, WorkerRequest)
        self.in_flight = InFlightTable(window)
        self.checksums = Checksums() if verifies else None
        self.workers = Workers()
        self.recent = RecentPlans(kept=keeps_recent, nbytes=state.cache_limit)
        self.staging = Staging(self.workers.map_segment, self.workers.unmap_segment)
        self.arenas = ServiceArenas(self.broker, self.workers, mapped)
        self.sender = Sender(self.broker, self.in_flight, self.workers, self.staging, self.checksums)
        self.values = Values(self.broker, self.staging, self.sender, mapped, self.checksums)
        self.models = ModelRuns(self.broker, self.staging, self.sender)
        self.sender.take_back = self.models.discharge
        self.answers = AnswerTaker(
            broker=self.broker,
            in_flight=self.in_flight,
            sender=self.sender,
            values=self.values,
            models=self.models,
            recent=self.recent,
            start_again=self._start_injected,
        )
        self.recovery = CrashRecovery(
            broker=self.broker,
            in_flight=self.in_flight,
            workers=self.workers,
            staging=self.staging,
            sender=self.sender,
            answers=self.answers,
        )

    # Workers.

    def introduce(self, worker: WorkerEnd) -> None:
        """Send a new worker every arena and segment. Raises `OSError`."""
        for arena in self.state.memory.arenas():
            worker.send(MapArena(arena.number, arena.nbytes), (arena.fd,))
        for number, nbytes, descriptor in self.staging.segments():
            worker.send(MapStage(number, nbytes), (descriptor,))

    # Messages.

    @property
    def room(self) -> int:
        """How many new messages may be started. Each that waits in the broker will need a place."""
        if self.workers.serving is None or self.workers.stopping:
            return 0
        return max(0, self.in_flight.room - len(self.broker.arenas.waiting) - len(self.broker.held))

    def start(self, envelope: Envelope, *, injected: bool = False) -> None:
        """Start a message: answer it, or dispatch it. `injected`: its fault has been injected already."""
        request = None
        try:
            request = self.broker.start(envelope, injected=injected)
            if request is not None:
                self._run(request)
        except Exception as error:  # the answer to this one message
            if request is not None:
                if request.claims is not None:  # it is in flight: its frame is sent when there is memory
                    if isinstance(error, MemoryError):
                        return
                    raise
                self.sender.discharge(request, end_ref=True)
            self.broker.refuse(envelope, error)

    def _start_injected(self, envelope: Envelope) -> None:
        self.start(envelope, injected=True)

    def _run(self, request: WorkerRequest) -> None:
        kind = type(request.message)
        if request.injects:
            request.body = encode_message(InjectFault(tag=kind.__name__.lower()))
            self.sender.dispatch(request)
        elif kind is Download:
            self.values.read(request)
        elif kind is RunModel:
            self.models.start(request)
        elif kind is WriteWeights:
            self.values.write_all(request)
        elif kind in WITH_VALUES:
            self.values.write(request)
        else:
            self.sender.encode(request)
            self.sender.dispatch(request)

    # Frames.

    def receive(self, frames: Sequence[FromWorker]) -> None:
        """Handle frames from the worker. Raises `Violation`, `BadFrame`: then the worker must be replaced."""
        for frame in frames:
            match frame:
                case Answers():
                    for answer in frame.answers:
                        self.answers.complete(answer)
                    self.answers.note_completed()
                case ArenaMade() | ArenaImported() | ArenaRefused():
                    self.arenas.take(frame)
                    self._start_waiting()
                case Nearing():
                    self.in_flight.nearing = True
                case InternalDone():
                    pass  # for a request that it got as a standby
                case Logged():
                    self.write_log(frame)
                case Dying():
                    self.workers.last_word = frame
                case other:
                    raise Violation(f"it sent {type(other).__name__}, which was not asked for")

    def _start_waiting(self) -> None:
        """Start the allocations that have waited for an arena."""
        waiting = self.broker.arenas.take_waiting()
        for envelope in waiting:
            self.start(envelope, injected=True)
        if waiting:
            self.broker.settle_waiting()

    def write_log(self, line: Logged) -> None:
        """Write a worker's log line, in the context of the request that was running. Raises `Violation`."""
        if "event" in line.fields or "self" in line.fields:
            raise Violation("it sent a log line with a reserved field name (event or self)")
        request = self.in_flight.requests.get(line.number)
        context = None if request is None else request.envelope.context
        said = Line(line.logger, LEVELS[line.level], line.event, line.fields)
        self.broker.write_in(context, lambda: write_line(said))

    # As the host of the broker: see `broker.Host`.

    def waits_for(self, number: int) -> bool:
        """Whether any request with a lower number is in flight or waits to be dispatched again."""
        return self.in_flight.waits_for(number)

    def create_arena(self, number: int, nbytes: int) -> None:
        """Ask the worker for an arena."""
        self.arenas.create(number, nbytes)

    def import_arena(self, number: int, nbytes: int, descriptor: int) -> None:
        """Let the worker map another service's arena."""
        self.arenas.import_from(number, nbytes, descriptor)

    def drop_import(self, number: int) -> None:
        """Let the worker unmap an imported arena."""
        self.arenas.drop_import(number)

    def drop_arena(self, number: int) -> None:
        """Unmap an empty arena everywhere."""
        self.arenas.drop(number)

    def forget(self, message: Forget) -> None:
        """Let every worker drop graphs and plans."""
        self.sender.graphs.forget(message.identities)
        if message.plans:
            self.recent.forget(message.plans)
            self.in_flight.forget_plans(message.plans)
            self.workers.tell_all(ForgetPlans(sorted(message.plans)))

    def clear_plans(self) -> None:
        """Let a standby drop its plans, and forget which plans have run lately."""
        plans = sorted(self.recent.plans)
        self.recent.forget(plans)
        self.in_flight.forget_all_plans()
        if plans:
            self.workers.tell_others(ForgetPlans(plans))

    @property
    def lent_bytes(self) -> int:
        """Bytes of the staging arrays that callers have."""
        return self.staging.lent_bytes

    def lend(self, spec: TensorSpec) -> np.ndarray:
        """An array in staging memory, for a caller."""
        return self.staging.lend(spec.dims, spec.dtype.numpy)

    def forget_deployed(self, deployed: Deployed) -> None:
        """Let the worker drop the run of a model's graph, and free its staging memory here."""
        self.sender.forget_run(deployed)
        self.models.forget(deployed)

    def close(self) -> None:
        """Free the staging memory, and unmap the arenas. Idempotent."""
        self.models.close()
        self.staging.close()
        self.recent.clear()
        self.arenas.close()
