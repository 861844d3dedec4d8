"""The planner: finds or builds the plan for a graph, and tells the requests that wait for it.

If the engine has a builder, the build thread builds a missing plan, once, and the requests that need it are
deferred. If it has none, `get_or_build` builds the plan on the runner's own thread. A second thread restores
plans that are kept on disk, so that a request whose plan is on disk waits for no build. This matters most
after a crash, when no plan is in the cache and a build may be first in the queue. Only the runner's thread
uses this module, except for `_Announcer`.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from cudnn_actor.actors import Crash
from cudnn_actor.actors.logs import Log
from cudnn_actor.broker.execution_state import ExecutionState
from cudnn_actor.engines.base import Engine, Plan
from cudnn_actor.execution.building import BuildThread, Job, Result
from cudnn_actor.execution.executor import Executor
from cudnn_actor.plan_store.cache import CAPACITY, PlanCache
from cudnn_actor.plan_store.stored import KeptPlans, NotKept, StoredPlans
from cudnn_actor.protocol.errors import CudnnActorError, OutOfMemory, UnsupportedGraph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

__all__ = ["BuildCrash", "Outcome", "Planner", "Waiter", "less_workspace"]

Outcome = Plan | CudnnActorError
"""The result of a build."""
Waiter = Callable[[str, Outcome], None]
"""Called with a graph's digest and the result of its build, on the runner's thread. Must not raise."""

_CLOSE_WAIT_S = 1.0
"""How long an actor that stops waits for the running build. A build that takes longer is interrupted."""

log = Log("cudnn_actor")


def less_workspace(needed: int, limit: int | None) -> int | None:
    """The limit for the next try, after the device had no room for a plan that needs `needed` bytes.

    None if the failure is final: no plan keeps the limit, or even a plan without workspace has failed.
    """
    return needed - 1 if needed > 0 and (limit is None or needed <= limit) else None


class BuildCrash(Crash):
    """Raised when the build thread has found the context dead, or has died itself.

    Carries the `digest` of the graph that was being built; None if there was none.
    """

    def __init__(self, cause: str, digest: str | None) -> None:
        super().__init__(cause)
        self.digest = digest


class Planner:
    """The plans of one incarnation.

    Parameters
    ----------
    executor
        The executor of the open engine.
    cache
        The plan cache, empty.
    state
        Gives the workspace limit, the plan store, and whether warming tunes.
    nudge
        Wakes the runner's host when a build has a result. Called on any thread.
    """

    def __init__(
        self, executor: Executor[Any], cache: PlanCache, state: ExecutionState, nudge: Callable[[], None]
    ) -> None:
        self.cache = cache
        self._executor = executor
        self._limit = state.workspace_limit
        self._tunes = state.autotune
        self._restorer, self._thread = _threads(executor.engine, state, nudge)
        self._all_threads = [thread for thread in (self._restorer, self._thread) if thread is not None]
        """The thread that restores kept plans, and the thread that builds; without those that are None."""
        self._waiting: defaultdict[str, list[Waiter]] = defaultdict(list)
        self._for_tuned: defaultdict[str, list[Waiter]] = defaultdict(list)
        self._tuned: set[str] = set()
        for thread in self._all_threads:
            thread.start()

    @property
    def builds_elsewhere(self) -> bool:
        """Whether there is a build thread, so that requests for missing plans can be deferred."""
        return self._thread is not None

    @property
    def digest_in_work(self) -> str | None:
        """The digest of the graph that is being built, or else of the one that is being restored."""
        return next(filter(None, (thread.digest_in_work for thread in reversed(self._all_threads))), None)

    def working_since(self) -> float | None:
        """Since when a thread has made no progress, in `time.monotonic()` seconds; None if both are idle."""
        since = (thread.working_since() for thread in self._all_threads)
        return min((one for one in since if one is not None), default=None)

    def close(self, *, wait: bool) -> None:
        """End the threads. `wait`: give the running build a moment to finish; else it is interrupted."""
        for thread in self._all_threads:
            thread.close(_CLOSE_WAIT_S if wait else 0.0)

    # On the runner's thread.

    def get_or_build(self, graph: OperationGraph) -> Plan:
        """The cached plan of a graph, or one that is built now. Blocks.

        Raises `UnsupportedGraph`, `OutOfMemory`, `ExecutionFailed`, `Crash`.
        """
        return self.cache.get(graph.digest(), lambda: self._build_here(graph), graph.footprint)

    def _build_here(self, graph: OperationGraph) -> Plan:
        limit = self._limit
        while True:
            try:
                return self._executor.build(graph, limit)
            except OutOfMemory as error:
                if (limit := less_workspace(error.requested, limit)) is None:
                    raise

    # On the build thread.

    def wait_for(self, graph: OperationGraph, waiter: Waiter) -> None:
        """Have a missing plan built, unless its build is under way. `waiter` is called with the result."""
        digest = graph.digest()
        self._waiting[digest].append(waiter)
        if self.cache.begin(digest):
            (self._restorer or self._builder_thread).ask(Job(digest, graph, self._limit))
        elif self._restorer is not None:
            self._restorer.hurry(digest)

    def wants_tuning(self, digest: str) -> bool:
        """Whether warming this graph must tune its plan: not if it is tuned, or known to be unsupported."""
        if not self._tunes or digest in self._tuned:
            return False
        return not isinstance(self.cache.peek(digest), UnsupportedGraph)

    def wait_for_tuned(self, graph: OperationGraph, waiter: Waiter) -> None:
        """Have a plan tuned. `waiter` is called with the plan that is used from then on.

        A missing plan must be under way already; it is tuned once it is built. If tuning fails, the waiter
        gets the untuned plan; if there is none either, it gets the error.
        """
        digest = graph.digest()
        first = digest not in self._for_tuned
        self._for_tuned[digest].append(waiter)
        if first and self.cache.peek(digest) is not None:
            self._builder_thread.ask(Job(digest, graph, self._limit, tune=True))
        elif first:
            self._waiting[digest].append(lambda _, outcome: self._tune_next(graph, outcome))

    @property
    def has_results(self) -> bool:
        """Whether there is anything to collect."""
        return bool(self._all_threads) and any(thread.has_results for thread in self._all_threads)

    def collect(self) -> None:
        """Put the threads' results into the cache, and call the waiters. Raises `Crash`."""
        for thread in self._all_threads:
            for result in thread.collect():
                self._take(result)

    @property
    def _builder_thread(self) -> BuildThread:
        assert self._thread is not None, "requests are deferred only if there is a build thread"
        return self._thread

    def _tune_next(self, graph: OperationGraph, outcome: Outcome) -> None:
        digest = graph.digest()
        if isinstance(outcome, CudnnActorError):
            _tell(self._for_tuned.pop(digest), digest, outcome)
        else:
            self._builder_thread.ask(Job(digest, graph, self._limit, tune=True))

    def _take(self, result: Result) -> None:
        job = result.job
        if job is None:
            raise BuildCrash(f"the build thread has died: {result.outcome!r}", self.digest_in_work)
        if isinstance(result.outcome, NotKept):
            self._builder_thread.ask(job)
            return
        self.cache.note_build(result.took_ns)
        outcome = self._prepared(job, result.outcome)
        if outcome is None:
            return
        if job.tune:
            self._end_tuning(job, outcome)
        else:
            self._end_build(job, outcome)

    def _prepared(self, job: Job, outcome: Plan | BaseException) -> Outcome | None:
        """A plan that is ready to run, or the error. None while one with less workspace is being built."""
        if isinstance(outcome, BaseException):
            return self._meaning(outcome, job.graph)
        try:
            self._executor.call("prepare", self._executor.engine.prepare, outcome)
        except OutOfMemory as error:
            limit = less_workspace(outcome.workspace, job.workspace_limit)
            if limit is None or job.tune:
                return error
            self._builder_thread.ask(job._replace(workspace_limit=limit))
            return None
        except CudnnActorError as error:
            return error
        return outcome

    def _meaning(self, error: BaseException, graph: OperationGraph) -> CudnnActorError:
        meant = self._executor.diagnose(error, self._executor.building(graph))
        if isinstance(meant, Crash):
            # not `digest_in_work`: the thread may be building another graph by now
            raise BuildCrash(str(meant), graph.digest()) from error
        return meant

    def _end_build(self, job: Job, outcome: Outcome) -> None:
        if isinstance(outcome, UnsupportedGraph) or not isinstance(outcome, CudnnActorError):
            self.cache.end(job.digest, outcome, job.graph.footprint)
        else:
            self.cache.end(job.digest, None)  # the error may be temporary, so it is not cached
        self._tuned.discard(job.digest)
        _tell(self._waiting.pop(job.digest), job.digest, outcome)

    def _end_tuning(self, job: Job, outcome: Outcome) -> None:
        if isinstance(outcome, CudnnActorError):
            log.warning("plan.not_tuned", graph=job.digest[:8], error=str(outcome))
            outcome = self.cache.peek(job.digest) or outcome
        else:
            self.cache.replace(job.digest, outcome, job.graph.footprint)
            self._tuned.add(job.digest)
            if len(self._tuned) > 2 * CAPACITY:  # plans that were evicted are tuned anew
                self._tuned.intersection_update(self.cache.digests)
        _tell(self._for_tuned.pop(job.digest), job.digest, outcome)


