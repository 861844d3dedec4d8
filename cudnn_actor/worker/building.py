"""The thread that builds plans: jobs in, results out, nobody waits for it.

The actor's thread asks and collects; the build thread opens, uses and closes
the builder. They share a queue of jobs under a condition and a deque of
results. A result is appended first and the actor nudged second; the actor
looks at the deque before every wait, and a nudge that finds it awake is kept
for its next wait (`Mailbox.nudge`), so no result is slept through.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from cudnn_actor.actors.logs import Log, carrying
from cudnn_actor.engines.base import Builder, Plan, StickyError
from cudnn_actor.protocol.graph import OperationGraph

__all__ = ["BuildThread", "Job", "Result"]

log = Log("cudnn_actor")


class Job(NamedTuple):
    """A plan to build, in at most so many bytes of workspace; or to tune."""

    digest: str
    graph: OperationGraph
    workspace_limit: int | None
    tune: bool = False


class Result(NamedTuple):
    """What came of a job, and how long it took in nanoseconds. Of no job: the thread itself has died."""

    job: Job | None
    outcome: Plan | BaseException
    took_ns: int


class _ClosedError(Exception):
    """Raised in the middle of tuning when nobody wants its plan any more."""


class BuildThread:
    """A builder on a daemon thread of its own. Plans to build go before plans to tune.

    Parameters
    ----------
    builder
        Not open yet; nobody else may use it.
    nudge
        Called on the build thread after each result, to wake whoever collects; must not block.
    announce
        Called on the build thread when it takes up a job, and when it has none: a library may hold the
        interpreter's lock for as long as it builds, so nothing else of the process can say so then.
    name
        The thread's.
    newest_first
        Whether the build that was asked for last is the next: where each is short, and many may have been
        asked for ahead of need.
    """

    def __init__(
        self,
        builder: Builder,
        nudge: Callable[[], None],
        announce: Callable[[bool], None],
        *,
        name: str = "cudnn-builder",
        newest_first: bool = False,
    ) -> None:
        self._builder = builder
        self._nudge = nudge
        self._announce = announce
        self._newest_first = newest_first
        self._changed = threading.Condition()
        self._builds: deque[Job] = deque()
        self._tunes: deque[Job] = deque()
        self._closing = False
        self._job: Job | None = None
        self._since: float | None = None
        self._results: deque[Result] = deque()
        self._thread = threading.Thread(target=carrying(self._run), name=name, daemon=True)

    # The actor's side.

    def start(self) -> None:
        """Start the thread, which opens the builder. Raises `RuntimeError` when there is no thread."""
        self._since = time.monotonic()
        self._thread.start()

    def ask(self, job: Job) -> None:
        """Have a plan built, or tuned. Never blocks for longer than a queue takes."""
        with self._changed:
            (self._tunes if job.tune else self._builds).append(job)
            if self._since is None:
                self._since = time.monotonic()
            self._changed.notify()

    def hurry(self, digest: str) -> None:
        """Make a build the next one, if it waits for its turn: a request waits for it now."""
        with self._changed:
            for job in [job for job in self._builds if job.digest == digest]:
                self._builds.remove(job)
                (self._builds.append if self._newest_first else self._builds.appendleft)(job)

    @property
    def has_results(self) -> bool:
        """Whether there is anything to collect."""
        return bool(self._results)

    def collect(self) -> Iterator[Result]:
        """What has come out, in order."""
        while self._results:
            yield self._results.popleft()

    def working_since(self) -> float | None:
        """Since when the thread has not got on, in `time.monotonic()` seconds; None when it is idle."""
        return self._since

    @property
    def digest_in_work(self) -> str | None:
        """The graph that is being built or tuned; None between jobs."""
        job = self._job
        return None if job is None else job.digest

    def close(self, wait_s: float = 0.0) -> None:
        """Ask the thread to end, and wait so long for the job in work: after that it is interrupted."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if wait_s > 0 and self._thread.is_alive():
            self._thread.join(wait_s)
        if self._thread.is_alive():
            self._builder.interrupt()

    # The build thread's side.

    def _run(self) -> None:
        try:
            self._builder.expect_builds()
            self._builder.open()
            while (job := self._next()) is not None:
                self._post(self._do(job))
        except BaseException as error:  # noqa: BLE001 - whoever waits for a plan must hear of it
            self._post(Result(None, error, 0))
        finally:
            self._since = None
            self._close_builder()

    def _next(self) -> Job | None:
        with self._changed:
            self._job = None
            if not (self._builds or self._tunes):
                self._announce(False)
            while not (self._closing or self._builds or self._tunes):
                self._since = None
                self._changed.wait()
            if self._closing:
                return None
            self._announce(True)
            self._since = time.monotonic()
            take_build = self._builds.pop if self._newest_first else self._builds.popleft
            self._job = take_build() if self._builds else self._tunes.popleft()
            return self._job

    def _do(self, job: Job) -> Result:
        started = time.perf_counter_ns()
        outcome: Plan | Exception
        try:
            outcome = self._tune(job) if job.tune else self._build(job)
        except StickyError:
            raise  # no other job could do better
        except Exception as error:  # noqa: BLE001 - the actor says what it means, for it knows the context
            outcome = error
        return Result(job, outcome, time.perf_counter_ns() - started)

    def _build(self, job: Job) -> Plan:
        return self._builder.build(job.graph, workspace_limit=job.workspace_limit)

    def _tune(self, job: Job) -> Plan:
        def progress(done: int, of: int, what: str) -> None:
            if self._closing:
                raise _ClosedError
            self._since = time.monotonic()
            log.info("plan.tuning", graph=job.digest[:8], done=done, of=of, candidate=what)

        return self._builder.tune(job.graph, workspace_limit=job.workspace_limit, progress=progress)

    def _post(self, result: Result) -> None:
        self._results.append(result)
        self._nudge()

    def _close_builder(self) -> None:
        try:
            self._builder.close()
        except Exception:  # of a dead context, say: there is nothing more to be done with it
            log.exception("builder.close_failed")
