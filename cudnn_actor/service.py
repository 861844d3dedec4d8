"""A service: the supervised actor, its mailbox and its memory, from start to end.

The threads of a service are the supervisor's and the actor's. The callbacks
here (`_on_event`) run on the supervisor's; everything else may be called on
any thread.
"""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any, Unpack

import pykka

from cudnn_actor.actor import CudnnActor
from cudnn_actor.actors import Actor, Envelope, Mailbox, MailboxRef
from cudnn_actor.engines import EngineChoice, choose_engine
from cudnn_actor.event_log import EventLog
from cudnn_actor.memory import MemoryTable
from cudnn_actor.options import Options, SpawnOptions, make_options
from cudnn_actor.protocol.errors import InvalidRequest, ServiceStopped, StartFailed
from cudnn_actor.state import ServiceState
from cudnn_actor.supervision import (
    ChildPolicy,
    ChildSpec,
    Escalated,
    ExitReason,
    FaultInjector,
    LifecycleEvent,
    Restart,
    Restarted,
    Restarting,
    RestartIntensity,
    Started,
    Stopped,
    Supervisor,
)

__all__ = ["CudnnService", "child_spec", "start"]

CHILD = "cudnn"
"""The actor's id under its supervisor, in events and log lines."""
_SHUTDOWN_S, _READY_WITHIN_S = 10.0, 300.0
"""Of a whole service under a supervisor of the user's: more than its own supervisor gives its actor."""


class CudnnService:
    """One supervised `CudnnActor`, for code without asyncio: plain threads and pykka actors.

    Made by `start`, or by `child_spec` under a supervisor of yours. From asyncio, use `spawn`, or
    `CudnnRef(service)` on one that exists.

    Parameters
    ----------
    options
        See `Options`.
    parent
        A pykka actor that is told `Escalated` when the restarts are used up.
    engine
        What runs the work; None for what `options.device` stands for.
    """

    def __init__(
        self,
        options: Options,
        *,
        parent: pykka.ActorRef[Any] | None = None,
        engine: EngineChoice | None = None,
    ) -> None:
        self.options = options
        self._engine = engine or choose_engine(options.device)
        self.device = self._engine.device
        self.events = EventLog()
        self.started: concurrent.futures.Future[None] = _promise()
        """Done when the actor is ready; fails with `StartFailed` when it never will be."""
        self.stopped: concurrent.futures.Future[Escalated | None] = _promise()
        """Done when the service has ended; its result says whether, and why, it gave up."""
        self._gone = threading.Event()
        self._turning = threading.RLock()
        """Held while a life of the service begins or ends. Re-entrant: `stopped` has callbacks."""
        faults = FaultInjector.of(options.faults)
        self.state = ServiceState(
            mailbox=Mailbox(options.mailbox),
            memory=self._new_memory(),
            faults=faults,
            workspace_limit=options.workspace_limit,
        )
        self.actor_ref: pykka.ActorRef[Any] = MailboxRef(self.state.mailbox, CudnnActor, self._gone)
        """A pykka reference that stays good across restarts."""
        self._parent = parent
        self._supervisor: Supervisor | None = None
        self._escalated: Escalated | None = None

    def make_supervisor(self) -> Supervisor:
        """The supervisor of this service, not yet launched. One made after its end starts the service anew.

        Raises `InvalidRequest` while the service runs.
        """
        with self._turning:
            if self._supervisor is not None:
                raise InvalidRequest(
                    field="service", value="running", problem="has been started already", fix="spawn another"
                )
            self._supervisor = supervisor = self._new_supervisor()
            # In this order: who reads `stopped` and then ends the service ends the life that it has read of.
            if self.stopped.done():
                self._renew()
        return supervisor

    def _new_supervisor(self) -> Supervisor:
        policy = ChildPolicy(id=CHILD, restart=Restart.TRANSIENT)
        child = ChildSpec(policy=policy, make=self._make_actor, hang_after_s=self.options.hang_after_s)
        # Where the memory dies with the context a successor would have nothing to go on with.
        restarts = self.options.max_restarts if self._engine.outlives_context else 0
        intensity = RestartIntensity(max_restarts=restarts, period_s=self.options.period_s)

        def listen(event: LifecycleEvent) -> None:
            if self._supervisor is supervisor:  # a lost one that comes back is not heard
                self._on_event(event)

        supervisor = _ServiceSupervisor([child], intensity=intensity, parent=self._parent, listener=listen)
        return supervisor

    def launch(self) -> None:
        """Start; `started` tells when it is done. Never blocks."""
        self.make_supervisor().launch()

    def end(self, reason: str = "asked to stop") -> None:
        """Stop after the request in work; `stopped` tells when it is done. Never blocks. Idempotent.

        A service that was never started is stopped at once.
        """
        with self._turning:
            supervisor = self._supervisor
            if supervisor is None and not self.stopped.done():
                self.events.append(Stopped(child=None, reason=ExitReason.shutdown(reason)))
                self._close(reason)
        if supervisor is not None:
            supervisor.end(reason)

    def stop(self, timeout: float | None = None) -> None:
        """Stop and wait for it, up to `timeout` seconds. Blocks. What still waits gets `ServiceStopped`.

        Raises `TimeoutError`.
        """
        stopped = self.stopped  # this life's: a supervisor of the user's may begin another at once
        self.end()
        stopped.result(timeout)

    def _make_actor(self, incarnation: int) -> Actor:
        return CudnnActor(self.state, self._engine.make, incarnation)

    def _on_event(self, event: LifecycleEvent) -> None:
        self.events.append(event)  # first: who waits for a start or an end finds it told
        match event:
            case Started():
                self.started.set_result(None)
            case Restarting():
                self.state.restarts += 1
            case Restarted() if not self.started.done():
                self.started.set_result(None)
            case Escalated():
                self._escalated = event
            case Stopped(child=None):
                self._ended(event)
            case Stopped():
                self.end(event.reason.cause or str(event.reason))  # without its actor it serves nobody

    def _ended(self, event: Stopped) -> None:
        with self._turning:
            self._supervisor = None
            self._close(str(event.reason) if self._escalated is None else f"gave up: {self._escalated.cause}")

    def _close(self, reason: str) -> None:
        self._gone.set()
        self.state.mailbox.close(reason)
        self.state.memory.close()
        if not self.started.done():
            self.started.set_exception(StartFailed(detail=reason))
        self.stopped.set_result(self._escalated)

    def _renew(self) -> None:
        self._escalated = None
        self.events = EventLog()
        self.started, self.stopped = _promise(), _promise()
        self.state.memory = self._new_memory()
        self.state.mailbox.reopen()
        self._gone.clear()

    def _new_memory(self) -> MemoryTable:
        return MemoryTable(self.device, limit=self.options.memory_limit)

    def failure(self) -> ServiceStopped | None:
        """The error that stands for a service that gave up; None for one that did not."""
        escalated = self._escalated
        return None if escalated is None else ServiceStopped(reason=f"gave up: {escalated.cause}")