class _Announcer:
    """Combines the announcements of several threads: something is being built while any of them builds.

    Parameters
    ----------
    announce
        `ExecutionState.announce_build`.
    """

    def __init__(self, announce: Callable[[bool], None]) -> None:
        self._announce = announce
        self._lock = threading.Lock()
        self._at_work: set[str] = set()

    def of(self, thread: str) -> Callable[[bool], None]:
        """The `announce` callback for the thread of that name."""

        def announce(builds: bool) -> None:
            with self._lock:
                (self._at_work.add if builds else self._at_work.discard)(thread)
                self._announce(bool(self._at_work))

        return announce


def _threads(
    engine: Engine, state: ExecutionState, nudge: Callable[[], None]
) -> tuple[BuildThread | None, BuildThread | None]:
    """The thread that restores kept plans, and the one that builds. Each has its own builder."""
    builds = engine.builder(state.builders)
    if builds is None:
        return None, None
    announcer = _Announcer(state.announce_build)
    store = state.plan_store
    name = "cudnn-builder"
    if store is None:
        return None, BuildThread(builds, nudge, announcer.of(name), name=name)
    restores = engine.builder(state.builders)
    assert restores is not None, "an engine either has builders or has none"
    # Newest first: a promoted standby may have many plans still to warm, of which requests need only a few.
    restorer = BuildThread(
        KeptPlans(store, restores),
        nudge,
        announcer.of("cudnn-plans"),
        name="cudnn-plans",
        newest_first=True,
    )
    return restorer, BuildThread(StoredPlans(store, builds), nudge, announcer.of(name), name=name)


def _tell(waiters: list[Waiter], digest: str, outcome: Outcome) -> None:
    for waiter in waiters:
        waiter(digest, outcome)
