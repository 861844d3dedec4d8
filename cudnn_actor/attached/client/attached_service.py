"""The stand-in for the service in an attached process: the part of `CudnnService` that handles use."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pykka

from cudnn_actor.actors import ActorStopped, Envelope, MailboxRef, ask, forks
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.attached.client.held import HeldBuffers
from cudnn_actor.attached.client.link import Link
from cudnn_actor.attached.client.outgoing import ShareWeights
from cudnn_actor.attached.wire import Attached, Happened, Lent, LoadedModel, Status, digest_of
from cudnn_actor.broker.execution_state import ExecutionState
from cudnn_actor.broker.request_counts import RequestCounters
from cudnn_actor.broker.service_state import Export, Import
from cudnn_actor.isolation.thread.cudnn_actor import CudnnActor
from cudnn_actor.memory import ExportedRange
from cudnn_actor.models.kept_graphs import KeptGraphs
from cudnn_actor.options import Options
from cudnn_actor.processes.channel import Channel
from cudnn_actor.protocol.errors import ServiceStopped
from cudnn_actor.protocol.graphs.limits import GraphLimits
from cudnn_actor.protocol.messages.buffer_messages import Values
from cudnn_actor.protocol.messages.messages import Free, UnloadModel
from cudnn_actor.protocol.messages.model_messages import ModelRef
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec
from cudnn_actor.service.arrays import as_values
from cudnn_actor.service.event_log import EventLog
from cudnn_actor.service.health import Health, HealthState
from cudnn_actor.service.metrics import Metrics
from cudnn_actor.supervision import Clock, Escalated, ExitReason, Restarted, Restarting, Started, Stopped
from cudnn_actor.supervision.events import stamp

__all__ = ["AttachedService"]

_OF_THE_BOUND = 4
"""The buffers of models' idle graphs may take the client's limit divided by this."""


class _ModelsElsewhere:
    """A stand-in for the deployed models. Only the service's process knows enough of them to check a
    message."""

    def run_of(self, _message: Any) -> None:
        """Return None: the run is not known here."""

    def slots(self, _run: None) -> None:
        """Check nothing; the other methods check nothing either."""

    require = check = written_by = slots


@dataclass(kw_only=True, eq=False, repr=False)
class _AttachedState(ExecutionState):
    """The part of a `ServiceState` that the handles of an attached process use."""

    mailbox: Link
    memory: HeldBuffers
    name: str
    counters: RequestCounters = field(default_factory=RequestCounters, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.models = _ModelsElsewhere()
        self.faults = None

    def discard(self, result: object) -> None:
        """Free a buffer that nobody receives, or unload a model. Any thread."""
        if isinstance(result, ModelRef):
            self.unload(result, None)
        if isinstance(result, BufferRef):
            with contextlib.suppress(ActorStopped):  # the server frees it
                self.mailbox.admit(Envelope(Free(buffer=result)))

    def unload(self, model: ModelRef, graphs: tuple[str, ...] | None) -> None:
        """Ask the service to forget graphs of a model, or all of them, without waiting: see `UnloadModel`.
        Any thread."""
        with contextlib.suppress(ActorStopped):
            self.mailbox.admit(Envelope(UnloadModel(model=model, graphs=graphs)))

    def forget(self, identities: frozenset[str], _plans: frozenset[str]) -> None:
        """Drop graphs from the caches, here and in the server. Plans stay, since all clients share them."""
        self.messages.forget(identities)
        self.mailbox.call(self.mailbox.forget_graphs, identities)


class AttachedService:
    """A service of another process, as handles see it. `connect` makes it, on the loop that owns it.

    Any thread may read its properties.

    Parameters
    ----------
    channel
        The connection. This object owns it from now on.
    attached
        The server's first frame.
    """

    def __init__(self, channel: Channel, attached: Attached) -> None:
        self.options = Options(name=attached.service)
        self.name, self.device, self.isolation = attached.service, attached.device, attached.isolation
        self.worker_pid = attached.worker_pid
        """The process id of the service's worker, as of the last lifecycle event; None for none."""
        self.models: Mapping[str, str] = attached.models
        """The files of the models that the server has by name."""
        self.loaded: Mapping[str, LoadedModel] = attached.loaded
        """The models of the server's process, by name. The dict is replaced in one step."""
        self.unused_gpu = None
        self.ending = False
        self.events = EventLog()
        self.stopped: concurrent.futures.Future[Escalated | None] = concurrent.futures.Future()
        """A future that is done when the connection has ended."""
        self._health: Health | None = None
        self._metrics: Metrics | None = None
        self._phase = HealthState.STARTING
        self._cause: ExitReason | None = None
        self._gone = threading.Event()
        held = HeldBuffers(attached.device)
        self.link = Link(
            channel,
            held,
            window=attached.window,
            graphs=attached.graphs,
            on_frame=self._take,
            on_lost=self._note_loss,
        )
        self.state = _AttachedState(
            mailbox=self.link,
            memory=held,
            name=attached.service,
            graph_limits=msgspec.structs.replace(GraphLimits(), operations=attached.operations),
        )
        bound = attached.nbytes
        self.kept_graphs = KeptGraphs(
            self.state.forget,
            self.state.cache_limit,
            lambda: None if bound is None else bound // _OF_THE_BOUND,
        )
        self.actor_ref: pykka.ActorRef[Any] = MailboxRef(self.link, CudnnActor, self._gone)
        """A pykka reference to the service. `stop` ends the attachment alone."""
        forks.watch(self)

    def __repr__(self) -> str:
        return f"<AttachedService {self.name!r} on {self.device}: {self._state_word()}>"

    def forget_parent(self) -> None:
        """Become stopped. Called in a forked child."""
        self.stopped = concurrent.futures.Future()
        self.stopped.set_result(None)

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the process that has attached."""
        return self.link.forked

    @property
    def alive(self) -> bool:
        """Whether the attachment, and the service, have not ended."""
        return self.link.closed is None

    @property
    def ready(self) -> bool:
        """Whether an incarnation of the actor serves now, as far as this process was told."""
        return self.alive and self._phase is HealthState.READY

    def health(self) -> Health:
        """The service's state, as the server last sent it: at most a quarter of a second ago.

        Raises `ServiceStopped` in a forked child.
        """
        self.link.check_process()
        assert self._health is not None, "the server sends it before anything else"
        state = self._phase if self.alive else HealthState.STOPPED
        changed = {"cause": self._cause} if self._cause is not None else {}
        return msgspec.structs.replace(self._health, state=state, generation=self.state.generation, **changed)

    def metrics(self) -> Metrics:
        """The metrics of the whole service, with all clients, as old as `health`."""
        self.link.check_process()
        assert self._metrics is not None, "the server sends it before anything else"
        return self._metrics

    def values(self, array: Any) -> Values:
        """Convert `array` for `Allocate.data` and `Upload.data`. Raises `InvalidRequest`."""
        self.link.check_process()
        return as_values(array, self.device, None)

    def failure(self) -> ServiceStopped | None:
        """The error to raise if the service or its process has ended, and this process did not ask for it;
        else None."""
        reason = self.link.closed
        return None if reason is None or self.ending else ServiceStopped(reason=reason)

    def end(self, reason: str = "asked to stop") -> concurrent.futures.Future[Escalated | None]:
        """Detach: the service goes on, and frees this process's buffers and models. Never blocks. Idempotent.

        Returns the `stopped` future. In a forked child nothing happens.
        """
        if not self.forked and not self.ending:
            self.ending = True
            self.link.close(reason)
            self.link.call(self.link.end, reason)
        return self.stopped

    def _state_word(self) -> str:
        if self.forked:
            return "of a parent process"
        return str(self._phase if self.alive else HealthState.STOPPED)

    def _html(self, caption: str) -> str:
        return f"<p>{caption.replace('<', '&lt;')}</p>"

    async def share_weight(self, values: np.ndarray, spec: TensorSpec) -> BufferRef:
        """A buffer of these values that other processes share: one that exists, or a new one. Raises as
        `upload`."""
        digest = await in_own_thread(digest_of, values)
        shared: BufferRef | None = await self._ask_to_share(ShareWeights(spec, digest))
        if shared is None:
            shared = await self._ask_to_share(ShareWeights(spec, digest, values))
        assert shared is not None, "with values, there is one"
        return shared

    async def export_buffer(self, buffer: BufferRef, timeout: float | None) -> ExportedRange:
        """The place of a buffer's bytes, once earlier work on it is done. Raises as `download`."""
        given: ExportedRange = await ask(self.link, Export(buffer=buffer), timeout=timeout)
        return given

    async def import_buffer(
        self, memory: ExportedRange, spec: TensorSpec, timeout: float | None
    ) -> BufferRef:
        """A reference to memory of another service, which can only be copied from. The caller frees it.
        Raises `CudnnActorError`."""
        message = Import(memory=memory, spec=spec)
        given: BufferRef = await ask(self.link, message, timeout=timeout, discard=self.state.discard)
        return given

    async def _ask_to_share(self, message: ShareWeights) -> BufferRef | None:
        given: BufferRef | None = await ask(self.link, message, discard=self.state.discard)
        return given

    # Frames from the server. On the owning loop.

    def _take(self, frame: Any) -> None:
        if isinstance(frame, Status):
            self._health, self._metrics = frame.health, frame.metrics
            self.state.generation = frame.health.generation
            if not self.events.all:
                self._phase = frame.health.state
        elif isinstance(frame, Lent):
            self.loaded = frame.loaded
        elif isinstance(frame, Happened):
            self._note_event(frame)

    def _note_event(self, frame: Happened) -> None:
        event = frame.event
        self.worker_pid = frame.worker_pid
        match event:
            case Started() | Restarted():
                self._phase = HealthState.READY
                self.state.generation = event.generation
            case Restarting():
                self._phase, self._cause = HealthState.RESTARTING, event.cause
            case Stopped(child=None):
                self.link.end(f"the service has stopped: {event.reason}")
        if self.events.all[-1:] != (event,) and not (isinstance(event, Stopped) and event.child is None):
            self.events.append(event)

    def _note_loss(self, reason: str) -> None:
        """Note that the connection has ended."""
        self._phase = HealthState.STOPPED
        self._cause = ExitReason.shutdown(reason)
        self._gone.set()
        self.events.append(stamp(Stopped(child=None, reason=self._cause), self.name, Clock()))
        self.state.messages.clear()
        if not self.stopped.done():
            self.stopped.set_result(None)
