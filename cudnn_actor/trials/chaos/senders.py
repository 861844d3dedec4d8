"""The ways to send a burst of requests and to wait for the answers: on a loop, on threads, under an alarm.

A sender belongs to one thread. Senders without an event loop block in `send`, so their task's coroutine runs
in one go: `run_without_a_loop`. Every wait checks regularly whether the run has been given up, so that a lost
request delays no caller's end.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from types import FrameType
from typing import Any, Protocol

import pykka

from cudnn_actor.protocol import RunGraph, ServiceStopped
from cudnn_actor.protocol.messages.operands import operands
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.trials.chaos.load_kinds import LoadKind
from cudnn_actor.trials.chaos.oracle import Alarmed, Deed
from cudnn_actor.trials.chaos.tally import Waiting

__all__ = [
    "AlarmedSender",
    "GivenUp",
    "LoopSender",
    "NewLoopSender",
    "PykkaSender",
    "Sender",
    "run_without_a_loop",
]

_LOOK_S = 0.25
_ALARMS = 0.5
"""The fraction of an alarmed sender's calls that may be interrupted."""
_ALARM_S = 300e-6
"""An alarm goes off within this time, in seconds: about the duration of a call."""

Note = Callable[[Waiting, Deed], None]

_Asked = concurrent.futures.Future[None]
"""A request of a thread: done when it has been answered."""


class GivenUp(Exception):
    """Raised when the run has been given up: unanswered requests are lost."""


class Sender(Protocol):
    """One way to send."""

    kind: LoadKind
    applies: bool
    """Whether it can send operations whose outputs the service allocates."""

    async def send(self, burst: Sequence[Deed], note: Note) -> list[tuple[Waiting | None, object]]:
        """Send a burst and wait for all of it. Returns each request (None if it was not sent) and its
        outcome.

        `note` is called with every request that was sent. Raises `GivenUp`.
        """


