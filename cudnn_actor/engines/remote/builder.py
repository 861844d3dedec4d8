"""A builder whose builds hold up no thread of this process.

A library may hold the interpreter's lock for as long as a build takes: then no thread of the process runs, on
whichever of them it was called. So another process builds, the service's builder process (`host`), and what
comes back is restored here, which is short. Waiting for it is a poll, without the lock.

The first build connects to it, or the first tuning, or `expect_builds`: who only restores and exports, like
a standby or a service whose plans are all kept on disk, never pays for the device memory that another process
takes.

=====================================  ==========================================================
a build, or tuning                     waits for a process that is starting, and for what others
                                       have asked of it before. A build in this process would stop
                                       every thread of it, and a plan that kills its device context
                                       being checked would take this one's with it
a plan that does not travel            is built here, too: it is known to be built without harm
a build whose process was stopped,     in another process, whatever `tries` says: no graph is to
or that it had not begun               blame
a graph in work when a process died    never here. In another process, at once, until `tries` have
                                       died of it; or, with `tries` 1, when it is asked for again.
                                       Then nowhere
no process (4 deaths within 60 s,      here, from then on, with a line in the log
other library versions)
=====================================  ==========================================================

The process ends by itself when it has done its share (`renew_after`): a library may keep something for every
graph that it has seen, which only the end of its process gives back. The next build is another process's.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from weakref import WeakKeyDictionary

from cudnn_actor.actors.logs import Log
from cudnn_actor.engines.base import Builder, BuilderAccess, EngineFailure, Plan, StickyError
from cudnn_actor.engines.remote.connection import (
    Connection,
    ProcessLeft,
    ProcessLost,
    ProcessSilent,
    ProcessStopped,
)
from cudnn_actor.engines.remote.messages import Build, Built, Open, Request, Tune
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
"""Builds after which the process is replaced: cuDNN 9.19 keeps 0.3 MiB for each graph, on average."""
_INTENSITY = RestartIntensity(max_restarts=3, period_s=60.0)
_EXIT_WITHIN_S = 5.0
"""From the end of a dying process's socket to its exit: the device's driver takes some 0.1 s between them."""
_SHOWN = 1000

log = Log("cudnn_actor")


class RemoteBuilder:
    """`engines.base.Builder` on a builder process. One thread opens, uses and closes it; any interrupts it.

    Parameters
    ----------
    make
        Import path of what makes the process's builder: "package.module:Name".
    arguments
        What that is called with.
    local
        A builder of the same kind for this process, not open yet, nobody else's: restores, and stands in.
    access
        The way to the process.
    start_within_s
        How long the process may take to become ready, in seconds, once it has taken the connection; one that
        takes longer is killed.
    tries
        How many processes one build may cost before it fails: more than one where a process knows what the
        last one died of, and does otherwise.
    answer_within_s
        How long the process may be silent over a build, or over a candidate that it tunes with, in seconds;
        one that is silent for longer is killed, and the build fails: it is not tried again at once.
    renew_after
        After how many builds, and candidates of tunings, the process is replaced.
    """

    def __init__(
        self,
        make: str,
        arguments: tuple[str | int | float | bool | None, ...],
        local: Builder,
        access: BuilderAccess,
        *,
        tries: int = 1,
        answer_within_s: float = 20.0,
        start_within_s: float = 20.0,
        renew_after: int = _RENEW_AFTER,
    ) -> None:
        self._opening = Open(make, arguments, renew_after)
        self._local = local
        self._access = access
        self._tries = tries
        self._answer_within_s = answer_within_s
        self._start_within_s = start_within_s
        # Plans may go on any thread, and their entries with them: that is one operation on a dict, as is
        # each of ours, and the interpreter does not interrupt it.
        self._kept: WeakKeyDictionary[Plan, bytes] = WeakKeyDictionary()
        self._killed: Counter[str] = Counter()
        """How many processes died of a graph, by its digest."""
        self._deaths: tuple[float, ...] = ()
        self._goes_elsewhere = False
        """Whether builds go to the process."""
        # Guards what `interrupt` touches. A connection is closed only when it is no longer here, so that
        # nobody shuts down a descriptor that has been closed, and may be another's by then.
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._interrupted = False

    @property
    def fingerprint(self) -> str:
        """The local builder's. A process that says another is not used."""
        return self._local.fingerprint

    def expect_builds(self) -> None:
        """Connect, before or after `open`. Does not wait for the process."""
        self._goes_elsewhere = True
        if self._connection is None:
            self._connected()

    def open(self) -> None:
        """Open the local builder. The first build connects to the process. Raises `EngineFailure`."""
        self._local.open()
        self._goes_elsewhere = True

    def close(self) -> None:
        """Let go of the process and close the local builder. Safe to call twice.

        No plan's bytes are lost by it: `export` works as before for plans from the process.
        """
        self._goes_elsewhere = False
        try:
            self._disconnect()
        finally:
            self._local.close()

    def interrupt(self) -> None:
        """Give up: the build that is waited for fails, and so does every later one. Any thread.

        Does not block, and does not reach into a build in this process. Closing is still the owner's.
        """
        with self._lock:
            self._interrupted = True
            if self._connection is not None:
                self._connection.interrupt()

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether there is a process to build in, within `timeout_s` seconds. Blocks."""
        return self._ready_connection(time.monotonic() + timeout_s) is not None

    def build(self, graph: OperationGraph, *, workspace_limit: int | None) -> Plan:
        """As `Builder.build`. Blocks without the interpreter's lock, but for `restore`.

        Raises `EngineFailure` `DIED` when the process dies of it, and `INTERRUPTED`.
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
        """As `Builder.tune`; when `progress` raises, the process is killed. Raises and blocks as `build`."""
        return self._plan(
            Tune(graph, workspace_limit),
            progress,
            lambda: self._local.tune(graph, workspace_limit=workspace_limit, progress=progress),
        )

    def export(self, plan: Plan) -> bytes | None:
        """As `Builder.export`; free for plans from the process, whose bytes are kept with them."""
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
            except _NoFault:
                continue
            except EngineFailure as error:
                tries -= 1
                if error.status != DIED or not tries:
                    raise

    def _try(
        self, request: Request, progress: Callable[[int, int, str], None], here: Callable[[], Plan]
    ) -> Plan:
        digest = request.graph.digest()
        if self._killed[digest] >= max(2, self._tries):
            died = f"{self._killed[digest]} builder processes died of this graph; it is not built again"
            raise EngineFailure(DIED, died)
        connection = self._ready_connection(None)
        if connection is not None:
            plan = self._restored(request.graph, self._answer(connection, request, progress))
            return here() if plan is None else plan
        if self._killed[digest]:
            raise EngineFailure(DIED, "a builder process died of this graph; it is not built in this one")
        return here()

    def _answer(
        self, connection: Connection, request: Request, progress: Callable[[int, int, str], None]
    ) -> Built:
        try:
            answer = connection.ask(request, progress, self._answer_within_s)
        except ProcessLost as loss:
            self._refuse_interrupted()
            digest = request.graph.digest()
            if isinstance(loss, ProcessStopped) or not loss.began or connection.was_killed():
                self._note_death(loss)
                raise _NoFault from loss
            self._killed[digest] += 1
            status = SILENT if isinstance(loss, ProcessSilent) else DIED
            raise EngineFailure(status, self._note_death(loss, digest)) from loss
        except BaseException:  # of `progress`: the process goes on with what nobody wants any more
            connection.kill(blameless=True)
            self._disconnect()
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

    # One process after the other.

    def _ready_connection(self, deadline: float | None) -> Connection | None:
        """A connection that takes requests; None when there is none before the deadline, or will be none.

        Raises `EngineFailure` `INTERRUPTED`.
        """
        self._refuse_interrupted()
        while self._goes_elsewhere:
            connection = self._connection or self._connected()
            if connection is None:
                continue
            try:
                if self._is_ready(connection, deadline):
                    return connection if self._fits(connection) else None
            except ProcessLost as loss:
                self._refuse_interrupted()
                self._note_death(loss)
            else:
                return None
        return None

    def _is_ready(self, connection: Connection, deadline: float | None) -> bool:
        """Whether the process takes requests; False where it does not before the deadline.

        Raises `ProcessLost`, also for one that takes too long.
        """

        def due() -> float:  # before it takes a connection it may have a build of another's
            if connection.accepted is None:
                return connection.made + self._start_within_s + self._answer_within_s
            return connection.accepted + self._start_within_s

        if connection.becomes_ready(due if deadline is None else lambda: min(deadline, due())):
            return True
        if time.monotonic() >= due():
            raise ProcessLost(f"it was not ready within {self._start_within_s:g} s")
        return False

    def _fits(self, connection: Connection) -> bool:
        """Whether plans of the process can be restored here; if not, it is not asked any more."""
        if connection.fingerprint == self.fingerprint:
            return True
        log.warning("builder.differs", here=self.fingerprint, there=connection.fingerprint, answer=_GIVEN_UP)
        self._goes_elsewhere = False
        self._disconnect()
        return False

    def _connected(self) -> Connection | None:
        """A new connection; None when there is none to be had, which counts as a death."""
        try:
            connection = Connection(self._access, self._opening)
        except OSError as error:
            log.warning("builder.not_started", error=str(error))
            self._count_death()
            return None
        with self._lock:
            self._connection = connection
            if self._interrupted:  # while it was being made, when there was nothing to shut down
                connection.interrupt()
        return connection

    def _taken(self) -> Connection | None:
        """The connection, which is nobody else's from here on."""
        with self._lock:
            connection, self._connection = self._connection, None
        return connection

    def _disconnect(self) -> None:
        if (connection := self._taken()) is not None:
            connection.close()

    def _note_death(self, loss: ProcessLost, digest: str = "") -> str:
        """What a process died of, once it has; the next connection is made behind it."""
        connection = self._taken()
        assert connection is not None, "what is lost was there"
        if loss.why:
            connection.kill(blameless=not digest)
        ended = connection.has_ended(_EXIT_WITHIN_S)
        words, pid = connection.last_words, connection.pid
        connection.close()
        if isinstance(loss, ProcessLeft):
            log.info("builder.renewed", pid=pid, after=self._opening.renew_after)
            return ""
        what = f"the builder process {pid} " if pid else "a builder process that did not start "
        what += f"was killed: {loss.why}" if loss.why else "has ended" if ended else "does not answer"
        if pid:  # else its host has said why there is none
            log.warning("builder.died", pid=pid, why=what, graph=digest[:8], stderr=words)
        self._count_death()
        if self._goes_elsewhere:
            self._connected()
        return f"{what}; it last said: {_shortened(words)}" if words else what

    def _count_death(self) -> None:
        deaths = _INTENSITY.admit(self._deaths, time.monotonic())
        if deaths is None:
            log.warning(
                "builder.given_up",
                deaths=len(self._deaths) + 1,
                within_s=_INTENSITY.period_s,
                answer=_GIVEN_UP,
            )
            self._goes_elsewhere = False
        else:
            self._deaths = deaths

    def _refuse_interrupted(self) -> None:
        """Raise what a build ends in that was given up."""
        if self._interrupted:
            self._disconnect()
            raise EngineFailure(INTERRUPTED, "the build was given up; this builder can only be closed")


class _NoFault(Exception):
    """Raised when a build is to be asked for again: it was not to blame for the end of its process."""


_GIVEN_UP = "plans are built in this process from here on, where a build may hold up every thread"


def _shortened(words: str) -> str:
    """The first lines and the last: of a crash the former matter, of an exception the latter."""
    if len(words) <= _SHOWN:
        return words
    return f"{words[: _SHOWN // 2]} … {words[-_SHOWN // 2 :]}"


def _unheard(done: int, of: int, what: str) -> None:
    """Progress of a build: there is none."""
