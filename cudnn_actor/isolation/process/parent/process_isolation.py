"""Process isolation: the actor runs in a worker process that the service's own process looks after."""

from __future__ import annotations

import functools
import os
import weakref
from typing import Any, NamedTuple

from cudnn_actor.actors import forks
from cudnn_actor.broker.progress import Progress
from cudnn_actor.broker.service_state import ServiceState
from cudnn_actor.engines import EngineChoice
from cudnn_actor.engines.remote import SERVING, BuilderHost
from cudnn_actor.isolation.base import READY_WITHIN_S, StandbyState, check_lost_thread, if_lost, limit_arenas
from cudnn_actor.isolation.process.cores import may_keep_one_busy
from cudnn_actor.isolation.process.generations import GenerationTable
from cudnn_actor.isolation.process.parent.dispatcher import Dispatcher
from cudnn_actor.isolation.process.parent.in_flight import WINDOW
from cudnn_actor.isolation.process.parent.monitor import WorkerMonitor
from cudnn_actor.isolation.process.parent.worker import Recipe
from cudnn_actor.isolation.process.parent.worker_host import WorkerHost
from cudnn_actor.isolation.process.parent.worker_source import WorkerSource
from cudnn_actor.isolation.process.status import StatusPage
from cudnn_actor.isolation.process.wire import Hello
from cudnn_actor.memory import MemoryTable
from cudnn_actor.options import Options
from cudnn_actor.processes.interpreter import find_python
from cudnn_actor.processes.own_folder import OwnFolder
from cudnn_actor.protocol.errors import StartFailed
from cudnn_actor.protocol.messages.receipts import PlanCounts
from cudnn_actor.supervision import Backoff

__all__ = ["ProcessIsolation"]

_MAIN = "cudnn_actor.isolation.process.child.main"
_LONGEST_BEAT_S = 0.25
_BEATS_PER_HANG = 8


class _Life(NamedTuple):
    """The objects of one life of the service, except its monitors."""

    state: ServiceState
    generations: GenerationTable
    builders: BuilderHost
    source: WorkerSource


