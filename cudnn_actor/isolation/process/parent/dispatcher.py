"""The dispatcher: the mailbox in process isolation. It sends requests to the worker and reads the answers.

A **turn** encodes the waiting messages, sends them, and completes the requests whose answers have come. It
works on the worker host (`worker_host`; "the host" below). The thread that takes the turns is the **owner**
of the socket:

- The first event loop that sends becomes the owner. Its turns run on its own thread, so a request costs no
  hop to another thread and back, and one turn serves all messages that have gathered since the last turn.
- The first request from anywhere else (another loop, or a pykka caller, also before any loop) makes the
  monitor's thread the owner, for the rest of the service's life. From then on, senders only put messages into
  the mailbox and wake it.
- A `tell` from another thread changes nothing: the monitor sends it, and the owner reads on. While such a
  message waits for room and the loop does not read, the monitor reads too.

The monitor also takes turns while a loop is the owner. It watches the worker, and does what would hold up the
loop: copies of large arrays, and sending to a full socket. So two threads may want the host. Only the thread
that has set `_taken` may touch it; testing and setting that flag is one step under the GIL. A loop never
waits for the host; the monitor does.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from cudnn_actor.actors import ActorStopped, Envelope, LoopBridge, Mailbox
from cudnn_actor.actors.interrupts import is_interruptible
from cudnn_actor.actors.logs import Log, speaking_for
from cudnn_actor.actors.pykka_seam import is_stop
from cudnn_actor.isolation.process.parent.fast_path import Reply, complete, hand_over, pass_over
from cudnn_actor.isolation.process.parent.in_flight import Violation
from cudnn_actor.isolation.process.parent.owning_loop import OwningLoop
from cudnn_actor.isolation.process.parent.straight_path import send_alone, straight, take_alone
from cudnn_actor.isolation.process.parent.straight_upload import UploadMailbox
from cudnn_actor.isolation.process.parent.worker_host import WorkerHost
from cudnn_actor.isolation.process.wire import Answers
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.protocol.errors import MailboxFull, ReentrantAsk
from cudnn_actor.protocol.messages.messages import COMPUTE, RunModel

__all__ = ["Dispatcher"]

log = Log("cudnn_actor")


class Dispatcher(UploadMailbox):
    """The mailbox in process isolation: see the module's docstring. `host` is set once, right after
    construction.

    Parameters
    ----------
    capacity
        As of `Mailbox`.
    """

    starts_elsewhere: ClassVar[bool] = True

    def __init__(self, capacity: int = 1024) -> None:
        super().__init__(capacity)
        # False until anyone but a single event loop asks: then the monitor owns the socket.
        self.needs_thread = False
        self.wake_monitor: Callable[[], Any] = bool
        """Wakes the monitor's thread, in a single call of a C function. If there is no monitor, this does
        nothing: the next monitor begins with a turn."""
        self.begun: Callable[[], int] = _none_begun
        """How many of the requests dispatched to the present worker it has begun."""
        self.channel: Channel | None = None
        """The present worker's socket. Written with the host held."""
        self.read_s = 0.0
        """When the socket was last read to its end, in `time.monotonic()` seconds. Any thread may read it."""
        self.why_condemned = ""
        """How the worker has broken the protocol; empty if it has not."""
        self.short_of_memory = False
        """Whether this process had too little memory to finish something since the monitor's last turn."""
        self.on_stop_asked: Callable[[], None] = lambda: None
        self._taken = False
        self._waiting: list[Any] = []
        """One lock for each thread that waits for the host. It is released when the host becomes free."""
        self._wants_turn = self._wants_reading = False
        self._heavy = False
        """Whether the next message is one that loops leave to the monitor (`Values.is_heavy`)."""
        self._monitor_woken = False
        """Whether the monitor was woken for work that the main thread leaves to other threads."""
        self.alone = 0
        """The number of the latest request that took the straight path."""
        self._stop: Envelope | None = None
        """pykka's stop message, which ends the service in its turn. Later messages are not started."""
        self._stop_told = False
        self.owner: OwningLoop | None = None
        """The loop that owns the socket. Written under the lock. None before the first request, and when the
        monitor owns the socket."""
        self._outbox: deque[Reply] = deque()
        """Replies that have not been delivered yet; the leftmost is next."""
        self._loops_to_wake: set[LoopBridge] = set()
        """Loops for which replies have been posted. They are woken before the host is freed."""
        self._here: LoopBridge | None = None
        """The bridge of the loop whose thread has the host; None for a thread without a loop."""

    # Senders.

    def admit(self, envelope: Envelope, *, waits: bool = True) -> None:
        """Accept a message, and arrange the turn that sends it. See `Mailbox.admit`."""
        owner = self.owner
        if owner is None or envelope.bridge is not owner.bridge:
            owner = self._owner_for(envelope)  # before the admission: after an error nothing was sent
        try:
            Mailbox.admit(self, envelope, waits=waits)  # each request comes here: `super` takes a while
            if self._afterwards:
                # A finalizer or a signal handler sent it during a mailbox operation on this same thread.
                # No turn is possible now. The interrupted operation will admit the message at its end.
                self.wake_monitor()
            elif owner is not None:
                owner.schedule()
            elif not self._wants_turn:  # else a turn is already wanted, and will find the message
                self._wants_turn = True
                self.wake_monitor()
        except (ActorStopped, MailboxFull, ReentrantAsk):
            raise
        except BaseException:
            self.wake_monitor()  # in the same step as the exception: the monitor sends what was admitted
            raise

    def admit_alone(self, envelope: Envelope) -> bool:
        """See `Mailbox.admit_alone`."""
        owner = self.owner
        if owner is None or self.host.in_flight.requests or type(envelope.message) not in COMPUTE:
            return False
        if (bridge := owner.bridge) is not envelope.bridge or not owner.reads(self.channel):
            return False
        # Not if a wake-up may be lost (`bridge.note_sent` sees to that), nor in a finalizer: `Mailbox.admit`.
        return not (bridge.posted or self._lock._is_owned()) and straight(self, bridge, send_alone, envelope)

    def take_alone(self, bridge: LoopBridge) -> bool:
        """Read and deliver the answer to the request that `admit_alone` has sent, or what has come instead.

        On the loop that owns the socket. Returns False if that request is not in flight, or if another thread
        has the host.
        """
        return self.alone in self.host.in_flight.requests and straight(self, bridge, take_alone, None)

    def waiting_elsewhere(self) -> int:
        """Requests that were dispatched, or wait to be dispatched again, and that the worker has not begun,
        according to its status page."""
        table = self.host.in_flight
        return max(0, table.handed - self.begun()) + table.waiting_again

    def look(self) -> bool:
        """See `Mailbox.look`."""
        owner = self.owner
        return owner is not None and owner.is_running_here() and owner.look()

    def _owner_for(self, envelope: Envelope) -> OwningLoop | None:
        """The owner after a message that the present owner did not send; None for the monitor.

        Correctness does not depend on which thread is the owner: a loop that has just lost the socket may
        still take a turn, because it too must find the host free. The owner's duty is that the socket is
        read. A loop reads from its first turn until it is told to stop. The monitor checks before each of its
        waits who the owner is, and is woken when that changes. So a loop that is blocked, or has stopped,
        delays only its own callers: a request from anywhere else takes the socket away from it.
        """
        bridge = envelope.bridge
        with self._lock:
            owner = self.owner
            shared = self.needs_thread
            if bridge is not None and not shared and (owner is None or owner.bridge.loop.is_closed()):
                before, self.owner = owner, OwningLoop(self, bridge)
                if before is not None:
                    before.close()
            elif envelope.wants_reply and not shared and (owner is None or bridge is not owner.bridge):
                # One step, with the wake-up: the monitor reads from here on, whatever the loop does.
                self.owner, self.needs_thread = None, True
                self.wake_monitor()
                if owner is not None:
                    owner.follow_soon()
            elif owner is not None and bridge is not owner.bridge and not owner.is_running_here():
                return None
            return self.owner

    def is_owner(self, loop: OwningLoop) -> bool:
        """Whether a loop owns the socket."""
        return self.owner is loop

    # Turns.

    def turn(self, bridge: LoopBridge | None = None, *, read: bool = False) -> None:
        """Take a turn. If another thread has the host, that thread takes the turn instead. Any thread.

        No wanted turn is lost. A thread that wants a turn first notes this, and then tests whether the host
        is free. The holder first frees the host, and then reads the notes. So if the thread finds the host
        taken, the holder has not looked at the notes yet, and takes that turn itself.

        Parameters
        ----------
        bridge
            The bridge of this thread's event loop; None for a thread without a loop.
        read
            Whether answers may have come.
        """
        if read:
            self._wants_reading = True
        self._wants_turn = True
        mine = False
        try:
            while True:
                # Testing and taking are one step. Therefore the test is not the condition of the loop: after
                # the condition comes the loop's back-edge, where another thread could run and take the host
                # too. Threads that wait for the host go first.
                if not self._wants_turn or self._taken or self._waiting:
                    return
                self._taken = mine = True
                self._here = bridge
                self.serve()
                # One step, like the handler below.
                self._taken = mine = False
                try:
                    if self._waiting:
                        self._waiting[0].release()
                except RuntimeError:  # the lock has been released already
                    pass
        except BaseException:
            # One step: the host becomes free, and another thread finishes the turn.
            if mine:
                self._taken = False
            self._wants_turn = self._wants_reading = True
            try:
                if self._waiting:
                    self._waiting[0].release()
                else:
                    self.wake_monitor()
            except RuntimeError:  # the lock has been released already
                pass
            raise

    def serve(self, *, monitor: bool = False) -> None:
        """Do the work of a turn, with the host held. Raises only the exception of a signal handler.

        On the main thread, a signal handler may raise an exception anywhere here (`actors.interrupts`). There
        a turn takes only the fast path (`fast_path`), which keeps the host consistent wherever it is
        interrupted, and leaves the rest to the monitor. `turn` frees the host of an interrupted turn and
        wakes the monitor, in one step. The monitor then finishes the turn: it completes the answers that were
        read, delivers the replies, and sends the requests that were dispatched. So the exception costs the
        interrupted caller its answer, and no other caller anything.
        """
        fast_only = is_interruptible()
        self._wants_turn = False
        was_left = monitor and (self._monitor_woken or self._heavy)
        if not fast_only:
            self._monitor_woken = False
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
                # This process is out of memory; the worker is not to blame. Answers that have come, and
                # requests to be sent, are where they were. The monitor tries again until there is memory.
                self.short_of_memory = self._wants_reading = True
                self.wake_monitor()
            except Exception as error:  # a bug in this library must not silently end a loop's callback
                if fast_only:
                    raise  # perhaps a signal handler's; if it is a bug, the monitor meets and logs it
                with speaking_for(self.host.state.name):
                    log.exception("dispatcher.failed")
                self.condemn(repr(error))
        if self._outbox:
            leaves |= self._deliver(fast_only=fast_only)
        if self._loops_to_wake:
            self._wake()
        if leaves and not self._monitor_woken:
            self._monitor_woken = True
            self.wake_monitor()
        is_near = was_left and self.loops_may_stay_awake and self.host.values.are_answered_soon
        if is_near and (owner := self.owner) is not None:
            owner.await_answer_soon()

    def _exchange(self, channel: Channel, *, fast_only: bool, monitor: bool) -> bool:
        """Read answers and send requests. Returns whether anything is left to other threads."""
        leaves, host = False, self.host
        sender = host.sender
        if sender.sending is not None:
            sender.finish_sending()
        if sender.copies.pending:  # left by another turn, or interrupted in it
            leaves = self._copy_late(monitor=monitor)
        began_s = time.monotonic() if self._wants_reading else 0.0
        if self._wants_reading:
            self._wants_reading = False
            channel.fetch()
        if channel.frames or host.broker.has_due:
            leaves |= self._complete(channel, fast_only=fast_only)
        if began_s and channel.drained and not channel.frames:
            self.read_s = began_s
        if channel.ended:
            self.wake_monitor()
        if self._ordinary or self._control or self._stop is not None or host.in_flight.again:
            leaves |= self._hand_over(fast_only=fast_only, monitor=monitor)
        sender.flush()
        if channel.backed_up and not channel.flush():
            self.wake_monitor()
        if sender.copies.pending:
            leaves |= self._copy_late(monitor=monitor)
        if host.staging.ended or host.models.has_returned:  # after what the worker waits for
            if fast_only:
                leaves = True
            else:
                host.staging.take_back()
                host.models.take_back()
        return leaves

    def _copy_late(self, *, monitor: bool) -> bool:
        """Make the copies that requests in flight wait for: see `late_copies`. Returns whether any is left.

        Between two copies, answers that have come are delivered.
        """
        copies = self.host.sender.copies
        if not monitor:
            return copies.make_light()
        while copies.pending:
            copies.make_first()
            if copies.pending:
                self._exchange_between()
        return False

    def _complete(self, channel: Channel, *, fast_only: bool) -> bool:
        host = self.host
        while complete(channel, host, self._outbox):
            frame = channel.frames[0]
            if pass_over(host.in_flight, channel):
                continue
            if fast_only:
                return True
            if type(frame) is Answers:
                host.answers.complete(frame.answers[channel.taken])
                channel.taken += 1
            else:
                channel.frames.popleft()
                host.receive((frame,))
        if host.broker.has_due:
            if fast_only:
                return True
            host.broker.settle_waiting()
        return False

    def read_to_the_end(self, channel: Channel) -> None:
        """Take every answer that a worker has sent. With the host held. Raises `Violation`, `BadFrame`."""
        self._complete(channel, fast_only=False)
        while channel.fetch():
            self._complete(channel, fast_only=False)

    def _hand_over(self, *, fast_only: bool, monitor: bool) -> bool:
        host = self.host
        if self._stop is not None or host.in_flight.again:
            if fast_only:
                return True
            host.sender.dispatch_again()
        while self._stop is None and not self._heavy and hand_over(self, host) and host.room and len(self):
            if fast_only:
                self._rouse_worker()
                return True
            if self._take_up_next(monitor=monitor):
                self._exchange_between()
                self._copy_late(monitor=monitor)
            host.sender.dispatch_again()
        if self._stop is not None:
            self._stop_in_its_turn(self._stop)
        return False

    def _exchange_between(self) -> None:
        """Send dispatched requests, and deliver the answers that have come, so that the worker computes and
        callers go on while the values of the next message are copied."""
        self.host.sender.flush()
        channel = self.channel
        if channel is None:
            return
        if not channel.flush():
            self.wake_monitor()
        if channel.fetch():
            self._complete(channel, fast_only=False)
        self._deliver(fast_only=False)
        self._wake()

    def _take_up_next(self, *, monitor: bool) -> bool:
        """Start the next message. Returns whether much was copied for it, or is to be copied late.

        A run that needs more staging memory waits for the large copies before it. Else all that wait would
        take their memory at once, where the worker gives it back about as soon as it is filled.
        """
        heavy, copies = False, self.host.sender.copies
        for envelope in self.take(1, 0.0):
            if is_stop(envelope.message) and self.host.broker.held:
                self.host.broker.held.add(envelope)  # it comes back behind those that wait
            elif is_stop(envelope.message):
                self._stop = envelope
            elif not monitor and (
                self.host.values.is_heavy(envelope.message)
                or (type(envelope.message) is RunModel and copies.has_heavy)
            ):
                self.restore([envelope])
                self._heavy = True
                self.wake_monitor()
                self._rouse_worker()
            else:
                heavy = monitor and self.host.values.is_heavy(envelope.message)
                self.host.start(envelope)
        return heavy or (monitor and copies.has_heavy)

    def _rouse_worker(self) -> None:
        """Wake the worker for values that the monitor will send it: both wake up at the same time."""
        first = self.first  # None if its sender has withdrawn it
        if first is not None and self.loops_may_stay_awake and not (self._monitor_woken or self.is_roused):
            self.host.values.rouse_worker_for(first.message)

    def _stop_in_its_turn(self, stop: Envelope) -> None:
        """Stop the service for pykka's stop message, once all earlier messages have been answered."""
        if not self._stop_told and not self.host.broker.is_awaited(stop.number):
            self._stop_told = True
            self.on_stop_asked()
            self.reply(stop, None, None)

    def condemn(self, why: str) -> None:
        """Stop using the present worker, and tell the monitor why. With the host held."""
        # One step.
        self.channel = None
        self.why_condemned = why
        self.wake_monitor()

    # Replies. With the host held.

    def reply(self, envelope: Envelope, value: Any, error: BaseException | None) -> None:
        """Put a reply into the outbox. It is delivered before the host is freed."""
        self._outbox.append((envelope, value, error))

    def _deliver(self, *, fast_only: bool) -> bool:
        """Deliver the replies in the outbox: at once to this thread's loop, to other loops by their bridges.

        A reply leaves the outbox after it has been delivered. If an interrupted turn leaves a delivered reply
        there, delivering it again has no effect. Returns whether a reply is left to other threads: settling a
        pykka future takes more than one step.
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
                    if envelope.watch is not None:
                        envelope.unwatch()
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
        self._loops_to_wake.clear()  # last: if a wake-up is interrupted, it is made again

    # The monitor's side.

    @contextlib.contextmanager
    def hold(self) -> Iterator[WorkerHost]:
        """Wait for the host, hold it, and finish with a turn. For the monitor. Never used on the main thread
        while requests are served."""
        self.await_host()
        try:
            self._here = None
            self.host.sender.finish_sending()
            yield self.host
            self.serve(monitor=True)
        except BaseException:
            self._wants_turn = True  # replies may have been given before it
            raise
        finally:
            self._taken = False
            with contextlib.suppress(IndexError, RuntimeError):  # none waits, or it has been woken
                self._waiting[0].release()
            self.turn()

    def await_host(self) -> None:
        """Wait until the host is free, and take it.

        A waiting thread joins the list first and tests `_taken` second. The holder frees the host first and
        looks at the list second. So at least one of the two sees the other.
        """
        freed = threading.Lock()
        freed.acquire(blocking=False)
        self._waiting.append(freed)
        try:
            while self._taken:
                freed.acquire()
            self._taken = True  # one step with the test above
        finally:
            self._waiting.remove(freed)

    @contextlib.contextmanager
    def monitors_turn(self) -> Iterator[WorkerHost]:
        """Take a full turn, which includes the work that loops leave to the monitor, and hold the host.

        The monitor waits for the host. If it only tried to take it, every try could coincide with a loop's
        turn, and the work that the loop has left to it, and woken it for only once, would never be done.
        """
        self._wants_reading = True
        self.short_of_memory = False
        with self.hold() as host:
            self.serve(monitor=True)
            yield host

    def monitor_reads(self) -> bool:
        """Whether the monitor must read the socket.

        True if no loop owns the socket, or if the owning loop does not read this socket yet. Also true if
        another sender's message waits because too many requests are in flight: only answers make room for
        it, and the loop, which should read them, may be blocked.
        """
        owner = self.owner
        return owner is None or not owner.reads(self.channel) or self._holds_up_others(owner)

    def _holds_up_others(self, owner: OwningLoop) -> bool:
        first = self.first
        return first is not None and not self.host.in_flight.room and first.bridge is not owner.bridge

    @property
    def needs_writer(self) -> bool:
        """Whether the socket was full, so that frames are still to be sent."""
        channel = self.channel
        return channel is not None and channel.backed_up

    def connect(self, channel: Channel, begun: Callable[[], int]) -> None:
        """Use this worker from now on. With the host held."""
        self.channel = channel
        self.begun = begun
        self.why_condemned = ""
        self._heavy = False
        if (owner := self.owner) is not None:
            owner.follow_soon()

    def disconnect(self) -> None:
        """Use no worker. With the host held."""
        stop, told, self._stop, self._stop_told = self._stop, self._stop_told, None, False
        if stop is not None and not told:
            self.restore([stop])
        self.channel = None
        self.begun = _none_begun
        if (owner := self.owner) is not None:
            owner.follow_soon()

    def forget_parent(self) -> None:
        """Drop the worker in a forked child, and leave the sockets to the parent's event loops.

        If a copied loop takes a turn in the child, it finds no channel, and so does nothing.
        """
        super().forget_parent()
        self._taken = False  # another thread may have had the host
        self._waiting = []
        self.channel = self._stop = self._here = None
        self.wake_monitor, self.on_stop_asked = bool, lambda: None
        self.on_near = []
        self.begun = _none_begun
        self._outbox.clear()  # the parent answers them
        self._loops_to_wake.clear()
        if (owner := self.owner) is not None:
            owner.forget_parent()

    def forget_owner(self) -> None:
        """Drop the references to the owning loop and the last monitor, because the service has ended."""
        self.wake_monitor = bool
        with self._lock:
            owner, self.owner, self.needs_thread = self.owner, None, False
        if owner is not None:
            owner.follow_soon()


def _none_begun() -> int:
    return 0
