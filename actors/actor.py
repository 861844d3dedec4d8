"""The base actor: what its thread does in each turn, and how it ends.

How it differs from `pykka.ThreadingActor` 4.5 (the implementation is in `pykka_seam`):

=========================================  ==============================================
pykka                                      here
=========================================  ==============================================
unbounded inbox, one message per turn      bounded mailbox, a batch per turn
ask racing stop can lose the reply         admission and closing share one lock
a second completion kills the thread       the first reply counts, later ones are ignored
BaseException stops every actor            it ends only its own actor
start() never learns of a failed on_start  the observer is told; waiting messages are answered
a failing tell kills the actor             the failure is logged; only `Crash` ends an actor
the loop keeps the last message alive      no message is referenced after its turn
an actor thread keeps the process alive    daemon thread
=========================================  ==============================================
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, Final, Literal, Protocol

import msgspec
import pykka

from cudnn_actor.actors.bridge import LoopBridge
from cudnn_actor.actors.envelope import Envelope
from cudnn_actor.actors.errors import ActorStopped, Crash
from cudnn_actor.actors.logs import Log, service_here, speak_for, speaking_for
from cudnn_actor.actors.mailbox import Mailbox
from cudnn_actor.actors.pykka_seam import HookedActor, is_of_pykka, is_stop
from cudnn_actor.protocol.errors import DeadlineExceeded

__all__ = ["DEFERRED", "Actor", "ActorExit", "ActorObserver", "Counters"]

DEFERRED: Final = object()
"""A handler returns this when it will give the reply later, through `Actor.settle`."""

_FLUSH_AFTER_NS = 200_000

log = Log("cudnn_actor.actors")


class ActorExit(msgspec.Struct, frozen=True, kw_only=True):
    """How an actor ended.

    Parameters
    ----------
    kind
        "normal" after a stop, "start_failed" when `on_start` raised, else "crash".
    error
        The exception, for the last two.
    """

    kind: Literal["normal", "start_failed", "crash"]
    error: BaseException | None = None


class ActorObserver(Protocol):
    """Gets an actor's lifecycle notifications (a supervisor). Called on the actor's thread; must not
    block."""

    def actor_ready(self) -> None:
        """The actor has started and takes messages from now on."""

    def actor_exited(self, exit: ActorExit) -> None:
        """The actor has ended. This is the last call that its thread makes."""


class Counters:
    """The counts of an actor. Only its thread writes them; any thread may read them."""

    __slots__ = ("expired", "failed", "finished", "withdrawn")

    def __init__(self) -> None:
        self.finished = self.failed = self.withdrawn = self.expired = 0

    def count(self, envelope: Envelope, value: Any, error: BaseException | None, now_ns: int) -> None:  # noqa: ARG002
        """Count an answer that is here now, on `time.perf_counter_ns`'s clock. A service counts more."""
        if error is None:
            self.finished += 1
        else:
            self.failed += 1

    def count_not_run(self, envelope: Envelope, error: Exception) -> None:
        """Count a message that is not run because its time has passed, or its caller has left."""
        if envelope.timed_out or isinstance(error, DeadlineExceeded):
            self.expired += 1
        else:
            self.withdrawn += 1


