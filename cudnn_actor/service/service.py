"""A service: the supervised actor, its mailbox and its memory, from start to end.

The threads of a service are the supervisor's and the actor's. `_on_event` runs
on the supervisor's; everything else may be called on any thread.

A service may have several lives, one after another, under a supervisor of the
user's. The state of one life (supervisor, events, promises, memory) is replaced
under `_turning`. A thread of an earlier life that was given up may resume later.
Under the same lock it finds that its supervisor is no longer the current one.
Promises are resolved after the lock is released, because their callbacks are
code of the user's.
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

import numpy as np
import pykka

from cudnn_actor.actors import Envelope, MailboxRef, forks
from cudnn_actor.actors.threads import ThreadRefused
from cudnn_actor.broker.service_state import ServiceState
from cudnn_actor.engines import EngineChoice
from cudnn_actor.engines.cuda.diagnosis.device_memory import DeviceMemoryReader
from cudnn_actor.isolation.selection import isolation_for
from cudnn_actor.isolation.thread.cudnn_actor import CudnnActor
from cudnn_actor.models.kept_graphs import KeptGraphs
from cudnn_actor.options import NAME, Options, takes_options
from cudnn_actor.plan_store.store import PlanStore
from cudnn_actor.protocol.errors import InvalidRequest, ServiceStopped, StartFailed, Words
from cudnn_actor.protocol.graphs.limits import GraphLimits
from cudnn_actor.protocol.messages.buffer_messages import Values
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.html_table import html_table, record_table
from cudnn_actor.protocol.types.tensor import TensorSpec
from cudnn_actor.service.arrays import as_values
from cudnn_actor.service.engine_choice import engine_for, warn_of
from cudnn_actor.service.event_log import EventLog
from cudnn_actor.service.giving_up import act_on
from cudnn_actor.service.health import Health, HealthState, health_state
from cudnn_actor.service.metrics import Metrics, requests_table
from cudnn_actor.service.promises import kept_promise, promise, resolve
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
from cudnn_actor.supervision.events import stamp

__all__ = ["CudnnService", "start", "start_checked"]

ShareWeight = Callable[[np.ndarray, TensorSpec], Awaitable[BufferRef]]
_FORKED = "this process was forked from the service's process"

CHILD = "cudnn"
"""The actor's id under its supervisor, in events and log lines."""
_RELEASED_WITHIN_S = 10.0
"""How long a new life waits for the resources of the last one to be released."""

_OF_THE_DEVICE = 4
"""Without `deployed_limit`, the buffers of models' idle graphs may take the device's memory divided by
this."""


