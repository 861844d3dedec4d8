"""The event loop that owns the worker's socket: it decides when its turns come, and reads the answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

from cudnn_actor.actors import LoopBridge
from cudnn_actor.actors.awake import Awake, look_at
from cudnn_actor.actors.interrupts import is_of_a_handler
from cudnn_actor.isolation.process.cores import ANSWER_S
from cudnn_actor.isolation.process.parent.worker_host import WorkerHost
from cudnn_actor.processes.channel import Channel

__all__ = ["OwningLoop", "TurnTaker"]

LEAST_GATHERED, MOST_GATHERED = 4, 32
SHARE = 3
"""A loop sends at once when the gathered messages are at least 1/SHARE of those in flight, now or usually.
The two numbers above bound this threshold."""
WAITING_S = 1e-3
"""A loop has a turn at least this often while its thread waits for answers without one."""


class TurnTaker(Protocol):
    """The part of the dispatcher that an owning loop uses: it takes the loop's turns."""

    host: WorkerHost
    channel: Channel | None
    needs_thread: bool
    loops_may_stay_awake: bool
    wake_monitor: Callable[[], Any]
    on_near: list[Callable[[], Any]]

    def turn(self, bridge: LoopBridge | None = None, *, read: bool = False) -> None:
        """Take a turn."""

    def take_alone(self, bridge: LoopBridge) -> bool:
        """Read and deliver the answer to the only request, if it was sent alone."""

    def is_owner(self, loop: OwningLoop) -> bool:
        """Whether a loop owns the socket."""


