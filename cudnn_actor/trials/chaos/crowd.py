"""The callers that send from their own threads: started together, and ended in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from cudnn_actor.protocol import ServiceStopped
from cudnn_actor.trials.chaos.attached import AttachedCallers
from cudnn_actor.trials.chaos.load import Ground, Task
from cudnn_actor.trials.chaos.load_kinds import LoadKind
from cudnn_actor.trials.chaos.senders import (
    AlarmedSender,
    GivenUp,
    LoopSender,
    NewLoopSender,
    PykkaSender,
    Sender,
    run_without_a_loop,
)
from cudnn_actor.trials.chaos.settings import Settings
from cudnn_actor.trials.chaos.task_program import bursts

__all__ = ["Crowd", "run_under_alarms"]

_LOOPS = 3
_THREADS = 2
_NUMBERS = {LoadKind.LOOPS: 1000, LoadKind.THREADS: 2000, LoadKind.PYKKA: 3000, LoadKind.ALARMS: 4000}
"""The number of the first task of each kind; a task's number determines its program."""


class Crowd:
    """The callers on threads. Created and ended on the thread of the run's first loop.

    Parameters
    ----------
    ground
        What all callers share.
    settings
        Determines which callers there are.
    attached
        The callers that are attached.
    """

    def __init__(self, ground: Ground, settings: Settings, attached: AttachedCallers) -> None:
        self._ground = ground
        self._attached = attached
        self._settings = settings
        self.failures: list[Exception] = []
        """Errors of the harness itself: those with which callers have ended and that are not answers."""
        self._loops: list[asyncio.AbstractEventLoop] = []
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start every caller."""
        ground, load = self._ground, self._settings.load
        if LoadKind.LOOPS in load:
            for number in range(_LOOPS):
                self._run(f"chaos-loop-{number}", self._on_a_loop, partial(self._several, number))
        if LoadKind.THREADS in load:
            for number in range(_THREADS):
                sender = NewLoopSender(ground.gpu, ground.abandoned)
                self._run(f"chaos-thread-{number}", self._on_a_thread, sender, number)
        if LoadKind.PYKKA in load:
            for number, blocks in enumerate((True, False)):
                asking = PykkaSender(ground.gpu, ground.abandoned, blocks=blocks)
                self._run(f"chaos-pykka-{number}", self._on_a_thread, asking, number)
        for name, caller in self._attached.callers().items():
            self._run(f"chaos-{name}", self._on_a_loop, caller)

    def alive(self) -> list[str]:
        """The names of the callers that have not ended."""
        return [thread.name for thread in self._threads if thread.is_alive()]

    def end(self, within_s: float) -> list[str]:
        """End all callers and wait for them. Returns the names of those that have not ended. Blocks.

        The run must be ending, or have been given up.
        """
        deadline = time.monotonic() + within_s
        if self._ground.abandoned.is_set():
            for loop in self._loops:
                with contextlib.suppress(RuntimeError):  # the loop has closed
                    loop.call_soon_threadsafe(_cancel_all)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return self.alive()

    def _run(self, name: str, target: Callable[..., None], *args: Any) -> None:
        def run() -> None:
            try:
                target(*args)
            except (GivenUp, ServiceStopped, asyncio.CancelledError):
                pass  # the first loop's tasks report it
            except Exception as error:  # noqa: BLE001 - the run's end raises it
                self.failures.append(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _on_a_thread(self, sender: Sender, number: int) -> None:
        number += _NUMBERS[sender.kind]
        run_without_a_loop(Task(self._ground, number, sender).run(bursts(self._settings, number)))

    def _on_a_loop(self, caller: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with asyncio.Runner() as runner:
            self._loops.append(runner.get_loop())
            runner.run(caller())

    async def _several(self, number: int) -> None:
        sender = LoopSender(self._ground.gpu, LoadKind.LOOPS)
        count = max(1, self._settings.tasks // 4)
        first = _NUMBERS[LoadKind.LOOPS] + 100 * number
        await asyncio.gather(
            *(
                Task(self._ground, task, sender).run(bursts(self._settings, task))
                for task in range(first, first + count)
            )
        )


def run_under_alarms(ground: Ground, settings: Settings) -> int:
    """Run the main thread's caller until the run is ending. Returns how often an alarm went off. Blocks."""
    number = _NUMBERS[LoadKind.ALARMS]
    sender = AlarmedSender(ground.gpu, ground.abandoned, settings.seed)
    try:
        run_without_a_loop(Task(ground, number, sender).run(bursts(settings, number)))
    except (GivenUp, ServiceStopped):
        pass
    finally:
        sender.close()
    return sender.alarms


def _cancel_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()
