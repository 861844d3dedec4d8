"""Sends the requests of a pool: each runs on a member, and on another one if that member is lost or restarts.

Only the pool's event loop calls this, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

from cudnn_actor.actors import Deadline
from cudnn_actor.pool.costs import Costs
from cudnn_actor.pool.restart_times import RestartTimes
from cudnn_actor.pool.routing import Ended, Given, MemberState, NoMember, Routing
from cudnn_actor.protocol.errors import CudnnActorError, QuarantinedRequest, ServiceStopped

__all__ = ["Dispatching"]

T = TypeVar("T")


class _Recalled(Exception):
    """Raised when a request was taken from a living member, and given to another one."""


class _Pending:
    """A request whose caller waits."""

    __slots__ = ("_changed", "error", "member", "moves", "recalled", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None
        """The caller's task, while it waits for a member's answer."""
        self.recalled = False
        """Whether the wait was cancelled because another member has the request now."""
        self.member: int | None = None
        self.moves = 0
        """How often the request was given to a member or taken from one. By this, an error of a member that
        was lost meanwhile is told from the request's own error."""
        self.error: CudnnActorError | None = None
        self._changed: asyncio.Event | None = None

    def move(self, member: int | None) -> None:
        """Give the request to a member, or, with None, let it wait for one."""
        self.member = member
        self.moves += 1
        if self._changed is not None:
            self._changed.set()

    async def await_member(self, deadline: Deadline) -> int:
        """The member that has the request. Waits while there is none. Raises the request's error, once it has
        one."""
        while self.member is None and self.error is None:
            self._changed = asyncio.Event()
            async with deadline.limiting():
                await self._changed.wait()
        if self.error is not None:
            raise self.error
        assert self.member is not None
        return self.member

    def recall(self) -> None:
        """Cancel the wait for the answer of a living member, so that the request is withdrawn there."""
        if self.task is not None and not self.recalled:
            self.recalled = True
            self.task.cancel()

    async def answer(self, work: Awaitable[T]) -> T:
        """The result of `work`. Raises `_Recalled` in place of a cancellation by `recall`.

        A task counts its cancellations, as `asyncio.timeout` needs it: if other code has cancelled it, too,
        `CancelledError` is raised.
        """
        self.task = task = asyncio.current_task()
        assert task is not None, "requests are sent by tasks"
        cancelling, self.recalled = task.cancelling(), False
        try:
            return await work
        except asyncio.CancelledError:
            if self.recalled and task.cancelling() <= cancelling + 1:
                raise _Recalled from None
            raise
        finally:
            self.task = None
            if self.recalled:
                task.uncancel()


