"""The monitor of a worker process. The supervisor supervises the monitor, and the worker does the work.

To its supervisor the monitor is an actor like any other: it starts, becomes ready, crashes, hangs and stops.
Its thread starts the worker. Then it waits for three things: the worker's end, data on the worker's socket if
no event loop owns that, and wake-ups for work that the owning loop leaves to it. The messages themselves
bypass the monitor (`dispatcher`).

How a worker ends, and what the monitor does:

==================================  ===========================================================
it sends `Dying`: its context is    its successor starts at once, since nothing of the worker
dead                                runs any more
its process ends                    its requests are taken over; a successor starts
it breaks the protocol, or the      it is killed. When its process has ended, as above
supervisor gives it up because it
makes no progress
==================================  ===========================================================

Answers that the worker sent before its end count. The monitor reads all of them before it takes over the
other requests.
"""

from __future__ import annotations

import contextlib
import select
import signal
import time
from collections.abc import Iterator
from typing import Any

from cudnn_actor.actors import Actor, Crash, Envelope, Mailbox
from cudnn_actor.actors.logs import Log
from cudnn_actor.broker.progress import Progress
from cudnn_actor.broker.service_state import ServiceState
from cudnn_actor.isolation.process.parent.crash import PendingReclaim
from cudnn_actor.isolation.process.parent.dispatcher import Dispatcher
from cudnn_actor.isolation.process.parent.in_flight import InFlightTable, Violation
from cudnn_actor.isolation.process.parent.liveness import (
    Claimed,
    FirstSeen,
    Wait,
    stalled_since,
    unless_unread,
)
from cudnn_actor.isolation.process.parent.verification import compare, verification
from cudnn_actor.isolation.process.parent.worker import WakeEvent, Worker
from cudnn_actor.isolation.process.parent.worker_host import WorkerHost
from cudnn_actor.isolation.process.parent.worker_source import WorkerSource
from cudnn_actor.isolation.process.wire import Dying, InternalDone, Stop
from cudnn_actor.isolation.staging import Block
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.processes.process_state import LOOK_EVERY_S, SilentTime, is_stopped
from cudnn_actor.processes.waiting import wait_for
from cudnn_actor.supervision.watch import look_every_s

__all__ = ["WorkerMonitor"]

ASKED_S, TERMINATED_S = 3.0, 1.0
"""Seconds that a worker may take to end after it was asked to, and then after a SIGTERM."""
KILLED_S = 5.0
"""How long the kernel may take to end a killed worker. On a busy machine it takes more than a second, and if
the worker may still write, fewer requests can run again. Shorter than a supervisor waits for a child's final
cleanup."""
BUILT_S = 60.0
"""How long a worker that builds a plan may be without a heartbeat. The first read of a library from a cold
disk takes ten seconds."""
MEMORY_S = 0.02
"""Seconds between two attempts when this process has no memory."""

log = Log("cudnn_actor")


class _WakingMailbox(Mailbox):
    """The monitor's own mailbox, to which pykka's `stop_all` writes. A message wakes the monitor's thread."""

    def __init__(self, wake_event: WakeEvent) -> None:
        super().__init__(capacity=1)
        self._wake_event = wake_event

    def admit(self, envelope: Envelope, *, waits: bool = True) -> None:
        """Accept a message. See `Mailbox.admit`."""
        super().admit(envelope, waits=waits)
        self._wake_event.wake()

    def nudge(self) -> None:
        """Wake the monitor. Any thread."""
        super().nudge()
        self._wake_event.wake()


