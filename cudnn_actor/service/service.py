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
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pykka

from cudnn_actor.actors import Envelope, MailboxRef, forks
from cudnn_actor.actors.logs import speaking_for
from cudnn_actor.broker.state import ServiceState
from cudnn_actor.engines import EngineChoice, choose_engine
from cudnn_actor.plans.store import PlanStore
from cudnn_actor.protocol.errors import InvalidRequest, ServiceStopped, StartFailed, Words
from cudnn_actor.protocol.messages import Values
from cudnn_actor.service.arrays import as_values
from cudnn_actor.service.event_log import EventLog
from cudnn_actor.service.giving_up import act_on
from cudnn_actor.service.health import Health, HealthState, health_state
from cudnn_actor.service.isolation import isolation_for
from cudnn_actor.service.options import NAME, Options, takes_options
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
from cudnn_actor.worker.actor import CudnnActor

__all__ = ["CudnnService", "child_spec", "start"]

T = TypeVar("T")

_FORKED = "this process was forked from its own"

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
            self._engine = engine or choose_engine(
                options.device, apart=options.isolation != "thread", executable=options.executable
            )
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
        self._cause: ExitReason | None = None
        """Why the last restart was made, or why the service has ended."""
        self._telling: int | None = None
        """The thread that runs the `on_give_up` callable; None while none does."""
        forks.watch(self)

    def forget_parent(self) -> None:
        """Be stopped in a forked child, also for those who wait for its start or its end."""
        self._turning = threading.RLock()  # which another thread may have held
        self.started, self.stopped = _promise(), _promise()
        _resolve(self.started, ServiceStopped(reason=_FORKED, forked=True))
        _resolve(self.stopped, None)

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that made the service: it has no part in it then."""
        return self.state.mailbox.forked

    @property
    def isolation(self) -> str:
        """ "thread" or "process": where the actor runs."""
        return self._isolation.name

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker that serves; None in thread isolation, and while there is none."""
        return self._isolation.worker_pid

    @property
    def alive(self) -> bool:
        """Whether the service has not ended. Any thread; never blocks."""
        return self.state.mailbox.closed is None

    @property
    def ready(self) -> bool:
        """Whether an incarnation of the actor serves now. Any thread; never blocks."""
        return self._health_state(self._supervisor) is HealthState.READY

    def health(self) -> Health:
        """How the service is. Any thread; never blocks; nothing is sent.

        Each field is read for itself, so one may be a moment newer than another. Raises `ServiceStopped` in a
        forked child, which cannot know.
        """
        self.state.mailbox.check_process()
        supervisor, now = self._supervisor, time.monotonic()
        state = self._health_state(supervisor)
        return Health(
            state=state,
            generation=self.state.generation,
            queued=self.state.mailbox.waiting,
            restarts=self.state.restarts,
            restarts_left=self._restarts_left(supervisor, now),
            cause=self._cause,
            **self._progress(supervisor, now),
        )

    def _health_state(self, supervisor: Supervisor | None) -> HealthState:
        """The supervisor was read before this asks for the end: it goes when the end has been noted."""
        return health_state(None if supervisor is None else supervisor.state, ended=not self.alive)

    def _restarts_left(self, supervisor: Supervisor | None, now: float) -> int:
        if supervisor is not None:
            return supervisor.state.restarts_left(0, now)
        return self.options.max_restarts if self.alive else 0

    def _progress(self, supervisor: Supervisor | None, now: float) -> dict[str, Any]:
        ready_at = None if supervisor is None else supervisor.state.children[0].ready_at
        progress = self._isolation.progress()
        last_s = max(progress.last_s, ready_at or 0.0)
        return {"working": progress.working, "last_progress_s": max(0.0, now - last_s) if last_s else None}

    def make_supervisor(self) -> Supervisor:
        """The supervisor of this service, not yet launched. One made after its end starts the service anew.

        Raises `InvalidRequest` while the service runs, `ServiceStopped` in a forked child.
        """
        self.state.mailbox.check_process()
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

        A service that was never started is stopped at once. In a forked child nothing happens.

        Returns
        -------
        concurrent.futures.Future
            The `stopped` of the life that this ended: a supervisor of the user's may begin another at once.
            Done already in a forked child.
        """
        if self.forked:
            return self.stopped
        if self._telling == threading.get_ident():  # by `on_give_up`: it has ended, and is told behind that
            return _kept(self._escalated)
        with self._turning:
            supervisor, stopped, tell = self._supervisor, self.stopped, _nothing
            if supervisor is None and not self._gone.is_set():
                self._cause = ExitReason.shutdown(reason)
                self.events.append(stamped(Stopped(child=None, reason=self._cause), self.name, Clock()))
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
        Raises `InvalidRequest`, and `ServiceStopped` in a forked child, which has no device.
        """
        self.state.mailbox.check_process()
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
                self._cause = event.cause
            case Escalated():
                self._escalated = event
            case Stopped(child=None):
                self._cause = event.reason
                gave_up = self._escalated
                tell = self._close(str(event.reason) if gave_up is None else f"gave up: {gave_up.cause}")
                self._supervisor = None  # behind the end: `health` takes none, before the end, for a start
                return tell
            case Stopped():  # without its actor it serves nobody
                return functools.partial(supervisor.end, event.reason.cause or str(event.reason))
        return _nothing

    def _close(self, reason: str) -> Callable[[], None]:
        """End this life, under the lock; returns what tells those who wait for it, when the lock is free."""
        self._gone.set()
        self.state.mailbox.close(reason)
        self.state.memory.close()
        started, stopped, escalated = self.started, self.stopped, self._escalated
        gave_up = escalated if started.done() else None  # else whoever started it gets `StartFailed`

        def tell() -> None:
            self._isolation.end()
            if gave_up is not None:
                # Before `stopped`: whoever waits for that, and ends the process then, cannot overtake this.
                self._telling = threading.get_ident()
                act_on(gave_up, self.options.on_give_up)
                self._telling = None
            _resolve(started, StartFailed(detail=reason))
            _resolve(stopped, escalated)

        return tell

    def _renew(self) -> None:
        self._escalated = self._cause = None
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


def _kept(outcome: T) -> concurrent.futures.Future[T]:
    """A promise that has been kept."""
    promise = _promise()
    promise.set_result(outcome)
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parent is not None and not isinstance(self.parent, pykka.ActorRef):
            raise InvalidRequest(
                field="parent",
                value=self.parent,
                problem="is not a pykka.ActorRef",
                fix="pass an actor's reference: what its start() returned, or self.actor_ref in its methods",
            )


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
    """The options of `child_spec` that are given by name.

    Parameters
    ----------
    restart
        After which ends of the whole service it is started again.
    """

    restart: Restart = Restart.PERMANENT


class _NamedChildOptions(_ChildOptions, frozen=True):
    """All options of `child_spec`: `id` may be given by place, too.

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
