"""`Pool`: several services of one machine behind one handle."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from cudnn_actor.actors.logs import Log
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.pool.dispatching import Dispatching
from cudnn_actor.pool.member import Member
from cudnn_actor.pool.membership import Membership
from cudnn_actor.pool.requests import PoolRequests
from cudnn_actor.pool.routing import MemberState
from cudnn_actor.processes.own_folder import OwnFolder
from cudnn_actor.protocol.errors import ServiceStopped, StartFailed
from cudnn_actor.protocol.types.checks import require_seconds
from cudnn_actor.service.client import DRAIN_S
from cudnn_actor.supervision import (
    Backoff,
    ChildPolicy,
    ExitReason,
    LifecycleEvent,
    RestartIntensity,
    Stopped,
    SupervisorPolicy,
)

__all__ = ["MemberStatistics", "Pool", "PoolStatistics"]

log = Log("cudnn_actor.pool")

T = TypeVar("T")
SHUTDOWN_S = 5.0
"""Seconds within which a member's process must end."""


class MemberStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A member of a pool, as the pool knows it.

    Parameters
    ----------
    name
        The member's name in log lines and events.
    device
        The device of its service, as in `spawn`.
    state
        Whether the member may get requests.
    pid
        The id of the member's process; None while there is none.
    socket
        The path of the member's socket, by which other processes of this user may attach to its service:
        `connect(path)`.
    restarts
        How often the member's process has been replaced.
    finished
        How many requests of the pool the member has answered.
    outstanding
        How many open requests the member has.
    device_us
        The estimated device time of the open requests, in microseconds.
    """

    name: str
    device: str
    state: MemberState
    pid: int | None
    socket: str
    restarts: int
    finished: int
    outstanding: int
    device_us: int


class PoolStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a pool.

    Parameters
    ----------
    members
        The statistics of each member.
    waiting
        How many requests wait until a member is up.
    moved
        How often a request was taken from a member that was lost, or that restarted while another one was to
        run the request sooner.
    direct_moves, host_moves
        How many buffers `move` has copied from device to device, and through the host.
    """

    members: tuple[MemberStatistics, ...]
    waiting: int
    moved: int
    direct_moves: int
    host_moves: int


