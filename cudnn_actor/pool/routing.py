"""The places of a pool's requests: which member has which, and which of them wait. Pure: no thread, clock or
I/O.

A member is up, restarting or removed:

| | from | to | its requests |
| --- | --- | --- | --- |
| `pause` | up | restarting | stay with it, except those that others will have run sooner |
| `lost` | up, restarting | restarting | are given to others, or wait if none is up |
| `back` | restarting | up | those that wait are given to members |
| `remove` | up, restarting | removed | as `lost`; once all are removed, they end |

A member gets requests only while it is up. Every request is pure, so that it may run again elsewhere. It
ends once: when the member that has it answers, when its caller withdraws it, when it was lost with too many
members, or when no member is left. An answer of a member that no longer has the request is refused.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from cudnn_actor.pool.choosing import Choose, Loads, least_time_of

__all__ = ["CHOICES", "Ended", "Given", "MemberState", "NoMember", "Routing"]

CHOICES = 8
"""A router takes the best of this many members: on most machines, of all. See docs/trials.md."""


class MemberState(enum.StrEnum):
    """Whether a member may get requests.

    `UP`: it may. `RESTARTING`: not now, because its process or its worker restarts, or a model of it is
    swapped. `REMOVED`: never again, because it was given up.
    """

    UP = "up"
    RESTARTING = "restarting"
    REMOVED = "removed"


class NoMember(Exception):
    """Raised when a request is submitted after all members were removed."""


@dataclass(frozen=True, slots=True)
class Given:
    """A request was given to a member, and has to be sent to it."""

    request: int
    member: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A request has ended without an answer, because it was lost with `losses` members, or because no member
    is left."""

    request: int
    losses: int


@dataclass(slots=True)
class _Request:
    cost_us: int
    member: int | None
    max_losses: int | None = None
    losses: int = 0


