"""One run, from the service's start to its end: load, faults, and what is left when they cease."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from cudnn_actor.cli.chaos.faults import Striker, fault_plan, injected_errors, watch
from cudnn_actor.cli.chaos.load import Ground, Task
from cudnn_actor.cli.chaos.oracle import Oracle
from cudnn_actor.cli.chaos.problems import Answers
from cudnn_actor.cli.chaos.program import program
from cudnn_actor.cli.chaos.settings import Settings
from cudnn_actor.cli.chaos.tally import LostRequest, Tally
from cudnn_actor.cli.chaos.warming import warm
from cudnn_actor.client import CudnnRef
from cudnn_actor.protocol import CudnnActorError, Drain, GetStatistics, ServiceStopped, Statistics
from cudnn_actor.spawning import spawn
from cudnn_actor.supervision import FaultPlan

__all__ = ["Outcome", "trial"]

_RESTARTS = 1_000_000
"""More than a run can need: no fault here is a reason to give up."""
_LOOK_S = 0.1
_DEVICES = {"cpu": "cpu", "cuda": "cuda:0"}


class Outcome(NamedTuple):
    """What came of a run.

    Parameters
    ----------
    device
        What it ran on.
    lost
        Requests that had not ended by the deadline.
    injected
        The scripted faults that struck, by name.
    statistics
        The service's own at the end; None where it did not say.
    stopped
        Why the service ended before its time; empty where it did not.
    seconds
        How long load and faults lasted.
    """

    device: str
    lost: list[LostRequest]
    injected: dict[str, int]
    statistics: Statistics | None
    stopped: str
    seconds: float


async def trial(
    settings: Settings,
    tally: Tally,
    ending: asyncio.Event,
    *,
    faults: FaultPlan | None = None,
    show: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run load and faults on a new service.

    Parameters
    ----------
    settings
        How.
    tally
        Filled in on the way.
    ending
        Set it to end early; it is set at the end.
    faults
        What is injected; None for what the settings stand for.
    show
        Called a few times a second.

    Raises
    ------
    InvalidRequest
        The service cannot be had like that.
    StartFailed
        It did not start.
    """
    gpu = await spawn(
        device=_DEVICES[settings.engine],
        isolation=settings.isolation,
        standby=settings.standby,
        max_restarts=_RESTARTS,
        hang_after_s=settings.hang_after_s,
        faults=fault_plan(settings) if faults is None else faults,
    )
    try:
        return await _Run(gpu, settings, tally, ending, show).run()
    finally:
        await gpu.aclose(drain_s=min(10.0, settings.deadline_s))


class _Run:
    def __init__(
        self,
        gpu: CudnnRef,
        settings: Settings,
        tally: Tally,
        ending: asyncio.Event,
        show: Callable[[], None],
    ) -> None:
        self._gpu = gpu
        self._settings = settings
        self._tally = tally
        self._ending = ending
        self._show = show
        self._stopped = ""
        oracle = Oracle(injected_errors(settings), excusable=settings.isolation == "thread")
        self._ground = Ground(
            gpu=gpu, answers=Answers(settings.seed), oracle=oracle, tally=tally, ending=ending
        )

    async def run(self) -> Outcome:
        """Everything, in order. What it starts has ended when it returns, but for requests that are lost."""
        tally, deadline_s = self._tally, self._settings.deadline_s
        await warm(self._gpu, self._show)
        tally.begin()
        watcher = asyncio.create_task(watch(self._gpu, self._tally))
        load = asyncio.create_task(self._load())
        striker = asyncio.create_task(Striker(self._gpu, self._tally, self._settings).run())
        try:
            await self._watch(load, lambda: self._ending.is_set() or tally.now_s > self._settings.seconds)
            seconds = tally.now_s
            await _end(striker)
            self._ending.set()
            await self._watch(load, lambda: tally.now_s > max(seconds, tally.last_outage_s) + deadline_s)
            return await self._conclude(load, seconds)
        finally:
            for task in (striker, load, watcher):
                await _end(task)
            tally.give_up()

    async def _load(self) -> None:
        seed, host = self._settings.seed, Task(self._ground, 0)
        try:
            await host.share()
            async with asyncio.TaskGroup() as tasks:
                for number in range(1, self._settings.tasks + 1):
                    tasks.create_task(Task(self._ground, number).run(program(seed, number)))
            await host.unshare()
        except* ServiceStopped as stops:
            self._stopped = str(stops.exceptions[0])

    async def _watch(self, load: asyncio.Task[None], over: Callable[[], bool]) -> None:
        """Wait until it is over, or the load has ended."""
        while not (over() or load.done()):
            left = max(self._settings.seconds - self._tally.now_s, 0.01)
            await asyncio.wait([load], timeout=min(left, _LOOK_S))
            self._show()

    async def _conclude(self, load: asyncio.Task[None], seconds: float) -> Outcome:
        lost = [] if load.done() else self._tally.lost()
        if load.done():
            load.result()  # an error here is the harness's own
        statistics: Statistics | None = None
        patience_s = min(5.0, self._settings.deadline_s)
        with contextlib.suppress(CudnnActorError):
            await self._gpu.ask(Drain(), timeout=patience_s)  # of buffers that nobody received, too
        with contextlib.suppress(CudnnActorError):
            statistics = await self._gpu.ask(GetStatistics(), timeout=patience_s)
        injected = Counter(fired.rule.fault.value for fired in self._gpu.faults_fired)
        return Outcome(self._gpu.device, lost, dict(injected), statistics, self._stopped, seconds)


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for it; an error of its own is raised."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
