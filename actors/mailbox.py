"""The bounded inbox: many senders, one actor that takes a batch per turn.

What is shared: two deques, the reason for closing, and whether the actor sleeps.
All are read and written under `_lock`. Nobody holds it across a call that could
block. So admission and closing are ordered: either a message is in a deque
before the close, and the closer answers it, or it comes after the close, and
its sender is refused. No message is lost between the two.

A sender on the main thread may be interrupted by an exception that a signal
handler raises. Locks are therefore taken by `with`, which always releases a C
lock; what must not be interrupted is one step (defined in `interrupts`).

The mailbox belongs to a service, not to one incarnation of its actor: messages
that wait here when an actor dies wait for its successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from cudnn_actor.actors import forks
from cudnn_actor.actors.bridge import LoopBridge
from cudnn_actor.actors.envelope import Envelope
from cudnn_actor.actors.errors import ActorStopped
from cudnn_actor.actors.pykka_seam import answer, is_stop
from cudnn_actor.protocol.errors import MailboxFull, ReentrantAsk, Words

__all__ = ["Mailbox"]

_PAUSE_LOOKS = 10
"""After a scan for withdrawn messages, the next one is made no sooner than this many times its duration."""
_get_ident = threading.get_ident


class Mailbox:
    """Messages that wait for an actor. Every method may be called on any thread.

    Parameters
    ----------
    capacity
        The number of waiting messages at which `submit` and `tell` are refused with `MailboxFull`. `ask` is
        never refused: its messages queue in order of arrival, as many as there are tasks that wait. Control
        messages overtake.
    """

    starts_elsewhere: ClassVar[bool] = False
    """Whether another process starts the messages, and so must be told when one is withdrawn."""
    asks_again: ClassVar[bool] = False
    """Whether `ask_again` may send messages."""
    checks: ClassVar[frozenset[type]] = frozenset()
    """The messages that `admit_awaited` checks, so that their senders need not."""

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = capacity
        self.needs_thread = True
        """Whether an answer takes a thread of this process, which a loop that never idles could starve."""
        self.withdrawn = 0
        """Messages of cancelled senders that were dropped to make room. Written under the lock."""
        self.expired = 0
        """How many messages were dropped because their senders' timeouts had passed."""
        self.on_refusal: Callable[[Envelope, Exception], None] | None = None
        """Told of each message that the mailbox itself answers with an error: on any thread, perhaps under
        the lock. It must be quick and raise nothing."""
        self.dropped = 0
        """Replies to messages of this mailbox whose event loop had closed."""
        self.deferred = 0
        """Messages that the actor has taken out and not started. They count as waiting. Written by the
        actor."""
        # never re-entered; an RLock because it knows its owner, see `admit`
        self._lock: Any = threading.RLock()
        self._afterwards: deque[Envelope] = deque()
        """Messages sent by a thread that held the lock already."""
        self._ordinary: deque[Envelope] = deque()
        self._control: deque[Envelope] = deque()
        self._to_wake: set[LoopBridge] = set()
        self._closed: str | None = None
        self._sleeping = False
        self._nudged = False
        self._wakeup = threading.Lock()
        self._wakeup.acquire()
        self._numbers = itertools.count(1)
        self._some_withdrawn = True
        """Whether a sender has called `note_withdrawn` since the last scan for withdrawn messages."""
        self._look_again_ns = 0
        """When the next scan without such a call is allowed, in `time.perf_counter_ns()`."""
        self._reader: int | None = None
        self.loops_may_stay_awake = False
        """Whether an event loop that sends may stay awake while an answer or a message is near."""
        self.on_near: list[Callable[[], Any]] = []
        """Each is called when the answer to the only message in work is near, on the event loop that sends,
        if a single one does. Only a mailbox whose messages another process answers calls them."""
        self.if_cancelled: Callable[[asyncio.Future[Any]], object] | None = None
        """The callback that `withdraw_if_cancelled` has returned; None before that."""
        self.forked = False
        """Whether this process was forked from the one that made the mailbox: nobody reads it here."""
        forks.watch(self)

    def __len__(self) -> int:
        return len(self._ordinary) + len(self._control)

    @property
    def first(self) -> Envelope | None:
        """The message that waits in front, a control message if there is one; None if none. Any thread."""
        try:
            return (self._control or self._ordinary)[0]
        except IndexError:  # it may have been withdrawn meanwhile
            return None

    @property
    def messages(self) -> list[Any]:
        """The messages that wait in here, control messages first, as they are now. Any thread."""
        return [each.message for each in (*self._control.copy(), *self._ordinary.copy())]

    @property
    def waiting(self) -> int:
        """Messages that have not been started: those in here, and those that the actor has deferred."""
        return len(self) + self.waiting_elsewhere()

    def look(self) -> bool:
        """Deliver the answers that have come from another process. Returns whether any had. Only on the event
        loop that sends, if a single one does, while it stays awake for them."""
        return False

    def admit_awaited(self, envelope: Envelope) -> None:
        """Do what `admit` does, for a message whose sender awaits the answer next. It may be there when this
        returns: then the sender goes on without a turn of its loop. On the loop of the envelope's bridge."""
        self.admit(envelope)

    def expect_upload(self) -> None:
        """Note that a sender will send a large array soon. Never blocks. On any thread."""

    def admit_alone(self, envelope: Envelope) -> bool:
        """Do what `admit` does, in fewer steps, if nothing is in work and another process can be sent the
        message at once. Returns whether it was done; if not, call `admit`. On the loop of the envelope's
        bridge.

        The message must be one whose `found` says what it runs, and no other thread may know the envelope.
        """
        del envelope
        return False

    def ask_again(self, message: Any) -> asyncio.Future[Any] | None:
        """Send a message that was sent before, in fewer steps than `asking.ask`, and without an envelope.

        Returns the future of its answer; None if the message has to be sent as the first time. Whoever does
        not wait for the answer any more calls `stop_waiting`.
        """
        del message
        return None

    def withdraw_if_cancelled(self) -> Callable[[asyncio.Future[Any]], object]:
        """A callback for futures of `ask_again`: it withdraws the message if the future is cancelled. From
        then on, it is `if_cancelled`. On the loop of these futures."""
        raise NotImplementedError

    def stop_waiting(self, future: asyncio.Future[Any]) -> None:
        """Withdraw the message of a future of `ask_again`, unless it has its answer."""

    def waiting_elsewhere(self) -> int:
        """Messages that have been taken out and not started."""
        return self.deferred

    def admit(self, envelope: Envelope, *, waits: bool = True) -> None:
        """Accept a message. From here on it is answered exactly once. Never blocks.

        Raises
        ------
        MailboxFull
            `waits` is False and `capacity` messages are waiting.
        ReentrantAsk
            The actor's own thread asks for a reply that it could never give.
        ActorStopped
            The mailbox is closed.
        """
        message = envelope.message
        if self._lock._is_owned():
            # The garbage collector has run a finalizer while this very thread holds the lock. It must neither
            # wait for the lock nor see the half-done change. The outer call admits it on its way out.
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
                # One step (see `interrupts`), with the wake-up as its only and last call: so a message that
                # was added always wakes the actor.
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
        """Accept one of pykka's own envelopes: the inbox interface that a pykka `ActorRef` uses.

        Raises as `admit` does: pykka's `ask` and `tell` never wait for room. An `ask` or `stop` sent after
        the close gets its error through its future, as in pykka when the actor is dead.
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
        """The next messages in order, control first. Waits up to `timeout` seconds for one. For the actor.

        Why the actor does not sleep while a message waits: under the lock that senders use, having seen both
        deques empty, the actor sets `_sleeping`. The next sender finds it set, clears it and wakes the actor,
        once. If the timeout passes and `_sleeping` is cleared already, a wake-up is on its way. The actor
        then waits for it, so that none is left over for a later sleep. A nudge while the actor is not asleep
        is kept for the next take: it may have come between the actor's `poll` and its sleep.
        """
        if self._afterwards:
            self._admit_afterwards()
        with self._lock:
            if self._reader not in (None, _get_ident()):
                return []
            batch = self._pop(most) if self._ordinary or self._control else []
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
        """Make the current `take`, or else the next, return without a message. Any thread."""
        with self._lock:
            self._nudged = not self._sleeping
            self._wake()

    @property
    def is_nudged(self) -> bool:
        """Whether the next `take` will return without a message, because of a nudge. Any thread."""
        return self._nudged

    def _wake(self) -> None:
        """Wake the actor if it sleeps. Under the lock: clearing `_sleeping` and waking are one step."""
        if self._sleeping:
            self._sleeping = False
            self._wakeup.release()

    def note_withdrawn(self) -> None:
        """Note that a sender no longer waits: a full mailbox may have room. Any thread."""
        self._some_withdrawn = True

    def restore(self, envelopes: Iterable[Envelope]) -> None:
        """Put messages that a dying actor had taken but not started back at the head, in order."""
        with self._lock:
            reason = self._closed
            if reason is None:
                self._ordinary.extendleft(reversed(list(envelopes)))
                self._wake()  # the caller may be a thread that was given up and now returns its messages
        if reason is not None:
            self._refuse(envelopes, reason)

    def close(self, reason: str) -> None:
        """Refuse all further messages, and answer the waiting ones with `ActorStopped`. Idempotent."""
        with self._lock:
            if self._closed is None:
                self._closed = reason
            waiting = self._pop(len(self._control) + len(self._ordinary))
        self._refuse(waiting, reason)

    def reopen(self) -> None:
        """Accept messages again after `close`, for a service that is started again."""
        with self._lock:
            self._closed = None

    @property
    def closed(self) -> str | None:
        """Why the mailbox was closed; None while it is open."""
        return self._closed

    def check_open(self) -> None:
        """Raise `ActorStopped` when the mailbox is closed, as `admit` would."""
        if self._closed is not None:
            raise self._refusal(self._closed)

    def check_process(self) -> None:
        """Raise `ActorStopped` in a process that was forked from the one that made the mailbox."""
        if self.forked:
            self.check_open()

    def _refusal(self, reason: str) -> ActorStopped:
        return ActorStopped(reason=reason, forked=self.forked)

    def forget_parent(self) -> None:
        """Close in a forked child: the thread that takes messages is in the parent."""
        self._lock = threading.RLock()  # another thread may have held the old one
        self._reader = None  # it may be the thread that forked: in the child it is refused like all others
        self.forked = True
        self._closed = "this process was forked from the service's process"
        # The waiting messages here are copies: the originals are answered in the parent.
        self._afterwards.clear()
        self._ordinary.clear()
        self._control.clear()
        self._to_wake.clear()

    def read_by(self, thread: int | None) -> None:
        """Declare the thread (its ident) that takes messages. Asks from that thread are refused.

        From then on no other thread gets any; one that sleeps in `take` is woken and gets nothing.
        """
        with self._lock:
            self._reader = thread
            self._wake()

    def _admit_afterwards(self) -> None:
        """Admit messages that were sent while the lock was held. Call it without the lock.

        Taking one out is atomic under the GIL.
        """
        with contextlib.suppress(IndexError):
            while True:
                envelope = self._afterwards.popleft()
                try:
                    self.admit(envelope)
                except (ActorStopped, ReentrantAsk) as error:
                    _answer(envelope, error)

    def _pop(self, most: int) -> list[Envelope]:
        control, ordinary = self._control, self._ordinary
        if not control and len(ordinary) <= most:  # the usual case
            batch = list(ordinary)
            ordinary.clear()
            return batch
        batch = [control.popleft() for _ in range(min(most, len(control)))]
        batch.extend([ordinary.popleft() for _ in range(min(most - len(batch), len(ordinary)))])
        return batch

    def _is_full(self) -> bool:
        return len(self._ordinary) + self.waiting_elsewhere() >= self.capacity

    def _stays_full(self) -> bool:
        """Drop withdrawn messages and return whether the mailbox is still full. Under the lock, only when
        full.

        A scan takes time in proportion to the length of the deque, and `ask` lets that grow. So a scan is
        made when a sender has called `note_withdrawn`, as every `ask` that ends early does. A cancelled
        future of `submit` does not call it. For those, a scan is made only after ten times the duration of
        the last one.
        """
        began_ns = time.perf_counter_ns()
        if not self._some_withdrawn and began_ns < self._look_again_ns:
            return True
        self._some_withdrawn = False
        waiting: deque[Envelope] = deque()
        for envelope in self._ordinary:
            if envelope.is_unawaited:
                self.expired += envelope.timed_out
                self.withdrawn += not envelope.timed_out
                error = ActorStopped(reason="withdrawn")
                if self.on_refusal is not None:
                    self.on_refusal(envelope, error)
                if (bridge := envelope.settle(None, error)) is not None:
                    self._to_wake.add(bridge)  # woken after the lock is released: it counts awaited replies
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

    def _refuse(self, envelopes: Iterable[Envelope], reason: str) -> None:
        """Answer the messages of a closed mailbox with `ActorStopped`; pykka's `stop`, with None."""
        for envelope in envelopes:
            if is_stop(envelope.message):
                _answer(envelope, None)
                continue
            stopped = ActorStopped(reason=reason, interrupted=envelope.crashes > 0)
            if self.on_refusal is not None:
                self.on_refusal(envelope, stopped)
            _answer(envelope, stopped)

    @staticmethod
    def _refuse_reentry(message: object) -> None:
        if not is_stop(message):
            raise ReentrantAsk(
                field="ask",
                value=Words(type(message).__name__),
                problem="was sent by the actor's own thread, which could never answer it",
                fix="use tell(), or call the method directly",
            )


def _answer(envelope: Envelope, error: Exception | None) -> None:
    bridge = envelope.settle(None, error)
    if bridge is not None:
        bridge.wake()
