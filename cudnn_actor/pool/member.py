"""A member as the pool sees it: its process, how the pool reaches it, and its supervision.

`supervision.core` decides what to do and when. This is the shell around it; only the pool's event loop calls
it. Each member has a supervisor of its own, so that a member which has used up its restarts does not affect
another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.attached import connect
from cudnn_actor.attached.client.attached_service import AttachedService
from cudnn_actor.pool.listener import Listener
from cudnn_actor.pool.member_process import MAIN, Begin, Failed, Said, preloaded_for, read_line
from cudnn_actor.processes.launching import Child, Launcher
from cudnn_actor.protocol.errors import StartFailed
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.supervision import (
    Clock,
    ExitReason,
    LifecycleEvent,
    Restarted,
    Restarting,
    Stopped,
    SupervisorPolicy,
    SupervisorState,
)
from cudnn_actor.supervision.core import decide
from cudnn_actor.supervision.signals import (
    CancelTimer,
    ChildExited,
    ChildReady,
    Effect,
    Emit,
    Escalate,
    Finish,
    KillChild,
    SetTimer,
    Signal,
    StartChild,
    StartRequested,
    StopChild,
    StopRequested,
    TimerFired,
    TimerKey,
)

__all__ = ["Member"]

_EXIT_S = 2.0
"""Seconds to wait for the exit status of a process whose connection has ended."""


class Incarnation:
    """One process of a member."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.child: Child | None = None
        self.control: socket.socket | None = None
        self.starting = True
        self.unwanted = False
        self.over = False
        """Whether the pool was told that the process is lost."""

    def close(self) -> None:
        """Kill the process if it runs, and release its resources. Idempotent.

        While it starts, the socket is only shut down: the loop may be about to read it.
        """
        self.unwanted = True
        if self.control is not None:
            with contextlib.suppress(OSError):
                self.control.shutdown(socket.SHUT_RDWR)
            if not self.starting:
                self.control.close()
        if self.child is not None:
            self.child.close()


