"""The mailbox of a service whose actor is in another process: whoever sends a message also delivers it.

In a service of one process the actor's thread takes messages out of the mailbox. Here nobody sits behind it:
the sender himself, on his event loop, takes a **turn** at the desk, which encodes what waits and sends it,
and the loop's own reader takes one when answers have come. So a request costs no hop to a thread and back,
and a loop's turn serves everything that has gathered since its last.

What is shared: the desk, by every loop and thread that sends, and the keeper's thread. Who may touch it: the
holder of `_free`, which nobody waits for but the keeper. Why no wish is lost: whoever wants a turn notes
what he wants first and tries the lock second; the holder gives the lock back first and looks at the notes
second. If the try fails, the holder has not given it back yet, so it looks after the note was made, and does
it on the wisher's behalf. An answer for another loop's future, or a pykka one, goes through its bridge.

Each event loop that sends reads the socket (`_Link`); one that is blocked, or does not run, holds up
nobody but itself, since any other reads as well. Where no loop can be relied on for an answer (a pykka
caller waits, every loop has closed), the keeper's thread reads: `keeper_reads` tells it. What would hold
a loop up (copies of large arrays, a socket that is full) is left to the keeper's thread too.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar

from cudnn_actor.actors import Envelope, LoopBridge, Mailbox
from cudnn_actor.actors.logs import Log, speaking_for
from cudnn_actor.actors.pykka_seam import is_stop
from cudnn_actor.workers.channel import Channel
from cudnn_actor.workers.cudnn_desk import CudnnDesk
from cudnn_actor.workers.ledger import Violation
from cudnn_actor.workers.wire import BadFrame

__all__ = ["Dispatcher"]

LEAST_GATHERED, MOST_GATHERED = 4, 32
SHARE = 3
"""A loop's messages are sent without more ado when they are this part of those in the air, within bounds."""
_MOST_A_TURN = 64
"""Messages taken out of the queue at once."""

log = Log("cudnn_actor")