def run_without_a_loop(task: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never suspends."""
    try:
        task.send(None)
    except StopIteration:
        return
    raise RuntimeError("the coroutine waits for an event loop, but there is none")


class LoopSender:
    """Sends from tasks of a running loop: a whole burst at once.

    Parameters
    ----------
    gpu
        The service.
    kind
        The kind of load that it is counted as.
    """

    applies = True

    def __init__(self, gpu: CudnnRef, kind: LoadKind = LoadKind.TASKS) -> None:
        self._gpu = gpu
        self.kind = kind

    async def send(self, burst: Sequence[Deed], note: Note) -> list[tuple[Waiting | None, object]]:
        """See `Sender`. Never raises `GivenUp`: its task is cancelled instead."""
        started = [_begin(self._gpu, deed, alone=len(burst) == 1) for deed in burst]
        futures = [each for each in started if isinstance(each, asyncio.Future)]
        for deed, each in zip(burst, started, strict=True):
            if isinstance(each, asyncio.Future):
                note(each, deed)
        if futures:
            await asyncio.wait(futures)
        return [(each if isinstance(each, asyncio.Future) else None, _outcome(each)) for each in started]


class NewLoopSender:
    """Sends from a plain thread: every burst by `asyncio.run`.

    Parameters
    ----------
    gpu
        The service.
    abandoned
        Set when the run is given up.
    """

    kind = LoadKind.THREADS
    applies = True

    def __init__(self, gpu: CudnnRef, abandoned: threading.Event) -> None:
        self._within = LoopSender(gpu)
        self._abandoned = abandoned

    async def send(self, burst: Sequence[Deed], note: Note) -> list[tuple[Waiting | None, object]]:
        """See `Sender`. Blocks."""

        async def outlast() -> list[tuple[Waiting | None, object]]:
            sending = asyncio.ensure_future(self._within.send(burst, note))
            while not sending.done():
                await asyncio.wait([sending], timeout=_LOOK_S)
                if self._abandoned.is_set() and not sending.done():
                    sending.cancel()
                    raise GivenUp
            return sending.result()

        return asyncio.run(outlast())


class PykkaSender:
    """Sends through the service's pykka reference: one by one, or a whole burst before the first wait.

    Parameters
    ----------
    gpu, abandoned
        As of `NewLoopSender`.
    blocks
        Whether each request is waited for before the next is sent.
    """

    kind = LoadKind.PYKKA
    applies = False

    def __init__(self, gpu: CudnnRef, abandoned: threading.Event, *, blocks: bool) -> None:
        self._ref = gpu.actor_ref
        self._abandoned = abandoned
        self._blocks = blocks

    async def send(self, burst: Sequence[Deed], note: Note) -> list[tuple[Waiting | None, object]]:
        """See `Sender`. Blocks. A pykka caller cannot give up, so no deed has a timeout."""
        outcomes: list[tuple[Waiting | None, object]] = []
        asked: list[tuple[_Asked, object]] = []
        for deed in burst:
            deed.timeout_s = deed.cancel_after_s = None
            request: _Asked = concurrent.futures.Future()
            note(request, deed)
            asked.append((request, self._ask(deed)))
            if self._blocks:
                outcomes.append(self._get(*asked.pop()))
        return outcomes + [self._get(*each) for each in asked]

    def _ask(self, deed: Deed) -> object:
        """A pykka future, or the error if the request was refused."""
        try:
            return self._ref.ask(deed.message, block=False)
        except Exception as error:  # noqa: BLE001 - the outcome, for the oracle to judge
            return error

    def _get(self, request: _Asked, future: object) -> tuple[Waiting, object]:
        outcome = _wait_for(future, self._abandoned) if isinstance(future, pykka.Future) else future
        request.set_result(None)
        return request, outcome


class AlarmedSender:
    """Sends from the main thread, one by one, while an alarm's handler may raise in the middle of a call.

    It alternates between pykka's `ask` and a running loop. On a loop only the sending is interrupted: asyncio
    itself guarantees nothing if a handler raises in the middle of its own code.

    Parameters
    ----------
    gpu, abandoned
        As of `NewLoopSender`.
    seed
        Decides when the alarm goes off.
    """

    kind = LoadKind.ALARMS
    applies = False

    def __init__(self, gpu: CudnnRef, abandoned: threading.Event, seed: int) -> None:
        self._gpu = gpu
        self._abandoned = abandoned
        self._chance = random.Random(f"{seed} alarms")
        self._armed = False
        self.alarms = 0
        """How many calls were interrupted."""
        self._before = signal.signal(signal.SIGALRM, self._interrupt)
        self._hook_before, sys.unraisablehook = sys.unraisablehook, self._not_raised
        self._runner = asyncio.Runner()
        # for futures that no caller received
        self._runner.get_loop().set_exception_handler(lambda _loop, _context: None)

    def close(self) -> None:
        """Restore the previous handler."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, self._before)
        sys.unraisablehook = self._hook_before
        self._runner.close()

    async def send(self, burst: Sequence[Deed], note: Note) -> list[tuple[Waiting | None, object]]:
        """See `Sender`. Blocks."""
        outcomes: list[tuple[Waiting | None, object]] = []
        for deed in burst:
            deed.timeout_s = deed.cancel_after_s = None
            deed.alarmed = self._chance.random() < _ALARMS
            way = self._from_a_loop if self._chance.random() < 0.5 else self._by_pykka
            request: _Asked = concurrent.futures.Future()
            note(request, deed)
            outcomes.append((request, way(deed)))
            request.set_result(None)
        return outcomes

    def _by_pykka(self, deed: Deed) -> object:
        future = self._call(deed, lambda: self._gpu.actor_ref.ask(deed.message, block=False))
        return _wait_for(future, self._abandoned) if isinstance(future, pykka.Future) else future

    def _from_a_loop(self, deed: Deed) -> object:
        async def ask() -> object:
            future = self._call(deed, lambda: self._gpu.submit(deed.message))
            if not isinstance(future, asyncio.Future):
                return future
            while not future.done():
                await asyncio.wait([future], timeout=_LOOK_S)
                if self._abandoned.is_set() and not future.done():
                    raise GivenUp
            return _outcome(future)

        return self._runner.run(ask())

    def _call(self, deed: Deed, call: Callable[[], object]) -> object:
        """The result of a call, or the error that it raises: possibly the alarm's, at most once."""
        try:
            try:
                if deed.alarmed:
                    self._armed = True
                    signal.setitimer(signal.ITIMER_REAL, self._chance.uniform(1e-6, _ALARM_S))
                return call()
            finally:
                self._armed = False
        except Alarmed as alarm:
            self.alarms += 1
            return alarm
        except Exception as error:  # noqa: BLE001 - the outcome, for the oracle to judge
            return error

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            raise Alarmed

    def _not_raised(self, unraisable: Any) -> None:
        # the alarm went off in a finalizer, where it is lost
        if not isinstance(unraisable.exc_value, Alarmed):
            self._hook_before(unraisable)


def _wait_for(future: pykka.Future[Any], abandoned: threading.Event) -> object:
    while True:
        try:
            return future.get(timeout=_LOOK_S)
        except pykka.Timeout:
            if abandoned.is_set():
                raise GivenUp from None
        except pykka.ActorDeadError as error:
            return error if isinstance(error, ServiceStopped) else ServiceStopped(reason=str(error))
        except Exception as error:  # noqa: BLE001 - the outcome, for the oracle to judge
            return error


def _begin(gpu: CudnnRef, deed: Deed, *, alone: bool) -> asyncio.Future[Any] | Exception:
    """Send a request. Returns its future, or the error if it is refused at once."""
    request: asyncio.Future[Any]
    try:
        if deed.gives and isinstance(deed.message, RunGraph):
            refs: dict[str, Any] = {**operands(deed.message)}
            given = {name: ref for name, ref in refs.items() if ref is not None}
            request = asyncio.ensure_future(gpu.apply(deed.message.graph, given, timeout=deed.timeout_s))
        elif deed.gives:
            applied: Any = deed.message
            request = asyncio.ensure_future(gpu.apply(applied, also=deed.also, timeout=deed.timeout_s))
        elif alone:
            request = asyncio.ensure_future(gpu.ask(deed.message, timeout=deed.timeout_s))
        else:
            request = gpu.submit(deed.message, timeout=deed.timeout_s)
    except Exception as error:  # noqa: BLE001 - the outcome, for the oracle to judge
        return error
    if deed.cancel_after_s is not None:
        request.get_loop().call_later(deed.cancel_after_s, request.cancel)
    return request


def _outcome(request: asyncio.Future[Any] | Exception) -> object:
    if not isinstance(request, asyncio.Future):
        return request
    if request.cancelled():
        return asyncio.CancelledError()
    error = request.exception()
    return request.result() if error is None else error
