"""A service: the supervised actor, its mailbox and its memory, from start to end.

The threads of a service are the supervisor's and the actor's. `_on_event` runs
on the supervisor's; everything else may be called on any thread.

A service may have several lives, one after another, under a supervisor of the
user's. What belongs to one life (supervisor, events, promises, memory) changes
hands under `_turning`, and a thread of the past that was given up and comes
back finds there, under the same lock, that it is of the past. Promises are
resolved when the lock is free: their callbacks are foreign code.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pykka

from cudnn_actor.actor import CudnnActor
from cudnn_actor.actors import Envelope, MailboxRef
from cudnn_actor.actors.logs import speaking_for
from cudnn_actor.arrays import as_values
from cudnn_actor.engines import EngineChoice, choose_engine
from cudnn_actor.event_log import EventLog
from cudnn_actor.options import NAME, Options, takes_options
from cudnn_actor.plan_store import PlanStore
from cudnn_actor.protocol.errors import InvalidRequest, ServiceStopped, StartFailed, Words
from cudnn_actor.protocol.messages import Values
from cudnn_actor.state import ServiceState
from cudnn_actor.supervision import (
    ChildPolicy,
    ChildSpec,
    Clock,
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
from cudnn_actor.supervision.events import stamped
from cudnn_actor.workers.isolation import isolation_for

__all__ = ["CudnnService", "child_spec", "start"]

T = TypeVar("T")

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
        self.name = options.name or NAME
        """What its log lines and events call it."""
        with speaking_for(self.name):
            self._engine = engine or choose_engine(options.device, apart=options.isolation != "thread")
        self.device = self._engine.device
        self._isolation = isolation_for(options, self._engine)
        self.events = EventLog()
        self.started: concurrent.futures.Future[None] = _promise()
        """Done when the actor is ready; fails with `StartFailed` when it never will be."""
        self.stopped: concurrent.futures.Future[Escalated | None] = _promise()
        """Done when the service has ended; its result says whether, and why, it gave up."""
        self._gone = threading.Event()
        self._turning = threading.RLock()
        """Held while a life of the service begins or ends. Re-entrant: a signal's handler may call `end`."""
        self.state = ServiceState(
            mailbox=self._isolation.mailbox(),
            memory=self._isolation.memory(self.device),
            faults=FaultInjector.of(options.faults),
            workspace_limit=options.workspace_limit,
            plan_store=None if options.plan_store is None else PlanStore(options.plan_store),
            autotune=options.autotune,
            name=self.name,
        )
        self._isolation.begin(self.state)
        self.actor_ref: pykka.ActorRef[Any] = MailboxRef(self.state.mailbox, CudnnActor, self._gone)
        """A pykka reference that stays good across restarts."""
        self._parent = parent
        self._supervisor: Supervisor | None = None
        self._escalated: Escalated | None = None

    @property
    def isolation(self) -> str:
        """ "thread" or "process": where the actor runs."""
        return self._isolation.name

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker that serves; None in thread isolation, and while there is none."""
        return self._isolation.worker_pid

    def make_supervisor(self) -> Supervisor:
        """The supervisor of this service, not yet launched. One made after its end starts the service anew.

        Raises `InvalidRequest` while the service runs.
        """
        with self._turning:
            if self._supervisor is not None:
                raise InvalidRequest(
                    field="service",
                    value=Words("running"),
                    problem="has been started already",
                    fix="spawn another",
                )
            self._supervisor = supervisor = self._new_supervisor()
            if self._gone.is_set():
                self._renew()
        return supervisor

    def _new_supervisor(self) -> Supervisor:
        isolation = self._isolation
        # Where the memory dies with the context a successor would have nothing to go on with.
        policy = ChildPolicy(id=CHILD, restart=Restart.TRANSIENT, replaceable=isolation.replaceable)
        child = ChildSpec(policy=policy, make=isolation.actor, hang_after_s=self.options.hang_after_s)
        intensity = RestartIntensity(max_restarts=self.options.max_restarts, period_s=self.options.period_s)

        def listen(event: LifecycleEvent) -> None:
            self._on_event(supervisor, event)

        supervisor = _ServiceSupervisor(
            [child],
            intensity=intensity,
            backoff=isolation.backoff,
            parent=self._parent,
            listener=listen,
            name=self.name,
        )
        return supervisor

    def launch(self) -> None:
        """Start; `started` tells when it is done. Never blocks."""
        self.make_supervisor().launch()

    def end(self, reason: str = "asked to stop") -> concurrent.futures.Future[Escalated | None]:
        """Stop after the request in work. Never blocks. Idempotent.

        A service that was never started is stopped at once.

        Returns
        -------
        concurrent.futures.Future
            The `stopped` of the life that this ended: a supervisor of the user's may begin another at once.
        """
        with self._turning:
            supervisor, stopped, tell = self._supervisor, self.stopped, _nothing
            if supervisor is None and not self._gone.is_set():
                ended = Stopped(child=None, reason=ExitReason.shutdown(reason))
                self.events.append(stamped(ended, self.name, Clock()))
                tell = self._close(reason)
        tell()
        if supervisor is not None:
            supervisor.end(reason)
        return stopped

    def stop(self, timeout: float | None = None) -> None:
        """Stop and wait for it, up to `timeout` seconds. Blocks. What still waits gets `ServiceStopped`.

        Raises `TimeoutError`.
        """
        self.end().result(timeout)

    def values(self, array: Any) -> Values:
        """What `Allocate.data` and `Upload.data` take of `array`, for code that sends messages itself.

        A NumPy array of whatever NumPy takes; an array on the service's device stays where it lies. Call it
        on the thread whose stream fills the array, after that work was enqueued. Never waits for a device.
        Raises `InvalidRequest`.
        """
        return as_values(array, self.device, self._engine.adopt)

    def _on_event(self, supervisor: Supervisor, event: LifecycleEvent) -> None:
        with self._turning:
            if self._supervisor is not supervisor:
                return  # a lost one that came back: its life has ended without it
            self.events.append(event)  # first: who waits for a start or an end finds it told
            tell = self._take(supervisor, event)
        tell()

    def _take(self, supervisor: Supervisor, event: LifecycleEvent) -> Callable[[], None]:
        """Note an event of the present life, under the lock; returns what to do when the lock is free."""
        match event:
            case Started() | Restarted():
                return functools.partial(_resolve, self.started, None)
            case Restarting():
                self.state.restarts += 1
            case Escalated():
                self._escalated = event
            case Stopped(child=None):
                self._supervisor = None
                gave_up = self._escalated
                return self._close(str(event.reason) if gave_up is None else f"gave up: {gave_up.cause}")
            case Stopped():  # without its actor it serves nobody
                return functools.partial(supervisor.end, event.reason.cause or str(event.reason))
        return _nothing

    def _close(self, reason: str) -> Callable[[], None]:
        """End this life, under the lock; returns what tells those who wait for it, when the lock is free."""
        self._gone.set()
        self.state.mailbox.close(reason)
        self.state.memory.close()
        started, stopped, escalated = self.started, self.stopped, self._escalated

        def tell() -> None:
            self._isolation.end()
            _resolve(started, StartFailed(detail=reason))
            _resolve(stopped, escalated)

        return tell

    def _renew(self) -> None:
        self._escalated = None
        self.events = EventLog()
        self.started, self.stopped = _promise(), _promise()
        self.state.memory = self._isolation.memory(self.device)
        self._isolation.begin(self.state)
        self.state.mailbox.reopen()
        self._gone.clear()

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


def _resolve(promise: concurrent.futures.Future[T], outcome: T | Exception) -> None:
    """Keep a promise, unless it has been kept already. Its callbacks run here."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        if isinstance(outcome, Exception):
            promise.set_exception(outcome)
        else:
            promise.set_result(outcome)


