"""A builder whose builds do not block the threads of this process.

A library may hold the interpreter's lock for a whole build, so that no other thread of the process can run.
Therefore the service's builder process (`host`) builds, and the result is restored here, which is short. This
process waits in a poll, without holding the lock.

The first build, the first tuning or `expect_builds` connects to the process. A builder that only restores and
exports, as in a standby or in a service whose plans are all on disk, does not start one, and so does not pay
for the device memory that a second process takes.

=====================================  ==========================================================
case                                   where the plan is built
=====================================  ==========================================================
a build, or tuning                     in the builder process. Waits while the process starts, and
                                       for earlier requests of others. In this process, a build
                                       would block every thread, and a plan that kills its device
                                       context during its check would destroy this process's
a plan that cannot be exported or      again in this process: building it has proved harmless. A tuned
restored                               one is not built again, which would take minutes: the tuning fails
a build whose process was stopped or   in another process, and does not count towards `tries`: the
killed for other reasons, or had not   graph is not to blame
started the build
a graph being built when a process     never in this process. In another process, at once, until
died                                   `tries` processes have died of it; with `tries` 1, at the
                                       next request for it. After that, nowhere
no process (4 deaths within 60 s, or   in this process from then on; a warning is logged. Tuning fails
other library versions)
=====================================  ==========================================================

The process exits by itself after `renew_after` builds: a library may keep memory for every graph that it has
seen, which is freed only when its process ends. Another process does the next build.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from weakref import WeakKeyDictionary

from cudnn_actor.actors.logs import Log
from cudnn_actor.engines.base import (
    Builder,
    BuilderAccess,
    Effort,
    EngineFailure,
    PieceByPiece,
    Plan,
    ProgressCallback,
    StickyError,
    unheard,
)
from cudnn_actor.engines.remote.builder_messages import Build, Built, Open
from cudnn_actor.engines.remote.connection import (
    Connection,
    ProcessLeft,
    ProcessLost,
    ProcessSilent,
    ProcessStopped,
)
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.supervision.policy import RestartIntensity

__all__ = ["DIED", "INTERRUPTED", "NOT_TUNED", "SILENT", "RemoteBuilder"]

DIED = "BUILDER_DIED"
"""Status of the `EngineFailure` of a build whose process died."""
SILENT = "BUILDER_SILENT"
"""Status of the `EngineFailure` of a build that hung: its process was killed."""
NOT_TUNED = "NO_BUILDER_TO_TUNE"
"""Status of the `EngineFailure` of a tuning for which there is no builder process."""
INTERRUPTED = "BUILDER_INTERRUPTED"
"""Status of the `EngineFailure` of a build that was interrupted."""

_RENEW_AFTER = 500
"""Builds after which the process is replaced: cuDNN 9.19 keeps 0.3 MiB for each graph, on average."""
_INTENSITY = RestartIntensity(max_restarts=3, period_s=60.0)
_EXIT_WITHIN_S = 5.0
"""How long a dying process may take from closing its socket to its exit; the driver takes about 0.1 s."""
_SHOWN = 1000

log = Log("cudnn_actor")


class RemoteBuilder:
    """`engines.base.Builder` on a builder process. One thread opens, uses and closes it; any can interrupt.

    Parameters
    ----------
    make
        Import path of the callable that makes the process's builder: "package.module:Name".
    arguments
        The callable's arguments.
    local
        A builder of the same kind for this process, not open yet and used by this object only. It restores
        plans, and builds them when there is no process.
    access
        Connects to the process.
    start_within_s
        How long the process may take to become ready after it has accepted the connection, in seconds. If it
        takes longer, it is killed.
    tries
        How many processes may die of one build before it fails. Use more than 1 if a process knows what
        killed its predecessor and avoids that.
    answer_within_s
        How long one plan may take to build and to try, in seconds. If the process is silent for longer, it is
        killed and the build fails; it is not tried again at once.
    renew_after
        The number of builds and tuning candidates after which the process is replaced.
    quiet_s
        For how long after a build that is waited for the process begins no candidate of what is built behind.
        Sizes of a model often come one soon after the other, and a candidate takes cuDNN up to 1.4 s.
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
        quiet_s: float = 0.0,
    ) -> None:
        self._opening = Open(make, arguments, renew_after, quiet_s)
        self._local = local
        self._access = access
        self._tries = tries
        self._answer_within_s = answer_within_s
        self._start_within_s = start_within_s
        # Plans may be collected on any thread, which removes their entries. That is a single operation on a
        # dict, like each of ours, so it is atomic.
        self._kept: WeakKeyDictionary[Plan, bytes] = WeakKeyDictionary()
        self._killed: Counter[str] = Counter()
        """How many processes died of a graph, by its digest."""
        self._deaths: tuple[float, ...] = ()
        self._goes_elsewhere = False
        """Whether builds go to the process."""
        # Guards the fields below. A connection is removed from here before it is closed, so that `interrupt`
        # never shuts down a descriptor number that has been closed and reused.
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._interrupted = False

    @property
    def fingerprint(self) -> str:
        """The local builder's. A process with a different one is not used."""
        return self._local.fingerprint

    def expect_builds(self) -> None:
        """Connect, before or after `open`. Does not wait for the process."""
        self._goes_elsewhere = True
        if self._connection is None:
            self._connect()

    def open(self) -> None:
        """Open the local builder. The first build connects to the process. Raises `EngineFailure`."""
        self._local.open()
        self._goes_elsewhere = True

    def close(self) -> None:
        """Disconnect from the process and close the local builder. Safe to call twice.

        `export` still works for plans from the process.
        """
        self._goes_elsewhere = False
        try:
            self._disconnect()
        finally:
            self._local.close()

    def interrupt(self) -> None:
        """Make the current build and every later one fail. Any thread.

        Does not block, and does not interrupt a build in this process. The owner must still call `close`.
        """
        with self._lock:
            self._interrupted = True
            if self._connection is not None:
                self._connection.interrupt()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for a process to build in; return whether there is one. Blocks."""
        return self._ready_connection(time.monotonic() + timeout_s) is not None

    def build(
        self,
        graph: OperationGraph,
        *,
        workspace_limit: int | None,
        progress: ProgressCallback = unheard,
        effort: Effort = "best",
    ) -> Plan:
        """As `Builder.build`. Blocks without holding the interpreter's lock, except in `restore`.

        Raises `EngineFailure` with status `DIED`, `SILENT` or `INTERRUPTED`, besides the builder's errors.
        """
        return self._plan(Build(graph, workspace_limit, effort=effort), progress)

    def tune(self, graph: OperationGraph, *, workspace_limit: int | None, progress: ProgressCallback) -> Plan:
        """As `Builder.tune`; when `progress` raises, the process is killed. Raises and blocks as `build`."""
        return self._plan(Build(graph, workspace_limit, tunes=True), progress)

    def export(self, plan: Plan) -> bytes | None:
        """As `Builder.export`; costs nothing for plans from the process, whose bytes are kept."""
        data = self._kept.get(plan)
        return self._local.export(plan) if data is None else data

    def restore(self, graph: OperationGraph, data: bytes) -> Plan:
        """Restore a plan by the local builder. Raises `EngineFailure`."""
        return self._local.restore(graph, data)

    # One plan.

    def _plan(self, request: Build, progress: ProgressCallback) -> Plan:
        tries = self._tries
        while True:
            try:
                return self._try(request, progress)
            except _NoFault:
                continue
            except EngineFailure as error:
                tries -= 1
                if error.status != DIED or not tries:
                    raise

    def _try(self, request: Build, progress: ProgressCallback) -> Plan:
        digest = request.graph.digest()
        if self._killed[digest] >= max(2, self._tries):
            died = f"{self._killed[digest]} builder processes died of this graph; it is not built again"
            raise EngineFailure(DIED, died)
        connection = self._ready_connection(None)
        if connection is not None:
            try:
                plan = self._restore(request.graph, self._answer(connection, request, progress))
            finally:
                self._forget_pieces()
            if plan is not None:
                return plan
        elif self._killed[digest]:
            raise EngineFailure(DIED, "a builder process died of this graph; it is not built in this one")
        if request.tunes:
            raise EngineFailure(NOT_TUNED, "tuning would hold up the threads of this process for minutes")
        limit, effort = request.workspace_limit, request.effort
        return self._local.build(request.graph, workspace_limit=limit, progress=progress, effort=effort)

    def _answer(self, connection: Connection, request: Build, progress: ProgressCallback) -> Built:
        try:
            answer = connection.ask(request, progress, self._answer_within_s, self._load_piece)
        except ProcessLost as loss:
            self._refuse_interrupted()
            digest = request.graph.digest()
            if isinstance(loss, ProcessStopped) or not loss.began or connection.was_killed():
                self._note_death(loss)
                raise _NoFault from loss
            self._killed[digest] += 1
            status = SILENT if isinstance(loss, ProcessSilent) else DIED
            raise EngineFailure(status, self._note_death(loss, digest)) from loss
        except BaseException:  # raised by `progress`: the process would go on with work that is not wanted
            connection.kill(blameless=True)
            self._disconnect()
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _load_piece(self, data: bytes) -> None:
        if isinstance(self._local, PieceByPiece):
            self._local.load_piece(data)

    def _forget_pieces(self) -> None:
        """Pieces of a build that has failed take memory, and are of no whole that is restored later."""
        if isinstance(self._local, PieceByPiece):
            self._local.forget_pieces()

    def _restore(self, graph: OperationGraph, built: Built) -> Plan | None:
        """The received plan; None if it could not be exported or restored. Raises `StickyError`."""
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
        """A connection that takes requests; None if there is none by the deadline, or no process to be had.

        Raises `EngineFailure` with status `INTERRUPTED`.
        """
        self._refuse_interrupted()
        while self._goes_elsewhere:
            connection = self._connection or self._connect()
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
        """Whether the process takes requests by the deadline.

        Raises `ProcessLost`, also if it takes too long to start.
        """

        def due() -> float:  # before it accepts a connection, it may be busy with another client's build
            if connection.accepted is None:
                return connection.made + self._start_within_s + self._answer_within_s
            return connection.accepted + self._start_within_s

        if connection.becomes_ready(due if deadline is None else lambda: min(deadline, due())):
            return True
        if time.monotonic() >= due():
            raise ProcessLost(f"it was not ready within {self._start_within_s:g} s")
        return False

    def _fits(self, connection: Connection) -> bool:
        """Whether plans of the process can be restored here; if not, stop using the process."""
        if connection.fingerprint == self.fingerprint:
            return True
        log.warning("builder.differs", here=self.fingerprint, there=connection.fingerprint, answer=_GIVEN_UP)
        self._goes_elsewhere = False
        self._disconnect()
        return False

    def _connect(self) -> Connection | None:
        """A new connection; None if it cannot be made, which counts as a death of the process."""
        try:
            connection = Connection(self._access, self._opening)
        except OSError as error:
            log.warning("builder.not_started", error=str(error))
            self._count_death()
            return None
        with self._lock:
            self._connection = connection
            if self._interrupted:  # while the connection was being made
                connection.interrupt()
        return connection

    def _take(self) -> Connection | None:
        """Remove and return the connection, so that `interrupt` cannot touch it any more."""
        with self._lock:
            connection, self._connection = self._connection, None
        return connection

    def _disconnect(self) -> None:
        if (connection := self._take()) is not None:
            connection.close()

    def _note_death(self, loss: ProcessLost, digest: str = "") -> str:
        """Wait for a lost process to end, log why, and connect anew. Returns a description of the death."""
        connection = self._take()
        assert connection is not None, "a lost connection must be the current one"
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
        if pid:  # else the host has logged why there is no process
            log.warning("builder.died", pid=pid, why=what, graph=digest[:8], stderr=words)
        self._count_death()
        if self._goes_elsewhere:
            self._connect()
        return f"{what}; it last said: {_shorten(words)}" if words else what

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
        """Raise `EngineFailure` if `interrupt` has been called."""
        if self._interrupted:
            self._disconnect()
            raise EngineFailure(INTERRUPTED, "the build was interrupted; this builder can only be closed")


class _NoFault(Exception):
    """Raised when a build must be requested again, because it did not cause the end of its process."""


_GIVEN_UP = "plans are built in this process from here on, where a build may block every thread"


def _shorten(words: str) -> str:
    """The start and the end of the text: a crash report starts with its cause, a traceback ends with it."""
    if len(words) <= _SHOWN:
        return words
    return f"{words[: _SHOWN // 2]} … {words[-_SHOWN // 2 :]}"