class OwningLoop:
    """The event loop that owns the socket: it schedules turns and reads.

    Methods run on the loop's own thread unless they say otherwise.
    """

    def __init__(self, dispatcher: TurnTaker, bridge: LoopBridge) -> None:
        self._dispatcher = dispatcher
        self.bridge = bridge
        self._scheduled = False
        self._gathered = 0
        """Messages since the last turn."""
        self._usual = 0
        """How many messages are usually in flight when answers come: the most lately, less an eighth at each
        reading. Right after many answers fewer are in flight, until the tasks that got them send again."""
        self._channel: Channel | None = None
        self._descriptors: list[int] = []
        """The duplicated descriptor of the socket that the loop reads: one, or none."""
        self._awake = Awake(bridge.loop)
        self.looks: Callable[[], object] = bool
        """Whether the socket can be read; nothing if the loop does not read it."""
        self._waited_since_s = 0.0
        """When this thread first waited for an answer since the loop's last turn."""
        self._turns_again = False
        """Whether the loop has a callback that notes its next turn."""
        self._progress_s = 0.0
        """`InFlightTable.progress_s` when it began to stay awake: it changes with each answer."""

    def schedule(self) -> None:
        """Take a turn: at once if the worker is idle or enough has gathered, else in a callback of the loop.

        A loop's tasks send one after another. If one turn sent all their messages together, the worker would
        wait for the last task, and then all tasks for the worker. In small batches the two work in parallel.
        """
        dispatcher = self._dispatcher
        self._gathered = gathered = self._gathered + 1
        in_flight = len(dispatcher.host.in_flight.requests)
        if self._channel is dispatcher.channel and (
            not in_flight
            or gathered >= MOST_GATHERED
            or (gathered >= LEAST_GATHERED and gathered * SHARE >= max(in_flight, self._usual))
        ):
            self._gathered = 0
            dispatcher.turn(self.bridge)
            if dispatcher.loops_may_stay_awake and dispatcher.host.values.are_answered_soon:
                self.await_answer()
        elif not self._scheduled or self._gathered > MOST_GATHERED:  # or it was lost by asyncio
            self.bridge.loop.call_soon(self._run)
            self._scheduled = True
        if self._channel is not dispatcher.channel:  # it reads no answers yet, and may lose the callback
            dispatcher.wake_monitor()

    def _run(self) -> None:
        try:
            self._scheduled = False
            self._gathered = 0
            if self._channel is not self._dispatcher.channel:
                self._follow()
            self._dispatcher.turn(self.bridge)
        except BaseException:
            self._dispatcher.wake_monitor()  # in the same step as the exception
            raise

    def is_running_here(self) -> bool:
        """Whether this loop is running on the calling thread. Any thread."""
        return asyncio._get_running_loop() is self.bridge.loop

    def reads(self, channel: Channel | None) -> bool:
        """Whether the loop reads this socket, as far as this object knows. Any thread."""
        return channel is not None and self._channel is channel and not self.bridge.loop.is_closed()

    def follow_soon(self) -> None:
        """Let the loop switch to the present worker's socket, or to none. Any thread."""
        try:
            self.bridge.loop.call_soon_threadsafe(self._follow)
        except RuntimeError:  # it has closed, and its selector with it
            self.close()

    def _follow(self) -> None:
        """Read the present worker's socket; none if this loop is not the owner any more."""
        dispatcher = self._dispatcher
        channel = dispatcher.channel if dispatcher.is_owner(self) else None
        if channel is self._channel and (channel is not None or not self._descriptors):
            return
        self._let_go()
        if channel is None:
            if dispatcher.needs_thread and self.bridge.awaited:
                self.bridge.note_sent(needs_thread=True)
            return
        try:
            self._descriptors.extend(map(os.dup, (channel.fileno(),)))  # one step makes and stores it
        except OSError as error:  # the socket is closed already: the monitor knows
            if is_of_a_handler(error):
                raise
            return
        self.bridge.loop.add_reader(self._descriptors[0], self._readable)
        self.looks = look_at(self._descriptors[0])
        self._channel = channel  # last: so a loop that `reads` reports as reading does read
        dispatcher.turn(self.bridge, read=True)

    def _readable(self) -> None:
        dispatcher = self._dispatcher
        table = dispatcher.host.in_flight
        in_flight = len(table.requests)
        self._usual = max(in_flight, self._usual * 7 // 8)
        if in_flight != 1 or not dispatcher.take_alone(self.bridge):
            dispatcher.turn(self.bridge, read=True)
        if table.nearing:
            self.await_answer()
            for tell in dispatcher.on_near:
                tell()
        channel = self._channel  # None if an exception has interrupted `_follow` or `_let_go`
        if channel is None or channel.ended or channel is not dispatcher.channel:
            self._let_go()

    def await_answer_soon(self) -> None:
        """Let the loop stay awake for the answer to a request that another thread has sent. Any thread."""
        with contextlib.suppress(RuntimeError):  # it has closed
            self.bridge.loop.call_soon_threadsafe(self.await_answer)

    def await_answer(self) -> None:
        """Stay awake until the answer comes that is near, but no longer than `ANSWER_S`.

        The worker has said so, or all that was sent is one short copy: its answer comes about when the worker
        could have said so.
        """
        table = self._dispatcher.host.in_flight
        table.nearing = False  # another thread may set it meanwhile: a word that is lost costs time alone
        if table.requests and not self._awake.stays:
            self._progress_s = table.progress_s
            self._awake.stay(ANSWER_S, self._none_answered, self.look)

    def may_wait(self) -> bool:
        """Whether this thread may wait for an answer without a turn of the loop: nothing else in it is ready,
        and it has had a turn in the last `WAITING_S`. Not with uvloop, which does not say what is ready."""
        ready = getattr(self.bridge.loop, "_ready", None)
        if ready is None:
            return False
        now_s = time.monotonic()
        if not ready:
            self._turns_again, self._waited_since_s = True, now_s
            self.bridge.loop.call_soon(self._note_turn)
            return True
        return self._turns_again and len(ready) == 1 and now_s - self._waited_since_s < WAITING_S

    def _note_turn(self) -> None:
        self._turns_again = False

    def look(self) -> bool:
        """Take the answers that have come. Returns whether any had. For a loop that stays awake."""
        if not self.looks():
            return False
        self._readable()
        return True

    def _none_answered(self) -> bool:
        return self._dispatcher.host.in_flight.progress_s == self._progress_s

    def _let_go(self) -> None:
        self._channel, self.looks = None, bool
        for descriptor in self._descriptors:
            self.bridge.loop.remove_reader(descriptor)
        self.close()

    def forget_parent(self) -> None:
        """Read no socket in a forked child. The selector is the parent's, so it is left unchanged."""
        self.close()

    def __del__(self) -> None:
        self.close()  # for a loop that was closed before it could run `_follow`

    def close(self) -> None:
        """Close the descriptor, which the loop does not read any more. Any thread; idempotent."""
        self._channel, self.looks = None, bool
        # Suppressed: no descriptor is left, or this object's construction was interrupted.
        with contextlib.suppress(IndexError, AttributeError):
            os.close(self._descriptors.pop())  # `pop` is one step: of two concurrent closers, one gets it