class ProcessIsolation:
    """The actor in a worker process that a `WorkerMonitor` looks after.

    Parameters
    ----------
    options, engine
        The service's.

    Raises
    ------
    InvalidRequest
        No Python was found to run the workers with: see `find_python`.
    """

    name = "process"
    replaceable = True
    backoff = Backoff(at_once=1, cap_s=1.0, reset_after_s=0.0)
    """An incarnation that was ready is replaced at once. Failing starts wait longer each time, up to a
    second: a start takes less than that, so longer waits would save little."""
    ready_within_s = READY_WITHIN_S

    def __init__(self, options: Options, engine: EngineChoice) -> None:
        self._executable = None if options.executable is None else os.fspath(options.executable)
        find_python(self._executable)  # raise now, not when a worker starts: retrying would not help
        self._options = options
        self.engine = engine
        self._dispatcher = Dispatcher(options.mailbox)
        self._generations: GenerationTable | None = None
        """The generation table of the life that begins next."""
        self.life: _Life | None = None
        """The present life or the last one; None before the first."""
        self._monitor: WorkerMonitor | None = None
        self._remove_plans: weakref.finalize[..., Any] | None = None
        """A finalizer that removes the plans' directory, when it is called or this object is collected; None
        for none."""
        forks.watch(self)

    def forget_parent(self) -> None:
        """Drop the worker in a forked child: it belongs to the parent."""
        self._monitor = None

    @property
    def worker_pid(self) -> int | None:
        """Process id of the current worker; None while none serves."""
        monitor = self._monitor
        worker = None if monitor is None else monitor.worker
        return None if worker is None or not worker.ready else worker.pid

    def mailbox(self) -> Dispatcher:
        """A mailbox whose senders dispatch their messages to the worker themselves."""
        return self._dispatcher

    def memory(self, device: str) -> MemoryTable:
        """A table whose entries a worker can read. Raises `StartFailed`."""
        try:
            self._generations = generations = GenerationTable()
        except OSError as error:
            raise StartFailed(detail=f"cannot create a file in memory (memfd_create): {error}") from error
        return MemoryTable(device, limit=self._options.memory_limit, mirror=generations)

    def begin(self, state: ServiceState) -> None:
        """Create the worker host, the builder host and the source of workers."""
        generations, self._generations = self._generations, None
        assert generations is not None
        self._dispatcher.host = WorkerHost(
            state,
            self._dispatcher.reply,
            host_arenas=self.engine.host_arenas,
            verifies=self._options.verify,
            keeps_recent=self._options.standby > 0,
        )
        builders = BuilderHost(self._preload, self._executable)
        source = WorkerSource(
            functools.partial(self._make_recipe, builders),
            generations,
            standby=self._options.standby > 0,
            hang_after_s=self._options.hang_after_s,
            ready_within_s=self.ready_within_s,
        )
        self.life = _Life(state, generations, builders, source)

    def _make_recipe(self, builders: BuilderHost) -> Recipe:
        queue = None if self.engine.host_arenas else builders.start()
        options, engine = self._options, self.engine.worker
        assert engine is not None, "only this process can make the engine"
        hello = Hello(
            make=engine.make,
            arguments=engine.arguments,
            device=self.engine.device,
            generation=0,
            window=WINDOW,
            workspace_limit=options.workspace_limit,
            plan_store=self._plan_directory(),
            autotune=options.autotune,
            cache_limit=options.cache_limit,
            plan_capacity=options.plan_capacity,
            beat_s=min(_LONGEST_BEAT_S, options.hang_after_s / _BEATS_PER_HANG),
            journal=builders.journal,
            fails=False,
        )
        return Recipe(
            preload=self._preload,
            executable=self._executable,
            hello=hello,
            builders=-1 if queue is None else queue.fileno(),
        )

    @property
    def _preload(self) -> tuple[str, ...]:
        """Modules to preload: the same for workers and builder processes, so that they share one
        forkserver."""
        return (_MAIN, SERVING, *self.engine.preload)

    def _plan_directory(self) -> str | None:
        """The directory where workers store plans, so that a successor and a standby find earlier plans.

        Makes one, which `end` removes, if the options name none. None for an engine that needs none.
        """
        if self._options.plan_store is not None:
            return str(self._options.plan_store)
        if self.engine.host_arenas:  # the CPU engine: its plans take no time to build
            return None
        folder = OwnFolder("plans")
        self._remove_plans = forks.finalize(self, folder.remove)
        return str(folder.path)

    def actor(self, incarnation: int) -> WorkerMonitor:
        """A monitor for a new worker."""
        check_lost_thread(self._monitor)
        life = self.life
        assert life is not None
        with self._dispatcher.hold():  # whoever sends uses the table
            limit_arenas(life.state.memory, self._options, self.engine)
        self._dispatcher.loops_may_stay_awake = may_keep_one_busy()  # reads files, as a supervisor may
        self._monitor = WorkerMonitor(
            life.state,
            self._dispatcher,
            life.source,
            generation=incarnation,
            hang_after_s=self._options.hang_after_s,
        )
        return self._monitor

    def progress(self) -> Progress:
        """Progress according to the in-flight table and the worker."""
        monitor = self._monitor
        return Progress() if monitor is None else monitor.progress()

    @property
    def in_flight(self) -> int:
        """The requests that the worker has."""
        return len(self._dispatcher.host.in_flight.requests)

    @property
    def standby(self) -> StandbyState:
        """The state of the standby, according to the source of workers."""
        life = self.life
        return StandbyState.NONE if life is None else life.source.standby_state(self._dispatcher.host)

    @property
    def plans(self) -> PlanCounts:
        """Counts of the worker's cache, as of its last heartbeat."""
        page = self._page
        return PlanCounts() if page is None else page.plan_counts

    @property
    def worker_host_bytes(self) -> int:
        """Bytes of host memory of the worker, as of its last heartbeat."""
        page = self._page
        return 0 if page is None else page.resident_bytes

    @property
    def standby_host_bytes(self) -> int:
        """Bytes of host memory of the standby, as of its last heartbeat."""
        life = self.life
        standby = None if life is None else life.source.standby
        return 0 if standby is None else standby.claims.resident_bytes

    @property
    def _page(self) -> StatusPage | None:
        """The status page of the current worker. A page that is closed meanwhile reads as zeros."""
        monitor = self._monitor
        worker = None if monitor is None else monitor.worker
        return None if worker is None else worker.claims

    def end(self) -> None:
        """Kill the standby, answer remaining requests, forget the loop, release transfer memory and table."""
        self._monitor = if_lost(self._monitor)
        life, dispatcher = self.life, self._dispatcher
        if life is None:
            return
        with dispatcher.hold() as host:
            life.source.close(host)
            host.recovery.retire()  # requests that were to run again never will: the mailbox answers
            host.close()
            life.generations.close()
        life.builders.close()
        dispatcher.forget_owner()
        remove, self._remove_plans = self._remove_plans, None
        if remove is not None:
            remove()
