"""One run, from the service's start to its end: load, faults, and the requests left at the end.

Every wait here is bounded: a service that loses requests, hangs or does not stop is reported, not waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cudnn_actor.attached import serve_socket
from cudnn_actor.cli.user_error import UserError
from cudnn_actor.protocol import (
    Allocate,
    BufferRef,
    CudnnActorError,
    Drain,
    GetStatistics,
    ServiceStopped,
    StartFailed,
    Statistics,
)
from cudnn_actor.protocol.messages.messages import Compute
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.service.spawning import spawn
from cudnn_actor.supervision import FaultPlan
from cudnn_actor.trials.chaos.answers import Answers
from cudnn_actor.trials.chaos.attached import AttachedCallers
from cudnn_actor.trials.chaos.batches import BatchedLoad
from cudnn_actor.trials.chaos.computations import Problem, accumulates, message
from cudnn_actor.trials.chaos.crowd import Crowd
from cudnn_actor.trials.chaos.graphs import LOAD
from cudnn_actor.trials.chaos.load import Ground, Task
from cudnn_actor.trials.chaos.load_kinds import OF_A_MODEL, LoadKind
from cudnn_actor.trials.chaos.models import LeftOut, LoadOfModel, ModelLoad, cases_of
from cudnn_actor.trials.chaos.oracle import Oracle
from cudnn_actor.trials.chaos.senders import LoopSender
from cudnn_actor.trials.chaos.settings import Settings
from cudnn_actor.trials.chaos.strikes import Striker, fault_plan, injected_errors, watch
from cudnn_actor.trials.chaos.swaps import SwapLoad
from cudnn_actor.trials.chaos.tally import LostRequest, Tally
from cudnn_actor.trials.chaos.task_program import bursts, problems_of

__all__ = ["Interrupted", "Outcome", "run_once"]

T = TypeVar("T")

_RESTARTS = 1_000_000
"""More restarts than a run can need: no fault here is a reason to give up."""
_START_S = 60.0
"""Seconds that a service's start may take. The first on a machine reads its libraries from a cold disk."""
_WARM_S, _STOP_S = 60.0, 30.0
_LOOK_S = 0.1
_DEVICES = {"cpu": "cpu", "cuda": "cuda:0"}


class Interrupted(Exception):
    """Raised when the run was ended before there was anything to report."""


class Outcome(NamedTuple):
    """The outcome of a run.

    Parameters
    ----------
    device
        The device that it ran on.
    lost
        Requests that had not ended by the deadline.
    injected
        The scripted faults that fired, by name.
    statistics
        The service's statistics at the end; None if it did not answer.
    stopped
        Why the service ended early; empty if it did not.
    seconds
        How long load and faults lasted.
    stuck
        What did not end in time: the service, or threads of callers.
    left_out
        Kinds of load that the model does not allow, each with the reason.
    """

    device: str
    lost: list[LostRequest]
    injected: dict[str, int]
    statistics: Statistics | None
    stopped: str
    seconds: float
    stuck: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


async def run_once(
    settings: Settings,
    tally: Tally,
    ending: threading.Event,
    *,
    faults: FaultPlan | None = None,
    show: Callable[[], None] = lambda: None,
    ready: Callable[[Ground], None] = lambda _: None,
) -> Outcome:
    """Run load and faults on a new service.

    Parameters
    ----------
    settings
        The settings. The caller of this function runs `LoadKind.ALARMS`, which needs the main thread.
    tally
        The counters, updated during the run.
    ending
        Set it to end early; it is set at the end.
    faults
        The faults to inject; None for those that the settings determine.
    show
        Called a few times a second.
    ready
        Called when the load begins.

    Raises
    ------
    InvalidRequest
        Such a service cannot run here.
    StartFailed
        It did not start.
    Interrupted
        `ending` was set before the load began.
    """
    await _try_a_start(settings, ending)
    async with _folder() as folder:
        plans = str(folder / "plans") if set(OF_A_MODEL).intersection(settings.load) else None
        gpu = await _within(_START_S, ending, _spawn(settings, faults, plans))
        outcome: Outcome | None = None
        try:
            outcome = await _Run(gpu, settings, tally, ending, folder, show=show, ready=ready).run()
        finally:
            ended = await _ends(gpu, settings)
    return outcome if ended else outcome._replace(stuck=(*outcome.stuck, "the service did not stop"))