class Actor(HookedActor):
    """An actor with a bounded mailbox that answers asyncio and pykka callers alike.

    Derive from it, and override `on_receive` and the hooks that you need. Start it with pykka's own
    `start(...)`. Send to it through `actors.asking` from asyncio, or through its `ActorRef` from any
    thread.

    Parameters
    ----------
    mailbox
        A mailbox that outlives this actor, for an actor that a supervisor replaces. None: the actor makes
        its own mailbox, and closes it when it ends.
    """

    batch_limit: ClassVar[int] = 64
    """The most messages taken from the mailbox in one turn."""
    ready_when_started: ClassVar[bool] = True
    """Whether the actor is ready as soon as `on_start` returns. If False, it calls `report_ready` itself."""
    mailbox_capacity: ClassVar[int] = 1024
    """Capacity of a mailbox that the actor makes itself."""

    def __init__(self, *, mailbox: Mailbox | None = None) -> None:
        super().__init__(mailbox if mailbox is not None else Mailbox(self.mailbox_capacity))
        self._owns_mailbox = mailbox is None
        self.counters = Counters()
        self.busy_since: float | None = None
        """When the current message was started (`time.monotonic()` seconds); None between messages."""
        self.current: Envelope | None = None
        """The envelope being processed; None between messages."""
        self.service: str | None = None
        """The service name that its log lines carry, whichever thread writes them; None for none."""
        self.abandoned = threading.Event()
        """Set by a supervisor that has given the actor up. Handler code that waits must wait on this too."""
        self.lost = False
        """Whether a supervisor has given up waiting for the actor's thread to end."""
        self._last_act = threading.Lock()
        """Taken once, before the final cleanup, by the thread that does it: the actor's own, or that of a
        supervisor that gives the actor up."""
        self._batch: deque[Envelope] = deque()
        self._in_hand: list[Envelope] = []
        """The message that is owed an answer. The thread that takes it out answers it. Taking it out is
        atomic."""
        self._to_wake: set[LoopBridge] = set()
        self._flushed_ns = 0
        self._observer: ActorObserver | None = None
        self._stop_reason: str | None = None

    # Hooks.

    def on_batch_end(self) -> None:
        """Run after each batch, before its replies are flushed. Place a fence here."""

    def defers(self, envelope: Envelope) -> Callable[[], None] | None:  # noqa: ARG002
        """Decide whether a message must wait for something other than its turn. Called before it is started.

        Returns
        -------
        callable or None
            A function that stores the message where it waits. The message has not started then; `resume`
            starts it later, or `take_deferred` hands it back. None to start it now.
        """
        return None

    def take_deferred(self) -> list[Envelope]:
        """Return the deferred messages, in order; they will not be resumed. Called in the final cleanup."""
        return []

    def poll(self) -> float | None:
        """Do periodic work other than messages (timers, fences). Runs before every wait for messages.

        Returns
        -------
        float or None
            The most seconds until the next call; None to be called again only when a message comes.
        """
        return None

    def on_stop_message(self) -> Any:
        """Handle pykka's `stop`: end after this message. Return `DEFERRED` to do more work first."""
        self.end("stopped")

    def on_crash(self, error: BaseException, current: Envelope | None, waiting: list[Envelope]) -> None:
        """Handle the messages that the dying actor had taken: `current` and, in order, `waiting`.

        Each must be answered here, or handed to a successor. The default answers all of them: a message that
        was not started gets `ActorStopped`, the current one gets the error that ended the actor. A
        `SystemExit` or another `BaseException` would end the asker's event loop too, so `ActorStopped`
        carries its text.

        Runs on the actor's thread. If that thread does not end, it runs on the supervisor's, and `lost` is
        True. Such an actor has no successor, and its thread may resume at any time: then only answer, and
        change nothing else.
        """
        if current is not None:
            mine = error if isinstance(error, Exception) else ActorStopped(reason=f"crashed: {error!r}")
            self.settle(current, None, mine)
        for envelope in waiting:
            self.settle(envelope, None, ActorStopped(reason=f"crashed: {error!r}"))

    # Life.

    def watch(self, observer: ActorObserver) -> None:
        """Notify `observer` of readiness and exit. Call it before `launch`."""
        self._observer = observer

    def report_ready(self) -> None:
        """Tell the observer that this actor is ready. On the actor's thread."""
        if self._observer is not None:
            self._observer.actor_ready()

    def join(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds for the actor's thread to end. Returns whether it has. Blocks."""
        if self.thread is not None:
            self.thread.join(timeout)
        return self.thread is None or not self.thread.is_alive()

    def end(self, reason: str) -> None:
        """End this actor after the current message, leaving the mailbox open. Any thread; never blocks."""
        self._stop_reason = reason
        self.actor_stopped.set()
        self.mailbox.nudge()

    def abandon(self, reason: str) -> None:
        """End an actor that makes no progress. Any thread; never blocks.

        An actor that waits on `abandoned` wakes up and ends. One that hangs elsewhere needs `give_up`.
        """
        self.end(reason)
        self.abandoned.set()

    def give_up(self, error: BaseException) -> bool:
        """Do the final cleanup of an abandoned actor whose thread does not end. On a supervisor's thread.

        It answers every message that the actor had taken. If the actor's thread resumes later, it answers
        none of them and takes no further message; but it finishes the call that it is in, and may still write
        the actor's state. So no successor may start while that thread lives.

        Returns
        -------
        bool
            False if the actor does its final cleanup itself.
        """
        if not self._last_act.acquire(blocking=False):
            return False
        self.lost = True
        self.actor_stopped.set()
        with speaking_for(self.service or service_here()):
            self._end_of_life()
            self._crash_hook(error, self._take_in_hand(), self._take_waiting())
        self._close_own_mailbox("given up")
        self.flush()
        self.mailbox.nudge()  # the thread may merely be waiting for messages
        return True

    def working_since(self) -> float | None:
        """When it last made progress, in `time.monotonic()` seconds; None while there is nothing to do.

        A watchdog reads it on its own thread. Actors whose work runs elsewhere override it to include that
        work.
        """
        return self.busy_since

    @property
    def last_turn_s(self) -> float:
        """When its last turn ended, in `time.monotonic()` seconds (on Linux `perf_counter` uses the same
        clock); 0 before the first. Any thread."""
        return self._flushed_ns / 1e9

    def on_late_end(self) -> None:
        """Close what only this thread uses. The last step of a thread that was given up and has resumed."""

    def run(self) -> None:
        """Run the actor from start to end, on its thread."""
        speak_for(self.service)
        self.mailbox.read_by(threading.get_ident())
        exit = self._live()
        if exit.error is None:
            # before the cleanup lock: a supervisor can give up a stop that hangs
            exit = self._stop_hook(exit)
        if self._last_act.acquire(blocking=False):
            self._finish(exit)
        else:
            self.mailbox.restore(self._take_waiting())  # messages taken just before it was given up
            self.on_late_end()

    def _live(self) -> ActorExit:
        try:
            self.on_start()
        except BaseException as error:  # noqa: BLE001 - one actor's end, whatever ended it
            return ActorExit(kind="start_failed", error=error)
        if self.ready_when_started:
            self.report_ready()
        try:
            while not self.actor_stopped.is_set():
                self._turn(self.poll())
        except BaseException as error:  # noqa: BLE001
            return ActorExit(kind="crash", error=error)
        return ActorExit(kind="normal")

    def _turn(self, wait: float | None) -> None:
        self._batch.extend(self.mailbox.take(self.batch_limit, wait))
        while self._batch and not self.actor_stopped.is_set():
            self._take_up(self._batch.popleft())
        self.on_batch_end()
        self.flush()

    def _take_in_hand(self) -> Envelope | None:
        try:
            return self._in_hand.pop()  # atomic under the GIL: of two threads that try, one succeeds
        except IndexError:
            return None

    def _take_waiting(self) -> list[Envelope]:
        """Take out all messages that were taken from the mailbox and not started. In the final cleanup."""
        waiting = [*self.take_deferred(), *self._batch]
        self._batch.clear()
        return waiting

    def _finish(self, exit: ActorExit) -> None:
        self.actor_stopped.set()
        self.busy_since = None
        self._end_of_life()
        current, waiting = self._take_in_hand(), self._take_waiting()
        if exit.error is None:
            # sent after the stop: a successor takes them, or close() answers them
            self.mailbox.restore(waiting)
        else:
            self._log_death(exit.kind, exit.error)
            self._crash_hook(exit.error, current, waiting)
        self._close_own_mailbox(exit.kind)
        self.flush()
        self.current = None
        if self._observer is not None:
            self._observer.actor_exited(exit)

    def _end_of_life(self) -> None:
        pykka.ActorRegistry.unregister(self.actor_ref)
        self.mailbox.read_by(None)

    def _close_own_mailbox(self, why: str) -> None:
        if self._owns_mailbox:
            self.mailbox.close(self._stop_reason or why)

    def _log_death(self, kind: str, error: BaseException) -> None:
        if isinstance(error, Crash) and error.logged:
            return
        # a supervisor expects and handles deaths
        write = log.error if self._observer is None else log.warning
        write("actor.died", actor=str(self), kind=kind, error=repr(error))

    def _stop_hook(self, exit: ActorExit) -> ActorExit:
        try:
            self.on_stop()
        except Crash as error:  # usually given up: its supervisor waits for this thread and knows the reason
            return ActorExit(kind="crash", error=error)
        except BaseException as error:
            log.exception("actor.stop_hook_failed", actor=str(self))
            return ActorExit(kind="crash", error=error)
        return exit

    def _crash_hook(self, error: BaseException, current: Envelope | None, waiting: list[Envelope]) -> None:
        try:
            self.on_crash(error, current, waiting)
        except BaseException:
            log.exception("actor.crash_hook_failed", actor=str(self))
            Actor.on_crash(self, error, current, waiting)
        try:
            self.on_failure(type(error), error, error.__traceback__)
        except BaseException:
            log.exception("actor.failure_hook_failed", actor=str(self))

    # One message.

    def resume(self, take: Callable[[], Envelope | None]) -> bool:
        """Start a message that was deferred. On the actor's thread, between messages.

        Parameters
        ----------
        take
            Removes the message from where it waits and returns it; None when there is none.

        Returns
        -------
        bool
            Whether a message was taken: False if there was none, or the actor is ending.
        """
        if self.actor_stopped.is_set() or (envelope := take()) is None:
            return False
        self._take_up(envelope, resumed=True)
        return True

    def _take_up(self, envelope: Envelope, *, resumed: bool = False) -> None:
        self.current = envelope
        self._in_hand.append(envelope)
        # Started before a crash: it runs again even if nobody waits, because its output is half written.
        again = envelope.started_ns > 0
        future = envelope.future
        if future is not None and future.done() and not again:  # withdrawn
            self._claim(envelope, DEFERRED)
            # Nobody reads this reply; it keeps the loop's count of awaited replies right.
            self._end_without_run(envelope, ActorStopped(reason="withdrawn"))
        elif envelope.deadline is not None and envelope.expired and not again:
            self._claim(envelope, DEFERRED)
            self._expire(envelope)
        elif not resumed and (defer := self.defers(envelope)) is not None:
            self._claim(envelope, DEFERRED)
            defer()
        elif not envelope.begin():
            self._claim(envelope, DEFERRED)
            self._expire(envelope)
        else:
            self._run(envelope)
        self.current = None

    def _run(self, envelope: Envelope) -> None:
        self.busy_since = time.monotonic()
        try:
            value = self._handle(envelope)
        except Crash:
            raise
        except Exception as error:  # noqa: BLE001 - the answer to this one message
            self._claim(envelope, DEFERRED)
            self._answer_error(envelope, error)
        else:
            try:
                self._in_hand.pop()  # `_claim`, inlined
            except IndexError:
                self._claim(envelope, value)
            if value is not DEFERRED:
                self.settle(envelope, value)
        self.busy_since = None

    def _claim(self, envelope: Envelope, value: Any) -> None:
        """Claim the right to answer for this thread. Raises `Crash` if the actor has been given up."""
        if self._take_in_hand() is None:
            if value is not DEFERRED and envelope.discard is not None:
                envelope.discard(value)
            raise Crash("resumed after it had been given up")

    def _handle(self, envelope: Envelope) -> Any:
        message = envelope.message
        handler = self.on_receive
        if is_of_pykka(message):
            if is_stop(message):
                return self.on_stop_message()
            handler = self._handle_receive
        if envelope.context is None:
            return handler(message)
        return envelope.context.run(handler, message)

    def _expire(self, envelope: Envelope) -> None:
        timeout = envelope.timeout_s or 0.0
        started = envelope.started_ns > 0  # i.e. before a crash
        self._end_without_run(envelope, DeadlineExceeded(timeout_s=timeout, started=started))

    def _end_without_run(self, envelope: Envelope, error: Exception) -> None:
        self.counters.count_not_run(envelope, error)
        self._post(envelope, None, error)

    def _answer_error(self, envelope: Envelope, error: Exception) -> None:
        if not envelope.wants_reply:
            context = envelope.context or contextvars.Context()
            context.run(self._log_failed_tell, envelope.message, error)
        self.settle(envelope, None, error)

    def _log_failed_tell(self, message: Any, error: Exception) -> None:
        log.error("actor.tell_failed", actor=str(self), message=repr(message), error=repr(error))

    def settle(self, envelope: Envelope, value: Any = None, error: BaseException | None = None) -> None:
        """Answer a message. On the actor's thread; asyncio callers see the answer at the next `flush`."""
        now_ns = time.perf_counter_ns()
        self.counters.count(envelope, value, error, now_ns)
        self._post_at(now_ns, envelope, value, error)

    def settle_together(self, envelope: Envelope, value: Any) -> None:
        """Answer one of several messages that finish together. The next `flush` wakes their loops."""
        self.counters.count(envelope, value, None, time.perf_counter_ns())
        bridge = envelope.settle(value)
        if bridge is not None:
            self._to_wake.add(bridge)

    def _post(self, envelope: Envelope, value: Any, error: BaseException | None) -> None:
        self._post_at(time.perf_counter_ns(), envelope, value, error)

    def _post_at(self, now_ns: int, envelope: Envelope, value: Any, error: BaseException | None) -> None:
        bridge = envelope.settle(value, error)
        if bridge is not None:
            self._to_wake.add(bridge)
            if now_ns - self._flushed_ns > _FLUSH_AFTER_NS:
                self.flush()

    def flush(self) -> None:
        """Wake the event loops that replies were posted for. A handler calls it before it does long work."""
        try:
            while self._to_wake:
                self._to_wake.pop().wake()
        except KeyError:  # a supervisor that gives this actor up flushes too, and emptied the set first
            pass
        self._flushed_ns = time.perf_counter_ns()
