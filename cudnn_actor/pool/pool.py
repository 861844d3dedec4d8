"""`Pool`: several services of one machine behind one handle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from cudnn_actor.actors import within
from cudnn_actor.actors.event_loop import running_loop
from cudnn_actor.actors.logs import Log
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.models.inputs import named_once
from cudnn_actor.models.sizes import Sizes
from cudnn_actor.pool.dispatching import Dispatching
from cudnn_actor.pool.member import Member
from cudnn_actor.pool.pure_requests import kind_of_compute, kind_of_run, require_arrays, with_copies
from cudnn_actor.pool.replicas import PoolBuffer, PoolModel, Replica
from cudnn_actor.pool.routing import MemberState
from cudnn_actor.protocol.errors import CudnnActorError, InvalidRequest, ServiceStopped, StartFailed
from cudnn_actor.protocol.types.checks import require_seconds, require_whole
from cudnn_actor.protocol.types.dtypes import DTypeLike
from cudnn_actor.protocol.types.tensor import Layout, LayoutLike
from cudnn_actor.protocol.types.tune import Tune
from cudnn_actor.service.client import DRAIN_S, CudnnRef
from cudnn_actor.service.computing import Computable
from cudnn_actor.service.event_log import EventLog
from cudnn_actor.service.model_sources import name_of, read_before, read_model
from cudnn_actor.supervision import (
    Backoff,
    ChildPolicy,
    Clock,
    ExitReason,
    LifecycleEvent,
    RestartIntensity,
    Stopped,
    SupervisorPolicy,
)
from cudnn_actor.supervision.events import log_event, stamped

__all__ = ["MemberStatistics", "Pool", "PoolStatistics"]

log = Log("cudnn_actor.pool")

T = TypeVar("T")
SHUTDOWN_S = 5.0
"""Seconds that a member's process has to end."""


class MemberStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A member of a pool, as the pool knows it.

    Parameters
    ----------
    name
        In log lines and events.
    device
        What it was spawned on.
    state
        Whether it may get requests.
    pid
        The id of its process; None while there is none.
    restarts
        How often its process has been replaced.
    finished
        How many requests of the pool it has answered.
    outstanding
        How many it has now.
    device_us
        The estimated device time of these, in microseconds.
    """

    name: str
    device: str
    state: MemberState
    pid: int | None
    restarts: int
    finished: int
    outstanding: int
    device_us: int


class PoolStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a pool.

    Parameters
    ----------
    members
        Those of each member.
    waiting
        Requests that wait for a member to be up.
    moved
        How often a member was lost that had a request, summed over all requests.
    """

    members: tuple[MemberStatistics, ...]
    waiting: int
    moved: int


