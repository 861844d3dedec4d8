"""Carries out, for `Pool` and `RayPool`, the consequences of changes of the members."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from cudnn_actor.actors.logs import Log
from cudnn_actor.pool.dispatching import Dispatching
from cudnn_actor.pool.listener import Numbered
from cudnn_actor.service.event_log import EventLog
from cudnn_actor.supervision import Clock, LifecycleEvent
from cudnn_actor.supervision.events import log_event, stamp

__all__ = ["Membership"]


M = TypeVar("M", bound=Numbered)


class Membership(Generic[M]):
    """The listener of all members of a pool: it decides which members get requests, and keeps the events.

    Parameters
    ----------
    name
        The pool's name.
    members
        How many members the pool has.
    dispatching
        The dispatching, which has the pool's requests.
    log
        The log for the lines of events.
    prepare
        A function that makes the pool's models and buffers on a member that has just started. It raises
        `CudnnActorError`.
    on_lost
        This is called with a member that was lost, before other members get its requests.
    on_given_up
        This is called with a member that is not started again, and with the number of members that remain.
    """

    def __init__(
        self,
        name: str,
        members: int,
        dispatching: Dispatching,
        log: Log,
        *,
        prepare: Callable[[M], Awaitable[None]],
        on_given_up: Callable[[M, int], object],
        on_lost: Callable[[M], object] | None = None,
    ) -> None:
        self._name, self._members, self._dispatching, self._log = name, members, dispatching, log
        self._prepare, self._on_given_up, self._on_lost = prepare, on_given_up, on_lost
        self.events = EventLog()
        self.settled = asyncio.Event()
        """Set when each member has been up once, or was given up."""
        self._unsettled = set(range(members))
        self._given_up: list[M] = []

    @property
    def names_given_up(self) -> str:
        """The names of the members that were given up; "" if none was."""
        return ", ".join(member.name for member in self._given_up)

    @property
    def last_cause(self) -> str:
        """The cause in the latest event that has one."""
        causes = [str(event.cause) for event in self.events.all if hasattr(event, "cause")]
        return causes[-1] if causes else "unknown"

    @property
    def remaining(self) -> int:
        """How many members were not given up."""
        return self._members - len(self._given_up)

    @property
    def up_once(self) -> int:
        """How many members have been up, and were not given up."""
        return self._members - len(self._unsettled | {member.number for member in self._given_up})

    # The methods of `listener.Listener`.

    async def prepare(self, member: M) -> None:
        """Make the pool's models and buffers on a member that has just started."""
        await self._prepare(member)

    def up(self, member: M) -> None:
        """Let a member get requests."""
        self._dispatching.up(member.number)
        self._settle(member)

    def pauses(self, member: M) -> None:
        """Give a member no new requests while its worker restarts."""
        self._dispatching.pause(member.number)

    def lost(self, member: M) -> None:
        """Give the requests of a lost member to other members."""
        if self._on_lost is not None:
            self._on_lost(member)
        self._dispatching.note_loss(member.number)

    def given_up(self, member: M) -> None:
        """Go on without a member. The pool ends if too few remain."""
        self._given_up.append(member)
        self._dispatching.remove(member.number)
        self._settle(member)
        self._on_given_up(member, self.remaining)

    def happened(self, event: LifecycleEvent) -> None:
        """Keep an event, let it reach the iterators of `events.follow`, and write its log line."""
        event = stamp(event, self._name, Clock())
        self.events.append(event)
        log_event(self._log, event)

    def _settle(self, member: M) -> None:
        self._unsettled.discard(member.number)
        if not self._unsettled:
            self.settled.set()
