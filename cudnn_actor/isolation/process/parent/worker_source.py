"""The source of a service's workers: it launches the next worker and the standby, and reaps dying workers.

One monitor uses it at a time; its successor takes it over when it ends. It keeps what outlives a worker, and
so cannot belong to a monitor:

- the **standby**: a worker that has its engine open, the arenas mapped and the recent plans built, and waits.
  If it dies, or hangs in its start, this is only logged. Another standby is started after a pause, which
  grows with the number of deaths;
- **dying** workers: they have been killed, and their successor does not wait for their end, mostly because
  their context is known to be dead. The memory that they may still write is released when they have
  certainly ended;
- the **forkserver**, which many services share. The first monitor that notices its death starts another.

Two things may block: launching a standby, and waiting for a lost standby's end. These run on a separate
thread, one job at a time (`_job`). The thread writes only the job's result, and the monitor takes the result
while it holds the host. So neither the host nor the monitor waits for a forkserver that is stopped. (If the
system has no thread for the job, the job runs on the monitor's thread, and blocks it.)"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from cudnn_actor.actors.logs import Log
from cudnn_actor.isolation.base import StandbyState
from cudnn_actor.isolation.process.generations import GenerationTable
from cudnn_actor.isolation.process.parent.crash import PendingReclaim
from cudnn_actor.isolation.process.parent.in_flight import Violation
from cudnn_actor.isolation.process.parent.warming import Warming
from cudnn_actor.isolation.process.parent.worker import Recipe, Worker
from cudnn_actor.isolation.process.parent.worker_host import WorkerHost
from cudnn_actor.isolation.process.wire import (
    Dying,
    InternalDone,
    Logged,
    Promote,
    Ready,
)
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.processes.launching import Launcher
from cudnn_actor.processes.process_state import LOOK_EVERY_S, SilentTime, is_stopped
from cudnn_actor.supervision import Backoff

__all__ = ["WorkerSource"]

_PAUSES = Backoff(initial_s=0.2, factor=2.0, cap_s=10.0, reset_after_s=30.0, at_once=1)
"""The pauses between the death of a standby and the start of the next."""
_UNTIL_KILLED_S = 5.0
_BEHIND_S = 0.05
"""Seconds from a promotion to the start of the next standby, so that the recovery goes first."""
_SILENT_BEATS = 8
"""A standby that has missed this many heartbeats in a row is not used."""

log = Log("cudnn_actor")


class Dead(NamedTuple):
    """A worker that is dying, and the memory that it may still write."""

    worker: Worker
    pending: PendingReclaim


class _Lost(NamedTuple):
    """A standby that has ended, or could not be started."""

    why: str
    pid: int | None = None


class WorkerSource:
    """The source of workers: see the module's docstring. Successive monitors' threads use it, one at a time.

    Parameters
    ----------
    recipe
        Returns how workers are made. Called once, by the first monitor.
    generations
        The service's generation table, which each worker maps.
    standby
        Whether to keep a standby.
    hang_after_s
        As in `Options`. A standby that is stopped in its start, or whose word that it is ready is lost, is
        replaced after this long.
    ready_within_s
        Seconds from a standby's launch until it is given up, if it is not ready: as long as a supervisor
        gives the worker that serves.
    """

    def __init__(
        self,
        recipe: Callable[[], Recipe],
        generations: GenerationTable,
        *,
        standby: bool,
        hang_after_s: float,
        ready_within_s: float,
    ) -> None:
        self._ask_recipe = recipe
        self._generations = generations
        self._keeps_standby = standby
        self.hang_after_s = hang_after_s
        self.ready_within_s = ready_within_s
        self.standby: Worker | None = None
        self.dying: list[Dead] = []
        self._deaths = 0
        self._next_at = 0.0
        self._warming = Warming()
        """The warming of the standby; without a standby, of the next one."""
        self._silent: SilentTime
        """How long the standby has been silent in its start."""
        self._starting: SilentTime
        """How long the standby's launch and start have taken. The job's thread uses it during the launch, the
        monitor afterwards."""
        self._job: concurrent.futures.Future[Worker | _Lost] | None = None
        """The job on the separate thread: a standby's start or end. Its result is the outcome."""
        self._closed = threading.Event()

    def launch(self, generation: int, unwanted: Callable[[], bool], *, fails: bool) -> Worker:
        """Launch a worker. Raises `OSError`, also if `unwanted` becomes true before the worker is there.

        Blocks for milliseconds, or for the forkserver's imports.
        """
        return Worker(self._recipe, generation, self._generations.fd, unwanted, fails=fails)

    @functools.cached_property
    def _recipe(self) -> Recipe:
        return self._ask_recipe()

    # The forkserver.

    @functools.cached_property
    def forkserver(self) -> Launcher:
        """The launcher of the workers. Its descriptor is readable when the forkserver has died."""
        return self._recipe.launcher

    def mind_forkserver(self) -> None:
        """Start another forkserver if it has died, so that the next worker does not wait for the imports.

        Blocks for the start of a process. The host need not be held.
        """
        if (end := self.forkserver.revive()) is not None:
            log.warning("forkserver.died", why=end)

    # The standby.

    def take_standby(self, host: WorkerHost, generation: int) -> Worker | None:
        """The standby, promoted to the next incarnation; it may still be starting. None if none is usable.

        With the host held.
        """
        self._take_in(host)
        worker, self.standby, host.workers.standby = self.standby, None, None
        self._warming = Warming()
        self._next_at = time.monotonic() + _BEHIND_S
        if worker is None:
            return None
        if worker.child.wait(0.0) or is_stopped(worker.pid) or (worker.ready and self._is_silent(worker)):
            self.let_die(worker, PendingReclaim())  # it has never had a request, so it writes nothing
            return None
        worker.send(Promote(generation))
        return worker

    def _is_silent(self, worker: Worker) -> bool:
        """Whether its last heartbeat is too old."""
        return time.monotonic() - worker.claims.beat_ns / 1e9 > _SILENT_BEATS * self._recipe.hello.beat_s

    def tend(self, host: WorkerHost, now: float, wake: Callable[[], None]) -> float | None:
        """Start a standby if one is due, and give up one that hangs in its start.

        Returns the seconds until the next call is due; None if none is. Never blocks (but see the module's
        docstring). With the host held. `wake` wakes the monitor when the job is done.
        """
        self._take_in(host)
        if (worker := self.standby) is not None and not worker.ready:
            if (why := self._why_too_late(worker)) is None:
                return LOOK_EVERY_S
            self._lose(host, wake, why)
        if not self._keeps_standby or self.standby is not None or self._job is not None:
            return None
        if now < self._next_at:
            return self._next_at - now
        try:
            recipe, generations = self._own_copies()
        except OSError as error:
            return self._note_death(f"it could not be started: {error}", now)
        self._starting = SilentTime(lambda: True)
        self._begin(functools.partial(self._launch_standby, recipe, generations), wake)
        return None

    def _why_too_late(self, worker: Worker) -> str | None:
        """Why a standby that is not ready is given up; None if it may go on."""
        if self._silent.look() >= self.hang_after_s:
            return worker.how_it_hangs(self.hang_after_s)
        if self._is_overdue():
            return f"was not ready within {self.ready_within_s:g} s"
        return None

    def _is_overdue(self) -> bool:
        """Whether the standby's launch and start have taken too long."""
        return self._starting.look() >= self.ready_within_s

    def _own_copies(self) -> tuple[Recipe, int]:
        """The recipe and the table's descriptor, with duplicated descriptors for the job's thread.

        The service may end during the job, and close its own descriptors. Raises `OSError`.
        """
        generations = os.dup(self._generations.fd)
        recipe = self._recipe
        if recipe.builders >= 0:
            try:
                recipe = msgspec.structs.replace(recipe, builders=os.dup(recipe.builders))
            except OSError:
                os.close(generations)
                raise
        return recipe, generations

    def _launch_standby(self, recipe: Recipe, generations: int) -> Worker | _Lost:
        try:
            return Worker(recipe, 0, generations, lambda: self._closed.is_set() or self._is_overdue())
        except OSError as error:
            if self._is_overdue():
                return _Lost(f"it was not launched within {self.ready_within_s:g} s")
            return _Lost(f"it could not be started: {error}")
        finally:
            os.close(generations)
            if recipe.builders >= 0:
                os.close(recipe.builders)

    def _begin(self, job: Callable[[], Worker | _Lost], wake: Callable[[], None]) -> None:
        result: concurrent.futures.Future[Worker | _Lost] = concurrent.futures.Future()
        self._job = result

        def run() -> None:
            try:
                result.set_result(job())
            except BaseException as error:  # noqa: BLE001 - the monitor raises it
                result.set_exception(error)
            wake()  # last: the monitor finds the result

        try:
            threading.Thread(target=run, name="standby", daemon=True).start()
        except RuntimeError:  # the system gives no thread: run it here, or its descriptors would stay open
            run()

    def _take_in(self, host: WorkerHost) -> None:
        """Take the result of a finished job."""
        job = self._job
        if job is None or not job.done():
            return
        self._job = None
        match job.result():
            case Worker() as worker:
                try:
                    host.introduce(worker)
                except OSError as error:
                    self.let_die(worker, PendingReclaim())  # it has never had a request, so it writes nothing
                    why = f"it could not be given the memory: {error}"
                    self._note_death(why, time.monotonic(), pid=worker.pid)
                else:
                    self.standby = host.workers.standby = worker
                    self._silent = worker.silent_time(worker.started)
            case lost:
                self._note_death(lost.why, time.monotonic(), pid=lost.pid)

    def hear_standby(self, host: WorkerHost, wake: Callable[[], None]) -> None:
        """Handle the standby's frames, and check whether it lives. Never blocks (but see the module's
        docstring). With the host held."""
        worker = self.standby
        if worker is None:
            return
        worker.channel.flush()
        try:
            for frame in worker.channel.receive():
                self._take(worker, frame, host)
        except (Violation, BadFrame) as error:
            self._lose(host, wake, str(error))
            return
        if worker.child.wait(0.0) or worker.channel.ended:
            self._lose(host, wake)

    def _take(self, worker: Worker, frame: Any, host: WorkerHost) -> None:
        match frame:
            case Ready(generation=0) if not worker.ready:
                worker.ready = True
                log.info("standby.ready", pid=worker.pid, after_s=round(time.monotonic() - worker.started, 3))
                self.warm(host)
            case InternalDone():
                self._warming.note_answer(frame.error)
                self.warm(host)
            case Logged():
                host.write_log(frame)
            case Dying():
                log.warning("standby.dying", pid=worker.pid, cause=frame.cause)
            case _:
                raise Violation(f"it sent {type(frame).__name__}, which was not asked for")

    def warm(self, host: WorkerHost) -> None:
        """Ask the standby to build recent plans that it lacks, some at a time."""
        worker = self.standby
        if worker is None or not worker.ready:
            return
        if (body := self._warming.next_request(host.recent.plans)) is not None:
            worker.ask(body)

    def standby_state(self, host: WorkerHost) -> StandbyState:
        """The state of the standby. Any thread may ask, without the host; the answer may be out of date at
        once."""
        worker = self.standby
        if not self._keeps_standby:
            return StandbyState.NONE
        if worker is None or not worker.ready:
            return StandbyState.STARTING
        warm = self._warming.lacks_nothing(host.recent.plans)
        return StandbyState.WARM if warm else StandbyState.READY

    def _lose(self, host: WorkerHost, wake: Callable[[], None], why: str = "") -> None:
        worker, self.standby, host.workers.standby = self.standby, None, None
        assert worker is not None
        self._warming = Warming()
        stable = worker.ready and time.monotonic() - worker.started >= _PAUSES.reset_after_s
        self._deaths = 0 if stable else self._deaths

        def end() -> _Lost:
            cause = why or worker.child.how_it_ended(1.0)
            self._end(worker)
            return _Lost(cause, worker.pid)

        self._begin(end, wake)  # there is no other job: its start is done, and no other standby is due

    def _note_death(self, why: str, now: float, pid: int | None = None) -> float:
        self._deaths += 1
        pause_s = _PAUSES.delay(self._deaths, random.random())
        self._next_at = now + pause_s
        log.warning("standby.died", pid=pid, why=why, next_in_s=pause_s)
        return pause_s

    # Dying workers.

    def let_die(self, worker: Worker, pending: PendingReclaim) -> None:
        """Kill a worker, and do not wait for its end. `pending`: the memory that it may still write."""
        worker.child.signal(signal.SIGKILL)
        worker.channel.close()
        self.dying.append(Dead(worker, pending))

    def reap(self, host: WorkerHost) -> None:
        """Reap the dying workers that have ended, and release their memory. With the host held."""
        for dead in tuple(self.dying):
            if dead.worker.child.wait(0.0):
                self.dying.remove(dead)
                host.recovery.reclaim(dead.pending)
                dead.worker.close()

    def close(self, host: WorkerHost) -> None:
        """End the standby, and wait for dying workers, because the service has ended. Blocks."""
        self._closed.set()
        worker, self.standby, host.workers.standby = self.standby, None, None
        if worker is not None:
            self._end(worker)
        job, self._job = self._job, None
        if job is not None:
            job.add_done_callback(self._end_late)  # called now, or later on the job's thread
        for dead in self.dying:
            dead.worker.child.wait(_UNTIL_KILLED_S)
            dead.worker.close()
        self.dying.clear()

    @classmethod
    def _end_late(cls, job: concurrent.futures.Future[Worker | _Lost]) -> None:
        if job.exception() is None and isinstance(worker := job.result(), Worker):
            cls._end(worker)

    @staticmethod
    def _end(worker: Worker) -> None:
        worker.child.signal(signal.SIGKILL)
        worker.child.wait(_UNTIL_KILLED_S)
        worker.close()