class Dispatcher(Mailbox):
    """See the module's docstring. `desk` is set once, right after construction.

    Parameters
    ----------
    capacity
        As of `Mailbox`.
    """

    starts_elsewhere: ClassVar[bool] = True

    desk: CudnnDesk

    def __init__(self, capacity: int = 1024) -> None:
        super().__init__(capacity)
        self.ring_keeper: Callable[[], None] = _nothing
        """Wakes the keeper's thread, for a look around. Any thread; never blocks."""
        self.begun: Callable[[], int] = _none_begun
        """How many of the requests handed to the present worker it has begun."""
        self.channel: Channel | None = None
        """The present worker's socket. Written with the desk held."""
        self.why_condemned = ""
        """What a worker has said that no honest one would say."""
        self.on_stop_asked: Callable[[], None] = _nothing
        self._free = threading.Lock()
        self._wants_turn = self._wants_reading = False
        self._heavy = False
        """A message that loops leave to the keeper is next."""
        self._stop: Envelope | None = None
        """pykka's stop, which ends the service in its turn; what came behind it is not taken up."""
        self._stop_told = False
        self._last_foreign = 0
        """Number of the last message for whose answer no event loop waits."""
        self._links: dict[LoopBridge, _Link] = {}
        self._keeper_reads = False
        """Whether the keeper looks at the socket, for those whose answers no event loop fetches."""
        self._to_wake: set[LoopBridge] = set()
        self._here: LoopBridge | None = None
        """Of the loop whose thread has the desk; None for a thread without one."""

    # Senders.

    def admit(self, envelope: Envelope, *, waits: bool = True) -> None:
        """Accept a message, and see to it that it goes on. See `Mailbox.admit`."""
        bridge = envelope.bridge
        if bridge is None:
            super().admit(envelope, waits=waits)
            with self._lock:
                self._last_foreign = max(self._last_foreign, envelope.number)
            self.turn()
            return
        link = self._links.get(bridge)
        if link is None:
            link = self._new_link(bridge)  # before the admission: an error here means that nothing was sent
        super().admit(envelope, waits=waits)
        link.schedule()

    def waiting_elsewhere(self) -> int:
        """Requests that the worker was handed, or will be again, and has not begun, as far as it says."""
        ledger = self.desk.ledger
        return max(0, ledger.handed - self.begun()) + ledger.on_the_ground

    def _new_link(self, bridge: LoopBridge) -> _Link:
        for old in tuple(self._links):
            if old.loop.is_closed() and (closed := self._links.pop(old, None)) is not None:
                closed.close()  # taking it out is one step: of several threads that come by, one closes it
        link = self._links[bridge] = _Link(self, bridge)
        return link

    def has_link(self, bridge: LoopBridge) -> bool:
        """Whether a loop still has a part here."""
        return bridge in self._links

    # Turns.

    def turn(self, bridge: LoopBridge | None = None, *, read: bool = False) -> None:
        """Do what there is to do at the desk, unless another is at it, who then does. Any thread.

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
        while self._wants_turn and self._free.acquire(blocking=False):
            try:
                self._serve(bridge)
            finally:
                self._free.release()
            self._wake()

    def _serve(self, bridge: LoopBridge | None, *, keeper: bool = False) -> None:
        self._wants_turn = False
        if self.channel is None:
            return
        self._here = bridge
        try:
            if self._wants_reading:
                self._wants_reading = False
                self._read()
            if keeper:
                self._heavy = False
            self._hand_over(keeper=keeper)
        except (Violation, BadFrame) as error:
            self.condemn(str(error))
        except Exception as error:  # a bug of ours must not end an event loop's callback in silence
            with speaking_for(self.desk.state.name):
                log.exception("dispatcher.failed")
            self.condemn(repr(error))
        finally:
            self._here = None

    def _read(self) -> None:
        channel = self.channel
        assert channel is not None
        frames = channel.receive()
        if frames:
            self.desk.receive(frames)
        if channel.ended:
            self.ring_keeper()

    def _hand_over(self, *, keeper: bool) -> None:
        desk = self.desk
        desk.hand_again()
        while self._stop is None and not self._heavy and (room := min(desk.room, _MOST_A_TURN)) and len(self):
            batch = self.take(room, 0.0)
            for place, envelope in enumerate(batch):
                if is_stop(envelope.message):
                    self._stop = envelope
                    self.restore(batch[place + 1 :])
                    break
                if not keeper and desk.is_heavy(envelope.message):
                    self.restore(batch[place:])
                    self._heavy = True
                    self.ring_keeper()
                    break
                desk.take_up(envelope)
            desk.hand_again()
        if self._stop is not None:
            self._stop_in_its_turn(self._stop)
        desk.flush()
        assert self.channel is not None
        backed_up = not self.channel.flush()
        if backed_up or (self._has_foreign and not self._keeper_reads):
            self.ring_keeper()

    def _stop_in_its_turn(self, stop: Envelope) -> None:
        """Pass pykka's stop on, once all that was sent before it has been answered."""
        if not self._stop_told and not self.desk.is_awaited(stop.number):
            self._stop_told = True
            self.on_stop_asked()
            self.reply(stop, None, None)

    @property
    def _has_foreign(self) -> bool:
        """Whether an answer is awaited that no event loop fetches: in the air, a stop's, or in the queue."""
        if self.desk.has_foreign or self._stop is not None:
            return True
        try:
            return self._ordinary[0].number <= self._last_foreign
        except IndexError:
            return False

    def condemn(self, why: str) -> None:
        """Have nothing more to do with the present worker, and tell the keeper. With the desk held."""
        self.channel = None
        self.why_condemned = why
        self.ring_keeper()

    # Replies. With the desk held.

    def reply(self, envelope: Envelope, value: Any, error: BaseException | None) -> None:
        """Answer: at once where it is this thread's loop that waits, else by way of its bridge."""
        bridge = envelope.bridge
        if bridge is None:
            envelope.settle(value, error)
        elif bridge is self._here:
            if error is not None or not bridge.deliver_at_once(envelope, value):
                bridge.deliver_here(envelope, value, error)
        else:
            bridge.post(envelope, value, error)
            self._to_wake.add(bridge)

    def _wake(self) -> None:
        while self._to_wake:
            with contextlib.suppress(KeyError):  # another has woken the last one
                self._to_wake.pop().wake()

    # The keeper's side.

    @contextlib.contextmanager
    def held(self) -> Any:
        """The desk, for the keeper, who waits for it; then, what others have wished for meanwhile."""
        with self._free:
            yield self.desk
            self._wants_turn = True
            self._serve(None, keeper=True)
        self._wake()
        self.turn()

    def keepers_turn(self) -> None:
        """Read, and do all that there is to do, also what loops leave to the keeper.

        It waits for the desk. Were it only to try, each of its tries could find a loop in its turn, and what
        that loop has left to it, and rung for once, would be left for good.
        """
        self._wants_reading = True
        with self.held():
            pass

    def keeper_reads(self) -> bool:
        """Whether the keeper must read: somebody waits for an answer that no event loop would fetch.

        The note is taken back before the look, and made after it. So a sender who finds it made has added
        what he waits for before this look, or the keeper was about to look once more.
        """
        self._keeper_reads = False
        self._keeper_reads = self._has_foreign or not any(
            link.reads(self.channel) for link in tuple(self._links.values())
        )
        return self._keeper_reads

    @property
    def needs_writer(self) -> bool:
        """Whether the socket had no room for all that was to be sent."""
        channel = self.channel
        return channel is not None and channel.backed_up

    def connect(self, channel: Channel, begun: Callable[[], int]) -> None:
        """Serve with this worker from now on: every loop that sends reads its socket. With the desk held."""
        self.channel = channel
        self.begun = begun
        self.why_condemned = ""
        self._heavy = False
        for link in tuple(self._links.values()):
            link.follow_soon()

    def disconnect(self) -> None:
        """Serve with nobody. With the desk held."""
        stop, told, self._stop, self._stop_told = self._stop, self._stop_told, None, False
        if stop is not None and not told:
            self.restore([stop])
        self.channel = None
        self.begun = _none_begun
        for link in tuple(self._links.values()):
            link.follow_soon()

    def forget_parent(self) -> None:
        """Have no worker in a forked child, and leave the sockets to the parent's event loops.

        A turn that a copy of a loop takes here finds no channel, and so does nothing.
        """
        super().forget_parent()
        self._free = threading.Lock()  # which another thread may have held
        self.channel = self._stop = self._here = None
        self.ring_keeper = self.on_stop_asked = _nothing
        self.begun = _none_begun
        for link in tuple(self._links.values()):
            link.forget_parent()

    def forget_loops(self) -> None:
        """Let go of every event loop: the service has ended."""
        for bridge in tuple(self._links):
            if (link := self._links.pop(bridge, None)) is not None:
                link.follow_soon()


