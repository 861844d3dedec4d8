"""The planner: finds or builds the plan for a graph, and tells the requests that wait for it.

If the engine has a builder, the build thread builds a missing plan, once, and the requests that need it are
deferred. If it has none, `get_or_build` builds the plan on the runner's own thread. A second thread restores
plans that are kept on disk, so that a request whose plan is on disk waits for no build. This matters most
after a crash, when no plan is in the cache and a build may be first in the queue. A third thread, which is
started for the first plan that is to be tuned, has plans tuned, which takes minutes: no build waits for it.

A run of a model does not wait for kernels that cuDNN would have to compile, if its graph can be run without:
it gets a provisional plan. A fourth thread, started for the first of these, has the preferred plan built
behind what others wait for, and that replaces the provisional one between two runs, as a tuned plan does.

Only the runner's thread uses this module, except for `_Announcer`.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Literal

from cudnn_actor.actors import Crash
from cudnn_actor.actors.logs import Log
from cudnn_actor.broker.execution_state import ExecutionState
from cudnn_actor.engines.base import Builder, Plan
from cudnn_actor.execution.building import BuildThread, Job, Result, close_all
from cudnn_actor.execution.executor import Executor
from cudnn_actor.plan_store.builders import NotStored, RestoringBuilder, StoringBuilder
from cudnn_actor.plan_store.cache import PlanCache
from cudnn_actor.protocol.errors import CudnnActorError, OutOfMemory, UnsupportedGraph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.types.tune import Tune

__all__ = ["BuildCrash", "Outcome", "Planner", "TuningWay", "Waiter", "less_workspace"]

Outcome = Plan | CudnnActorError
"""The result of a build."""
Waiter = Callable[[str, Outcome], None]
"""A function that is called on the runner's thread with a graph's digest and the result of its build. It must
not raise."""

TuningWay = Literal["measure", "cached"]
"""Whether candidates are measured, unless the plan store has a tuned plan, or only the store is asked."""

_CLOSE_WAIT_S = 1.0
"""Seconds for which an actor that stops waits for running builds. Longer builds are interrupted."""

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
        The state, with the workspace limit, the plan store, and whether warming tunes.
    nudge
        A function that wakes the runner's host when a build has a result. It may be called on any thread.
    """

    def __init__(
        self, executor: Executor[Any], cache: PlanCache, state: ExecutionState, nudge: Callable[[], None]
    ) -> None:
        self.cache = cache
        self._executor = executor
        self._limit = state.workspace_limit
        self._tunes = state.autotune
        self._announcer = _Announcer(state.announce_build)
        self._nudge, self._store, self._builders = nudge, state.plan_store, state.builders
        self._restorer, self._thread = self._threads()
        self._tuner: BuildThread | None = None
        self._all_threads = [thread for thread in (self._restorer, self._thread) if thread is not None]
        """The threads that restore kept plans, that build, that tune, and that replace provisional plans;
        without those that are None."""
        self._improver: BuildThread | None = None
        self._waiting: defaultdict[str, list[tuple[Waiter, bool]]] = defaultdict(list)
        """The waiters of each build, with whether a provisional plan will do."""
        self._for_better: defaultdict[str, list[Waiter]] = defaultdict(list)
        self._improving: dict[str, Job] = {}
        """The jobs whose results replace provisional plans."""
        self._unimproved: set[str] = set()
        """Provisional plans that nothing has been found to replace."""
        self._for_tuned: defaultdict[tuple[str, TuningWay], list[Callable[[], None]]] = defaultdict(list)
        self._tuning: dict[tuple[str, TuningWay], Job] = {}
        """The jobs for whose results they wait, since they were asked for."""
        self._tuned: set[str] = set()
        for thread in self._all_threads:
            thread.start()

    def _threads(self) -> tuple[BuildThread | None, BuildThread | None]:
        """The thread that restores kept plans, and the one that builds. Each has its own builder."""
        builds = self._executor.engine.builder(self._builders)
        if builds is None:
            return None, None
        if self._store is None:
            return None, self._new_thread(builds, "cudnn-builder")
        # Newest first: a promoted standby may have many plans still to warm, of which requests need few.
        restorer = self._new_thread(
            RestoringBuilder(self._store, self._new_builder()), "cudnn-plans", newest_first=True
        )
        return restorer, self._new_thread(StoringBuilder(self._store, builds), "cudnn-builder")

    def _new_builder(self) -> Builder:
        builder = self._executor.engine.builder(self._builders)
        assert builder is not None, "an engine either has builders or has none"
        return builder

    def _new_thread(self, builder: Builder, name: str, *, newest_first: bool = False) -> BuildThread:
        announce = self._announcer.of(name)
        return BuildThread(builder, self._nudge, announce, name=name, newest_first=newest_first)

    @property
    def builds_elsewhere(self) -> bool:
        """Whether there is a build thread, so that requests for missing plans can be deferred."""
        return self._thread is not None

    @property
    def digest_in_work(self) -> str | None:
        """The digest of the graph on which the thread works that has made no progress for longest."""
        in_work = [
            (thread.working_since() or 0.0, digest)  # one with a job that has ended has died
            for thread in self._all_threads
            if (digest := thread.digest_in_work) is not None
        ]
        return min(in_work)[1] if in_work else None

    def working_since(self) -> float | None:
        """Since when a thread has made no progress, in `time.monotonic()` seconds; None if both are idle."""
        since = (thread.working_since() for thread in self._all_threads)
        return min((one for one in since if one is not None), default=None)

    def close(self, *, wait: bool) -> None:
        """End the threads. `wait`: give the running builds a moment to finish; else they are interrupted."""
        close_all(self._all_threads, _CLOSE_WAIT_S if wait else 0.0)

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

    def wait_for(self, graph: OperationGraph, waiter: Waiter, *, soon: bool = False) -> None:
        """Start the build of a missing plan, unless it is under way. `waiter` is called with the result.

        `soon`: a provisional plan will do.
        """
        digest = graph.digest()
        self._waiting[digest].append((waiter, soon))
        if self.cache.begin(digest):
            job = Job(digest, graph, self._limit, effort="soon" if soon else "best")
            (self._restorer or self._builder_thread).ask(job)
        elif self._restorer is not None:
            self._restorer.hurry(digest)

    def is_provisional(self, digest: str) -> bool:
        """Whether a cached plan is provisional, and another is to replace it."""
        known = self.cache.peek(digest)
        found = known is not None and not isinstance(known, UnsupportedGraph) and known.provisional
        return found and digest not in self._unimproved

    def wait_for_better(self, graph: OperationGraph, waiter: Waiter) -> None:
        """Wait until a provisional plan is replaced. `waiter` is called with the plan that is used then."""
        self._for_better[graph.digest()].append(waiter)
        self._improve(graph)

    def _improve(self, graph: OperationGraph) -> None:
        """Start the build of the plan that replaces a provisional one, unless it is under way."""
        digest = graph.digest()
        if digest in self._improving:
            return
        job = self._improving[digest] = Job(digest, graph, self._limit, effort="behind")
        if self._improver is None:
            builder = self._new_builder()
            builds = builder if self._store is None else StoringBuilder(self._store, builder)
            self._improver = self._new_thread(builds, "cudnn-improver")
            self._all_threads.append(self._improver)
            self._improver.start()
        self._improver.ask(job)

    def way_of_tuning(self, tune: Tune) -> TuningWay | None:
        """The way of tuning that a request with this `tune` asks for; None for no tuning."""
        if tune == "cached":
            return None if self._restorer is None else "cached"
        return "measure" if tune or self._tunes else None

    def wants_tuning(self, digest: str, way: TuningWay) -> bool:
        """Whether a plan is to be tuned: not if it is tuned, or known to be unsupported.

        The store is not asked again for a plan that is missing: it is asked before the plan is built.
        """
        if digest in self._tuned:
            return False
        known = self.cache.peek(digest)
        return not isinstance(known, UnsupportedGraph) and (way == "measure" or known is not None)

    def wait_for_tuned(self, graph: OperationGraph, way: TuningWay, waiter: Callable[[], None]) -> None:
        """Start the tuning of a plan. `waiter` is called once it is done or has failed; if it failed, the
        plan stays.

        A missing plan must be under way already; it is tuned once it is built.
        """
        digest = graph.digest()
        key = digest, way
        first = key not in self._for_tuned
        self._for_tuned[key].append(waiter)
        if first and self.cache.peek(digest) is not None:
            self._ask_tuner(graph, way)
        elif first:
            self._waiting[digest].append((lambda _, outcome: self._tune_next(graph, way, outcome), True))

    def _ask_tuner(self, graph: OperationGraph, way: TuningWay) -> None:
        digest = graph.digest()
        job = self._tuning[digest, way] = Job(digest, graph, self._limit, tune=True)
        if way == "cached":
            assert self._restorer is not None, "else no request has this way"
            self._restorer.ask(job)
            return
        if self._tuner is None:
            builder = self._new_builder()
            tunes = builder if self._store is None else StoringBuilder(self._store, builder)
            self._tuner = self._new_thread(tunes, "cudnn-tuner")
            self._all_threads.append(self._tuner)
            self._tuner.start()
        self._tuner.ask(job)

    def forget(self, digest: str) -> None:
        """Drop a plan that is not expected to be needed again. If it is being tuned, that is abandoned."""
        known = self.cache.peek(digest)
        self.cache.drop(digest)
        self._tuned.discard(digest)
        self._unimproved.discard(digest)
        # If requests wait for a better plan and have none, they get this one.
        if known is not None and (better := self._improving.pop(digest, None)) is not None:
            assert self._improver is not None, "it was asked for that"
            self._improver.abandon(better)
            _tell(self._for_better.pop(digest, []), digest, known)
        self._abandon_tuning((digest, "measure"), self._tuner)
        self._abandon_tuning((digest, "cached"), self._restorer)

    def _abandon_tuning(self, key: tuple[str, TuningWay], thread: BuildThread | None) -> None:
        if (job := self._tuning.pop(key, None)) is not None:
            assert thread is not None, "it was asked for that"
            thread.abandon(job)
        for waiter in self._for_tuned.pop(key, ()):
            waiter()

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

    def _tune_next(self, graph: OperationGraph, way: TuningWay, outcome: Outcome) -> None:
        key = graph.digest(), way
        if isinstance(outcome, CudnnActorError):
            for waiter in self._for_tuned.pop(key, ()):
                waiter()
        elif key in self._for_tuned:  # else the plan was forgotten meanwhile
            self._ask_tuner(graph, way)

    def _take(self, result: Result) -> None:
        job = result.job
        if job is None:
            raise BuildCrash(f"the build thread has died: {result.outcome!r}", self.digest_in_work)
        if job.tune:
            self._take_tuned(job, result)
            return
        if job.effort == "behind":
            self._take_better(job, result)
            return
        if isinstance(result.outcome, NotStored):
            self._builder_thread.ask(job)
            return
        self.cache.note_build(result.took_ns)
        outcome = self._prepare(job, result.outcome)
        if outcome is not None:
            self._end_build(job, outcome)

    def _take_tuned(self, job: Job, result: Result) -> None:
        key = next((key for key, wanted in self._tuning.items() if wanted is job), None)
        if key is None:  # it was abandoned
            return
        del self._tuning[key]
        if not isinstance(result.outcome, NotStored):
            self.cache.note_build(result.took_ns)
            outcome = self._prepare(job, result.outcome)
            assert outcome is not None, "it is not built again with less workspace"
            self._use_tuned(job, outcome)
        for waiter in self._for_tuned.pop(key):
            waiter()

    def _take_better(self, job: Job, result: Result) -> None:
        if self._improving.get(job.digest) is not job:  # it was abandoned
            return
        del self._improving[job.digest]
        self.cache.note_build(result.took_ns)
        outcome = self._prepare(job, result.outcome)
        assert outcome is not None, "it is not built again with less workspace"
        known = self.cache.peek(job.digest)
        if isinstance(outcome, CudnnActorError):
            log.warning("plan.not_replaced", graph=job.digest[:8], error=str(outcome))
            self._unimproved.add(job.digest)
        elif self.is_provisional(job.digest):  # else it was tuned meanwhile, or evicted
            self.cache.replace(job.digest, outcome, job.graph.footprint)
            known = outcome
        _tell(self._for_better.pop(job.digest, []), job.digest, known or outcome)

    def _prepare(self, job: Job, outcome: Plan | BaseException) -> Outcome | None:
        """A plan that is ready to run, or the error. None while one with less workspace is being built."""
        if isinstance(outcome, BaseException):
            return self._error_of(outcome, job.graph)
        try:
            self._executor.call("prepare", self._executor.engine.prepare, outcome)
        except OutOfMemory as error:
            limit = less_workspace(outcome.workspace, job.workspace_limit)
            if limit is None or job.tune or job.effort == "behind":
                return error
            self._builder_thread.ask(job._replace(workspace_limit=limit))
            return None
        except CudnnActorError as error:
            return error
        return outcome

    def _error_of(self, error: BaseException, graph: OperationGraph) -> CudnnActorError:
        meant = self._executor.diagnose(error, self._executor.build_tag(graph))
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
        self._unimproved.discard(job.digest)
        waiting = self._waiting.pop(job.digest)
        if self.is_provisional(job.digest):
            self._for_better[job.digest] += [waiter for waiter, soon in waiting if not soon]
            waiting = [each for each in waiting if each[1]]
            self._improve(job.graph)
        _tell([waiter for waiter, _ in waiting], job.digest, outcome)

    def _use_tuned(self, job: Job, outcome: Outcome) -> None:
        if isinstance(outcome, CudnnActorError):
            log.warning("plan.not_tuned", graph=job.digest[:8], error=str(outcome))
            return
        self.cache.replace(job.digest, outcome, job.graph.footprint)
        self._tuned.add(job.digest)
        if len(self._tuned) > 2 * self.cache.capacity:  # plans that were evicted are tuned again
            self._tuned.intersection_update(self.cache.digests)


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


def _tell(waiters: list[Waiter], digest: str, outcome: Outcome) -> None:
    for waiter in waiters:
        waiter(digest, outcome)
