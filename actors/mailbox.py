"""The bounded inbox: many senders, one actor that takes a batch a turn.

What is shared: two deques, a closing reason and whether the actor sleeps. All
are read and written under `_lock`, which nobody holds across a call that could
block, so admission and closing are two moments in one order: a message is
either in a deque before the close, and the closer answers it, or it comes
after, and its sender is refused. None can fall between.

A sender on the main thread may be interrupted by an exception that a signal's
handler raises. Locks are taken by `with`, which gives a C lock back whatever
comes; what must not be torn apart is one step (`interrupts` says what that is).

The mailbox belongs to a service, not to one incarnation of its actor: what
waits here when an actor dies waits for its successor.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, ClassVar

from cudnn_actor.actors import forks
from cudnn_actor.actors.bridge import LoopBridge
from cudnn_actor.actors.envelope import Envelope
from cudnn_actor.actors.errors import ActorStopped
from cudnn_actor.actors.pykka_seam import answer, is_stop
from cudnn_actor.protocol.errors import MailboxFull, ReentrantAsk, Words

__all__ = ["Mailbox"]

_PAUSE_LOOKS = 10
"""A look for senders that have gone is followed by a pause of so many times its own length."""
_get_ident = threading.get_ident


class Mailbox:
    """Messages on their way to an actor. Every method may be called on any thread.

    Parameters
    ----------
    capacity
        Messages that may wait before `submit` and `tell` are refused with `MailboxFull`. Messages with
        a waiting sender (`ask`) queue up behind them in order of arrival, as many as there are tasks that
        wait; control messages overtake.
    """

    starts_elsewhere: ClassVar[bool] = False
    """Whether another process starts the messages, so that it must be told of those that are withdrawn."""

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = capacity
        self.needs_thread = True
        """Whether an answer takes a thread of this process, which a loop that never idles could starve."""
        self.withdrawn = 0
        """Messages of cancelled senders that were dropped to make room. Written under the lock."""
        self.expired = 0
        """The same, of senders whose time was up."""
        self.dropped = 0
        """Replies to messages of this mailbox whose event loop had closed."""
        self.deferred = 0
        """Messages that the actor has taken out and not started, which count as waiting. The actor's."""
        self._lock: Any = threading.RLock()  # re-entered by nobody: it knows its owner, see `admit`
        self._afterwards: deque[Envelope] = deque()
        """Sent by a thread that was inside already."""
        self._ordinary: deque[Envelope] = deque()
        self._control: deque[Envelope] = deque()
        self._to_wake: set[LoopBridge] = set()
        self._closed: str | None = None
        self._sleeping = False
        self._nudged = False
        self._wakeup = threading.Lock()
        self._wakeup.acquire()
        self._numbers = itertools.count(1)
        self._some_left = True
        """Whether senders have said that they have gone since the deque was last looked through for them."""
        self._look_again_ns = 0
        """When it may be looked through for those that do not say so, in `time.perf_counter_ns()`."""
        self._reader: int | None = None
        self.forked = False
        """Whether this process was forked from the mailbox's: nobody reads it here."""
        forks.watch(self)

    def __len__(self) -> int:
        return len(self._ordinary) + len(self._control)

    @property
    def waiting(self) -> int:
        """Messages that have not been started: those in here, and those that the actor has deferred."""
        return len(self) + self.waiting_elsewhere()

    def waiting_elsewhere(self) -> int:
        """Messages that have been taken out and not started."""
        return self.deferred

    def admit(self, envelope: Envelope, *, waits: bool = True) -> None:
        """Accept a message: from here on it will be answered, exactly once. Never blocks.

        Raises
        ------
        MailboxFull
            `waits` is False and `capacity` messages wait already.
        ReentrantAsk
            The actor's own thread asks for a reply that it could never give.
        ActorStopped
            The mailbox is closed.
        """
        message = envelope.message
        if self._lock._is_owned():
            # A finalizer, which the collector has run in the middle of a step of this very thread's: it may
            # neither wait for that step nor see its half. Whoever is inside admits it on the way out.
            self._afterwards.append(envelope)
            return
        if self._reader is not None and self._reader == _get_ident() and envelope.wants_reply:
            self._refuse_reentry(message)
        control = getattr(message, "control", False)
        bridge = envelope.bridge
        with self._lock:
            if self._closed is not None:
                raise self._refusal(self._closed)
            full = not waits and not control and self._is_full() and self._stays_full()
            if not full:
                queue = self._control if control else self._ordinary
                number, now_ns, entry = next(self._numbers), time.perf_counter_ns(), (envelope,)
                # One step, with the wake-up as its only and last call: a message that is in wakes the actor.
                envelope.mailbox = self
                envelope.number = number
                envelope.admitted_ns = now_ns
                if bridge is not None:
                    bridge.awaited += 1
                queue += entry
                if self._sleeping:
                    self._sleeping = False
                    self._wakeup.release()
        if self._to_wake:
            self._wake_withdrawn()
        if self._afterwards:
            self._admit_afterwards()
        if full:
            raise MailboxFull(capacity=self.capacity)

    def put(self, envelope: Any) -> None:
        """Accept one of pykka's own envelopes: the inbox side of a pykka `ActorRef`.

        Raises as `admit` does: pykka's `ask` and `tell` never wait for room. An `ask` or `stop` that comes
        after the close gets its error through its future, as pykka's own do when the actor is dead.
        """
        message, reply_to = envelope.message, envelope.reply_to
        context = contextvars.copy_context()
        try:
            self.admit(Envelope(message, reply_to=reply_to, context=context), waits=is_stop(message))
        except ActorStopped as error:
            if reply_to is None:
                raise
            answer(reply_to, None, error)

    def take(self, most: int, timeout: float | None = None) -> list[Envelope]:
        """The next messages in order, control first; waits up to `timeout` seconds for one. Actor's side.

        Why no message is slept through: the actor declares itself asleep under the lock that senders
        add under, having seen both deques empty. Whoever adds next finds the declaration, withdraws it
        and wakes it, once. A timeout that finds it withdrawn knows that a wake-up is on its way, and waits
        for it, so that no wake-up is left over for a later sleep. A nudge that finds nobody asleep is kept
        for the next take: it may have come between the actor's look around and its sleep.
        """
        if self._afterwards:
            self._admit_afterwards()
        with self._lock:
            if self._reader not in (None, _get_ident()):
                return []
            batch = self._pop(most)
            nudged, self._nudged = self._nudged, False
            if batch or nudged or (timeout is not None and timeout <= 0.0):
                return batch
            self._sleeping = True
        if self._afterwards:
            self._admit_afterwards()
        woken = self._wakeup.acquire(timeout=-1 if timeout is None else timeout)
        if not woken:
            with self._lock:
                if self._sleeping:
                    self._sleeping = False
                    return []
            self._wakeup.acquire()
        with self._lock:
            return self._pop(most) if self._reader in (None, _get_ident()) else []

    def nudge(self) -> None:
        """Wake the actor for a look around, without a message: its present take, or its next. Any thread."""
        with self._lock:
            self._nudged = not self._sleeping
            self._wake()

    def _wake(self) -> None:
        """Wake the actor if it sleeps. Under the lock: taking the note back and waking are one step."""
        if self._sleeping:
            self._sleeping = False
            self._wakeup.release()

    def note_left(self) -> None:
        """Some sender has gone: where it is full, there may be room. Any thread."""
        self._some_left = True

    def restore(self, envelopes: Iterable[Envelope]) -> None:
        """Put back, at the head and in order, what a dying actor had taken but not started."""
        with self._lock:
            reason = self._closed
            if reason is None:
                self._ordinary.extendleft(reversed(list(envelopes)))
                self._wake()  # a thread that was given up hands back what it took
        if reason is None:
            return
        for envelope in envelopes:
            _answer(envelope, None if _is_stop(envelope) else _stopped(envelope, reason))

    def close(self, reason: str) -> None:
        """Refuse all further messages and answer those that wait with `ActorStopped`. Idempotent."""
        with self._lock:
            if self._closed is None:
                self._closed = reason
            left = self._pop(len(self._control) + len(self._ordinary))
        for envelope in left:
            _answer(envelope, None if _is_stop(envelope) else _stopped(envelope, reason))

    def reopen(self) -> None:
        """Take messages again after `close`, for a service that is started anew."""
        with self._lock:
            self._closed = None

    @property
    def closed(self) -> str | None:
        """Why the mailbox was closed; None while it is open."""
        return self._closed

    def check_open(self) -> None:
        """Raise `ActorStopped` when the mailbox is closed: the answer that `admit` would give."""
        if self._closed is not None:
            raise self._refusal(self._closed)

    def check_process(self) -> None:
        """Raise `ActorStopped` in a process that was forked from the mailbox's."""
        if self.forked:
            self.check_open()

    def _refusal(self, reason: str) -> ActorStopped:
        return ActorStopped(reason=reason, forked=self.forked)

    def forget_parent(self) -> None:
        """Be closed in a forked child: whoever took messages is a thread of the parent."""
        self._lock = threading.RLock()  # which another thread may have held
        self._reader = None  # it may be the thread that has forked: in here it is refused as all are
        self.forked = True
        self._closed = "this process was forked from its own"
        # The copies of what waits are nobody's: their originals are answered in the parent.
        self._afterwards.clear()
        self._ordinary.clear()
        self._control.clear()
        self._to_wake.clear()

    def read_by(self, thread: int | None) -> None:
        """Declare the thread (its ident) that takes messages, whose own asks are refused.

        From then on no other gets any; one that sleeps here already is woken and finds nothing.
        """
        with self._lock:
            self._reader = thread
            self._wake()

    def _admit_afterwards(self) -> None:
        """Admit what was sent in the middle of a step; not in one. Taking it is one step under the GIL."""
        with contextlib.suppress(IndexError):
            while True:
                envelope = self._afterwards.popleft()
                try:
                    self.admit(envelope)
                except (ActorStopped, ReentrantAsk) as error:
                    _answer(envelope, error)

    def _pop(self, most: int) -> list[Envelope]:
        control, ordinary = self._control, self._ordinary
        if not control and len(ordinary) <= most:  # mostly
            batch = list(ordinary)
            ordinary.clear()
            return batch
        batch = [control.popleft() for _ in range(min(most, len(control)))]
        batch.extend([ordinary.popleft() for _ in range(min(most - len(batch), len(ordinary)))])
        return batch

    def _is_full(self) -> bool:
        return len(self._ordinary) + self.waiting_elsewhere() >= self.capacity

    def _stays_full(self) -> bool:
        """Whether it is full without those whose senders have gone. Under the lock, and only when full.

        A look through the deque takes as long as it is, and `ask` lets it grow. So one is made when somebody
        has said that he goes, as whoever awaits an `ask` does; for the others (a future of `submit` that was
        cancelled), not before ten times as long has passed as the last one took.
        """
        began_ns = time.perf_counter_ns()
        if not self._some_left and began_ns < self._look_again_ns:
            return True
        self._some_left = False
        waiting: deque[Envelope] = deque()
        for envelope in self._ordinary:
            if envelope.withdrawn:
                self.expired += envelope.timed_out
                self.withdrawn += not envelope.timed_out
                if (bridge := envelope.settle(None, ActorStopped(reason="withdrawn"))) is not None:
                    self._to_wake.add(bridge)  # once the lock is free, for its loop's count of what it awaits
            else:
                waiting.append(envelope)
        self._ordinary = waiting
        now_ns = time.perf_counter_ns()
        self._look_again_ns = now_ns + _PAUSE_LOOKS * (now_ns - began_ns)
        return self._is_full()

    def _wake_withdrawn(self) -> None:
        for bridge in tuple(self._to_wake):
            self._to_wake.discard(bridge)
            bridge.wake()

    @staticmethod
    def _refuse_reentry(message: object) -> None:
        if not is_stop(message):
            raise ReentrantAsk(
                field="ask",
                value=Words(type(message).__name__),
                problem="is asked by the actor's own thread, which could never answer it",
                fix="tell() it instead, or call the method directly",
            )


def _is_stop(envelope: Envelope) -> bool:
    return is_stop(envelope.message)


def _stopped(envelope: Envelope, reason: str) -> ActorStopped:
    return ActorStopped(reason=reason, interrupted=envelope.crashes > 0)


def _answer(envelope: Envelope, error: Exception | None) -> None:
    bridge = envelope.settle(None, error)
    if bridge is not None:
        bridge.wake()