class CudnnService:
    """One supervised `CudnnActor`, for code without asyncio: plain threads and pykka actors.

    Create it with `start`, or with `child_spec` for a supervisor of yours. In asyncio code use `spawn`, or
    wrap an existing service: `CudnnRef(service)`.

    `with start(...) as service:` stops it at the end of the body, as `stop` does, and then raises the body's
    exception, if there is one.

    Parameters
    ----------
    options
        See `Options`.
    parent
        A pykka actor that is told `Escalated` when the restarts are used up.
    engine
        The engine that runs the work; None for the one that `options.device` selects.
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
        """The service's name in log lines and events."""
        self._engine = engine or engine_for(options)
        self.device = self._engine.device
        self.unused_gpu = self._engine.reason if self._engine.unused_gpu else None
        """Why the service runs on the CPU, if a GPU could have been expected; else None."""
        if self.unused_gpu is not None:
            warn_of(self.unused_gpu)  # first: where warnings are errors, nothing is left over
        self._isolation = isolation_for(options, self._engine)
        self.models: Mapping[str, str] = {}
        """The names by which models can be loaded, and their files. Only an attached service has some."""
        self.share_weight: ShareWeight | None = None
        """A function that uploads a weight which other processes may share; None if no other process can."""
        self._device_memory = DeviceMemoryReader(self._engine.bus_id)
        self.events = EventLog()
        self.started: concurrent.futures.Future[None] = promise()
        """Done when the actor is ready; fails with `StartFailed` if it never becomes ready."""
        self.stopped: concurrent.futures.Future[Escalated | None] = promise()
        """Done when the service has ended. The result is the `Escalated` if it gave up, else None."""
        self._gone = threading.Event()
        self._released = threading.Event()
        """Whether no life of the service is releasing its resources. The isolation has the resources of one
        life only, so the next life begins after that."""
        self._released.set()
        self._turning = threading.RLock()
        """Held while a life of the service begins or ends. Re-entrant, since a signal handler may call
        `end`."""
        self.state = ServiceState(
            mailbox=self._isolation.mailbox(),
            memory=self._isolation.memory(self.device),
            faults=FaultInjector.of(options.faults),
            workspace_limit=options.workspace_limit,
            plan_store=None if options.plan_store is None else PlanStore(options.plan_store),
            autotune=options.autotune,
            cache_limit=options.cache_limit,
            plan_capacity=options.plan_capacity,
            graph_limits=options.graph_limits or GraphLimits(),
            name=self.name,
        )
        self.kept_graphs = KeptGraphs(self.state.forget, self.state.cache_limit, self._deployed_limit)
        """The graphs of the service's models."""
        self._isolation.begin(self.state)
        self.actor_ref: pykka.ActorRef[Any] = MailboxRef(self.state.mailbox, CudnnActor, self._gone)
        """A pykka reference that stays valid across restarts."""
        self._parent = parent
        self._supervisor: Supervisor | None = None
        self._escalated: Escalated | None = None
        self._cause: ExitReason | None = None
        """Why the last restart was made, or why the service has ended."""
        self.ending = False
        """Whether the service's end has begun, by `end` or because it gave up: from then on, nobody needs to
        close it."""
        self._telling: int | None = None
        """The thread that runs the `on_give_up` callable; None while none does."""
        forks.watch(self)

    def _deployed_limit(self) -> int | None:
        """The bytes that the buffers of models' idle graphs may take now; None for no limit."""
        if self.options.deployed_limit is not None:
            return self.options.deployed_limit
        limit, memory = self.state.memory.limit, self._engine.memory_bytes
        known = min(limit, memory) if limit and memory else limit or memory
        return known // _OF_THE_DEVICE if known else None

    def forget_parent(self) -> None:
        """Become stopped in a forked child, also for code that waits for the start or the end."""
        self._turning = threading.RLock()  # another thread may have held the old one
        self.started, self.stopped = promise(), promise()
        resolve(self.started, ServiceStopped(reason=_FORKED, forked=True))
        resolve(self.stopped, None)

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that made the service, so that it cannot use it."""
        return self.state.mailbox.forked

    @property
    def isolation(self) -> str:
        """ "thread" or "process": where the actor runs."""
        return self._isolation.name

    @property
    def worker_pid(self) -> int | None:
        """Process id of the serving worker; None in thread isolation, and while no worker serves."""
        return self._isolation.worker_pid

    @property
    def alive(self) -> bool:
        """Whether the service has not ended. Any thread; never blocks."""
        return self.state.mailbox.closed is None

    @property
    def ready(self) -> bool:
        """Whether an incarnation of the actor serves now. Any thread; never blocks."""
        return self._health_state(self._supervisor) is HealthState.READY

    def __repr__(self) -> str:
        return f"<CudnnService {self.name!r} on {self.device}: {self._state_word()}>"

    def health(self) -> Health:
        """The service's state. Any thread; never blocks; sends no message.

        The fields are read one by one, so one may be a moment newer than another. Raises `ServiceStopped` in
        a forked child.
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

    def metrics(self) -> Metrics:
        """The service's metrics. Any thread; sends no message.

        On CUDA, it waits for the driver for 5 ms at most, except on the thread of an event loop. Else it
        never blocks.

        Each number is read by itself, so one may be a moment newer than another. A number is replaced in one
        step. A collection is copied in one call of a C function, or is never changed. So no lock is needed,
        and writers need not know of readers. Raises `ServiceStopped` in a forked child.
        """
        self.state.mailbox.check_process()
        health, state, isolation = self.health(), self.state, self._isolation
        counters, mailbox, memory = state.counters, state.mailbox, state.memory
        return Metrics(
            service=self.name,
            device=self.device,
            state=health.state,
            generation=health.generation,
            queued=health.queued,
            restarts_left=health.restarts_left,
            in_flight=isolation.in_flight,
            requests=counters.snapshots(),
            finished=counters.finished,
            failed=counters.failed,
            withdrawn=counters.withdrawn + mailbox.withdrawn,
            expired=counters.expired + mailbox.expired,
            replayed=state.replayed,
            restarts_by_cause=dict(state.restarts_by_cause),
            standby=isolation.standby,
            plans=isolation.plans,
            live_buffers=memory.live_buffers,
            live_bytes=memory.live_bytes,
            arena_bytes=memory.arena_bytes,
            worker_host_bytes=isolation.worker_host_bytes,
            standby_host_bytes=isolation.standby_host_bytes,
            device_memory=self._device_memory.read(),
        )

    def _health_state(self, supervisor: Supervisor | None) -> HealthState:
        """The state of the service with this supervisor. The caller reads the supervisor before this method
        checks for the end. The supervisor is cleared only after the end is recorded. So None here, with no
        end, means that the service has not started."""
        return health_state(None if supervisor is None else supervisor.state, ended=not self.alive)

    def _repr_html_(self) -> str:
        return self._html(repr(self))

    def _html(self, caption: str) -> str:
        """The HTML that notebooks show of a handle: tables of the service's health and of its requests. Any
        thread; never blocks; sends no message."""
        if self.forked:
            return html_table(caption, (), ())
        return f"{record_table(caption, self.health())}\n{requests_table(self.metrics())}"

    def _state_word(self) -> str:
        """The service's state for a repr, also in a forked child, which has no `Health` of it."""
        return "of a parent process" if self.forked else str(self._health_state(self._supervisor))

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
        """Create the service's supervisor, not yet launched. After the service's end, this begins a new life.

        Blocks while the last life, if it has just ended, releases its resources.

        Raises `InvalidRequest` while the service runs, `StartFailed` if the system has no room for a new life
        or the last one does not release its resources within ten seconds, `ServiceStopped` in a forked child.
        """
        self.state.mailbox.check_process()
        while True:
            with self._turning:
                if self._supervisor is not None:
                    raise InvalidRequest(
                        field="service",
                        value=Words("running"),
                        problem="has been started already",
                        fix="spawn another",
                    )
                if self._released.is_set():
                    if self._gone.is_set():
                        self._renew()
                    self._supervisor = supervisor = self._new_supervisor()
                    return supervisor
            if not self._released.wait(_RELEASED_WITHIN_S):
                raise StartFailed(detail="the last life of this service has not released its resources")

    def _new_supervisor(self) -> Supervisor:
        isolation = self._isolation
        # Where the memory dies with the context, a successor could not continue.
        policy = ChildPolicy(
            id=CHILD,
            restart=Restart.TRANSIENT,
            ready_within_s=isolation.ready_within_s,
            replaceable=isolation.replaceable,
        )
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
        """Start the service; `started` is done when it is ready. Blocks only as `make_supervisor` does.

        Raises as `make_supervisor` does, and `StartFailed` if the system cannot start a thread.
        """
        supervisor = self.make_supervisor()
        try:
            supervisor.launch()
        except ThreadRefused as error:
            with self._turning:
                self._supervisor = None
                tell = self._end_unsupervised(str(error))
            tell()
            raise StartFailed(detail=str(error)) from error

    def end(self, reason: str = "asked to stop") -> concurrent.futures.Future[Escalated | None]:
        """Stop after the current request. Never blocks. Idempotent.

        A service that was never started stops at once. In a forked child nothing happens.

        Returns
        -------
        concurrent.futures.Future
            The `stopped` future of the life that this call ends (a supervisor of the user's may begin another
            life at once). In a forked child it is done already.
        """
        if self.forked:
            return self.stopped
        self.ending = True
        # Called by the `on_give_up` callable: the service has ended, and `stopped` is resolved afterwards.
        if self._telling == threading.get_ident():
            return kept_promise(self._escalated)
        with self._turning:
            supervisor, stopped, tell = self._supervisor, self.stopped, _nothing
            if supervisor is None and not self._gone.is_set():
                tell = self._end_unsupervised(reason)
        tell()
        if supervisor is not None:
            supervisor.end(reason)
        return stopped

    def _end_unsupervised(self, reason: str) -> Callable[[], None]:
        """End a life that no supervisor runs, under the lock. Returns the function that `_close` returns."""
        self.ending = True
        self._cause = ExitReason.shutdown(reason)
        self.events.append(stamp(Stopped(child=None, reason=self._cause), self.name, Clock()))
        return self._close(reason)

    def stop(self, timeout: float | None = None) -> None:
        """Stop and wait up to `timeout` seconds for the end. Blocks. Waiting requests get `ServiceStopped`.

        Raises `TimeoutError`.
        """
        self.end().result(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, and block until the service has ended. Requests that still wait get `ServiceStopped`."""
        self.stop()

    def values(self, array: Any) -> Values:
        """Convert `array` for `Allocate.data` and `Upload.data`, for code that sends messages itself.

        Whatever NumPy accepts becomes a NumPy array; an array on the service's device stays there. Call it
        on the thread whose stream fills the array, after that work was enqueued. Never waits for a device.
        Raises `InvalidRequest`, and `ServiceStopped` in a forked child, which has no device.
        """
        self.state.mailbox.check_process()
        return as_values(array, self.device, self._engine.adopt)

    def _on_event(self, supervisor: Supervisor, event: LifecycleEvent) -> None:
        with self._turning:
            if self._supervisor is not supervisor:
                return  # a supervisor thread that was given up has resumed: its life has ended already
            if isinstance(event, Stopped) and event.child is None:
                self.ending = True  # before the event: code that reads it may drop its handle at once
            self.events.append(event)  # first: code that waits for a start or an end then finds the event
            tell = self._take(supervisor, event)
        tell()

    def _take(self, supervisor: Supervisor, event: LifecycleEvent) -> Callable[[], None]:
        """Process an event of the current life, under the lock. Returns a function to call after the lock is
        released."""
        match event:
            case Started() | Restarted():
                return functools.partial(resolve, self.started, None)
            case Restarting():
                self.state.restarts_by_cause[event.cause.kind] += 1
                self._cause = event.cause
            case Escalated():
                self._escalated = event
            case Stopped(child=None):
                self._cause = event.reason
                gave_up = self._escalated
                tell = self._close(str(event.reason if gave_up is None else gave_up))
                self._supervisor = None  # after the end: `health` reads None without an end as "starting"
                return tell
            case Stopped():  # the actor has ended for good, so the service ends too
                return functools.partial(supervisor.end, event.reason.cause or str(event.reason))
        return _nothing

    def _close(self, reason: str) -> Callable[[], None]:
        """End this life, under the lock. Returns a function to call after the lock is released: it releases
        the resources and notifies the waiters."""
        self._released.clear()
        self._gone.set()
        self.state.mailbox.close(reason)
        self.state.memory.close()
        started, stopped, escalated = self.started, self.stopped, self._escalated
        gave_up = escalated if started.done() else None  # else the code that started it gets `StartFailed`

        def tell() -> None:
            try:
                self._isolation.end()
                self.state.messages.clear()
            finally:
                self._released.set()  # before the callbacks: these may begin another life
            if gave_up is not None:
                # Before `stopped` is resolved: code that waits for it may end the process.
                self._telling = threading.get_ident()
                act_on(gave_up, self.options.on_give_up)
                self._telling = None
            resolve(started, StartFailed(detail=reason))
            resolve(stopped, escalated)

        return tell

    def _renew(self) -> None:
        """Begin another life, under the lock. Raises `StartFailed`; then nothing has changed."""
        memory = self._isolation.memory(self.device)
        self._escalated = self._cause = None
        self.ending = False
        self.events = EventLog()
        self.started, self.stopped = promise(), promise()
        self.state.memory = memory
        self._isolation.begin(self.state)
        self.state.mailbox.reopen()
        self._gone.clear()

    def failure(self) -> ServiceStopped | None:
        """The error to raise if the service gave up; None if it did not."""
        escalated = self._escalated
        return None if escalated is None else ServiceStopped(reason=str(escalated))


class _ServiceSupervisor(Supervisor):
    """A supervisor that a supervisor of the user's may kill. In that case, too, the service's end is
    reported."""

    def on_crash(self, error: BaseException, current: Envelope | None, waiting: list[Envelope]) -> None:
        """Give up the actor, so that its requests are answered, then report that the service has stopped."""
        super().on_crash(error, current, waiting)
        if self._failure is None:  # a failure is raised only after the last event has been emitted
            self._emit(Stopped(child=None, reason=ExitReason.killed(str(error))))


def _nothing() -> None:
    pass


class _StartOptions(Options, frozen=True, kw_only=True):
    """The options of `start`.

    Parameters
    ----------
    parent
        A pykka actor that is told `Escalated` when the service gives up; None for none.
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
    """Start a service from code without asyncio: `with start(...) as service:`, or `stop` it yourself.

    Blocks until its actor is ready.

    Raises
    ------
    InvalidRequest
        An option is out of its range.
    StartFailed
        The actor could not be started, and the restarts are used up.
    """
    return start_checked(options, parent=options.parent)


def start_checked(options: Options, *, parent: pykka.ActorRef[Any] | None = None) -> CudnnService:
    """Do what `start` does, with options that have been checked. Blocks, and raises `StartFailed`."""
    service = CudnnService(options, parent=parent)
    service.launch()
    try:
        service.started.result()
    except BaseException:  # Ctrl-C too: the caller has no handle to end the service with
        service.end("the call that started it was interrupted")
        raise
    return service
