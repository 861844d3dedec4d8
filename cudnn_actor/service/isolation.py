"""Where the actor of a service lives: on a thread of this process, or in a worker process of its own.

Both give a service the same things: its mailbox, its memory, what its supervisor starts and how patiently.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import weakref
from typing import Any, Protocol, TypeVar

from cudnn_actor.actors import Actor, Mailbox, forks
from cudnn_actor.broker.progress import Progress
from cudnn_actor.broker.state import ServiceState
from cudnn_actor.engines import EngineChoice
from cudnn_actor.engines.remote import SERVING, BuilderHost
from cudnn_actor.memory import MemoryTable
from cudnn_actor.processes.interpreter import find_python
from cudnn_actor.protocol.errors import StartFailed
from cudnn_actor.service.options import Options
from cudnn_actor.supervision import Backoff
from cudnn_actor.worker.actor import CudnnActor
from cudnn_actor.workers.checksums import Checksums
from cudnn_actor.workers.dispatcher import Dispatcher
from cudnn_actor.workers.generations import GenerationTable
from cudnn_actor.workers.monitor import WorkerMonitor
from cudnn_actor.workers.source import Source
from cudnn_actor.workers.wire import Hello
from cudnn_actor.workers.worker import Recipe
from cudnn_actor.workers.worker_host import WINDOW, WorkerHost

__all__ = ["Isolation", "ProcessIsolation", "ThreadIsolation", "isolation_for"]

A = TypeVar("A", bound=Actor)

_MAIN = "cudnn_actor.workers.process.main"
_LONGEST_BEAT_S = 0.25
_BEATS_PER_HANG = 8


class Isolation(Protocol):
    """What a service asks of where its actor lives."""

    name: str
    replaceable: bool
    """Whether a successor can go on where an incarnation ended."""
    backoff: Backoff

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker that serves; None where there is none."""

    def mailbox(self) -> Mailbox:
        """The service's mailbox: one for all its lives."""

    def memory(self, device: str) -> MemoryTable:
        """A table for a life that begins."""

    def begin(self, state: ServiceState) -> None:
        """Get ready for a life, whose table `state` has. Never blocks."""

    def actor(self, incarnation: int) -> Actor:
        """What the supervisor is to start as this incarnation.

        Raises `StartFailed` while a thread that was given up lives: it may still write what this one would.
        """

    def progress(self) -> Progress:
        """How the present incarnation's work gets on. Any thread; never blocks."""

    def end(self) -> None:
        """Give up what the life had that has ended. Blocks for a process to be killed, where there is one."""


class ThreadIsolation:
    """The actor on a thread of this process.

    Parameters
    ----------
    options, engine
        The service's.
    """

    name = "thread"
    worker_pid = None
    backoff = Backoff()

    def __init__(self, options: Options, engine: EngineChoice) -> None:
        self.replaceable = engine.outlives_context
        self._options = options
        self._engine = engine
        self._actor: CudnnActor | None = None
        self._builders: BuilderHost | None = None

    def mailbox(self) -> Mailbox:
        """A mailbox that the actor's thread reads."""
        return Mailbox(self._options.mailbox)

    def memory(self, device: str) -> MemoryTable:
        """A table of this process."""
        return MemoryTable(device, limit=self._options.memory_limit)

    def begin(self, state: ServiceState) -> None:
        """Remember the state, and have a builder process started when a plan is to be built."""
        self._state = state
        state.builders = self._builders = BuilderHost(
            (SERVING, *self._engine.preload), self._options.executable
        )

    def actor(self, incarnation: int) -> CudnnActor:
        """The actor itself."""
        _check_lost_thread(self._actor)
        self._actor = CudnnActor(self._state, self._engine.make, incarnation)
        return self._actor

    def progress(self) -> Progress:
        """The actor's."""
        actor = self._actor
        return Progress() if actor is None else actor.progress()

    def end(self) -> None:
        """Forget the actor, and end the builder process: all else is the actor's and the table's."""
        self._actor = _if_lost(self._actor)
        builders, self._builders = self._builders, None
        if builders is not None:
            builders.close()