class _Link:
    """One event loop's part: its turns, and its reader on the socket. On the loop, but for `follow_soon`."""

    def __init__(self, dispatcher: Dispatcher, bridge: LoopBridge) -> None:
        self._dispatcher = dispatcher
        self._bridge = bridge
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
        self._gathered += 1
        flights = len(dispatcher.desk.ledger.flights)
        if self._channel is dispatcher.channel and (
            not flights or self._gathered >= min(MOST_GATHERED, max(LEAST_GATHERED, flights // SHARE))
        ):
            self._gathered = 0
            dispatcher.turn(self._bridge)
        elif not self._scheduled:
            self._scheduled = True
            self._bridge.loop.call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        self._gathered = 0
        if self._channel is not self._dispatcher.channel:
            self._follow()
        self._dispatcher.turn(self._bridge)

    def reads(self, channel: Channel | None) -> bool:
        """Whether the loop looks at this socket, as far as is known. Any thread."""
        return channel is not None and self._channel is channel and not self._bridge.loop.is_closed()

    def follow_soon(self) -> None:
        """Have the loop read the present worker's socket, or none. Any thread."""
        try:
            self._bridge.loop.call_soon_threadsafe(self._follow)
        except RuntimeError:  # it has closed, and its selector with it
            self.close()

    def _follow(self) -> None:
        dispatcher = self._dispatcher
        channel = dispatcher.channel if dispatcher.has_link(self._bridge) else None
        if channel is self._channel:
            return
        self._let_go()
        if channel is None:
            return
        try:
            descriptor = channel.duplicate()
        except OSError:  # it has gone already: the keeper knows
            return
        self._descriptors.append(descriptor)
        self._bridge.loop.add_reader(descriptor, self._readable)
        self._channel = channel
        dispatcher.turn(self._bridge, read=True)

    def _readable(self) -> None:
        self._dispatcher.turn(self._bridge, read=True)
        if self._channel is not None and self._channel.ended:
            self._let_go()

    def _let_go(self) -> None:
        self._channel = None
        for descriptor in self._descriptors:
            self._bridge.loop.remove_reader(descriptor)
        self.close()

    def forget_parent(self) -> None:
        """Read no socket in a forked child. The selector is the parent's: nothing is taken out of it."""
        self._channel = None

    def close(self) -> None:
        """Let go of the socket, of a loop that reads it no more. Any thread; idempotent."""
        self._channel = None
        with contextlib.suppress(IndexError):
            os.close(self._descriptors.pop())  # taking it out is one step: of two that close, one does


def _nothing() -> None:
    pass


def _none_begun() -> int:
    return 0
