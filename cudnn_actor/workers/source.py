"""Where a service's workers come from, and where they go: the next one, the standby, those that are dying.

All of it is one monitor's at a time, as the service is: a monitor hands over what is here to its successor by
ending. What outlives a worker, and so is not a monitor's own:

- the **standby**: a worker that has its engine open, the arenas mapped and the recent plans built, and waits.
  Its death is a line in the log; another is started behind it, after a pause that grows;
- those that are **dying**: their context is known to be dead, so their successor has not waited for them;
  what they may still have mapped for writing is given back when they have gone for certain;
- the **forkserver**, which is many a service's: whoever sees its death starts another behind it.

What may block, the launch of a standby and the wait for a lost one's end, is done on a thread of its own, one
such job at a time (`_job`). The thread writes nothing but the job's result; the monitor takes that in, with
the host held as for all else. So neither the host nor the monitor waits for a forkserver that is stopped."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from cudnn_actor.actors.logs import Log
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.processes.launching import Launcher
from cudnn_actor.processes.process_state import is_stopped
from cudnn_actor.protocol.messages import Compute, Warm
from cudnn_actor.supervision import Backoff
from cudnn_actor.workers.generations import GenerationTable
from cudnn_actor.workers.in_flight import Violation
from cudnn_actor.workers.wire import Dying, InternalDone, Logged, Promote, Ready, encode_message
from cudnn_actor.workers.worker import Recipe, Worker
from cudnn_actor.workers.worker_host import PendingReclaim, WorkerHost

__all__ = ["Source"]

_PAUSES = Backoff(initial_s=0.2, factor=2.0, cap_s=10.0, reset_after_s=30.0, at_once=1)
"""Between the death of a standby and the start of the next."""
_WARMED_AT_ONCE = 16
_UNTIL_KILLED_S = 5.0
_BEHIND_S = 0.05
"""From a promotion to the start of the next standby: the recovery comes first."""
_SILENT_BEATS = 8
"""Without so many signs of life in a row a standby is not relied on."""

log = Log("cudnn_actor")


class Dead(NamedTuple):
    """A worker that is dying, and what it may still write."""

    worker: Worker
    pending: PendingReclaim


class _Lost(NamedTuple):
    """A standby that has ended, or never was."""

    why: str
    pid: int | None = None


class Source:
    """See the module's docstring. The monitor's thread, one after another.

    Parameters
    ----------
    recipe
        Says how workers are made; asked once, by the first monitor.
    generations
        The service's table, which each maps.
    standby
        Whether to keep one.
    """

    def __init__(self, recipe: Callable[[], Recipe], generations: GenerationTable, *, standby: bool) -> None:
        self._ask_recipe = recipe
        self._generations = generations
        self._keeps_standby = standby
        self.standby: Worker | None = None
        self.dying: list[Dead] = []
        self._deaths = 0
        self._next_at = 0.0
        self._warming: set[str] = set()
        """Digests that the standby has been told of."""
        self._job: concurrent.futures.Future[Worker | _Lost] | None = None
        """What is done on a thread: a standby's start or end, which follows as its result."""
        self._closed = threading.Event()

    def launch(self, generation: int, unwanted: Callable[[], bool], *, fails: bool) -> Worker:
        """A worker that is starting. Raises `OSError`, also for one that is unwanted before it is there.

        Blocks for milliseconds, or for a server's imports.
        """
        return Worker(self._recipe, generation, self._generations.fd, unwanted, fails=fails)

    @functools.cached_property
    def _recipe(self) -> Recipe:
        return self._ask_recipe()

    # The forkserver.

    @functools.cached_property
    def forkserver(self) -> Launcher:
        """Where workers come from: readable when it has died."""
        return self._recipe.launcher

    def mind_forkserver(self) -> None:
        """Start another behind one that has died, so that the next worker does not wait for its imports.

        Blocks for the start of a process; the host need not be held.
        """
        if (end := self.forkserver.revive()) is not None:
            log.warning("forkserver.died", why=end)

    # The standby.

    def take_standby(self, host: WorkerHost, generation: int) -> Worker | None:
        """The standby as the next incarnation, perhaps still starting; None when there is none that lives.

        With the host held.
        """
        self._take_in(host)
        worker, self.standby, host.standby = self.standby, None, None
        self._warming.clear()
        self._next_at = time.monotonic() + _BEHIND_S
        if worker is None:
            return None
        if worker.child.wait(0.0) or is_stopped(worker.pid) or (worker.ready and self._is_silent(worker)):
            self.let_die(worker, PendingReclaim())  # it has never had a request, so it may write nothing
            return None
        worker.send(Promote(generation))
        return worker

    def _is_silent(self, worker: Worker) -> bool:
        """Whether it has given no sign of life for too long."""
        return time.monotonic() - worker.claims.beat_ns / 1e9 > _SILENT_BEATS * self._recipe.hello.beat_s

    def tend(self, host: WorkerHost, now: float, wake: Callable[[], None]) -> float | None:
        """Have a standby started when one is due; seconds until one is, None for never.

        Never blocks. With the host held. `wake` wakes the monitor, for another look.
        """
        self._take_in(host)
        if not self._keeps_standby or self.standby is not None or self._job is not None:
            return None
        if now < self._next_at:
            return self._next_at - now
        try:
            recipe, generations = self._own_copies()
        except OSError as error:
            return self._note_death(f"it could not be started: {error}", now)
        self._begin(functools.partial(self._launch_standby, recipe, generations), wake)
        return None

    def _own_copies(self) -> tuple[Recipe, int]:
        """The recipe and the table's descriptor, for a thread: the service may end, and close its own.

        Raises `OSError`.
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
            return Worker(recipe, 0, generations, self._closed.is_set)
        except OSError as error:
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
            except BaseException as error:  # noqa: BLE001 - the monitor says so
                result.set_exception(error)
            wake()  # last: the monitor finds the result

        try:
            threading.Thread(target=run, name="standby", daemon=True).start()
        except RuntimeError:  # no thread is to be had: a job that is not done would leave what it has open
            run()

    def _take_in(self, host: WorkerHost) -> None:
        """Note what has become of a job that is done."""
        job = self._job
        if job is None or not job.done():
            return
        self._job = None
        match job.result():
            case Worker() as worker:
                try:
                    host.introduce(worker)
                except OSError as error:
                    self.let_die(worker, PendingReclaim())  # it has never had a request: it writes nothing
                    why = f"it could not be given the memory: {error}"
                    self._note_death(why, time.monotonic(), pid=worker.pid)
                else:
                    self.standby = host.standby = worker
            case lost:
                self._note_death(lost.why, time.monotonic(), pid=lost.pid)

    def hear_standby(self, host: WorkerHost, wake: Callable[[], None]) -> None:
        """Take what the standby says, and see whether it lives. Never blocks. With the host held."""
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
                self.warm(host)
            case Logged():
                host.write_log(frame)
            case Dying():
                log.warning("standby.dying", pid=worker.pid, cause=frame.cause)
            case _:
                raise Violation(f"it sent {type(frame).__name__}, which was not asked for")

    def warm(self, host: WorkerHost) -> None:
        """Have the standby get the plans that have run lately and that it has not, some at a time."""
        worker = self.standby
        if worker is None or not worker.ready:
            return
        missing = [digest for digest in reversed(host.recent) if digest not in self._warming]
        if not missing:
            return
        batch = missing[:_WARMED_AT_ONCE]
        self._warming.update(batch)
        messages: tuple[Compute, ...] = tuple(host.recent[digest] for digest in batch)
        worker.ask(encode_message(Warm(messages=messages)))

    def _lose(self, host: WorkerHost, wake: Callable[[], None], why: str = "") -> None:
        worker, self.standby, host.standby = self.standby, None, None
        assert worker is not None
        self._warming.clear()
        stable = time.monotonic() - worker.started >= _PAUSES.reset_after_s
        self._deaths = 0 if stable else self._deaths

        def end() -> _Lost:
            cause = why or worker.child.how_it_ended(1.0)
            self._end(worker)
            return _Lost(cause, worker.pid)

        self._begin(end, wake)  # there is no other job: that of its own start is done, and no other is due

    def _note_death(self, why: str, now: float, pid: int | None = None) -> float:
        self._deaths += 1
        pause_s = _PAUSES.delay(self._deaths, 0.0)
        self._next_at = now + pause_s
        log.warning("standby.died", pid=pid, why=why, next_in_s=pause_s)
        return pause_s

    # Those that end.

    def let_die(self, worker: Worker, pending: PendingReclaim) -> None:
        """Have a worker end whose context is dead, without waiting for it."""
        worker.child.signal(signal.SIGKILL)
        worker.channel.close()
        self.dying.append(Dead(worker, pending))

    def reap(self, host: WorkerHost) -> None:
        """Give back what those had that have gone by now. With the host held."""
        for dead in tuple(self.dying):
            if dead.worker.child.wait(0.0):
                self.dying.remove(dead)
                host.reclaim(dead.pending)
                dead.worker.close()

    def close(self, host: WorkerHost) -> None:
        """End the standby, and wait for everybody. The service has ended. Blocks."""
        self._closed.set()
        worker, self.standby, host.standby = self.standby, None, None
        if worker is not None:
            self._end(worker)
        job, self._job = self._job, None
        if job is not None:
            job.add_done_callback(self._end_late)  # here and now, or on its own thread
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