class WorkerMonitor(Actor):
    """Watches one incarnation's worker, from its start to its end.

    Parameters
    ----------
    state, dispatcher, source
        The service's own objects.
    generation
        Which incarnation this is, counted from 1.
    hang_after_s
        As in `Options`.
    """

    def __init__(
        self,
        state: ServiceState,
        dispatcher: Dispatcher,
        source: WorkerSource,
        *,
        generation: int,
        hang_after_s: float,
    ) -> None:
        self._wake_event = WakeEvent()
        super().__init__(mailbox=_WakingMailbox(self._wake_event))
        self._owns_mailbox = True  # it was made for this monitor, and ends with it
        self.service = state.name
        self._state = state
        self._dispatcher = dispatcher
        self._source = source
        self._generation = generation
        self.hang_after_s = hang_after_s
        self.worker: Worker | None = None
        """The process; None before it is started, and after its end."""
        self._serving = False
        self._pause_s: float | None = None
        """The longest wait before the next look around, in seconds; None to wait until something happens."""
        self._was_short = False
        """Whether memory was short at the last look around."""
        self._first_seen = FirstSeen()
        """Used by the supervisor's thread."""
        self._read_into: Block | None = None
        """The block to which the worker is copying a buffer, to verify it before it serves; None for none."""

    # From outside.

    def end(self, reason: str) -> None:
        """Let the worker finish the requests that it has begun, then stop. Any thread; never blocks."""
        super().end(reason)
        self._wake_event.wake()

    def abandon(self, reason: str) -> None:
        """Kill the worker. Any thread; never blocks."""
        self.abandoned.set()  # first: without it, the thread would take this for an orderly stop
        super().abandon(reason)
        self._wake_event.wake()

    def working_since(self) -> float | None:
        """Since when the worker has made no progress with what it was sent, in `time.monotonic()` seconds;
        None if it owes no answer. On the supervisor's thread.

        The worker's heartbeat reports its progress; each plan that a build or tuning tries counts
        (`liveness`). A worker sends no heartbeat while it is stopped, or while a library holds the
        interpreter's lock, as may happen in a build. So a worker that has reported a build gets at least
        `BUILT_S`, unless the kernel reports it as stopped: then it builds nothing.

        Time in which this process has not read the worker's answers is not held against it. A loop that owns
        the socket may be blocked, so the monitor is woken to read.
        """
        worker = self.worker
        if worker is None or not self._serving:
            return None
        since_s = self._stalled_since(worker)
        if since_s is None:
            return None
        if (building_ns := worker.claims.building_ns) and not is_stopped(worker.pid):
            since_s = max(since_s, building_ns / 1e9 + max(0.0, BUILT_S - self.hang_after_s))
        now, every_s = time.monotonic(), look_every_s(self.hang_after_s)
        if now - since_s >= every_s:
            self._wake_event.wake()
        return unless_unread(
            since_s, self._dispatcher.read_s, now, limit_s=self.hang_after_s, every_s=every_s
        )

    def _stalled_since(self, worker: Worker) -> float | None:
        host, page = self._dispatcher.host, worker.claims
        claimed = Claimed(page.since_ns / 1e9, page.built_ns / 1e9)
        waits = (self._wait_for_answer(worker, host.in_flight), self._wait_for_arena(host))
        answered_s = host.in_flight.answered_s
        return min((stalled_since(wait, answered_s, claimed) for wait in waits if wait), default=None)

    def _wait_for_answer(self, worker: Worker, table: InFlightTable) -> Wait | None:
        oldest = table.oldest
        if oldest is None or not table.requests:
            return None
        return self._first_seen.wait_for(oldest, worker.claims, time.monotonic())

    @staticmethod
    def _wait_for_arena(host: WorkerHost) -> Wait | None:
        asked_s = host.workers.arena_asked_s
        return None if asked_s is None else Wait(asked_s, asked_s)

    def progress(self) -> Progress:
        """The progress of the worker's requests. Any thread. Never blocks: it does not ask the kernel."""
        worker, table = self.worker, self._dispatcher.host.in_flight
        last_s, working = table.progress_s, bool(table.requests)
        if (wait := self._wait_for_arena(self._dispatcher.host)) is not None:
            last_s, working = max(last_s, wait.since_s), True
        if worker is not None and working:
            last_s = max(last_s, worker.claims.since_ns / 1e9)
        return Progress(working=working, last_s=last_s)

    # Starting.

    def on_start(self) -> None:
        """Take the standby or start a worker, wait until it is ready, and let it serve. Raises `Crash`."""
        self._dispatcher.wake_monitor = self._wake_event.wake_call
        faults = self._state.faults
        fails = faults is not None and faults.on_start() is not None
        if fails:
            log.info("fault.injected", fault="crash in start", plan="start")
        with self._hold() as host:
            self.worker = None if fails else self._source.take_standby(host, self._generation)
            host.workers.starting = self.worker
        if self.worker is None:
            self._launch(fails=fails)
        else:
            pid, ready = self.worker.pid, self.worker.ready
            log.info("standby.promoted", pid=pid, generation=self._generation, ready=ready)
        self._await_ready()
        self._verify()
        with self._hold() as host:
            self._serve(host)

    @contextlib.contextmanager
    def _hold(self) -> Iterator[WorkerHost]:
        """Hold the host during the start. Raises `Crash` if the monitor was given up meanwhile.

        `on_crash`, on whichever thread it runs, holds the host too. So a monitor that was given up either
        finds that out here, or has finished this step before `on_crash`, which then undoes it.
        """
        with self._dispatcher.hold() as host:
            if self.abandoned.is_set():
                raise Crash("it was given up while it started")
            yield host

    def _launch(self, *, fails: bool) -> None:
        try:
            worker = self._source.launch(self._generation, self._is_given_up, fails=fails)
        except OSError as error:
            raise Crash(str(error)) from error
        self.worker = worker
        with self._hold() as host:
            host.workers.last_word = None
            host.workers.starting = worker  # first: from here on, it is sent every new arena and segment
            try:
                host.introduce(worker)
            except OSError as error:
                raise Crash(f"worker {worker.pid} could not be given the memory: {error}") from error

    def _is_given_up(self) -> bool:
        return self.abandoned.is_set() or self.actor_stopped.is_set()

    def _await_ready(self) -> None:
        worker = self.worker
        assert worker is not None
        silent = worker.silent_time(worker.started)
        while not worker.ready:
            events = self._await_event(worker, silent)
            self._dispatcher.turn()
            if worker.channel.fileno() in events:
                self._read_start_frames(worker)
            elif worker.child.pidfd in events:
                raise Crash(f"worker {worker.pid} {worker.child.how_it_ended(1.0)} in its start")

    def _await_event(self, worker: Worker, silent: SilentTime) -> set[int]:
        """Wait for a frame from a starting worker, for its end, or for room in its socket. Raises `Crash`.

        May return without any of these.
        """
        channel = worker.channel
        descriptors = (channel.fileno(), worker.child.pidfd, self._wake_event.descriptor)
        events = wait_for(descriptors, LOOK_EVERY_S, channel.fileno() if channel.backed_up else None)
        self._wake_event.clear()
        if self._is_given_up():
            raise Crash("it was given up while it started")
        if silent.look() >= self.hang_after_s:
            raise Crash(f"worker {worker.pid} {worker.how_it_hangs(self.hang_after_s)}")
        return events

    def _receive(self, worker: Worker) -> list[Any]:
        """The frames that a starting worker has sent. If this process has no memory, waits for some.

        Also sends what is left of the frames for the worker: the socket holds only some hundred frames until
        the worker reads them. Raises `BadFrame`, `Crash`.
        """
        worker.channel.flush()
        while True:
            try:
                return worker.channel.receive()
            except MemoryError:  # frames remain to be read, but `poll` may not report them again
                time.sleep(MEMORY_S)
            if self._is_given_up():
                raise Crash("it was given up while it started")

    def _read_start_frames(self, worker: Worker) -> None:
        try:
            frames = worker.take_ready(self._receive(worker))
            with self._dispatcher.hold() as host:
                host.receive(frames)
        except (Violation, BadFrame) as error:
            raise Crash(f"worker {worker.pid} broke the protocol in its start: {error}") from error
        last = host.workers.last_word
        if last is not None:
            host.workers.last_word = None
            raise Crash(last.cause)
        if worker.channel.ended and not worker.ready:
            raise Crash(f"worker {worker.pid} {worker.child.how_it_ended(1.0)} in its start")

    def _verify(self) -> None:
        """Compare uploaded buffers with their checksums, if there are any. Raises `Crash`."""
        worker = self.worker
        assert worker is not None
        with self._dispatcher.hold() as host:
            if host.checksums is None or not host.checksums:
                return
            for slot, body, block in verification(host):
                if block is not None:
                    self._read_into = block  # the worker may write to it until it reports that it is done
                    self._await_done(worker, worker.ask(body), host)
                    self._read_into = None
                compare(host, slot, block)

    def _await_done(self, worker: Worker, number: int, host: WorkerHost) -> None:
        """Wait until the worker has finished the internal request. Raises `Crash`, also if that failed."""
        silent = worker.silent_time(time.monotonic())
        while True:
            events = self._await_event(worker, silent)
            frames = self._receive(worker)
            host.receive(frames)
            done = [frame for frame in frames if isinstance(frame, InternalDone) and frame.number == number]
            if done:
                if (error := done[0].error) is not None:  # the block does not hold the buffer's values
                    raise Crash(f"worker {worker.pid} could not read a buffer: {error.kind} {error.facts}")
                return
            if worker.channel.ended or worker.child.pidfd in events:
                raise Crash(f"worker {worker.pid} {worker.child.how_it_ended(1.0)} in its start")

    def _serve(self, host: WorkerHost) -> None:
        worker, dispatcher = self.worker, self._dispatcher
        assert worker is not None
        self._state.generation = self._generation
        dispatcher.on_stop_asked = lambda: self.end("stopped")
        claims = worker.claims
        dispatcher.connect(worker.channel, lambda: claims.begun_count)
        host.recent.on_new = self._wake_event.wake
        host.workers.attach(worker)
        self._serving = True
        self._wake_event.wake()  # for a first look around

    # Serving.

    def poll(self) -> float | None:
        """Wait until something happens, and handle it. Raises `Crash` at the worker's end."""
        try:
            self._look_around()
            short = self._dispatcher.short_of_memory
        except MemoryError:  # of this process: the worker goes on, and the next call does the rest
            short = True
        if short and not self._was_short:
            log.warning("memory.short", doing="trying again until there is some")
        self._was_short = short
        if short:
            time.sleep(MEMORY_S)
        return 0.0

    def _look_around(self) -> None:
        worker, dispatcher = self.worker, self._dispatcher
        assert worker is not None
        self._wait(worker, self._pause_s)
        self._wake_event.clear()
        if self.actor_stopped.is_set():
            return
        with dispatcher.monitors_turn() as host:
            self._look_for_the_end(worker, host)
            self._pause_s = self._tend(host)

    def _tend(self, host: WorkerHost) -> float | None:
        """Handle the standby and dying workers. Returns seconds until the next call is due; None for none."""
        source, wake = self._source, self._wake_present_monitor
        source.hear_standby(host, wake)  # first: it notices a standby's death, and `tend` starts another
        pause_s = source.tend(host, time.monotonic(), wake)
        source.warm(host)
        source.reap(host)
        return pause_s

    def _wake_present_monitor(self) -> None:
        """Wake the present monitor. A job that this monitor has begun may end when another monitor serves.

        A monitor sets `wake_monitor` before its first look, and a job sets its result before this call. So
        the present monitor is woken, or finds the result at its first look.
        """
        self._dispatcher.wake_monitor()

    def _wait(self, worker: Worker, timeout_s: float | None) -> None:
        poll = select.poll()
        poll.register(self._wake_event.descriptor, select.POLLIN)
        poll.register(worker.child.pidfd, select.POLLIN)
        dispatcher = self._dispatcher
        wanted = select.POLLIN if dispatcher.monitor_reads() else 0
        wanted |= select.POLLOUT if dispatcher.needs_writer else 0
        poll.register(worker.channel.fileno(), wanted)  # a hang-up is reported in any case
        if (standby := self._source.standby) is not None:
            poll.register(standby.child.pidfd, select.POLLIN)
            telling = select.POLLOUT if standby.channel.backed_up else 0
            poll.register(standby.channel.fileno(), select.POLLIN | telling)
        for dead in self._source.dying:
            poll.register(dead.worker.child.pidfd, select.POLLIN)
        forkserver = self._source.forkserver.fileno()
        poll.register(forkserver, select.POLLIN)
        events = poll.poll(None if timeout_s is None else timeout_s * 1e3)
        if (forkserver, select.POLLIN) in events:
            self._source.mind_forkserver()

    def _look_for_the_end(self, worker: Worker, host: WorkerHost) -> None:
        if why := self._dispatcher.why_condemned:
            raise Crash(f"worker {worker.pid} broke the protocol: {why}")
        gone = worker.child.wait(0.0) or worker.channel.ended
        if gone:  # its `Dying` frame may still be unread
            self._read_to_the_end(worker)
        if (last := host.workers.last_word) is not None:
            raise Crash(last.cause)
        if gone:
            raise Crash(f"worker {worker.pid} {worker.child.how_it_ended(KILLED_S)}")

    # The end.

    def on_stop(self) -> None:
        """Let the worker finish the requests that it has begun, and end: by `Stop`, then by SIGTERM, then by
        SIGKILL."""
        if self.abandoned.is_set():
            raise Crash("it was given up by its supervisor")
        worker = self.worker
        assert worker is not None
        with self._dispatcher.hold() as host:
            host.workers.stopping = True
            worker.send(Stop())
        for number, within_s in ((None, ASKED_S), (signal.SIGTERM, TERMINATED_S), (signal.SIGKILL, KILLED_S)):
            if number is not None:
                log.warning("worker.slow_to_stop", pid=worker.pid, signal=signal.Signals(number).name)
                worker.child.signal(number)
            if self._ends_within(worker, within_s):
                break
        with self._dispatcher.hold() as host:
            self._read_to_the_end(worker)
            self._dispatcher.disconnect()
            gone = worker.child.wait(0.0)
            pending = host.recovery.take_over_requests(
                "it was killed while it stopped", may_still_write=not gone
            )
            if gone:
                host.recovery.reclaim(pending)
            host.recovery.retire()
            host.workers.stopping = False
        self._close(worker)

    def _ends_within(self, worker: Worker, within_s: float) -> bool:
        """Whether the worker ends within this time. Delivers its answers meanwhile. Raises `Crash`."""
        deadline = time.monotonic() + within_s
        while not worker.child.wait(0.0):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            wait_for((worker.channel.fileno(), worker.child.pidfd, self._wake_event.descriptor), left)
            self._wake_event.clear()
            if self.abandoned.is_set():
                raise Crash("it was given up while it stopped")
            with self._dispatcher.monitors_turn():
                pass
            if worker.channel.ended:
                worker.child.wait(max(0.0, deadline - time.monotonic()))
        return True

    def on_crash(self, error: BaseException, current: Envelope | None, waiting: list[Envelope]) -> None:
        """Kill the process, wait for its end unless its context is dead, then take over its requests."""
        super().on_crash(error, current, waiting)
        worker = self.worker
        if worker is None:
            self._wake_event.close()
            return
        last = self._dispatcher.host.workers.last_word
        dead = last is not None and last.context_dead
        worker.child.signal(signal.SIGKILL)
        gone = dead or worker.child.wait(KILLED_S)
        if not gone:
            log.error("worker.not_killed", pid=worker.pid)
        with self._dispatcher.hold() as host:
            pending = self._take_over_from(host, worker, str(error) or repr(error), may_still_write=not gone)
            if not worker.child.wait(0.0):
                self._source.let_die(worker, pending)
                self.worker = None
            else:
                host.recovery.reclaim(pending)
        if self.worker is not None:
            self._close(worker)
        self._wake_event.close()

    def _take_over_from(
        self, host: WorkerHost, worker: Worker, cause: str, *, may_still_write: bool
    ) -> PendingReclaim:
        """Take over the requests of a worker that has ended. Returns the memory that its process may still
        write."""
        if not self._serving:
            host.workers.starting = None
            pending = PendingReclaim()
            pending.blocks.extend(() if self._read_into is None else (self._read_into,))
            return pending
        if not self._dispatcher.why_condemned:
            self._read_to_the_end(worker)
        last: Dying | None = host.workers.last_word
        if last is not None:
            cause = last.cause
            host.state.blame_build(last.digest, cause)
        self._dispatcher.disconnect()
        self._serving = False
        return host.recovery.take_over_requests(cause, may_still_write=may_still_write)

    def _read_to_the_end(self, worker: Worker) -> None:
        """Read every answer that the worker has sent. With the host held."""
        try:
            self._dispatcher.read_to_the_end(worker.channel)
        except (Violation, BadFrame) as error:
            log.warning("worker.broke_the_protocol", pid=worker.pid, why=str(error))
        except Exception:  # a bug in this library: the requests must still be taken over
            log.exception("worker.last_words_failed", pid=worker.pid)

    def _close(self, worker: Worker) -> None:
        self._serving = False
        self.worker = None
        worker.close()
        self._wake_event.close()

    def on_late_end(self) -> None:
        """Kill a worker that this monitor has started after it was given up."""
        if self.worker is not None:
            self.worker.child.signal(signal.SIGKILL)
            self._close(self.worker)
