"""The mailbox of a service whose actor is in another process: one thread sends to the worker and reads.

A **turn** at the host encodes the messages that wait, sends them, and completes the requests whose answers
have come. Who takes the turns is the **owner** of the socket:

- The first event loop that sends owns it. Its turns run on its own thread, so a request costs no hop to
  another thread and back, and a turn serves all that has gathered since the last.
- The first request of anybody else (another loop, a pykka caller) makes the monitor's thread the owner, for
  the rest of the service's life. From then on senders only put messages into the mailbox and wake it.

The monitor takes turns of its own also while a loop is the owner: it looks after the worker, and does what
would hold the loop up (copies of large arrays, a socket that is full). So two threads may want the host, and
whoever has noted that he has it (`_taken`) may touch it. The look and the note are one step under the GIL.
A loop never waits for the host, the monitor does. No wish is lost: whoever wants a turn notes it first and
looks whether the host is free second; the holder frees it first and looks at the notes second. If it was not
free, the holder has not looked yet, and takes the turn on the other's behalf.

Correctness does not depend on who is the owner: a loop that was it a moment ago may still take a turn, since
it has to find the host free, too. What the owner adds is that somebody reads. A loop reads from its first
turn until it is told to stop; the monitor looks before each of its waits who the owner is, and is woken when
that changes. A loop that is blocked, or has stopped, therefore delays its own callers alone: whoever else
asks takes the socket away from it.

A turn on the main thread may end anywhere in an exception of a signal's handler (`actors.interrupts`). It
takes the fast path only (`fast_path`), which leaves the host whole wherever it ends, and leaves the rest to
the monitor. Whoever is interrupted frees the host and wakes the monitor in the same step, and the monitor
does whatever there is to do: it completes what has been read, delivers what is complete, and sends what was
handed over. So the exception costs its own caller his answer, and nobody else anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from cudnn_actor.actors import ActorStopped, Envelope, LoopBridge, Mailbox
from cudnn_actor.actors.interrupts import is_interruptible, is_of_a_handler
from cudnn_actor.actors.logs import Log, speaking_for
from cudnn_actor.actors.pykka_seam import is_stop
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.protocol.errors import MailboxFull, ReentrantAsk
from cudnn_actor.workers.fast_path import Reply, complete, hand_over
from cudnn_actor.workers.in_flight import Violation
from cudnn_actor.workers.wire import Answers
from cudnn_actor.workers.worker_host import WorkerHost

__all__ = ["Dispatcher"]

LEAST_GATHERED, MOST_GATHERED = 4, 32
SHARE = 3
"""A loop's messages are sent without more ado when they are this part of those in flight, within bounds."""

log = Log("cudnn_actor")