class ProcessIsolation:
    """The actor in a worker process, kept by a `WorkerMonitor`.

    Parameters
    ----------
    options, engine
        The service's.

    Raises
    ------
    InvalidRequest
        There is no Python to run workers by: see `find_python`.
    """

    name = "process"
    replaceable = True
    backoff = Backoff(at_once=1, cap_s=1.0, reset_after_s=0.0)
    """An incarnation that was ready is replaced at once. Failing starts wait longer and longer, up to a
    second: a start takes less than that, so longer waits would spare little."""

    def __init__(self, options: Options, engine: EngineChoice) -> None:
        self._executable = None if options.executable is None else os.fspath(options.executable)
        find_python(self._executable)  # now, and not when a worker is started: no other attempt does better
        self._options = options
        self._engine = engine
        self._dispatcher = Dispatcher(options.mailbox)
        self._monitor: WorkerMonitor | None = None
        self._remove_plans: weakref.finalize[..., Any] | None = None
        """Removes the plans' directory, when called or when nobody is left to call it; None for none."""
        forks.watch(self)

    def forget_parent(self) -> None:
        """Have no worker in a forked child: it is the parent's."""
        self._monitor = None

    @property
    def worker_pid(self) -> int | None:
        """Of the present worker; None while there is none that serves."""
        monitor = self._monitor
        worker = None if monitor is None else monitor.worker
        return None if worker is None or not worker.ready else worker.pid

    def mailbox(self) -> Dispatcher:
        """A mailbox whose senders deliver."""
        return self._dispatcher

    def memory(self, device: str) -> MemoryTable:
        """A table whose places a worker can look up. Raises `StartFailed`."""
        try:
            self._generations = GenerationTable()
        except OSError as error:
            raise StartFailed(detail=f"a file in memory cannot be had (memfd_create): {error}") from error
        return MemoryTable(device, limit=self._options.memory_limit, mirror=self._generations)

    def begin(self, state: ServiceState) -> None:
        """The host of its workers, and where its workers come from."""
        self._state = state
        dispatcher = self._dispatcher
        host_arenas = self._engine.host_arenas
        dispatcher.host = WorkerHost(state, dispatcher.reply, host_arenas=host_arenas)
        if self._options.verify:
            dispatcher.host.checksums = Checksums()
        self._builders = BuilderHost(self._preload, self._executable)
        self._source = Source(self._recipe, self._generations, standby=self._options.standby > 0)

    def _recipe(self) -> Recipe:
        builders = None if self._engine.host_arenas else self._builders.start()
        options, (make, arguments) = self._options, self._engine.worker
        hello = Hello(
            make=make,
            arguments=arguments,
            device=self._engine.device,
            generation=0,
            window=WINDOW,
            workspace_limit=options.workspace_limit,
            plan_store=self._plan_store(),
            autotune=options.autotune,
            beat_s=min(_LONGEST_BEAT_S, options.hang_after_s / _BEATS_PER_HANG),
            journal=self._builders.journal,
            scripted=self._state.faults is not None,
            fails=False,
        )
        return Recipe(
            preload=self._preload,
            executable=self._executable,
            hello=hello,
            builders=-1 if builders is None else builders.fileno(),
        )

    @property
    def _preload(self) -> tuple[str, ...]:
        """One forkserver for workers and builder processes."""
        return (_MAIN, SERVING, *self._engine.preload)

    def _plan_store(self) -> str | None:
        """Where workers keep plans: a successor and a standby find there what was built before them."""
        if self._options.plan_store is not None:
            return str(self._options.plan_store)
        if self._engine.host_arenas:  # whose plans take no time to build
            return None
        directory = tempfile.mkdtemp(prefix="cudnn-actor-plans-")
        remove = functools.partial(shutil.rmtree, ignore_errors=True)
        self._remove_plans = forks.finalize(self, remove, directory)
        return directory

    def actor(self, incarnation: int) -> WorkerMonitor:
        """The monitor of a new worker."""
        _check_lost_thread(self._monitor)
        self._monitor = WorkerMonitor(
            self._state,
            self._dispatcher,
            self._source,
            generation=incarnation,
            hang_after_s=self._options.hang_after_s,
        )
        return self._monitor

    def progress(self) -> Progress:
        """What the in-flight table and the worker say."""
        monitor = self._monitor
        return Progress() if monitor is None else monitor.progress()

    def end(self) -> None:
        """Kill the standby, have the rest answered, forget the loop, give up transfer memory and table."""
        self._monitor = _if_lost(self._monitor)
        dispatcher = self._dispatcher
        with dispatcher.held() as host:
            self._source.close(host)
            host.retire()  # what was to run again, and never will: the mailbox, which is closed, answers it
            host.close()
            self._generations.close()
        self._builders.close()
        dispatcher.forget_owner()
        remove, self._remove_plans = self._remove_plans, None
        if remove is not None:
            remove()


def _if_lost(actor: A | None) -> A | None:
    """An actor that was given up: it is to be remembered."""
    return actor if actor is not None and actor.lost else None


def _check_lost_thread(before: Actor | None) -> None:
    """Raise `StartFailed` where the actor before was given up and its thread has not ended."""
    if before is not None and before.lost and not before.join(0.0):
        raise StartFailed(detail="a thread of the service that was given up has not ended")


def isolation_for(options: Options, engine: EngineChoice) -> Isolation:
    """What `options.isolation` stands for with this engine."""
    elsewhere, _ = engine.worker
    if not elsewhere and options.isolation != "process":
        return ThreadIsolation(options, engine)
    kind = options.isolation_on(engine.device)
    return ProcessIsolation(options, engine) if kind == "process" else ThreadIsolation(options, engine)
