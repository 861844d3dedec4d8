"""The thread that builds plans. It takes jobs from a queue and appends results to a deque.

The actor's thread adds jobs and collects results, and never waits for the build thread. The build thread
opens, uses and closes the builder. The two share a queue of jobs, under a condition, and a deque of results.
The build thread appends a result first and nudges the actor second. The actor looks at the deque before every
wait, and a nudge that finds it awake is kept for its next wait (`Mailbox.nudge`). So the actor never sleeps
while a result is there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from cudnn_actor.actors.logs import Log, carry_service
from cudnn_actor.actors.threads import start_thread
from cudnn_actor.engines.base import Builder, Effort, Plan, StickyError
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

__all__ = ["BuildThread", "Job", "Result", "close_all"]

log = Log("cudnn_actor")


class Job(NamedTuple):
    """A plan to build, with that effort, or to tune. `workspace_limit` is in bytes."""

    digest: str
    graph: OperationGraph
    workspace_limit: int | None
    tune: bool = False
    effort: Effort = "best"


class Result(NamedTuple):
    """The outcome of a job, and how long it took in nanoseconds. If `job` is None, the thread has died."""

    job: Job | None
    outcome: Plan | BaseException
    took_ns: int


class _UnwantedError(Exception):
    """Raised during tuning when nobody wants its result any more, or the build thread is being closed."""


class BuildThread:
    """A builder on a daemon thread of its own, which does one job after the other.

    Parameters
    ----------
    builder
        A builder that is not open yet, and that nobody else may use.
    nudge
        This is called on the build thread after each result, to wake the thread that collects it. It must not
        block.
    announce
        This is called on the build thread, with True before a job starts, and with False when there is none.
        During the build, no thread of the process might be able to report it: a library may hold the
        interpreter's lock until the build ends.
    name
        The thread's name.
    newest_first
        Whether the latest queued build is done first. This helps if each build is short and many are asked
        for before they are needed.
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
        self._jobs: deque[Job] = deque()
        self._closing = False
        self._job: Job | None = None
        self._unwanted: Job | None = None
        """The job in work, once nobody wants its result."""
        self._since: float | None = None
        self._results: deque[Result] = deque()
        self._thread = threading.Thread(target=carry_service(self._run), name=name, daemon=True)

    # The actor's side.

    def start(self) -> None:
        """Start the thread, which opens the builder. Raises `ThreadRefused`."""
        self._since = time.monotonic()
        start_thread(self._thread)

    def ask(self, job: Job) -> None:
        """Add a job. Blocks only for the queue's lock."""
        with self._changed:
            self._jobs.append(job)
            if self._since is None:
                self._since = time.monotonic()
            self._changed.notify()

    def hurry(self, digest: str) -> None:
        """Move a queued build to the front, because a request waits for it now."""
        with self._changed:
            for job in [job for job in self._jobs if job.digest == digest]:
                self._jobs.remove(job)
                (self._jobs.append if self._newest_first else self._jobs.appendleft)(job)

    def abandon(self, job: Job) -> None:
        """Leave a tuning that nobody wants any more: at its next candidate if it has begun. It may still have
        a result."""
        with self._changed:
            if self._job is job:
                self._unwanted = job
            elif job in self._jobs:
                self._jobs.remove(job)

    @property
    def has_results(self) -> bool:
        """Whether there is anything to collect."""
        return bool(self._results)

    def collect(self) -> Iterator[Result]:
        """Remove and return the results, in order."""
        while self._results:
            yield self._results.popleft()

    def working_since(self) -> float | None:
        """Since when the thread has made no progress, in `time.monotonic()` seconds; None when it is idle."""
        return self._since

    @property
    def digest_in_work(self) -> str | None:
        """The digest of the graph that is being built or tuned; None between jobs."""
        job = self._job
        return None if job is None else job.digest

    def ask_to_end(self) -> None:
        """Let the thread end after the running job. Does not wait."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def close(self, wait_s: float = 0.0) -> None:
        """Ask the thread to end. Wait up to `wait_s` seconds for the running job, then interrupt it."""
        self.ask_to_end()
        if wait_s > 0 and self._thread.is_alive():
            self._thread.join(wait_s)
        if self._thread.is_alive():
            self._builder.interrupt()

    # The build thread's side.

    def _run(self) -> None:
        try:
            self._builder.expect_builds()
            self._builder.open()
            while self._do_next():
                pass
        except BaseException as error:  # noqa: BLE001 - the requests that wait for a plan must be told
            self._post(Result(None, error, 0))
        finally:
            self._since = None
            self._close_builder()

    def _do_next(self) -> bool:
        """Wait for a job, and do it. Returns False when the thread is to end.

        A function of its own, so that no variable keeps a job's graph while the thread waits for the next.
        """
        job = self._next()
        if job is not None:
            self._post(self._do(job))
        return job is not None

    def _next(self) -> Job | None:
        with self._changed:
            self._job = None
            if not self._jobs:
                self._announce(False)
            while not (self._closing or self._jobs):
                self._since = None
                self._changed.wait()
            if self._closing:
                return None
            self._announce(True)
            self._since = time.monotonic()
            self._job = self._jobs.pop() if self._newest_first else self._jobs.popleft()
            return self._job

    def _do(self, job: Job) -> Result:
        started = time.perf_counter_ns()
        outcome: Plan | Exception
        try:
            outcome = self._tune(job) if job.tune else self._build(job)
        except StickyError:
            raise  # the context is dead: every other job would fail too
        except Exception as error:  # noqa: BLE001 - the actor interprets it: it can probe the context
            outcome = error
        return Result(job, outcome, time.perf_counter_ns() - started)

    def _build(self, job: Job) -> Plan:
        progress = self._note_progress
        return self._builder.build(
            job.graph, workspace_limit=job.workspace_limit, progress=progress, effort=job.effort
        )

    def _tune(self, job: Job) -> Plan:
        def progress(done: int, of: int, what: str) -> None:
            self._note_progress()
            if self._closing or self._unwanted is job:
                raise _UnwantedError
            if not of:  # it builds the first choices, or waits while another client is served
                return
            log.info("plan.tuning", graph=job.digest[:8], done=done, of=of, candidate=what)

        return self._builder.tune(job.graph, workspace_limit=job.workspace_limit, progress=progress)

    def _note_progress(self, *_: object) -> None:
        self._since = time.monotonic()

    def _post(self, result: Result) -> None:
        self._results.append(result)
        self._nudge()

    def _close_builder(self) -> None:
        try:
            self._builder.close()
        except Exception:  # its context may be dead; nothing more can be done with it
            log.exception("builder.close_failed")


def close_all(threads: Sequence[BuildThread], wait_s: float) -> None:
    """Close several threads, and wait up to `wait_s` seconds for all of their running jobs together."""
    for thread in threads:
        thread.ask_to_end()
    until_s = time.monotonic() + wait_s
    for thread in threads:
        thread.close(until_s - time.monotonic())