class Dispatcher(Mailbox):
    """See the module's docstring. `host` is set once, right after construction.

    Parameters
    ----------
    capacity
        As of `Mailbox`.
    """

    starts_elsewhere: ClassVar[bool] = True

    host: WorkerHost

    def __init__(self, capacity: int = 1024) -> None:
        super().__init__(capacity)
        self.needs_thread = False
        self.wake_monitor: Callable[[], Any] = bool
        """Wakes the monitor's thread for a look around, in one call of C. Where there is none, the next one
        begins with a turn."""
        self.begun: Callable[[], int] = _none_begun
        """How many of the requests handed to the present worker it has begun."""
        self.channel: Channel | None = None
        """The present worker's socket. Written with the host held."""
        self.why_condemned = ""
        """What a worker has said that no honest one would say."""
        self.short_of_memory = False
        """Whether something was left undone since the monitor's last turn, for want of memory here."""
        self.on_stop_asked: Callable[[], None] = _nothing
        self._taken = False
        self._waiting: list[Any] = []
        """A lock of each thread that waits for the host, released when it is free."""
        self._wants_turn = self._wants_reading = False
        self._heavy = False
        """A message that loops leave to the monitor is next."""
        self._left = False
        """Whether the monitor was woken for something that the main thread leaves to others."""
        self._stop: Envelope | None = None
        """pykka's stop, which ends the service in its turn; what came behind it is not taken up."""
        self._stop_told = False
        self._owner: _OwningLoop | None = None
        """Written under the lock. None before anybody has asked, and where the monitor owns the socket."""
        self._shared = False
        """Whether somebody else than one event loop has asked: then the monitor owns the socket."""
        self._outbox: deque[Reply] = deque()
        """Replies that have been given and not delivered: the left one is next."""
        self._loops_to_wake: set[LoopBridge] = set()
        """Loops that replies have been posted for, and that are woken before the host is free."""
        self._here: LoopBridge | None = None
        """Of the loop whose thread has the host; None for a thread without one."""

    # Senders.

    def admit(self, envelope: Envelope, *, waits: bool = True) -> None:
        """Accept a message, and see to it that it goes on. See `Mailbox.admit`."""
        owner = self._owner
        if owner is None or envelope.bridge is not owner.bridge:
            owner = self._owner_for(envelope)  # before the admission: after an error nothing was sent
        try:
            super().admit(envelope, waits=waits)
            if self._afterwards:
                # Sent by a finalizer, or a handler, amid a step of this very thread's, which is no place for
                # a turn: it may be looking through the messages. Whoever is inside admits it on the way out.
                self.wake_monitor()
            elif owner is not None:
                owner.schedule()
            elif not self._wants_turn:  # else whoever takes the turn that is wanted finds the message
                self._wants_turn = True
                self.wake_monitor()
        except (ActorStopped, MailboxFull, ReentrantAsk):
            raise
        except BaseException:
            self.wake_monitor()  # one step from the exception on: what was admitted is sent by the monitor
            raise

    def waiting_elsewhere(self) -> int:
        """Requests that the worker was handed, or will be again, and has not begun, as far as it says."""
        table = self.host.in_flight
        return max(0, table.handed - self.begun()) + table.waiting_again

    def _owner_for(self, envelope: Envelope) -> _OwningLoop | None:
        """The loop that takes the turn for a message that the owner has not asked; None for the monitor."""
        bridge = envelope.bridge
        with self._lock:
            owner = self._owner
            if owner is None or owner.bridge.loop.is_closed():
                if bridge is None or self._shared:
                    return None
                before, self._owner = owner, _OwningLoop(self, bridge)
                if before is not None:
                    before.close()
            elif bridge is not owner.bridge:
                if not envelope.wants_reply:
                    return owner if owner.is_running_here() else None
                self._shared, self._owner, self.needs_thread = True, None, True
                owner.follow_soon()
                self.wake_monitor()
            return self._owner

    def is_owner(self, loop: _OwningLoop) -> bool:
        """Whether a loop owns the socket."""
        return self._owner is loop

    # Turns.

    def turn(self, bridge: LoopBridge | None = None, *, read: bool = False) -> None:
        """Do what there is to do at the host, unless another is at it, who then does. Any thread.

        Parameters
        ----------
        bridge
            Of the event loop whose thread this is; None for a thread without one.
        read
            Whether answers may have come.
        """
        if read:
            self._wants_reading = True
        self._wants_turn = True
        mine = False
        try:
            while True:
                # Looking and taking are one step. So the look is no condition of the loop: behind that comes
                # the back-edge, where another thread might take the host too. Those that wait come first.
                if not self._wants_turn or self._taken or self._waiting:
                    return
                self._taken = mine = True
                self._here = bridge
                self._serve()
                # One step, as where it ends in an exception.
                self._taken = mine = False
                try:
                    if self._waiting:
                        self._waiting[0].release()
                except RuntimeError:  # it has been told
                    pass
        except BaseException:
            # One step: the host is free, and another thread does whatever there is to do.
            if mine:
                self._taken = False
            self._wants_turn = self._wants_reading = True
            try:
                if self._waiting:
                    self._waiting[0].release()
                else:
                    self.wake_monitor()
            except RuntimeError:  # it has been told
                pass
            raise

    def _serve(self, *, monitor: bool = False) -> None:
        """What a turn does. With the host held. Raises what a signal's handler raises, and nothing else."""
        fast_only = is_interruptible()
        self._wants_turn = False
        if not fast_only:
            self._left = False
        if monitor:
            self._heavy = False
        leaves = False
        channel = self.channel
        if channel is not None:
            try:
                leaves = self._exchange(channel, fast_only=fast_only, monitor=monitor)
            except (Violation, BadFrame) as error:
                self.condemn(str(error))
            except MemoryError:
                # This process's own want, for which no worker is to blame. What has come, or was to be sent,
                # is where it was: the monitor tries again, until there is memory.
                self.short_of_memory = self._wants_reading = True
                self.wake_monitor()
            except Exception as error:  # a bug of ours must not end an event loop's callback in silence
                if fast_only:
                    raise  # or a handler's: the monitor goes on, and finds a bug of ours again
                with speaking_for(self.host.state.name):
                    log.exception("dispatcher.failed")
                self.condemn(repr(error))
        if self._outbox:
            leaves |= self._deliver(fast_only=fast_only)
        if self._loops_to_wake:
            self._wake()
        if leaves and not self._left:
            self._left = True
            self.wake_monitor()

    def _exchange(self, channel: Channel, *, fast_only: bool, monitor: bool) -> bool:
        """Read answers and send requests; whether anything is left to other threads."""
        leaves = False
        self.host.finish_sending()
        if self._wants_reading:
            self._wants_reading = False
            channel.fetch()
        if channel.frames or self.host.broker.has_drains_due:
            leaves = self._complete(channel, fast_only=fast_only)
        if channel.ended:
            self.wake_monitor()
        if self._ordinary or self._control or self._stop is not None or self.host.in_flight.waiting_again:
            leaves |= self._hand_over(fast_only=fast_only, monitor=monitor)
        self.host.flush()
        if not channel.flush():
            self.wake_monitor()
        return leaves

    def _complete(self, channel: Channel, *, fast_only: bool) -> bool:
        host = self.host
        while complete(channel, host, self._outbox):
            if fast_only:
                return True
            frame = channel.frames[0]
            if type(frame) is Answers:
                host.complete(frame.answers[channel.taken])
                channel.taken += 1
            else:
                channel.frames.popleft()
                host.receive((frame,))
        if host.broker.has_drains_due:
            if fast_only:
                return True
            host.broker.settle_drains()
        return False

    def read_to_the_end(self, channel: Channel) -> None:
        """Take every answer that a worker has sent. With the host held. Raises `Violation`, `BadFrame`."""
        self._complete(channel, fast_only=False)
        while channel.fetch():
            self._complete(channel, fast_only=False)

    def _hand_over(self, *, fast_only: bool, monitor: bool) -> bool:
        host = self.host
        if fast_only and (self._stop is not None or host.in_flight.waiting_again):
            return True
        host.hand_again()
        while self._stop is None and not self._heavy and hand_over(self, host) and host.room and len(self):
            if fast_only:
                return True
            self._take_up_next(monitor=monitor)
            host.hand_again()
        if self._stop is not None:
            self._stop_in_its_turn(self._stop)
        return False

    def _take_up_next(self, *, monitor: bool) -> None:
        for envelope in self.take(1, 0.0):
            if is_stop(envelope.message):
                self._stop = envelope
            elif not monitor and self.host.is_heavy(envelope.message):
                self.restore([envelope])
                self._heavy = True
                self.wake_monitor()
            else:
                self.host.take_up(envelope)

    def _stop_in_its_turn(self, stop: Envelope) -> None:
        """Pass pykka's stop on, once all that was sent before it has been answered."""
        if not self._stop_told and not self.host.broker.is_awaited(stop.number):
            self._stop_told = True
            self.on_stop_asked()
            self.reply(stop, None, None)

    def condemn(self, why: str) -> None:
        """Have nothing more to do with the present worker, and tell the monitor. With the host held."""
        # One step.
        self.channel = None
        self.why_condemned = why
        self.wake_monitor()

    # Replies. With the host held.

    def reply(self, envelope: Envelope, value: Any, error: BaseException | None) -> None:
        """Answer: it is delivered before the host is free."""
        self._outbox.append((envelope, value, error))

    def _deliver(self, *, fast_only: bool) -> bool:
        """Deliver what is in the outbox: at once where this thread's loop waits for it, else by its bridge.

        A reply leaves the outbox when it has been delivered; whoever delivers one again finds that it was.
        Whether one is left to other threads: a pykka future takes more than a step.
        """
        outbox, here = self._outbox, self._here
        while outbox:
            reply = outbox[0]
            envelope, value, error = reply
            bridge = envelope.bridge
            if bridge is None:
                if fast_only and envelope.reply_to is not None:
                    return True
                envelope.settle(value, error)
                del outbox[0]
            elif bridge is here and not bridge.posted:
                if error is None and (future := envelope.future) is not None and not future.done():
                    future.set_result(value)
                else:
                    envelope.deliver(value, error)
                # One step.
                bridge.awaited -= 1
                del outbox[0]
            else:
                entry, loop = (reply,), {bridge}
                # One step.
                bridge.posted += entry
                self._loops_to_wake |= loop
                del outbox[0]
        return False

    def _wake(self) -> None:
        for bridge in tuple(self._loops_to_wake):
            bridge.wake()
        self._loops_to_wake.clear()  # behind it: a wake-up in which somebody was interrupted is made again

    # The monitor's side.

    @contextlib.contextmanager
    def held(self) -> Iterator[WorkerHost]:
        """The host, for the monitor, who waits for it; then, what there is to do. Never on the main thread
        while requests are served."""
        self._await_host()
        try:
            self._here = None
            self.host.finish_sending()
            yield self.host
            self._serve(monitor=True)
        except BaseException:
            self._wants_turn = True  # replies may have been given before it
            raise
        finally:
            self._taken = False
            with contextlib.suppress(IndexError, RuntimeError):  # nobody waits; he has been told
                self._waiting[0].release()
            self.turn()

    def _await_host(self) -> None:
        """Wait until the host is free, and take it.

        Whoever waits joins the list first and looks second; whoever frees the host does so first, and looks
        at the list second. So one of the two sees the other.
        """
        freed = threading.Lock()
        freed.acquire(blocking=False)
        self._waiting.append(freed)
        try:
            while self._taken:
                freed.acquire()
            self._taken = True  # one step with the look
        finally:
            self._waiting.remove(freed)

    @contextlib.contextmanager
    def monitors_turn(self) -> Iterator[WorkerHost]:
        """Read, do all that there is to do, also what the loop leaves to the monitor, and keep the host.

        It waits for the host. Were it only to try, each of its tries could find a loop in its turn, and what
        that loop has left to it, and has woken it for once, would be left for good.
        """
        self._wants_reading = True
        self.short_of_memory = False
        with self.held() as host:
            self._serve(monitor=True)
            yield host

    def monitor_reads(self) -> bool:
        """Whether the monitor must read: no loop owns the socket, or it does not read this worker's yet."""
        owner = self._owner
        return owner is None or not owner.reads(self.channel)

    @property
    def needs_writer(self) -> bool:
        """Whether the socket had no room for all that was to be sent."""
        channel = self.channel
        return channel is not None and channel.backed_up

    def connect(self, channel: Channel, begun: Callable[[], int]) -> None:
        """Serve with this worker from now on. With the host held."""
        self.channel = channel
        self.begun = begun
        self.why_condemned = ""
        self._heavy = False
        if (owner := self._owner) is not None:
            owner.follow_soon()

    def disconnect(self) -> None:
        """Serve with nobody. With the host held."""
        stop, told, self._stop, self._stop_told = self._stop, self._stop_told, None, False
        if stop is not None and not told:
            self.restore([stop])
        self.channel = None
        self.begun = _none_begun
        if (owner := self._owner) is not None:
            owner.follow_soon()

    def forget_parent(self) -> None:
        """Have no worker in a forked child, and leave the sockets to the parent's event loops.

        A turn that a copy of a loop takes here finds no channel, and so does nothing.
        """
        super().forget_parent()
        self._taken = False  # another thread may have had it
        self._waiting = []
        self.channel = self._stop = self._here = None
        self.wake_monitor, self.on_stop_asked = bool, _nothing
        self.begun = _none_begun
        self._outbox.clear()  # answered in the parent
        self._loops_to_wake.clear()
        if (owner := self._owner) is not None:
            owner.forget_parent()

    def forget_owner(self) -> None:
        """Let go of the owning loop, and of the last monitor: the service has ended."""
        self.wake_monitor = bool
        with self._lock:
            owner, self._owner, self._shared, self.needs_thread = self._owner, None, False, False
        if owner is not None:
            owner.follow_soon()


