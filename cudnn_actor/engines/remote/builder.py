"""A builder whose builds hold up no thread of this process.

A library may hold the interpreter's lock for as long as a build takes: then no thread of the process runs, on
whichever of them it was called. So a child process builds, and what comes back is restored here, which is
short. Waiting for the child is a poll, without the lock.

The first build starts the child, or the first tuning, or `expect_builds`: who only restores and exports, like
a standby or a service whose plans are all kept on disk, never pays for the device memory that a second
process takes.

=====================================  ==========================================================
a build, or tuning                     waits for a child that is starting. A build in this process
                                       would stop every thread of it, and a plan that kills its
                                       device context being checked would take this one's with it
a plan that does not travel            is built here, too: it is known to be built without harm
a build whose child was stopped        in another child, whatever `tries` says: no graph is to blame
a graph in work when a child died      never here. In another child, at once, until `tries` have
                                       died of it; or, with `tries` 1, when it is asked for again.
                                       Then nowhere
no child (4 deaths within 60 s, other  here, from then on, with a line in the log
library versions)
=====================================  ==========================================================

A child is replaced when it has done its share (`renew_after`): a library may keep something for every graph
that it has seen, which only the end of its process gives back. The next child is started then, and takes over
when it is ready, so nobody waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from weakref import WeakKeyDictionary

from cudnn_actor.actors.logs import Log
from cudnn_actor.engines.base import Builder, EngineFailure, Plan, StickyError
from cudnn_actor.engines.remote.frames import Build, Built, Request, Tune
from cudnn_actor.engines.remote.process import BuilderProcess, ChildLost, ChildSilent, ChildStopped
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graph import OperationGraph
from cudnn_actor.supervision.policy import RestartIntensity

__all__ = ["DIED", "INTERRUPTED", "SILENT", "RemoteBuilder"]

DIED = "BUILDER_DIED"
"""Status of the `EngineFailure` of a build whose process died."""
SILENT = "BUILDER_SILENT"
"""Status of the `EngineFailure` of a build that hung: its process was ended."""
INTERRUPTED = "BUILDER_INTERRUPTED"
"""Status of the `EngineFailure` of a build that was given up."""

_RENEW_AFTER = 500
"""Builds after which a child is replaced: cuDNN 9.19 keeps 0.3 MiB for each graph, on average."""
_INTENSITY = RestartIntensity(max_restarts=3, period_s=60.0)
_EXIT_WITHIN_S = 5.0
"""From the end of a dying process's socket to its exit: the device's driver takes some 0.1 s between them."""
_SHOWN = 1000

log = Log("cudnn_actor")


class RemoteBuilder:
    """`engines.base.Builder` on a child process. One thread opens, uses and closes it; any may interrupt it.

    Parameters
    ----------
    make
        Import path of what makes the child's builder: "package.module:Name".
    arguments
        What that is called with.
    local
        A builder of the same kind for this process, not open yet, nobody else's: restores, and stands in.
    start_within_s
        How long a child may take to become ready, in seconds; one that takes longer is ended.
    tries
        How many children one build may cost before it fails: more than one where a child knows what the
        last one died of, and does otherwise.
    answer_within_s
        How long a child may be silent over a build, or over a candidate that it tunes with, in seconds; one
        that is silent for longer is ended, and the build fails: it is not tried again at once.
    grace_s
        How long a child is given, at `close`, to end by itself, in seconds.
    renew_after
        After how many builds, and candidates of tunings, a child is replaced.
    executable
        Path of the Python that runs children; None for what `find_python` finds.
    """

    def __init__(
        self,
        make: str,
        arguments: tuple[str | int | float | bool | None, ...],
        local: Builder,
        *,
        tries: int = 1,
        answer_within_s: float = 20.0,
        start_within_s: float = 20.0,
        grace_s: float = 2.0,
        renew_after: int = _RENEW_AFTER,
        executable: str | None = None,
    ) -> None:
        self._executable = executable
        self._tries = tries
        self._answer_within_s = answer_within_s
        self._make = make
        self._arguments = arguments
        self._local = local
        self._start_within_s = start_within_s
        self._grace_s = grace_s
        self._renew_after = renew_after
        # Plans may go on any thread, and their entries with them: that is one operation on a dict, as is
        # each of ours, and the interpreter does not interrupt it.
        self._kept: WeakKeyDictionary[Plan, bytes] = WeakKeyDictionary()
        self._killed: Counter[str] = Counter()
        """How many children died of a graph, by its digest."""
        self._deaths: tuple[float, ...] = ()
        self._uses_children = False
        self._next: BuilderProcess | None = None
        """What is to take over from the child. The owner's thread's alone, so `interrupt` leaves it."""
        # Guards what `interrupt` touches. A child is ended only when it is no longer here, so that nobody
        # shuts down a descriptor that has been closed, and may be another's by then.
        self._lock = threading.Lock()
        self._child: BuilderProcess | None = None
        self._interrupted = False

    @property
    def fingerprint(self) -> str:
        """The local builder's. A child that says another is not used."""
        return self._local.fingerprint

    def expect_builds(self) -> None:
        """Start a child, before or after `open`. Does not wait for it."""
        self._uses_children = True
        if self._child is None:
            self._started()

    def open(self) -> None:
        """Open the local builder. The first build starts a child. Raises `EngineFailure`."""
        self._local.open()
        self._uses_children = True

    def close(self) -> None:
        """End the child and close the local builder. Safe to call twice. Blocks for the child's exit.

        No plan's bytes are lost by it: `export` works as before for plans from a child.
        """
        self._uses_children = False
        try:
            self._end_next()
            if (child := self._taken()) is not None:
                # One that is starting has nothing to finish, and is deaf until it is ready.
                child.end(0.0 if child.fingerprint is None else self._grace_s)
        finally:
            self._local.close()

    def interrupt(self) -> None:
        """Give up: the build that waits for the child fails, and so does every later one. Any thread.

        Does not block, and does not reach into a build in this process. Closing is still the owner's.
        """
        with self._lock:
            self._interrupted = True
            if self._child is not None:
                self._child.interrupt()

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether there is a child to build in, within `timeout_s` seconds; starts one if need be. Blocks."""
        return self._ready_child(time.monotonic() + timeout_s) is not None

    def build(self, graph: OperationGraph, *, workspace_limit: int | None) -> Plan:
        """As `Builder.build`. Blocks without the interpreter's lock, but for `restore`.

        Raises `EngineFailure` `DIED` when the child dies of it, and `INTERRUPTED`.
        """
        return self._plan(
            Build(graph, workspace_limit),
            _unheard,
            lambda: self._local.build(graph, workspace_limit=workspace_limit),
        )

    def tune(
        self,
        graph: OperationGraph,
        *,
        workspace_limit: int | None,
        progress: Callable[[int, int, str], None],
    ) -> Plan:
        """As `Builder.tune`; when `progress` raises, the child is ended. Raises and blocks as `build`."""
        return self._plan(
            Tune(graph, workspace_limit),
            progress,
            lambda: self._local.tune(graph, workspace_limit=workspace_limit, progress=progress),
        )

    def export(self, plan: Plan) -> bytes | None:
        """As `Builder.export`; free for plans from the child, whose bytes are kept with them."""
        data = self._kept.get(plan)
        return self._local.export(plan) if data is None else data

    def restore(self, graph: OperationGraph, data: bytes) -> Plan:
        """As the local builder does. Raises `EngineFailure`."""
        return self._local.restore(graph, data)

    # One plan.

    def _plan(
        self, request: Request, progress: Callable[[int, int, str], None], here: Callable[[], Plan]
    ) -> Plan:
        tries = self._tries
        while True:
            try:
                return self._try(request, progress, here)
            except EngineFailure as error:
                tries -= not isinstance(error.__cause__, ChildStopped)
                if error.status != DIED or not tries:
                    raise

    def _try(
        self, request: Request, progress: Callable[[int, int, str], None], here: Callable[[], Plan]
    ) -> Plan:
        digest = request.graph.digest()
        if self._killed[digest] >= max(2, self._tries):
            died = f"{self._killed[digest]} builder processes died of this graph; it is not built again"
            raise EngineFailure(DIED, died)
        child = self._ready_child(time.monotonic() + self._start_within_s)
        if child is not None:
            child = self._renewed(child)
            plan = self._restored(request.graph, self._answer(child, request, progress))
            return here() if plan is None else plan
        if self._killed[digest]:
            raise EngineFailure(DIED, "a builder process died of this graph; it is not built in this one")
        return here()

    def _answer(
        self, child: BuilderProcess, request: Request, progress: Callable[[int, int, str], None]
    ) -> Built:
        try:
            answer = child.ask(request, progress, self._answer_within_s)
        except ChildLost as loss:
            self._refuse_interrupted()
            digest = request.graph.digest()
            self._killed[digest] += not isinstance(loss, ChildStopped)
            status = SILENT if isinstance(loss, ChildSilent) else DIED
            raise EngineFailure(status, self._buried(loss, digest)) from loss
        except BaseException:  # of `progress`: the child goes on talking of what nobody wants any more
            self._end()
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _restored(self, graph: OperationGraph, built: Built) -> Plan | None:
        """The plan that came; None for one that does not travel. Raises `StickyError`."""
        if built.data is None:
            return None
        try:
            plan = self._local.restore(graph, built.data)
        except StickyError:
            raise
        except EngineFailure as error:
            log.warning("builder.not_restored", graph=graph.digest()[:8], error=str(error))
            return None
        self._kept[plan] = built.data
        return plan

    # One child after the other.

    def _ready_child(self, deadline: float) -> BuilderProcess | None:
        """A child that waits for requests; None when there is none before the deadline.

        Raises `EngineFailure` `INTERRUPTED`.
        """
        self._refuse_interrupted()
        while self._uses_children:
            child = self._child or self._started()
            if child is None:
                continue
            try:
                if self._is_ready(child, deadline):
                    return child if self._fits(child) else None
            except ChildLost as loss:
                self._refuse_interrupted()
                self._buried(loss)
            else:
                return None
        return None

    def _is_ready(self, child: BuilderProcess, deadline: float) -> bool:
        """Whether a child takes requests. Raises `ChildLost`, also for one that takes too long to start."""
        due = child.started + self._start_within_s
        if child.becomes_ready(min(deadline, due)):
            return True
        if time.monotonic() >= due:
            raise ChildLost(f"it was not ready within {self._start_within_s:g} s")
        return False

    def _fits(self, child: BuilderProcess) -> bool:
        """Whether plans of a child can be restored here; if not, it is the last one."""
        if child.fingerprint == self.fingerprint:
            return True
        log.warning("builder.differs", here=self.fingerprint, there=child.fingerprint, answer=_GIVEN_UP)
        self._uses_children = False
        self._end()
        return False

    def _renewed(self, child: BuilderProcess) -> BuilderProcess:
        """The child that is to build: the next one, once that is ready, where this one has done its share."""
        if child.asked < self._renew_after:
            return child
        try:
            if not self._is_next_ready(child.fingerprint):
                return child
        except (ChildLost, OSError) as error:
            log.warning("builder.not_renewed", pid=child.pid, error=str(error))
            self._end_next()
            child.asked = 0  # it serves as long again before the next try
            return child
        successor, self._next = self._next, None
        assert successor is not None, "it is ready"
        with self._lock:
            self._child = successor
            if self._interrupted:
                successor.interrupt()
        log.info("builder.renewed", pid=successor.pid, instead_of=child.pid, after=child.asked)
        child.end(0.0)
        return successor

    def _is_next_ready(self, fingerprint: str | None) -> bool:
        """Whether the next child can take over; started if need be. Raises `ChildLost`, `OSError`."""
        if self._next is None:
            self._next = self._new_child()
        if not self._is_ready(self._next, 0.0):
            return False
        if self._next.fingerprint != fingerprint:
            raise ChildLost(f"the next one has other versions: {self._next.fingerprint}")
        return True

    def _new_child(self) -> BuilderProcess:
        return BuilderProcess(self._make, self._arguments, self._executable)

    def _end_next(self) -> None:
        successor, self._next = self._next, None
        if successor is not None:
            successor.end(0.0)

    def _started(self) -> BuilderProcess | None:
        """A new child; None when there is no process to be had, which counts as a death."""
        try:
            child, self._next = self._next or self._new_child(), None
        except (OSError, InvalidRequest) as error:
            log.warning("builder.not_started", error=str(error))
            self._count_death()
            return None
        with self._lock:
            self._child = child
            if self._interrupted:  # while it was being started, when there was nothing to shut down
                child.interrupt()
        return child

    def _taken(self) -> BuilderProcess | None:
        """The child, which is nobody else's from here on."""
        with self._lock:
            child, self._child = self._child, None
        return child

    def _end(self) -> None:
        if (child := self._taken()) is not None:
            child.end(0.0)

    def _buried(self, loss: ChildLost, digest: str = "") -> str:
        """What a child died of, once it has; the next is started behind it."""
        child = self._taken()
        assert child is not None, "who is lost was there"
        status = child.end(0.0 if loss.why else _EXIT_WITHIN_S)
        words = child.last_words
        what = f"the builder process {child.pid} {f'was ended: {loss.why}' if loss.why else status}"
        log.warning("builder.died", pid=child.pid, why=what, graph=digest[:8], stderr=words)
        self._count_death()
        if self._uses_children:
            self._started()
        return f"{what}; it last said: {words[-_SHOWN:]}" if words else what

    def _count_death(self) -> None:
        deaths = _INTENSITY.admit(self._deaths, time.monotonic())
        if deaths is None:
            log.warning(
                "builder.given_up",
                deaths=len(self._deaths) + 1,
                within_s=_INTENSITY.period_s,
                answer=_GIVEN_UP,
            )
            self._uses_children = False
        else:
            self._deaths = deaths

    def _refuse_interrupted(self) -> None:
        """Raise what a build ends in that was given up, and end the child that is in the middle of it."""
        if self._interrupted:
            self._end()
            raise EngineFailure(INTERRUPTED, "the build was given up; this builder can only be closed")


_GIVEN_UP = "plans are built in this process from here on, where a build may hold up every thread"


def _unheard(done: int, of: int, what: str) -> None:
    """Progress of a build: there is none."""