class Pool:
    """Several services of one machine behind one handle. Made by `spawn_pool`.

    Each member is a service in a process of its own. A pure request (`compute`, `run`) goes to the member
    with the least to do. If that is lost, the request runs again on another: the caller sees latency, and no
    error. A pool is used on the event loop that it was made on.

    Parameters
    ----------
    name
        The pool's.
    devices
        The device of each member.
    options
        `spawn`'s options for the members, as plain data.
    folder
        Where the members' sockets lie; owned by the pool from now on.
    intensity
        How often each member may be replaced.
    min_ready
        The pool stops when fewer members than this are not given up.
    ready_within_s
        Seconds in which a member has to start.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[str],
        options: Mapping[str, Any],
        folder: Path,
        *,
        intensity: RestartIntensity,
        min_ready: int,
        ready_within_s: float,
    ) -> None:
        self.name, self.devices = name, tuple(devices)
        self._folder, self._min_ready = folder, min_ready
        self._loop, self._process = running_loop(), os.getpid()
        self._dispatching = Dispatching(len(self.devices))
        self._events = EventLog()
        self._replicas: list[Replica[Any]] = []
        self._preparing = [asyncio.Lock() for _ in self.devices]
        self._settled = asyncio.Event()
        """Set when each member has been up once, or was given up."""
        self._unsettled = set(range(len(self.devices)))
        self._given_up: list[Member] = []
        self._ending: asyncio.Task[None] | None = None
        self.failure: ServiceStopped | None = None
        """Why it has stopped, if nobody asked it to."""
        self.on_failure: Callable[[], object] | None = None
        """Called when it stops by itself."""
        self._members = [
            Member(
                number,
                each := f"{name}-{number}",
                options={**options, "device": device, "name": each},
                path=folder / f"{number}.sock",
                policy=SupervisorPolicy(
                    children=(ChildPolicy(id=each, ready_within_s=ready_within_s, shutdown_s=SHUTDOWN_S),),
                    intensity=intensity,
                    backoff=Backoff(at_once=1),
                ),
                listener=self,
                executable=options.get("executable"),
            )
            for number, device in enumerate(self.devices)
        ]

    def __repr__(self) -> str:
        return f"<Pool {self.name!r} of {len(self._members)} members{'' if self.alive else ': stopped'}>"

    def __len__(self) -> int:
        """How many members it has, those that were given up included."""
        return len(self._members)

    # What it is.

    @property
    def alive(self) -> bool:
        """Whether it has not ended. Sends no message; never blocks."""
        return self._ending is None

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
                restarts=member.restarts,
                finished=self._dispatching.finished[member.number],
                outstanding=len(routing.of(member.number)),
                device_us=routing.device_us[member.number],
            )
            for member in self._members
        )
        return PoolStatistics(members=members, waiting=len(routing.waiting), moved=self._dispatching.moved)

    def events(self) -> AsyncGenerator[LifecycleEvent, None]:
        """All events of its members since its start, then each new one, until it stops.

        `child` is a member's name. `Escalated` says that a member was given up; the others go on.
        """
        return self._events.follow()

    def on(self, member: int) -> CudnnRef:
        """The handle of one member's service, for what must stay together: buffers, and requests with them.

        When the member's process ends, the handle's requests raise `ServiceStopped`, and so does this method
        until the member is back. Another member refuses its references with `StaleBufferError`. The pool does
        not count its requests when it chooses a member. Raises `InvalidRequest` for no such member.
        """
        number = require_whole("member", member, 0, len(self._members) - 1)
        gpu = self._members[number].gpu
        if gpu is None:
            raise ServiceStopped(reason=f"the process of {self._members[number].name} does not run")
        return gpu

    # Pure requests.

    async def compute(
        self,
        what: Computable,
        arrays: Mapping[str, Any] | None = None,
        /,
        *,
        also: Sequence[str] = (),
        timeout: float | None = None,
        **named: Any,
    ) -> Any:
        """Arrays in, arrays out, on one of the members: see `CudnnRef.compute`.

        Parameters
        ----------
        what, also, timeout
            As there.
        arrays, named
            By name: an array, or what `Pool.upload` gave, which is only read; and an operation's other
            fields.

        Raises
        ------
        InvalidRequest
            A `BufferRef` was given, which belongs to one member; or a buffer of the pool was given for what
            is overwritten. Else as there.
        QuarantinedRequest
            Four members ended while they had it.
        ServiceStopped
            No member is left.
        CudnnActorError
            As there.
        """
        given = named_once(arrays, named)
        self._require_arrays(given)
        with_copies(what, given, None)  # refuses what is overwritten, before anything is sent

        async def work(member: int, left_s: float | None) -> Any:
            own = with_copies(what, given, member)
            return await self.on(member).compute(what, own, also=also, timeout=left_s)

        with within(timeout) as deadline:
            return await self._dispatching.run(kind_of_compute(what, given), work, deadline)

    def submit(
        self,
        what: Computable,
        arrays: Mapping[str, Any] | None = None,
        /,
        *,
        also: Sequence[str] = (),
        timeout: float | None = None,
        **named: Any,
    ) -> asyncio.Task[Any]:
        """The same as a task, at once; cancelling it withdraws the request. What is wrong is its result."""
        given = named_once(arrays, named)
        return self._loop.create_task(self.compute(what, given, also=also, timeout=timeout))

    async def call(
        self,
        work: Callable[[CudnnRef, Callable[[Replica[Any]], Any]], Awaitable[T]],
        *,
        kind: Hashable = None,
        timeout: float | None = None,
    ) -> T:
        """Run an asynchronous function on one of the members: any pure request, with buffers that are there.

            y = await pool.call(lambda gpu, own: gpu.compute(graph, x=x, w=own(weights)))

        Parameters
        ----------
        work
            Gets the member's handle, and a function that gives the member's own buffer or model for what
            `upload` or `load` gave. If the member is lost, it is called again with another. So it must not
            matter how often it runs; what it allocates it frees.
        kind
            Calls of one kind take the device about as long as each other.
        timeout
            Seconds for all of it; then it is cancelled.

        Raises
        ------
        DeadlineExceeded
            No answer within `timeout`.
        QuarantinedRequest, ServiceStopped
            As `compute`.
        CudnnActorError
            What `work` raises on a member that was not lost, and so does whatever else it raises.
        """

        async def sent(member: int, _left_s: float | None) -> T:
            async with deadline.limiting():
                return await work(self.on(member), lambda replica: replica.of(member))

        with within(timeout) as deadline:
            return await self._dispatching.run(("call", kind), sent, deadline)

    async def run(
        self,
        model: PoolModel,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        timeout: float | None = None,
        **named: Any,
    ) -> dict[str, np.ndarray]:
        """Run a model that this pool has loaded, on one of the members: see `CudnnRef.run`.

        Inputs are arrays, and so are the outputs, by name. Raises as `compute` and `CudnnRef.run`.
        """
        self._require_own(model)
        given = named_once(inputs, named)
        self._require_arrays(given)

        async def work(member: int, left_s: float | None) -> dict[str, np.ndarray]:
            return await self.on(member).run(model.of(member), given, timeout=left_s)

        with within(timeout) as deadline:
            return await self._dispatching.run(kind_of_run(model, given), work, deadline)

    # What all members have.

    async def upload(
        self, array: Any, *, layout: LayoutLike = Layout.NCHW, dtype: DTypeLike | None = None
    ) -> PoolBuffer:
        """Copy an array to each member, and to each that is started later: weights, say. `free` frees it.

        The pool keeps a copy of the array. Raises `InvalidRequest` and `OutOfMemory` as `CudnnRef.upload`.
        """
        buffer = PoolBuffer(np.array(array, order="C"), layout, dtype)
        await self._replicate(buffer)
        return buffer

    async def free(self, buffer: PoolBuffer) -> None:
        """Free a buffer of the pool on all members, once earlier work is done."""
        await self._drop(buffer)

    async def load(
        self,
        model: Any,
        *,
        dims: Mapping[str, Sizes] | None = None,
        dtype: DTypeLike | None = None,
        tune: Tune | None = None,
        name: str | None = None,
    ) -> PoolModel:
        """Load a model on each member, and on each that is started later. It is read once.

        Parameters and errors are those of `CudnnRef.load`. `unload` ends it.
        """
        source = read_before(model, dtype=dtype)
        if source is None:
            source = await in_own_thread(read_model, model, {"dtype": dtype})
        loaded = PoolModel(source, name_of(model, name), dims, tune)
        await self._replicate(loaded)
        return loaded

    async def unload(self, model: PoolModel) -> None:
        """Unload a model on all members, once its runs are done."""
        await self._drop(model)

    async def _replicate(self, replica: Replica[Any]) -> None:
        self._require_alive()
        self._replicas.append(replica)  # first: a member that starts meanwhile makes it, too
        try:
            for member in self._members:
                await self._make_on(member)
        except BaseException:
            await asyncio.shield(self._drop(replica))
            raise

    async def _make_on(self, member: Member) -> None:
        """Make on a member what it lacks. If it is lost meanwhile, its next process makes it."""
        gpu = member.gpu
        if gpu is None:
            return
        try:
            await self._give_replicas(member, gpu)
        except CudnnActorError:
            if member.gpu is gpu:
                raise

    async def _give_replicas(self, member: Member, gpu: CudnnRef) -> None:
        async with self._preparing[member.number]:
            while missing := [each for each in self._replicas if member.number not in each.at]:
                replica = missing[0]
                copy = replica.at[member.number] = await replica.make(gpu)
                if member.gpu is not gpu:
                    replica.lost(member.number)
                    raise ServiceStopped(reason=f"the process of {member.name} has ended")
                if replica not in self._replicas:  # it was dropped meanwhile
                    del replica.at[member.number]
                    await replica.drop(gpu, copy)

    async def _drop(self, replica: Replica[Any]) -> None:
        replica.closed = True
        if replica in self._replicas:
            self._replicas.remove(replica)
        while replica.at:
            member, copy = replica.at.popitem()
            gpu = self._members[member].gpu
            if gpu is not None:
                with contextlib.suppress(ServiceStopped):  # it has gone, and the copy with it
                    await replica.drop(gpu, copy)

    # Its life.

    async def start(self) -> None:
        """Start the members, and wait until each is up or given up.

        Raises `StartFailed` if fewer than `min_ready` can be started; then all have ended.
        """
        for member in self._members:
            member.start()
        try:
            await self._settled.wait()
        except BaseException:
            await self._end("cancelled while it started")
            raise
        if not self.alive:
            await self._finished()
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
        await self._finished()

    async def _finished(self) -> None:
        assert self._ending is not None, "it is called once it ends"
        await asyncio.shield(self._ending)

    def _begin_to_end(self, reason: ExitReason) -> None:
        if self._ending is None:
            self._dispatching.close(str(reason))
            self._ending = self._loop.create_task(self._end_members(reason))
            self._settled.set()

    async def _end_members(self, reason: ExitReason) -> None:
        for member in self._members:
            member.stop()
        for member in self._members:
            await member.finished.wait()
        self.happened(Stopped(child=None, reason=reason))
        await in_own_thread(shutil.rmtree, self._folder, True)

    def _why_given_up(self) -> str:
        names = ", ".join(member.name for member in self._given_up)
        causes = [event.cause for event in self._events.all if hasattr(event, "cause")]
        left = f"{len(self._members) - len(self._given_up)} members are left, and min_ready={self._min_ready}"
        return f"{names} could not be kept running ({causes[-1] if causes else 'unknown'}): {left}"

    # What happens to members: `member.Listener`.

    async def prepare(self, member: Member) -> None:
        """Make on a member that has just started what all members have."""
        gpu = member.gpu
        assert gpu is not None, "it has just started"
        await self._give_replicas(member, gpu)

    def up(self, member: Member) -> None:
        """Give a member requests."""
        self._dispatching.up(member.number)
        self._settle(member)

    def pauses(self, member: Member) -> None:
        """Give a member nothing new while its worker restarts."""
        self._dispatching.pause(member.number)

    def lost(self, member: Member) -> None:
        """Give what a member had to others."""
        for replica in self._replicas:
            replica.lost(member.number)
        self._dispatching.lost(member.number)

    def given_up(self, member: Member) -> None:
        """Go on without a member, or end if too few are left."""
        self._given_up.append(member)
        self._dispatching.remove(member.number)
        self._settle(member)
        left = len(self._members) - len(self._given_up)
        log.error("member.removed", child=member.name, left=left, min_ready=self._min_ready)
        if left < self._min_ready and self.alive:
            why = self._why_given_up()
            self.failure = ServiceStopped(reason=why)
            self._begin_to_end(ExitReason.crash(why))
            if self.on_failure is not None:
                self.on_failure()

    def happened(self, event: LifecycleEvent) -> None:
        """Keep an event, tell those that follow, and write its log line."""
        event = stamped(event, self.name, Clock())
        self._events.append(event)
        log_event(log, event)

    def _settle(self, member: Member) -> None:
        self._unsettled.discard(member.number)
        if not self._unsettled:
            self._settled.set()

    # Checks.

    def _require_alive(self) -> None:
        if not self.alive:
            raise ServiceStopped(reason="the pool was closed")

    def _require_own(self, model: object) -> None:
        if model not in self._replicas:
            raise InvalidRequest(
                field="model",
                value=model,
                problem="is no model that this pool has loaded, or was unloaded",
                fix="pass what pool.load gave",
            )

    def _require_arrays(self, given: Mapping[str, Any]) -> None:
        require_arrays(given, {member.name: member.gpu for member in self._members})
