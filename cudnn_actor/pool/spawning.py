"""`spawn_pool`: starts and stops a pool for async code."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any, Literal

from cudnn_actor.actors.body import Body
from cudnn_actor.actors.event_loop import running_loop
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.engines import check_device, visible_gpus
from cudnn_actor.options import make_options
from cudnn_actor.pool.member_options import plain_options
from cudnn_actor.pool.pool import Pool
from cudnn_actor.processes.own_folder import OwnFolder
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.types.checks import require_seconds, require_whole
from cudnn_actor.supervision import RestartIntensity

__all__ = ["SpawningPool", "spawn_pool"]

_NAME = "pool"
_REFUSED = ("device", "faults", "graph_limits", "name", "on_give_up")
"""The options of `spawn` that a member does not take: see `plain_options`."""


def spawn_pool(
    devices: Sequence[str] | Literal["all"] = "all",
    *,
    replicas: int = 1,
    name: str = _NAME,
    min_ready: int = 1,
    max_restarts: int = 3,
    period_s: float = 60.0,
    ready_within_s: float = 600.0,
    **options: Any,
) -> SpawningPool:
    """Start a pool: `async with spawn_pool(["cuda:0", "cuda:1"]) as pool`, or `pool = await spawn_pool(...)`.

    Parameters
    ----------
    devices
        The devices, as in `spawn`: "cpu" or "cuda:N". A device may be listed several times. "all" stands for
        all GPUs that this process may use (`CUDA_VISIBLE_DEVICES` is respected).
    replicas
        How many members each device has.
    name
        The pool's name in log lines and events. Its members are NAME-0, NAME-1 and so on.
    min_ready
        The least number of members that must be left. With fewer, the pool stops, the body of `async with` is
        cancelled, and `ServiceStopped` is raised in its place. A member is given up when its process has
        ended more often than it may be replaced.
    max_restarts, period_s
        Each member's process is replaced at most `max_restarts` times within `period_s` seconds. The same
        limits hold for the worker of a member's service.
    ready_within_s
        Seconds within which a member's process must start its service, and load the pool's models and
        buffers; else it is replaced.
    options
        The other options of `spawn`, for all members, without `faults`, `graph_limits` and `on_give_up`.

    Raises
    ------
    InvalidRequest
        An option is out of its range: raised at once. There is no GPU that could be used for "all", or there
        are fewer members than `min_ready`: raised when awaited or entered.
    StartFailed
        Fewer than `min_ready` members can be started. Raised when awaited or entered.
    """
    require_whole("replicas", replicas, 1)
    require_whole("min_ready", min_ready, 1)
    named = None if devices == "all" else _check(devices)
    if named is not None:
        require_whole("min_ready", min_ready, 1, len(named) * replicas)
    plain = plain_options(options, _REFUSED, "members")
    require_seconds("ready_within_s", ready_within_s, positive=True)
    intensity = RestartIntensity(max_restarts=max_restarts, period_s=period_s)
    make_options({"name": name, **options})  # raises if an option is out of its range
    policy = {"intensity": intensity, "min_ready": min_ready, "ready_within_s": ready_within_s}
    return SpawningPool(name, named, replicas, plain, policy)


def _all_gpus(executable: Any) -> list[str]:
    """All GPUs that can be used. Blocks. Raises `InvalidRequest` if there are none."""
    found, why_none = visible_gpus(executable)
    if not found:
        raise InvalidRequest(
            field="devices",
            value="all",
            problem=f"needs a GPU that can be used here: {why_none or 'this process may use none'}",
            fix='name the devices: spawn_pool(["cpu", "cpu"])',
        )
    return list(found)


def _check(devices: Sequence[str]) -> list[str]:
    if isinstance(devices, str) or not devices:
        raise InvalidRequest(
            field="devices",
            value=devices,
            problem="is no list of devices",
            fix='give one for each member, ["cuda:0", "cuda:1"], or "all"',
        )
    for device in devices:
        check_device(device)
    return list(devices)


class SpawningPool:
    """A pool that is about to start: the result of `spawn_pool`.

    Parameters
    ----------
    name, options
        As in `Pool`.
    devices
        The devices; None for all GPUs.
    replicas
        How many members each device has.
    policy
        The other parameters of `Pool`, by name.
    """

    def __init__(
        self,
        name: str,
        devices: list[str] | None,
        replicas: int,
        options: dict[str, Any],
        policy: dict[str, Any],
    ) -> None:
        self._name, self._devices, self._replicas = name, devices, replicas
        self._options, self._policy = options, policy
        self._pool: Pool | None = None
        self._body: Body | None = None

    def __repr__(self) -> str:
        return "<the result of spawn_pool(), which starts a pool when it is awaited or entered>"

    def __await__(self) -> Generator[Any, None, Pool]:
        return self._start().__await__()

    async def _start(self) -> Pool:
        running_loop()
        devices = self._devices
        if devices is None:
            devices = await in_own_thread(_all_gpus, self._options.get("executable"))
            require_whole("min_ready", self._policy["min_ready"], 1, len(devices) * self._replicas)
        members = [device for device in devices for _ in range(self._replicas)]
        folder = await in_own_thread(OwnFolder, "pool")
        pool = Pool(self._name, members, self._options, folder, **self._policy)
        await pool.start()
        return pool

    async def __aenter__(self) -> Pool:
        self._pool = await self._start()
        self._body = Body()
        self._pool.on_failure = self._body.cancel
        return self._pool

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pool, body = self._pool, self._body
        assert pool is not None, "it was entered"
        assert body is not None, "likewise"
        body.end()
        cancelled = kind is asyncio.CancelledError
        try:
            await pool.aclose()
        except asyncio.CancelledError:  # of the body, which has ended meanwhile, or of its task
            cancelled = True
            await pool.aclose()
        alone = body.cancelled_alone()
        if pool.failure is not None and (kind is None or cancelled) and (alone or not cancelled):
            raise pool.failure from error
        if cancelled and kind is None:
            raise asyncio.CancelledError