class _OwningLoop:
    """The event loop that owns the socket: its turns, and its reader.

    What another thread may call says so.
    """

    def __init__(self, dispatcher: Dispatcher, bridge: LoopBridge) -> None:
        self._dispatcher = dispatcher
        self.bridge = bridge
        self._scheduled = False
        self._gathered = 0
        """Messages since the last turn."""
        self._channel: Channel | None = None
        self._descriptors: list[int] = []
        """Of the socket that the loop reads: one, or none."""

    def schedule(self) -> None:
        """Take a turn: at once for a worker that has nothing to do, else for what is sent in the next moment.

        A loop's tasks send one after another. Were all of it sent together, the worker would wait for the
        last of them, and then they for the worker; in small lots the two work side by side.
        """
        dispatcher = self._dispatcher
        self._gathered = gathered = self._gathered + 1
        in_flight = len(dispatcher.host.in_flight.requests)
        if self._channel is dispatcher.channel and (
            not in_flight
            or gathered >= MOST_GATHERED
            or (gathered >= LEAST_GATHERED and gathered * SHARE >= in_flight)
        ):
            self._gathered = 0
            dispatcher.turn(self.bridge)
        elif not self._scheduled or self._gathered > MOST_GATHERED:  # more than that: asyncio has lost it
            self.bridge.loop.call_soon(self._run)
            self._scheduled = True

    def _run(self) -> None:
        try:
            self._scheduled = False
            self._gathered = 0
            if self._channel is not self._dispatcher.channel:
                self._follow()
            self._dispatcher.turn(self.bridge)
        except BaseException:
            self._dispatcher.wake_monitor()  # one step from the exception on
            raise

    def is_running_here(self) -> bool:
        """Whether this thread runs it. Any thread."""
        return asyncio._get_running_loop() is self.bridge.loop

    def reads(self, channel: Channel | None) -> bool:
        """Whether the loop looks at this socket, as far as is known. Any thread."""
        return channel is not None and self._channel is channel and not self.bridge.loop.is_closed()

    def follow_soon(self) -> None:
        """Have the loop read the present worker's socket, or none. Any thread."""
        try:
            self.bridge.loop.call_soon_threadsafe(self._follow)
        except RuntimeError:  # it has closed, and its selector with it
            self.close()

    def _follow(self) -> None:
        dispatcher = self._dispatcher
        channel = dispatcher.channel if dispatcher.is_owner(self) else None
        if channel is self._channel:
            return
        self._let_go()
        if channel is None:
            return
        try:
            self._descriptors.extend(map(os.dup, (channel.fileno(),)))  # noted by the call that makes it
        except OSError as error:  # it has gone already: the monitor knows
            if is_of_a_handler(error):
                raise
            return
        self.bridge.loop.add_reader(self._descriptors[0], self._readable)
        self._channel = channel  # last: a loop of which it is thought that it reads does
        dispatcher.turn(self.bridge, read=True)

    def _readable(self) -> None:
        self._dispatcher.turn(self.bridge, read=True)
        if self._channel is not None and self._channel.ended:
            self._let_go()

    def _let_go(self) -> None:
        self._channel = None
        for descriptor in self._descriptors:
            self.bridge.loop.remove_reader(descriptor)
        self.close()

    def forget_parent(self) -> None:
        """Read no socket in a forked child. The selector is the parent's: nothing is taken out of it."""
        self._channel = None

    def __del__(self) -> None:
        self.close()  # its loop was closed between being told to let go and doing so

    def close(self) -> None:
        """Let go of the socket, of a loop that reads it no more. Any thread; idempotent."""
        self._channel = None
        # None is left, or this object was interrupted while it was made.
        with contextlib.suppress(IndexError, AttributeError):
            os.close(self._descriptors.pop())  # taking it out is one step: of two that close, one does


def _nothing() -> None:
    pass


def _none_begun() -> int:
    return 0
