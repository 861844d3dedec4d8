"""Sends the requests of a pool: each runs on a member, and on another one if that member is lost or restarts.

Only the pool's event loop calls this, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from asyncio import current_task
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from cudnn_actor.actors import Deadline
from cudnn_actor.actors.event_loop import running_loop
from cudnn_actor.pool.costs import Cost, Costs
from cudnn_actor.pool.restart_times import RestartTimes
from cudnn_actor.pool.routing import Ended, Given, MemberState, NoMember, Routing
from cudnn_actor.protocol.errors import CudnnActorError, QuarantinedRequest, ServiceStopped

__all__ = ["Dispatching", "OpenRequest"]

T = TypeVar("T")


class OpenRequest(msgspec.Struct, eq=False):
    """A request whose caller waits. One is made for each request. It is a struct, since to make that takes no
    bytecode.

    Parameters
    ----------
    cost
        The estimate for its kind.
    task
        The caller's task.
    cancelling
        The cancellations of the task when it began to wait for a member's answer.
    given_s
        When it was sent to the member, on the clock of `Dispatching`.
    """

    cost: Cost
    task: asyncio.Task[Any]
    cancelling: int
    given_s: float
    member: int | None = None
    """The member that has the request; None while it waits for one."""
    moves: int = 0
    """How often the request was taken from a member, or given to one; 0 for one that `begin` has given to its
    first. By this, an error of a member that was lost meanwhile is told from the request's own error."""
    is_sent: bool = True
    """Whether the task waits for a member's answer, and not for a member."""
    recalled: bool = False
    """Whether the wait was cancelled because another member has the request now."""
    error: CudnnActorError | None = None
    changed: asyncio.Event | None = None

    def move(self, member: int | None) -> None:
        """Give the request to a member, or, with None, let it wait for one."""
        self.member = member
        self.moves += 1
        if self.changed is not None:
            self.changed.set()

    async def await_member(self, deadline: Deadline) -> int:
        """The member that has the request. Waits while there is none. Raises the request's error, once it has
        one."""
        self.is_sent = False
        while self.member is None and self.error is None:
            self.changed = asyncio.Event()
            async with deadline.limiting():
                await self.changed.wait()
        self.is_sent = True
        if self.error is not None:
            raise self.error
        assert self.member is not None
        return self.member

    def recall(self) -> None:
        """Cancel the wait for the answer of a living member, so that the request is withdrawn there."""
        if self.is_sent and not self.recalled:
            self.recalled = True
            self.task.cancel()

    def end_recall(self) -> bool:
        """Note that a wait that was recalled has ended. Returns whether nothing else has cancelled the task.

        A task counts its cancellations, as `asyncio.timeout` needs it.
        """
        self.recalled = False
        return self.task.uncancel() <= self.cancelling


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
        self.routing = Routing[OpenRequest](members, seed=seed)
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
        self._quarantined = itertools.count()
        # For `begin` and `end`, which are in the way of each request:
        self._costs, self._last_s = self.costs.known, self.costs.last_s
        self._up: Sequence[int] = ()
        """The members among which `begin` chooses; none if it must not, because there are many, or because
        the pool was closed."""
        loads: Any = self.routing.loads
        self._device_us: list[int] = loads.device_us
        self._has: list[dict[OpenRequest, int]] = loads.requests
        self._loop: asyncio.AbstractEventLoop | None = None
        """The pool's event loop, from when a member was up on. To find it takes longer than all else here: on
        Python 3.11, a system call."""
        self._closed: str | None = None
        self._idle: asyncio.Event | None = None
        """Set once no request is open; None while nobody waits for that."""

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
        request = self.begin(kind, max_losses)
        try:
            return await self.go_on(request, work, deadline)
        except BaseException:
            self.withdraw(request)
            raise

    def begin(self, kind: Hashable, max_losses: int | None = None) -> OpenRequest:
        """Submit a request of the current task, and give it to a member, if one is up.

        The caller goes on with `go_on`. Or, if the request has a member, the caller may send it there itself
        at once, and then call `end` after the answer, or, after an error, `go_on` if `has_moved` returns
        True. However that ends, if it ends without an answer, the caller calls `withdraw`.

        Raises `ServiceStopped`.
        """
        cost, up, task = self._costs.get(kind), self._up, current_task(self._loop)
        if cost is None or task is None or not up or max_losses is not None:
            return self._begin_unusual(kind, max_losses)
        request = OpenRequest(cost, task, task.cancelling(), self._clock())
        # The same as `Routing.submit`, inlined: the first of the members with the least to do.
        device_us, member = self._device_us, up[0]
        if least_us := device_us[member]:
            for other in up:
                if device_us[other] < least_us:
                    member, least_us = other, device_us[other]
        request.member = member
        # One step, which no signal handler interrupts: nothing is called.
        self._has[member][request] = cost_us = cost.us
        device_us[member] = least_us + cost_us
        return request

    def _begin_unusual(self, kind: Hashable, max_losses: int | None) -> OpenRequest:
        """Submit a request that `begin` does not submit in fewer steps."""
        if self._closed is not None:
            raise ServiceStopped(reason=self._closed)
        cost, task = self.costs.of(kind), current_task()  # of this loop: in a forked child, it is another
        assert task is not None, "requests are sent by tasks"
        request = OpenRequest(cost, task, task.cancelling(), self._clock(), moves=1)
        try:
            request.member = self.routing.submit(request, cost.us, max_losses)
        except NoMember:
            raise ServiceStopped(reason="no member of the pool is left") from None
        except BaseException:
            self.withdraw(request)
            raise
        return request

    def end(self, request: OpenRequest, member: int) -> None:
        """Note that a member has answered a request."""
        cost_us = None if request.moves or self._idle is not None else self._has[member].pop(request, None)
        if cost_us is None:
            self._end_unusual(request, member)
            return
        # The same as `Routing.end_answered` and `Costs.note_answer`, inlined.
        self._device_us[member] -= cost_us
        self.finished[member] += 1
        now_s, given_s, last_s = self._clock(), request.given_s, self._last_s[member]
        self._last_s[member] = now_s
        request.cost.observe((now_s - (given_s if given_s > last_s else last_s)) * 1e6)

    def _end_unusual(self, request: OpenRequest, member: int) -> None:
        """Note the answer of a request that was perhaps moved, while somebody perhaps waits for the end of
        all."""
        if self.routing.end_answered(request, member):
            self.finished[member] += 1
            self.costs.note_answer(request.cost, member, request.given_s, self._clock())
        else:
            self.routing.withdraw(request)  # another member has it: the answer was on its way
        if request.recalled:
            request.end_recall()
        if self._idle is not None:
            self._note_idle()

    def has_moved(self, request: OpenRequest, moves: int, error: BaseException) -> bool:
        """Whether an error, with which the wait for a member's answer has ended, only says that the request
        was taken from that member. If not, it is the request's own.

        `moves`: the request's, when it was sent to the member.
        """
        recalled = request.recalled and request.end_recall()
        if isinstance(error, asyncio.CancelledError):
            return recalled
        return isinstance(error, CudnnActorError) and request.moves != moves

    async def go_on(
        self, request: OpenRequest, work: Callable[[int, float | None], Awaitable[T]], deadline: Deadline
    ) -> T:
        """Run a request of `begin` on the member that has it, or that will get it: see `run`."""
        while True:
            member = await request.await_member(deadline)
            moves, request.given_s = request.moves, self._clock()
            request.cancelling = request.task.cancelling()
            try:
                found = await work(member, deadline.left_s)
            except BaseException as error:
                if not self.has_moved(request, moves, error):
                    raise
            else:
                self.end(request, member)
                return found

    def withdraw(self, request: OpenRequest) -> None:
        """End a request without an answer, if it has not ended."""
        self.routing.withdraw(request)
        if self._idle is not None:
            self._note_idle()

    def _note_idle(self) -> None:
        assert self._idle is not None, "somebody waits for it"
        if self.routing.is_idle:
            self._idle.set()
            self._idle = None

    @property
    def closed(self) -> bool:
        """Whether requests are refused, because `close` was called."""
        return self._closed is not None

    async def drain(self) -> None:
        """Wait until all requests have ended."""
        if not self.routing.is_idle:
            self._idle = idle = self._idle or asyncio.Event()
            await idle.wait()

    def close(self, reason: str) -> None:
        """End all requests with `ServiceStopped`, and refuse further ones. Idempotent."""
        if self._closed is None:
            self._closed, self._up = reason, ()
            for request in self.routing.open:
                request.error = ServiceStopped(reason=reason)
                request.move(None)

    # Changes of members.

    def up(self, member: int) -> None:
        """Let a member get requests, if it was not removed."""
        self._down.discard(member)
        self.restart_times.up(member, self._clock())
        if self._closed is None and self.routing.compares_all:
            self._up = self.routing.loads.up
        self._loop = running_loop()
        self._arrange()

    def pause(self, member: int) -> None:
        """Note that a member's worker restarts: the member gets no new requests, and other members get those
        of its requests that they will run sooner."""
        if member in self._down:
            return
        back_us = round(1e6 * self.restart_times.worker_s(member))
        self._down.add(member)
        self.restart_times.down(member, self._clock(), process=False)
        if self.routing.is_up(member):
            self._carry_out(self.routing.pause(member, back_us))
        self._arrange()

    def note_loss(self, member: int) -> None:
        """Note that a member has ended, and has lost its requests."""
        if self.routing.states[member] is not MemberState.REMOVED:
            self._down.add(member)
            self.restart_times.down(member, self._clock(), process=True)
            self._take_from(member)
            self._carry_out(self.routing.note_loss(member))
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
        for request in self.routing.of(member):
            self.moved += 1
            request.move(None)

    def _carry_out(self, moved: Sequence[Given[OpenRequest] | Ended[OpenRequest]]) -> None:
        for each in moved:
            request = each.request
            if request.member is not None:  # it was taken from a living member, which would answer, too
                self.moved += 1
                request.recall()
            if isinstance(each, Given):
                request.move(each.member)
            else:
                request.error = self._error_of(each)
                request.move(None)
        if self._idle is not None:
            self._note_idle()

    def _error_of(self, ended: Ended[OpenRequest]) -> CudnnActorError:
        if all(state is MemberState.REMOVED for state in self.routing.states):
            return ServiceStopped(reason="no member of the pool is left", interrupted=ended.losses > 0)
        return QuarantinedRequest(
            request_id=next(self._quarantined),
            digest="",
            cause=f"{ended.losses} members of the pool ended or restarted while they had it",
            message="request",
        )