class Member:
    """A service in a process of its own. It is used on the event loop that has made it.

    Parameters
    ----------
    number, name
        The member's number in the pool, from 0, and its name in log lines and events.
    options
        The options of `spawn`, as plain data.
    path
        The path of the member's socket.
    policy
        The supervision policy of the member, which is the only child.
    listener
        The receiver of the member's events.
    executable
        The Python that runs the member; None for the one that runs this process.
    """

    def __init__(
        self,
        number: int,
        name: str,
        *,
        options: dict[str, Any],
        path: Path,
        policy: SupervisorPolicy,
        listener: Listener[Member],
        executable: str | None = None,
    ) -> None:
        self.number, self.name = number, name
        self.gpu: CudnnRef | None = None
        """The handle of the service while its process lives."""
        self.restarts = 0
        """How often the member's process has been replaced."""
        self.finished = asyncio.Event()
        """An event that is set once no process of the member lives and none will be started."""
        self._options, self.path, self._listener = options, path, listener
        self._executable = executable
        self._state = SupervisorState.initial(policy, seed=number)
        self._clock = Clock()
        self._loop = asyncio.get_running_loop()
        self._timers: dict[TimerKey, asyncio.TimerHandle] = {}
        self._current: Incarnation | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<member {self.name!r}>"

    @property
    def pid(self) -> int | None:
        """The id of the member's process; None while there is none."""
        child = None if self._current is None else self._current.child
        return None if child is None else child.pid

    def start(self) -> None:
        """Start the member, and start it again whenever it ends."""
        self._signal(StartRequested())

    def stop(self) -> None:
        """End the member. `finished` is set when that is done."""
        self._signal(StopRequested())

    def restart(self) -> None:
        """Kill the member's process, which is then replaced as after any other end."""
        if self._current is not None and self._current.child is not None:
            self._current.child.signal(signal.SIGKILL)

    # Decisions of the supervision, and their effects.

    def _signal(self, signal: Signal) -> None:
        self._state, effects = decide(self._state, signal, self._clock.monotonic())
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case StartChild(incarnation=number):
                self._current = Incarnation(number)
                self._starting = self._spawn(self._start(self._current))
            case StopChild(deadline=deadline):
                self._spawn(self._stop(self._current, deadline))
            case KillChild():
                self._kill(self._current)
            case SetTimer(key=key, at=at):
                fires = functools.partial(self._fire, key)
                self._timers[key] = self._loop.call_later(max(0.0, at - self._clock.monotonic()), fires)
            case CancelTimer(key=key):
                if (timer := self._timers.pop(key, None)) is not None:
                    timer.cancel()
            case Emit(event=event):
                self._emit(event)
            case Escalate():
                self._listener.given_up(self)
            case Finish():
                self.finished.set()

    def _fire(self, key: TimerKey) -> None:
        self._timers.pop(key, None)
        self._signal(TimerFired(key=key))

    def _emit(self, event: LifecycleEvent) -> None:
        if isinstance(event, Restarted):
            self.restarts += 1
        if not (isinstance(event, Stopped) and event.child is None):  # that one is the end of the supervisor
            self._listener.happened(event)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the loop has only a weak reference
        task.add_done_callback(self._tasks.discard)
        return task

    # The life of a process.

    async def _start(self, one: Incarnation) -> None:
        try:
            await self._launch(one)
            gpu = await connect(self.path, name=self.name)
            service: Any = gpu._service
            if one.unwanted:  # another process may have replaced it by now
                service.end("not wanted any more")
                return
            self.gpu = gpu
            service.stopped.add_done_callback(lambda _: self._note_end(one))
            await self._listener.prepare(self)
        except Exception as error:  # noqa: BLE001 - whatever prevents a start is its reason
            one.starting = False
            if not one.over:
                one.over, self.gpu = True, None
                self._listener.lost(self)
                one.close()
                self._note_exit(one, ExitReason.start_failed(str(error)))
            return
        finally:
            one.starting = False
            if one.unwanted:
                one.close()
        if not one.over and not one.unwanted:
            self._signal(ChildReady(child=self.name, incarnation=one.number))
            self._spawn(self.follow(one, service))
            self._listener.up(self)

    async def _launch(self, one: Incarnation) -> None:
        """Start the process, and wait until its service serves. Raises `OSError`, `CudnnActorError`."""
        one.control, end_of_child = socket.socketpair()
        one.control.setblocking(False)
        launcher = Launcher.of_process(preloaded_for(self._options["device"]), self._executable)

        def launch() -> Child:
            with end_of_child:
                return launcher.launch(MAIN, (end_of_child.fileno(),), lambda: one.unwanted)

        one.child = await in_own_thread(launch)
        begin = msgspec.json.encode(Begin(self._options, str(self.path), os.getpid())) + b"\n"
        await self._loop.sock_sendall(one.control, begin)
        line = await read_line(one.control)
        if not line:
            raise StartFailed(detail=f"the process of {self.name} has ended while it started")
        said = msgspec.json.decode(line, type=Said)
        if isinstance(said, Failed):
            raise said.error.to_error()

    async def follow(self, one: Incarnation, service: AttachedService) -> None:
        """Tell the pool when the service's own worker restarts, while its process lives."""
        async for event in service.events.follow():
            if one.over:
                return
            if isinstance(event, Restarting):
                self._listener.pauses(self)
            elif isinstance(event, Restarted):
                self._listener.up(self)

    def _note_end(self, one: Incarnation) -> None:
        """Note that the connection to a process has ended, and that its requests and buffers are lost."""
        if one.over:
            return
        one.over = True
        self.gpu = None
        self._listener.lost(self)
        if not one.unwanted:
            self._spawn(self._reap(one))

    async def _reap(self, one: Incarnation) -> None:
        """Find out how a process has ended, and report its end, so that it is replaced."""
        how = "has ended"
        if one.child is not None:
            with contextlib.suppress(ValueError, OSError):  # it was closed meanwhile
                how = await in_own_thread(one.child.how_it_ended, _EXIT_S)
        one.close()
        self._note_exit(one, ExitReason.crash(f"its process {how}"))

    def _note_exit(self, one: Incarnation, reason: ExitReason) -> None:
        self._signal(ChildExited(child=self.name, incarnation=one.number, reason=reason))

    async def _stop(self, one: Incarnation | None, deadline: float) -> None:
        """End a process in order, or kill it at the deadline."""
        assert one is not None, "a child that is asked to stop was started"
        one.unwanted = True
        if one.starting and self._starting is not None:
            one.close()
            await asyncio.wait({self._starting})
        if self.gpu is not None:
            await self.gpu.aclose(drain_s=0.0)  # the pool has waited for open requests
        if one.control is not None:
            one.control.close()  # the process ends then
        reason = ExitReason.shutdown()
        if one.child is not None:
            left_s = max(0.0, deadline - self._clock.monotonic())
            with contextlib.suppress(ValueError):  # it was closed meanwhile
                if not await in_own_thread(one.child.wait, left_s):
                    reason = ExitReason.killed("not stopped in time")
        one.close()
        self._note_exit(one, reason)

    def _kill(self, one: Incarnation | None) -> None:
        """Kill a process, whether it is ready or not."""
        assert one is not None, "a child that is killed was started"
        gpu, self.gpu = self.gpu, None
        if not one.over:
            one.over = True
            self._listener.lost(self)
        one.close()
        if gpu is not None:
            gpu._service.end("its process was killed")