class _ServiceSupervisor(Supervisor):
    """A supervisor that a supervisor of the user's may kill: then, too, its service ends for everybody."""

    def on_crash(self, error: BaseException, current: Envelope | None, waiting: list[Envelope]) -> None:
        """Give up the actor, so that what it was asked is answered; then say that the service has stopped."""
        super().on_crash(error, current, waiting)
        if self._failure is None:  # which is raised behind the last event
            self._emit(Stopped(child=None, reason=ExitReason.killed(str(error))))


def _promise() -> concurrent.futures.Future[Any]:
    """A future that a waiter who gives up, and so cancels it, cannot take from the others."""
    promise: concurrent.futures.Future[Any] = concurrent.futures.Future()
    promise.set_running_or_notify_cancel()
    return promise


def start(*, parent: pykka.ActorRef[Any] | None = None, **options: Unpack[SpawnOptions]) -> CudnnService:
    """Start a service from code without asyncio. Blocks until its actor is ready.

    Parameters
    ----------
    parent
        A pykka actor that is told `Escalated` when the service gives up.
    **options
        See `Options`.

    Raises
    ------
    InvalidRequest
        An option is out of its range.
    StartFailed
        The actor could not be started, and the restarts are used up.
    """
    service = CudnnService(make_options(options), parent=parent)
    service.launch()
    try:
        service.started.result()
    except BaseException:  # a Ctrl-C too: nobody would have a handle to end it with
        service.end("given up while it started")
        raise
    return service


def child_spec(
    id: str = "cudnn", *, restart: Restart = Restart.PERMANENT, **options: Unpack[SpawnOptions]
) -> tuple[ChildSpec, CudnnService]:
    """A service as a child of a `Supervisor` of yours, and the handle that reaches it.

    The handle stays good when your supervisor starts the service anew; its buffers do not: they are
    `StaleBufferError` from then on.

    Parameters
    ----------
    id
        The child's name under your supervisor.
    restart
        After which ends of the whole service it is started again.
    **options
        See `Options`.
    """
    service = CudnnService(make_options(options))
    policy = ChildPolicy(id=id, restart=restart, shutdown_s=_SHUTDOWN_S, ready_within_s=_READY_WITHIN_S)
    return ChildSpec(policy=policy, make=lambda _: service.make_supervisor()), service