def _nothing() -> None:
    pass


class _StartOptions(Options, frozen=True, kw_only=True):
    """What `start` takes.

    Parameters
    ----------
    parent
        A pykka actor that is told `Escalated` when the service gives up; None for nobody.
    """

    parent: pykka.ActorRef[Any] | None = None


@takes_options(_StartOptions)
def start(options: _StartOptions) -> CudnnService:
    """Start a service from code without asyncio. Blocks until its actor is ready.

    Raises
    ------
    InvalidRequest
        An option is out of its range.
    StartFailed
        The actor could not be started, and the restarts are used up.
    """
    service = CudnnService(options, parent=options.parent)
    service.launch()
    try:
        service.started.result()
    except BaseException:  # a Ctrl-C too: nobody would have a handle to end it with
        service.end("given up while it started")
        raise
    return service


class _ChildOptions(Options, frozen=True, kw_only=True):
    """What `child_spec` takes by name.

    Parameters
    ----------
    restart
        After which ends of the whole service it is started again.
    """

    restart: Restart = Restart.PERMANENT


class _NamedChildOptions(_ChildOptions, frozen=True):
    """And by place.

    Parameters
    ----------
    id
        The child's name under your supervisor; the service's own too, unless `name` is given.
    """

    id: str = NAME


@takes_options(_NamedChildOptions)
def child_spec(options: _NamedChildOptions) -> tuple[ChildSpec, CudnnService]:
    """A service as a child of a `Supervisor` of yours, and the handle that reaches it.

    The handle stays good when your supervisor starts the service anew; its buffers do not: they are
    `StaleBufferError` from then on.

    Raises
    ------
    InvalidRequest
        An option is out of its range.
    """
    policy = ChildPolicy(
        id=options.id, restart=options.restart, shutdown_s=_SHUTDOWN_S, ready_within_s=_READY_WITHIN_S
    )
    service = CudnnService(msgspec.structs.replace(options, name=options.name or options.id))
    return ChildSpec(policy=policy, make=lambda _: service.make_supervisor()), service
