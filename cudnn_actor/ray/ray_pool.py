"""`RayPool`: several services of a Ray cluster behind one handle."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any, TypeVar

import ray

from cudnn_actor.actors.event_loop import running_loop
from cudnn_actor.actors.logs import Log, speaking_for
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.pool import MemberState
from cudnn_actor.pool.membership import Membership
from cudnn_actor.protocol.errors import InvalidRequest, StartFailed
from cudnn_actor.protocol.types.checks import require_seconds
from cudnn_actor.ray.placing import Placed, place
from cudnn_actor.ray.requests import RayRequests
from cudnn_actor.ray.settings import Settings, Spread, check_settings
from cudnn_actor.ray.statistics import RayPoolStatistics, ReplicaStatistics
from cudnn_actor.ray.watching import Watched
from cudnn_actor.service.client import DRAIN_S
from cudnn_actor.supervision import ExitReason, LifecycleEvent, Stopped

__all__ = ["RayPool"]

log = Log("cudnn_actor.ray")

T = TypeVar("T")
_END_S = 5.0
"""Seconds within which replicas must end their services, before Ray ends their processes."""


class RayPool(RayRequests):
    """Services of a Ray cluster behind one handle: `async with RayPool(num_replicas=4) as pool`.

    Each replica is a service in a Ray actor, which Ray places, and starts again if it ends. A pure request
    (`compute`, `run`, `call`) goes to the replica with the least to do. If that replica ends, or does not
    answer any more, the request runs again on another one: the caller sees latency, and no error. The methods
    are those of `cudnn_actor.pool.Pool`. `pool = await RayPool(...)` starts a pool without a block; `aclose`
    ends it. Use a pool on the event loop on which it was started.

    Parameters
    ----------
    num_replicas
        How many replicas the pool has.
    num_gpus, num_cpus
        The GPUs and CPUs of a node that each replica takes, as Ray counts them. With `num_gpus=0`, its
        service runs on the CPU. A replica sees only its own GPUs, so its device is "cuda:0".
    resources
        Other resources of Ray that each replica takes, by name.
    spread
        How Ray places the replicas: "SPREAD" over nodes if it can, "STRICT_SPREAD" always on a node for each;
        "PACK" on few nodes if it can, "STRICT_PACK" always on one node.
    name
        The pool's name in log lines and events. Its replicas are NAME-0, NAME-1 and so on.
    min_ready
        The least number of replicas that must be left. With fewer, the pool stops.
    mailbox
        How many requests a replica is sent at a time. `compute` and `run` wait for room; `submit` raises
        `MailboxFull` once there are this many requests for each replica.
    max_restarts
        How often Ray starts each replica's process again; -1 for no limit. Within a process, its service
        replaces its worker as with `spawn`.
    ready_within_s
        Seconds within which each replica must be up, or be given up, when the pool starts. If no replica is
        up when a model is loaded or a buffer is uploaded, one must be up within this time.
    lost_after_s
        Seconds after which a replica that gives no sign of life counts as lost, whatever Ray reports: its
        requests run on others. It gets new requests when it answers again.
    runtime_env
        Ray's environment for the replicas; None for the one of `ray.init`.
    options
        Other options of `spawn`, for all replicas, as plain data.

    Raises
    ------
    InvalidRequest
        An option is out of its range: raised at once. Ray is not initialised: raised when awaited or entered.
    StartFailed
        Fewer than `min_ready` replicas are up in time. Raised when awaited or entered.
    """

    def __init__(
        self,
        num_replicas: int,
        *,
        num_gpus: float = 1,
        num_cpus: float = 1,
        resources: Mapping[str, float] | None = None,
        spread: Spread = "SPREAD",
        name: str = "pool",
        min_ready: int = 1,
        mailbox: int = 64,
        max_restarts: int = -1,
        ready_within_s: float = 600.0,
        lost_after_s: float = 5.0,
        runtime_env: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._settings = check_settings(
            Settings(
                num_replicas=num_replicas,
                resources={**(resources or {}), "CPU": num_cpus, "GPU": num_gpus},
                spread=spread,
                name=name,
                min_ready=min_ready,
                mailbox=mailbox,
                max_restarts=max_restarts,
                ready_within_s=ready_within_s,
                lost_after_s=lost_after_s,
                runtime_env=runtime_env,
                options=options,
            )
        )
        super().__init__(self._settings)
        self._process = os.getpid()
        self._membership: Membership[Watched] = Membership(
            name,
            num_replicas,
            self._dispatching,
            log,
            prepare=self._replication.prepare,
            on_given_up=self._note_given_up,
        )
        self._placed: Placed | None = None
        self._watching: list[asyncio.Task[None]] = []
        self._ending: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "" if self.ready else ": no replica is up" if self.alive else ": stopped"
        return f"<RayPool {self.name!r} of {len(self)} replicas{state}>"

    # Its state.

    @property
    def alive(self) -> bool:
        """Whether it has not ended. Sends no message; never blocks."""
        return self._ending is None

    @property
    def ready(self) -> bool:
        """Whether a replica is up now. Sends no message; never blocks."""
        return self.alive and MemberState.UP in self._dispatching.routing.states

    def statistics(self) -> RayPoolStatistics:
        """The pool's figures. Sends no message; never blocks."""
        routing = self._dispatching.routing
        return RayPoolStatistics(
            members=tuple(self._figures(each) for each in self._members),
            waiting=len(routing.waiting),
            moved=self._dispatching.moved,
        )

    def _figures(self, replica: Watched) -> ReplicaStatistics:
        routing, number = self._dispatching.routing, replica.number
        hello = None if replica.life is None else replica.life.hello
        return ReplicaStatistics(
            name=replica.name,
            device=self._settings.device if hello is None else hello.device,
            state=routing.states[number],
            pid=None if hello is None else hello.pid,
            node=None if hello is None else hello.node,
            worker_pid=replica.worker_pid,
            restarts=max(0, replica.generation - 1),
            finished=self._dispatching.finished[number],
            outstanding=len(routing.of(number)),
            device_us=routing.device_us[number],
        )

    def events(self) -> AsyncGenerator[LifecycleEvent, None]:
        """All events of the replicas since the pool's start, then each new one, until the pool stops.

        `child` is a replica's name. `Escalated` says that a replica was given up; the other replicas go on.
        """
        return self._membership.events.follow()

    # Its life.

    def __await__(self) -> Generator[Any, None, RayPool]:
        return self._start().__await__()

    async def __aenter__(self) -> RayPool:
        return await self._start()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _start(self) -> RayPool:
        running_loop()
        if not ray.is_initialized():
            raise InvalidRequest(
                field="ray",
                value="not initialised",
                problem="is needed before a pool starts",
                fix="call ray.init(...), or ray.init(address='auto') on a node of a cluster",
            )
        settings = self._settings
        memory = await in_own_thread(self._values.begin)  # first: a cancellation leaves no actors
        self._placed = await _place_within(settings)
        self._members = self._replication.members = tuple(
            Watched(
                number,
                settings.name_of(number),
                actor,
                mailbox=settings.mailbox,
                lost_after_s=settings.lost_after_s,
                listener=self._membership,
                memory=memory,
            )
            for number, actor in enumerate(self._placed.actors)
        )
        self._watching = [asyncio.ensure_future(each.watch()) for each in self._members]
        try:
            async with asyncio.timeout(settings.ready_within_s):
                await self._membership.settled.wait()
        except TimeoutError:
            pass
        except BaseException:
            await self._end("cancelled while it started")
            raise
        if not self.alive or self._membership.up_once < settings.min_ready:
            why = self._why_given_up()
            await self._end("too few replicas are up")
            raise StartFailed(detail=why)
        return self

    async def aclose(self, *, drain_s: float = DRAIN_S) -> None:
        """Wait up to `drain_s` seconds for earlier requests, then end all replicas. Idempotent.

        Requests that have not been answered by then get `ServiceStopped`. In a forked child nothing happens.
        """
        if os.getpid() != self._process:
            return
        require_seconds("drain_s", drain_s)
        if self.alive:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._dispatching.drain()
        await self._end("closed")

    async def _end(self, reason: str) -> None:
        self._begin_to_end(ExitReason.shutdown(reason))
        assert self._ending is not None
        await asyncio.shield(self._ending)

    def _begin_to_end(self, reason: ExitReason) -> None:
        if self._ending is None:
            self._dispatching.close(str(reason))
            self._replication.end(str(reason))
            self._values.end()
            self._ending = asyncio.ensure_future(self._end_replicas(reason))
            self._membership.settled.set()

    async def _end_replicas(self, reason: ExitReason) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        lives = [each.life for each in self._members if each.life is not None and each.reachable]
        for life in lives:
            life.end(str(reason))
        if self._placed is not None and ray.is_initialized():
            ends = [asyncio.ensure_future(life.end_service()) for life in lives]
            if ends:
                _, late = await asyncio.wait(ends, timeout=_END_S)
                for end in late:
                    end.cancel()
            if problem := await self._placed.remove_within(_END_S):
                with speaking_for(self.name):
                    log.warning("ray.not_removed", problem=problem)
        self._membership.happened(Stopped(child=None, reason=reason))

    def _why_given_up(self) -> str:
        membership = self._membership
        if not membership.names_given_up:
            settings = self._settings
            needs = ", ".join(f"{each:g} {name}" for name, each in settings.resources.items() if each)
            return (
                f"{membership.up_once} of {len(self)} replicas were up after {settings.ready_within_s:g} s: "
                f"`ray status` shows whether the cluster has {needs} for each"
            )
        return f"{membership.names_given_up} could not be kept running: {membership.last_cause}"

    def _note_given_up(self, _replica: Watched, left: int) -> None:
        if left < self._settings.min_ready:
            self._begin_to_end(ExitReason.crash(self._why_given_up()))


async def _place_within(settings: Settings) -> Placed:
    """Let Ray start the replicas. Raises `StartFailed` if it has not answered within `ready_within_s`.

    After an error or a cancellation, no replica is left, once Ray has answered.
    """
    placing = asyncio.ensure_future(in_own_thread(place, settings))
    try:
        await asyncio.wait({placing}, timeout=settings.ready_within_s)
    except asyncio.CancelledError:
        await asyncio.wait({placing}, timeout=_END_S)
        if not placing.done():
            placing.cancel()
        elif placing.exception() is None:
            await placing.result().remove_within(_END_S)
        raise
    if placing.done():
        return placing.result()
    placing.cancel()
    detail = f"Ray's control service has not answered within {settings.ready_within_s:g} s"
    raise StartFailed(detail=detail, fix="see whether `ray status` is answered")