class Dispatching:
    """The open requests of a pool, and the members that may get them.

    Parameters
    ----------
    members
        How many members there are. None is up at first.
    seed
        The seed of the choice among more members than a router compares.
    clock
        A function that returns monotonic seconds.
    """

    def __init__(self, members: int, *, seed: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.routing = Routing(members, seed=seed)
        self._clock = clock
        self._down = set(range(members))
        """The members whose process or worker restarts."""
        self._held = [0] * members
        """For each member: how many `holding` blocks it is in. It gets no new requests meanwhile."""
        for member in range(members):
            self.routing.pause(member)
        self.restart_times = RestartTimes(members, clock())
        self.costs = Costs(members)
        self.finished = [0] * members
        """For each member: how many requests it has answered."""
        self.moved = 0
        """How often a request was taken from a member."""
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count()
        self._closed: str | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(
        self,
        kind: Hashable,
        work: Callable[[int, float | None], Awaitable[T]],
        deadline: Deadline,
        *,
        max_losses: int | None = None,
    ) -> T:
        """Run a pure request, again if its member is lost, and return its answer.

        Parameters
        ----------
        kind
            Requests of one kind take about as long as each other.
        work
            This sends the request to a member. Its arguments are the member's number and the seconds that are
            left. It is cancelled if the member restarts and another one will answer sooner.
        deadline
        The deadline of the request.
        max_losses
            The request ends when it was lost with this many members; None for the usual limit.

        Raises
        ------
        ServiceStopped
            No member is left, or the pool was closed.
        QuarantinedRequest
            The request was lost with too many members.
        CudnnActorError
            `work` has raised it, on a member that was not lost.
        """
        number = next(self._numbers)
        request = self._pending[number] = _Pending()
        self._idle.clear()
        try:
            request.move(self._submit(number, self.costs.estimate_us(kind), max_losses))
            while True:
                member = await request.await_member(deadline)
                moves, given_s = request.moves, self._clock()
                try:
                    found = await request.answer(work(member, deadline.left_s))
                except _Recalled:
                    continue
                except CudnnActorError:
                    if request.moves == moves:
                        raise
                    continue  # the error is only that the member was lost
                if self.routing.answered(number, member):
                    self.finished[member] += 1
                    self.costs.answered(kind, member, given_s=given_s, now_s=self._clock())
                return found
        finally:
            self.routing.withdraw(number)  # does nothing if it was answered
            del self._pending[number]
            if not self._pending:
                self._idle.set()

    def _submit(self, number: int, cost_us: int, max_losses: int | None) -> int | None:
        if self._closed is not None:
            raise ServiceStopped(reason=self._closed)
        try:
            return self.routing.submit(number, cost_us, max_losses)
        except NoMember:
            raise ServiceStopped(reason="no member of the pool is left") from None

    @property
    def closed(self) -> bool:
        """Whether requests are refused, because `close` was called."""
        return self._closed is not None

    async def drain(self) -> None:
        """Wait until all requests have ended."""
        await self._idle.wait()

    def close(self, reason: str) -> None:
        """End all requests with `ServiceStopped`, and refuse further ones. Idempotent."""
        if self._closed is None:
            self._closed = reason
            for request in self._pending.values():
                request.error = request.error or ServiceStopped(reason=reason)
                request.move(None)

    # What happens to members.

    def up(self, member: int) -> None:
        """Let a member get requests, if it was not removed."""
        self._down.discard(member)
        self.restart_times.up(member, self._clock())
        self._arrange()

    def pause(self, member: int) -> None:
        """Note that a member's worker restarts: the member gets no new requests, and others get those that
        they will run sooner."""
        if member in self._down:
            return
        back_us = round(1e6 * self.restart_times.worker_s(member))
        self._down.add(member)
        self.restart_times.down(member, self._clock(), process=False)
        if self.routing.is_up(member):
            self._carry_out(self.routing.pause(member, back_us))
        self._arrange()

    def lost(self, member: int) -> None:
        """Note that a member has ended, and has lost its requests."""
        if self.routing.states[member] is not MemberState.REMOVED:
            self._down.add(member)
            self.restart_times.down(member, self._clock(), process=True)
            self._take_from(member)
            self._carry_out(self.routing.lost(member))
            self._arrange()

    def remove(self, member: int) -> None:
        """Note that a member has ended for good."""
        self._take_from(member)
        self._carry_out(self.routing.remove(member))
        self._arrange()

    @contextlib.contextmanager
    def holding(self, member: int) -> Iterator[None]:
        """Give a member no new requests within the block, as long as another member is up."""
        self._held[member] += 1
        self._arrange()
        try:
            yield
        finally:
            self._held[member] -= 1
            self._arrange()

    def _arrange(self) -> None:
        """Let the members be up that neither restart nor are held. If there are none, let the held ones be
        up."""
        removed = MemberState.REMOVED
        ready = [
            member
            for member, state in enumerate(self.routing.states)
            if state is not removed and member not in self._down
        ]
        wanted = [member for member in ready if not self._held[member]] or ready
        for member in wanted:  # first, so that a member is always up if one can be
            if not self.routing.is_up(member):
                self._carry_out(self.routing.back(member))
        for member in set(ready).difference(wanted):
            if self.routing.is_up(member):
                self.routing.pause(member)

    def _take_from(self, member: int) -> None:
        for number in self.routing.of(member):
            self.moved += 1
            self._pending[number].move(None)

    def _carry_out(self, moved: Sequence[Given | Ended]) -> None:
        for each in moved:
            request = self._pending[each.request]
            if request.member is not None:  # by a living member, which would answer, too
                self.moved += 1
                request.recall()
            if isinstance(each, Given):
                request.move(each.member)
            else:
                request.error = self._error_of(each)
                request.move(None)

    def _error_of(self, ended: Ended) -> CudnnActorError:
        if all(state is MemberState.REMOVED for state in self.routing.states):
            return ServiceStopped(reason="no member of the pool is left", interrupted=ended.losses > 0)
        return QuarantinedRequest(
            request_id=ended.request,
            digest="",
            cause=f"{ended.losses} members of the pool ended or restarted while they had it",
            message="request",
        )
