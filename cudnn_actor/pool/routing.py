"""The places of a pool's requests: which member has which, and which of them wait. Pure: no thread, clock or
I/O.

A member is up, restarting or removed:

| | from | to | its requests |
| --- | --- | --- | --- |
| `pause` | up | restarting | stay with it, except those that another member will have run sooner |
| `note_loss` | up, restarting | restarting | are given to other members, or wait if none is up |
| `back` | restarting | up | waiting requests are given to members |
| `remove` | up, restarting | removed | as `note_loss`; once all are removed, they end |

A member gets requests only while it is up. Every request is pure, so that it may run again elsewhere. It
ends once: when the member that has it answers, when its caller withdraws it, when it was lost with too many
members, or when no member is left. An answer of a member that no longer has the request is refused.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

from cudnn_actor.pool.choosing import Choose, Loads, least_time_of

__all__ = ["CHOICES", "Ended", "Given", "MemberState", "NoMember", "Routing"]

R = TypeVar("R", bound=Hashable)

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
class Given(Generic[R]):
    """A request was given to a member, and has to be sent to it."""

    request: R
    member: int


@dataclass(frozen=True, slots=True)
class Ended(Generic[R]):
    """A request has ended without an answer, because it was lost with `losses` members, or because no member
    is left."""

    request: R
    losses: int


@dataclass(slots=True)
class _Losses:
    """With how many members a request was lost, and with how many it ends."""

    limit: int
    number: int = 0


class Routing(Generic[R]):
    """The members of a pool, and its open requests.

    A request may be any object that is hashable. Nearly all are answered by the member that gets them first.
    So there is no record for a request: only its cost, by request, with the member that has it.

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
        self._has: list[dict[R, int]] = [{} for _ in range(members)]
        """For each member: the costs of its requests, in the order in which it got them."""
        self._up = list(range(members))
        self._loads = Loads(up=self._up, device_us=self._device_us, requests=self._has)
        self._waiting: dict[R, int] = {}
        """The costs of the requests that no member has, in their order."""
        self._losses: dict[R, _Losses] = {}
        """The losses of the open requests that were lost, or that have a limit of their own."""
        self._choose = least_time_of(CHOICES) if choose is None else choose
        self.compares_all = choose is None and members <= CHOICES
        """Whether a request is given to the one with the least to do of all members that are up."""
        self._random, self._max_losses = Random(seed), max_losses

    @property
    def states(self) -> tuple[MemberState, ...]:
        """The state of each member."""
        return tuple(self._states)

    def is_up(self, member: int) -> bool:
        """Whether a member may get requests."""
        return self._states[member] is MemberState.UP

    @property
    def loads(self) -> Loads:
        """The loads of the members, which change with the router. `Dispatching` gives requests to members,
        and ends those that were answered, by changing them itself: a call to this class takes longer."""
        return self._loads

    @property
    def device_us(self) -> tuple[int, ...]:
        """For each member: the estimated device time of its requests, in microseconds."""
        return tuple(self._device_us)

    @property
    def waiting(self) -> tuple[R, ...]:
        """The requests that no member has, in the order in which they will be given to one."""
        return tuple(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether no request is open."""
        return not (self._waiting or any(self._has))

    @property
    def open(self) -> tuple[R, ...]:
        """All requests that have not ended."""
        return tuple(itertools.chain(*self._has, self._waiting))

    def of(self, member: int) -> tuple[R, ...]:
        """The requests that a member has, in the order in which it got them."""
        return tuple(self._has[member])

    def submit(self, request: R, cost_us: int, max_losses: int | None = None) -> int | None:
        """Add a request with its estimated device time in microseconds, and give it to a member.

        `max_losses` is the request's own limit; None for the limit of all requests. Returns the member, or
        None if none is up: then the request waits. Raises `NoMember` if all members are removed.
        """
        if not self._up and all(state is MemberState.REMOVED for state in self._states):
            raise NoMember
        if max_losses is not None:
            self._losses[request] = _Losses(max_losses)
        return self._place(request, cost_us or 1)

    def end_answered(self, request: R, member: int) -> bool:
        """End a request that a member has answered.

        Returns whether the answer counts. It does not if the request has ended, or if another member has it
        now.
        """
        cost_us = self._has[member].pop(request, None)
        if cost_us is None:
            return False
        self._device_us[member] -= cost_us
        self._losses.pop(request, None)
        return True

    def withdraw(self, request: R) -> int | None:
        """End a request that its caller has withdrawn. Returns the member that has it; None for none."""
        self._losses.pop(request, None)
        if self._waiting.pop(request, None) is None:
            for member, has in enumerate(self._has):
                if request in has:
                    self._take_from(member, request)
                    return member
        return None

    def pause(self, member: int, back_us: int | None = None) -> list[Given[R] | Ended[R]]:
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

    def _sooner_elsewhere(self, member: int, free_us: int) -> list[Given[R] | Ended[R]]:
        """Move the requests that other members will have run sooner. The member will begin to run its
        requests in `free_us` microseconds."""
        moved: list[Given[R] | Ended[R]] = []
        for request, cost_us in tuple(self._has[member].items()):
            if self._up and self._device_us[self._choose(self._loads, self._random)] < free_us:
                moved += self._give_to_others(member, [request])
            else:
                free_us += cost_us  # it stays, and later requests wait for it
        return moved

    def note_loss(self, member: int) -> list[Given[R] | Ended[R]]:
        """Note that a member has ended and restarts. Returns its requests that were given to other members
        or have ended."""
        self._require(member, MemberState.UP, MemberState.RESTARTING)
        return self._leave(member, MemberState.RESTARTING)

    def back(self, member: int) -> list[Given[R]]:
        """Note that a restarting member is up. Returns which member got each request that had to wait."""
        self._require(member, MemberState.RESTARTING)
        self._states[member] = MemberState.UP
        self._up.append(member)
        waiting, self._waiting = self._waiting, {}
        given = list[Given[R]]()
        for request, cost_us in waiting.items():
            chosen = self._place(request, cost_us)
            assert chosen is not None, "a member is up"
            given.append(Given(request, chosen))
        return given

    def remove(self, member: int) -> list[Given[R] | Ended[R]]:
        """Give a member up for good. Returns its requests that were given to other members or have ended. If
        no member is left, all requests end."""
        if self._states[member] is MemberState.REMOVED:
            return []
        moved = self._leave(member, MemberState.REMOVED)
        if any(state is not MemberState.REMOVED for state in self._states):
            return moved
        waiting, self._waiting = self._waiting, {}
        return [*moved, *self._end_all(waiting)]

    def _require(self, member: int, *states: MemberState) -> None:
        if self._states[member] not in states:
            raise ValueError(f"member {member} is {self._states[member]}")

    def _leave(self, member: int, state: MemberState) -> list[Given[R] | Ended[R]]:
        if self._states[member] is MemberState.UP:
            self._up.remove(member)
        self._states[member] = state
        return self._give_to_others(member, self.of(member))

    def _give_to_others(self, member: int, requests: Sequence[R]) -> list[Given[R] | Ended[R]]:
        """Take requests from the member that has lost them, and give them to other members."""
        costs_us = {request: self._take_from(member, request) for request in requests}
        spent = [request for request in requests if self._is_spent(request)]
        moved: list[Given[R] | Ended[R]] = list(self._end_all(spent))
        for request in spent:
            del costs_us[request]
        for request, cost_us in costs_us.items():
            chosen = self._place(request, cost_us)
            if chosen is not None:
                moved.append(Given(request, chosen))
        return moved

    def _is_spent(self, request: R) -> bool:
        """Note the loss of a request. Returns whether it was lost too often."""
        losses = self._losses.setdefault(request, _Losses(self._max_losses))
        losses.number += 1
        return losses.number >= losses.limit

    def _end_all(self, requests: Iterable[R]) -> Iterable[Ended[R]]:
        """End requests that no member has, and that do not wait."""
        for request in requests:
            losses = self._losses.pop(request, None)
            yield Ended(request, 0 if losses is None else losses.number)

    def _place(self, request: R, cost_us: int) -> int | None:
        if not self._up:
            self._waiting[request] = cost_us
            return None
        member = self._choose(self._loads, self._random)
        self._has[member][request] = cost_us
        self._device_us[member] += cost_us  # whole numbers, so that no rounding errors add up
        return member

    def _take_from(self, member: int, request: R) -> int:
        """Take a request from a member. Returns its cost."""
        cost_us = self._has[member].pop(request)
        self._device_us[member] -= cost_us
        return cost_us