class Pool(PoolRequests):
    """Several services of one machine behind one handle. `spawn_pool` makes it.

    Each member is a service in a process of its own. A pure request (`compute`, `run`) goes to the member
    with the least to do. If that member is lost, the request runs again on another one: the caller sees
    latency, and no error. Use a pool on the event loop on which it was made.

    Parameters
    ----------
    name
        The pool's name.
    devices
        The device of each member.
    options
        The options of `spawn` for the members, as plain data.
    folder
        The folder of the members' sockets. The pool owns it from now on.
    intensity
        How often each member may be replaced.
    min_ready
        The pool stops when fewer members than this are left, because the rest were given up.
    ready_within_s
        Seconds within which a member must start.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[str],
        options: Mapping[str, Any],
        folder: OwnFolder,
        *,
        intensity: RestartIntensity,
        min_ready: int,
        ready_within_s: float,
    ) -> None:
        self.devices = tuple(devices)
        self._folder, self._min_ready = folder, min_ready
        self._process = os.getpid()
        self._ending: asyncio.Task[None] | None = None
        self.failure: ServiceStopped | None = None
        """Why the pool has stopped by itself; None if it has not."""
        self.on_failure: Callable[[], object] | None = None
        """Called when it stops by itself."""
        dispatching = Dispatching(len(self.devices))
        self._membership: Membership[Member] = Membership(
            name,
            len(self.devices),
            dispatching,
            log,
            prepare=self._prepare,
            on_lost=self._note_lost,
            on_given_up=self._note_given_up,
        )
        members = [
            Member(
                number,
                each := f"{name}-{number}",
                options={**options, "device": device, "name": each},
                path=folder.path / f"{number}.sock",
                policy=SupervisorPolicy(
                    children=(ChildPolicy(id=each, ready_within_s=ready_within_s, shutdown_s=SHUTDOWN_S),),
                    intensity=intensity,
                    backoff=Backoff(at_once=1),
                ),
                listener=self._membership,
                executable=options.get("executable"),
            )
            for number, device in enumerate(self.devices)
        ]
        super().__init__(name, members, dispatching)

    def __repr__(self) -> str:
        return f"<Pool {self.name!r} of {len(self._members)} members{'' if self.alive else ': stopped'}>"

    # Its state.

    @property
    def ready(self) -> bool:
        """Whether a member is up now. Sends no message; never blocks."""
        return self.alive and MemberState.UP in self._dispatching.routing.states

    def statistics(self) -> PoolStatistics:
        """The pool's figures. Sends no message; never blocks."""
        routing = self._dispatching.routing
        members = tuple(
            MemberStatistics(
                name=member.name,
                device=self.devices[member.number],
                state=routing.states[member.number],
                pid=member.pid,
                socket=os.fspath(member.path),
                restarts=member.restarts,
                finished=self._dispatching.finished[member.number],
                outstanding=len(routing.of(member.number)),
                device_us=routing.device_us[member.number],
            )
            for member in self._members
        )
        return PoolStatistics(
            members=members,
            waiting=len(routing.waiting),
            moved=self._dispatching.moved,
            direct_moves=self._moving.direct,
            host_moves=self._moving.by_host,
        )

    def events(self) -> AsyncGenerator[LifecycleEvent, None]:
        """All events of the members since the pool's start, then each new one, until the pool stops.

        `child` is a member's name. `Escalated` says that a member was given up; the other members go on.
        """
        return self._membership.events.follow()

    # Its life.

    async def start(self) -> None:
        """Start the members, and wait until each is up or given up.

        Raises `StartFailed` if fewer than `min_ready` can be started; then all have ended.
        """
        for member in self._members:
            member.start()
        try:
            await self._membership.settled.wait()
        except BaseException:
            await self._end("cancelled while it started")
            raise
        if not self.alive:
            await self._await_end()
            raise StartFailed(detail=self._why_given_up())

    async def aclose(self, *, drain_s: float = DRAIN_S) -> None:
        """Wait up to `drain_s` seconds for earlier requests, then end all members. Idempotent.

        Requests that have not been answered by then get `ServiceStopped`. In a forked child nothing happens.
        """
        if os.getpid() != self._process:
            return
        require_seconds("drain_s", drain_s)
        if self.alive:
            drains = [member.gpu.drain() for member in self._members if member.gpu is not None]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await asyncio.gather(self._dispatching.drain(), *drains, return_exceptions=True)
        await self._end("closed")

    async def __aenter__(self) -> Pool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _end(self, reason: str) -> None:
        self._begin_to_end(ExitReason.shutdown(reason))
        await self._await_end()

    async def _await_end(self) -> None:
        assert self._ending is not None, "it is called once it ends"
        await asyncio.shield(self._ending)

    def _begin_to_end(self, reason: ExitReason) -> None:
        if self._ending is None:
            self._dispatching.close(str(reason))
            self._ending = self._loop.create_task(self._end_members(reason))
            self._membership.settled.set()

    async def _end_members(self, reason: ExitReason) -> None:
        for member in self._members:
            member.stop()
        for member in self._members:
            await member.finished.wait()
        self._replication.end()
        self._membership.happened(Stopped(child=None, reason=reason))
        await in_own_thread(self._folder.remove)

    def _why_given_up(self) -> str:
        membership = self._membership
        left = f"{membership.remaining} members are left, and min_ready={self._min_ready}"
        return f"{membership.names_given_up} could not be kept running ({membership.last_cause}): {left}"

    async def _prepare(self, member: Member) -> None:
        await self._replication.give_all(member)

    def _note_lost(self, member: Member) -> None:
        self._replication.note_loss(member)

    def _note_given_up(self, member: Member, left: int) -> None:
        log.error("member.removed", child=member.name, left=left, min_ready=self._min_ready)
        if left < self._min_ready and self.alive:
            why = self._why_given_up()
            self.failure = ServiceStopped(reason=why)
            self._begin_to_end(ExitReason.crash(why))
            if self.on_failure is not None:
                self.on_failure()