class Routing:
    """The members of a pool, and its open requests.

    Parameters
    ----------
    members
        How many members there are, at least 1. They are numbered from 0, and are up at first.
    choose
        The function that chooses the member that gets a request among the members that are up. None for
        `least_time_of(CHOICES)`.
    seed
        The seed of the random generator for `choose`.
    max_losses
        A request that was lost with this many members ends: it may be the cause.
    """

    def __init__(
        self, members: int, *, choose: Choose | None = None, seed: int = 0, max_losses: int = 4
    ) -> None:
        self._states = [MemberState.UP] * members
        self._device_us = [0] * members
        self._has: list[dict[int, None]] = [
            {} for _ in range(members)
        ]  # in the order in which members got them
        self._up = list(range(members))
        self._loads = Loads(up=self._up, device_us=self._device_us, requests=self._has)
        self._requests: dict[int, _Request] = {}
        self._waiting: deque[int] = deque()
        self._choose = least_time_of(CHOICES) if choose is None else choose
        self._random, self._max_losses = Random(seed), max_losses

    @property
    def states(self) -> tuple[MemberState, ...]:
        """The state of each member."""
        return tuple(self._states)

    def is_up(self, member: int) -> bool:
        """Whether a member may get requests."""
        return self._states[member] is MemberState.UP

    @property
    def device_us(self) -> tuple[int, ...]:
        """For each member: the estimated device time of its requests, in microseconds."""
        return tuple(self._device_us)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The requests that no member has, in the order in which they will be given to one."""
        return tuple(self._waiting)

    def of(self, member: int) -> tuple[int, ...]:
        """The requests that a member has, in the order in which it got them."""
        return tuple(self._has[member])

    def submit(self, request: int, cost_us: int, max_losses: int | None = None) -> int | None:
        """Add a request with its estimated device time in microseconds, and give it to a member.

        `max_losses` is the request's own limit; None for the limit of all requests. Returns the member, or
        None if none is up: then the request waits. Raises `NoMember` if all members are removed.
        """
        if request in self._requests:
            raise ValueError(f"request {request} has not ended")
        if not self._up and all(state is MemberState.REMOVED for state in self._states):
            raise NoMember
        found = self._requests[request] = _Request(max(1, cost_us), None, max_losses)
        return self._place(request, found)

    def answered(self, request: int, member: int) -> bool:
        """End a request that a member has answered.

        Returns whether the answer counts. It does not if the request has ended, or if another member has it
        now.
        """
        found = self._requests.get(request)
        if found is None or found.member != member:
            return False
        self._end(request, found)
        return True

    def withdraw(self, request: int) -> int | None:
        """End a request that its caller has withdrawn. Returns the member that has it; None for none."""
        found = self._requests.get(request)
        if found is None:
            return None
        if found.member is None:
            self._waiting.remove(request)
        member = found.member
        self._end(request, found)
        return member

    def pause(self, member: int, back_us: int | None = None) -> list[Given | Ended]:
        """Note that a member restarts and will run the requests that it has. It gets no new ones until it is
        back.

        Parameters
        ----------
        member
            The member's number.
        back_us
            Microseconds until the member may be back. A request that another member would run sooner is given
            to that one. That counts as a loss, since the request may have ended the worker. None: all
            requests stay.

        Returns
        -------
        list
            The requests that were given to other members, or have ended.
        """
        self._require(member, MemberState.UP)
        self._up.remove(member)
        self._states[member] = MemberState.RESTARTING
        return [] if back_us is None else self._sooner_elsewhere(member, back_us)

    def _sooner_elsewhere(self, member: int, free_us: int) -> list[Given | Ended]:
        """Move the requests that other members will have run sooner. The member begins with its requests in
        `free_us` microseconds."""
        moved: list[Given | Ended] = []
        for request in self.of(member):
            found = self._requests[request]
            if self._up and self._device_us[self._choose(self._loads, self._random)] < free_us:
                moved += self._give_to_others([request])
            else:
                free_us += found.cost_us  # it stays, and later requests wait for it
        return moved

    def lost(self, member: int) -> list[Given | Ended]:
        """Note that a member has ended and restarts. Returns its requests that were given to others or have
        ended."""
        self._require(member, MemberState.UP, MemberState.RESTARTING)
        return self._leave(member, MemberState.RESTARTING)

    def back(self, member: int) -> list[Given]:
        """Note that a restarting member is up. Returns which member got each request that had to wait."""
        self._require(member, MemberState.RESTARTING)
        self._states[member] = MemberState.UP
        self._up.append(member)
        waiting, given = list(self._waiting), list[Given]()
        self._waiting.clear()
        for request in waiting:
            chosen = self._place(request, self._requests[request])
            assert chosen is not None, "a member is up"
            given.append(Given(request, chosen))
        return given

    def remove(self, member: int) -> list[Given | Ended]:
        """Give a member up for good. Returns its requests that were given to others or have ended. If no
        member is left, all requests end."""
        if self._states[member] is MemberState.REMOVED:
            return []
        moved = self._leave(member, MemberState.REMOVED)
        if any(state is not MemberState.REMOVED for state in self._states):
            return moved
        return [*moved, *self._end_all(list(self._waiting))]

    def _require(self, member: int, *states: MemberState) -> None:
        if self._states[member] not in states:
            raise ValueError(f"member {member} is {self._states[member]}")

    def _leave(self, member: int, state: MemberState) -> list[Given | Ended]:
        if self._states[member] is MemberState.UP:
            self._up.remove(member)
        self._states[member] = state
        return self._give_to_others(self.of(member))

    def _give_to_others(self, requests: Sequence[int]) -> list[Given | Ended]:
        """Take requests from the members that have lost them, and give them to others."""
        for request in requests:
            found = self._requests[request]
            self._take_from(request, found)
            found.losses += 1
        spent = [request for request in requests if self._is_spent(self._requests[request])]
        moved: list[Given | Ended] = list(self._end_all(spent))
        for request in requests:
            if (again := self._requests.get(request)) is not None:
                chosen = self._place(request, again)
                if chosen is not None:
                    moved.append(Given(request, chosen))
        return moved

    def _is_spent(self, found: _Request) -> bool:
        return found.losses >= (self._max_losses if found.max_losses is None else found.max_losses)

    def _end_all(self, requests: Iterable[int]) -> Iterable[Ended]:
        """End requests that no member has."""
        ended = [Ended(request, self._requests.pop(request).losses) for request in requests]
        gone = {each.request for each in ended}
        self._waiting = deque(request for request in self._waiting if request not in gone)
        return ended

    def _place(self, request: int, found: _Request) -> int | None:
        if not self._up:
            self._waiting.append(request)
            return None
        member = self._choose(self._loads, self._random)
        found.member = member
        self._has[member][request] = None
        self._device_us[member] += found.cost_us  # whole numbers, so that no rounding errors add up
        return member

    def _take_from(self, request: int, found: _Request) -> None:
        member = found.member
        assert member is not None, "it has one"
        found.member = None
        del self._has[member][request]
        self._device_us[member] -= found.cost_us

    def _end(self, request: int, found: _Request) -> None:
        if found.member is not None:
            self._take_from(request, found)
        del self._requests[request]