@contextlib.asynccontextmanager
async def _folder() -> AsyncIterator[Path]:
    """A folder for sockets, and for a model's plans, which take longer to build than the time between two
    faults."""
    folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="cudnn-actor-chaos-")
    try:
        yield Path(folder)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _spawn(settings: Settings, faults: FaultPlan | None, plan_store: str | None) -> CudnnRef:
    return await spawn(
        device=_DEVICES[settings.engine],
        isolation=settings.isolation,
        standby=settings.standby,
        max_restarts=_RESTARTS,
        hang_after_s=settings.hang_after_s,
        plan_store=plan_store,
        faults=fault_plan(settings) if faults is None else faults,
    )


async def _try_a_start(settings: Settings, ending: threading.Event) -> None:
    """Start a service without faults, and stop it.

    The run's own service may restart without limit: it would try for ever if no worker can start.
    """

    async def start_and_stop() -> None:
        gpu = await spawn(device=_DEVICES[settings.engine], isolation=settings.isolation)
        await gpu.aclose(drain_s=1.0)

    await _within(_START_S, ending, start_and_stop())


async def _within(seconds: float, ending: threading.Event, start: Coroutine[Any, Any, T]) -> T:
    """The result of a start. Raises `StartFailed` after `seconds`, `Interrupted` when the run is ended."""
    starting = asyncio.ensure_future(start)
    deadline = time.monotonic() + seconds
    while not starting.done():
        await asyncio.wait([starting], timeout=_LOOK_S)
        if starting.done():
            break
        if ending.is_set() or time.monotonic() > deadline:
            starting.cancel()
            await asyncio.wait([starting], timeout=1.0)
            if ending.is_set():
                raise Interrupted
            raise StartFailed(detail=f"it was not ready within {seconds:g} s")
    return starting.result()


async def _ends(gpu: CudnnRef, settings: Settings) -> bool:
    """Stop the service. Returns whether it stopped in time."""
    closing = asyncio.ensure_future(gpu.aclose(drain_s=min(10.0, settings.deadline_s)))
    await asyncio.wait([closing], timeout=_STOP_S)
    return closing.done()


class _Run:
    def __init__(
        self,
        gpu: CudnnRef,
        settings: Settings,
        tally: Tally,
        ending: threading.Event,
        folder: Path,
        *,
        show: Callable[[], None],
        ready: Callable[[Ground], None],
    ) -> None:
        self._gpu = gpu
        self._settings = settings
        self._tally = tally
        self._ending = ending
        self._show = show
        self._ready = ready
        self._stopped = ""
        oracle = Oracle(injected_errors(settings), excusable=settings.isolation == "thread")
        self._ground = Ground(
            gpu=gpu,
            answers=Answers(settings.seed),
            oracle=oracle,
            tally=tally,
            ending=ending,
            abandoned=threading.Event(),
            problems=problems_of(settings),
        )
        self._attached = AttachedCallers(self._ground, settings, folder)
        self._crowd = Crowd(self._ground, settings, self._attached)
        self._models: list[LoadOfModel] = []
        self._left_out: list[str] = []

    async def run(self) -> Outcome:
        """Do everything, in order. When it returns, all that it started has ended, except lost requests."""
        tally, deadline_s = self._tally, self._settings.deadline_s
        problems = [LOAD[number] for number in self._ground.problems]
        if set(OF_A_MODEL).intersection(self._settings.load):
            for each in await self._read(Path(self._settings.model)):
                await self._warm_model(each)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_warm(self._gpu, problems, self._show), _WARM_S)
        tally.begin()
        watcher = asyncio.create_task(
            watch(self._gpu, self._tally, pauses=self._settings.isolation == "thread")
        )
        load = asyncio.create_task(self._load())
        striker = asyncio.create_task(Striker(self._gpu, tally, self._settings, self._attached.victims).run())
        try:
            await self._watch(load, lambda: self._ending.is_set() or tally.now_s > self._settings.seconds)
            seconds = tally.now_s
            await _end(striker)
            self._ending.set()
            await self._watch(load, lambda: tally.unmoved_s(seconds) > deadline_s)
            return await self._outcome(load, seconds)
        finally:
            self._ending.set()
            self._ground.abandoned.set()
            for task in (striker, load, watcher):
                await _end(task)
            tally.give_up(LoadKind.TASKS, *OF_A_MODEL)

    async def _read(self, path: Path) -> list[LoadOfModel]:
        """The kinds of load with a model. Its weights are uploaded when it is run first."""
        from cudnn_actor.onnx import OnnxModel  # noqa: PLC0415 - needs an extra

        load, seed, gpu, tally = self._settings.load, self._settings.seed, self._gpu, self._tally
        excused = tuple(injected_errors(self._settings))
        read = await asyncio.to_thread(OnnxModel, path)
        found: list[LoadOfModel] = []
        if LoadKind.MODELS in load:
            cases = await asyncio.to_thread(cases_of, path, read, seed)
            found.append(ModelLoad(gpu, read, cases, excused, tally))
        if LoadKind.BATCHED in load:
            found.append(BatchedLoad(gpu, path, read, excused, tally, seed=seed))
        if LoadKind.SWAPS in load:
            swappable = await asyncio.to_thread(partial(OnnxModel, path, swappable=True))
            found.append(SwapLoad(gpu, path, swappable, excused, tally, seed=seed))
        return found

    async def _warm_model(self, load: LoadOfModel) -> None:
        """Warm one of them; leave it out if the model does not allow it. Raises `UserError` if it must be."""
        try:
            await asyncio.wait_for(load.warm(), _WARM_S)
        except TimeoutError:
            pass
        except LeftOut as why:
            if load.kind in self._settings.required:
                raise UserError(f"--load {load.kind}: {why}; leave {load.kind} out") from why
            self._left_out.append(f"{load.kind}: {why}")
            return
        self._models.append(load)

    async def _load(self) -> None:
        if LoadKind.ATTACHED not in self._settings.load:
            await self._load_all()
            return
        async with serve_socket(self._gpu, self._attached.path):
            await self._load_all()

    async def _load_all(self) -> None:
        sender = LoopSender(self._gpu)
        host = Task(self._ground, 0, sender)
        count = self._settings.tasks if LoadKind.TASKS in self._settings.load else 0
        try:
            await host.share()
            self._ready(self._ground)
            self._crowd.start()
            async with asyncio.TaskGroup() as tasks:
                for number in range(1, count + 1):
                    program = bursts(self._settings, number)
                    tasks.create_task(Task(self._ground, number, sender).run(program))
                for each in self._models:
                    tasks.create_task(each.run(self._ending))
            while self._crowd.alive() or self._ground.others:  # noqa: ASYNC110 - they are threads
                await asyncio.sleep(_LOOK_S)
            await host.check_and_free_shared()
        except* ServiceStopped as stops:
            self._stopped = str(stops.exceptions[0])

    async def _watch(self, load: asyncio.Task[None], over: Callable[[], bool]) -> None:
        """Wait until `over` returns True, or the load has ended."""
        while not (over() or load.done()):
            left = max(self._settings.seconds - self._tally.now_s, 0.01)
            await asyncio.wait([load], timeout=min(left, _LOOK_S))
            self._show()

    async def _outcome(self, load: asyncio.Task[None], seconds: float) -> Outcome:
        """The outcome of a run whose load has ended, or makes no progress."""
        lost = [] if load.done() else self._tally.lost_requests()
        if load.done():
            load.result()  # an error here is a bug of the harness
        if self._crowd.failures:
            raise self._crowd.failures[0]
        statistics: Statistics | None = None
        patience_s = min(5.0, self._settings.deadline_s)
        with contextlib.suppress(CudnnActorError):
            await self._gpu.ask(Drain(), timeout=patience_s)  # also for buffers that no caller received
        with contextlib.suppress(CudnnActorError):
            statistics = await self._gpu.ask(GetStatistics(), timeout=patience_s)
        self._ground.abandoned.set()
        stuck = await asyncio.to_thread(self._crowd.end, 5.0)
        injected = Counter(fired.rule.fault.value for fired in self._gpu.faults_fired)
        return Outcome(
            self._gpu.device,
            lost,
            dict(injected),
            statistics,
            self._stopped,
            seconds,
            tuple(f"thread {name} did not end" for name in stuck),
            tuple(self._left_out),
        )


async def _warm(gpu: CudnnRef, problems: Sequence[Problem], show: Callable[[], None]) -> None:
    """Build every plan of the load, so that the run measures crashes and not build times.

    Plans whose build fails through a fault are left out.
    """
    for problem in problems:
        with contextlib.suppress(CudnnActorError):
            await _warm_one(gpu, problem)
        show()


async def _warm_one(gpu: CudnnRef, problem: Problem) -> None:
    refs: dict[str, BufferRef] = {}
    try:
        for role, spec in problem.specs.items():
            refs[role] = await gpu.ask(Allocate(spec=spec))
        await gpu.warm(_messages(problem, refs))
    finally:
        for ref in refs.values():
            with contextlib.suppress(CudnnActorError):
                await gpu.free(ref)


def _messages(problem: Problem, refs: Mapping[str, BufferRef]) -> list[Compute]:
    messages = []
    for operation in problem.forms:
        given = {name: refs[role] for name, role in operation.named()}
        betas = (0.0, 1.0) if accumulates(operation) else (0.0,)
        messages += [message(operation, given, beta=beta) for beta in betas]
    return messages


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for it; its error, if any, is raised."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
