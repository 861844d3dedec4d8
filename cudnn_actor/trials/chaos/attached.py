"""Callers in attached processes: of the service by its socket, and of another server that is killed.

A client of this process, on an event loop of its own, runs the programs of all others, and its answers are
judged like their answers. Two processes of `attached_program` are killed by the injector: a client, which
holds buffers and sends requests all the time, and a server with a service of its own. Its caller here finds
each request ended, by a right answer or by `ServiceStopped`, and attaches to the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path

from cudnn_actor.attached import connect
from cudnn_actor.protocol import ServiceStopped, StartFailed
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.trials.chaos import attached_program, processes
from cudnn_actor.trials.chaos.faults import FaultKind
from cudnn_actor.trials.chaos.load import Ground, Task
from cudnn_actor.trials.chaos.load_kinds import LoadKind
from cudnn_actor.trials.chaos.oracle import Wrong
from cudnn_actor.trials.chaos.processes import Found, Role
from cudnn_actor.trials.chaos.senders import LoopSender
from cudnn_actor.trials.chaos.settings import Settings
from cudnn_actor.trials.chaos.task_program import bursts

__all__ = ["AttachedCallers"]

_FIRST = {LoadKind.ATTACHED: 5000, LoadKind.DOOMED: 6000}
"""The number of the first task of each kind."""
_LOOK_S = 0.25


class AttachedCallers:
    """The callers of a run that are attached.

    Parameters
    ----------
    ground
        What all callers share.
    settings
        The settings, which determine the callers.
    folder
        The folder of the sockets. The service's is served there, if there is any such caller.
    """

    def __init__(self, ground: Ground, settings: Settings, folder: Path) -> None:
        self._ground, self._settings = ground, settings
        self.path, self._doomed_path = folder / "service", folder / "doomed"
        self.victims: dict[FaultKind, int] = {}
        """The process ids that may be killed now. Written by the thread of their caller."""

    def callers(self) -> Mapping[str, Callable[[], Coroutine[None, None, None]]]:
        """The coroutine function that each caller runs on an event loop of its own, by name."""
        load, faults = self._settings.load, self._settings.faults
        found: dict[str, Callable[[], Coroutine[None, None, None]]] = {}
        if LoadKind.ATTACHED in load:
            found["attached"] = self._run_attached
            if FaultKind.KILL_CLIENT in faults:
                found["client"] = self._keep_a_client
        if LoadKind.DOOMED in load:
            found["doomed"] = self._keep_a_server
        return found

    # Clients of the service.

    async def _run_attached(self) -> None:
        try:
            async with connect(self.path, name="chaos") as gpu:
                await self.run_tasks(gpu, LoadKind.ATTACHED, 0)
        except ServiceStopped as error:
            if self._ground.gpu.alive:
                raise RuntimeError("an attached client has lost a service that goes on") from error
            raise

    async def run_tasks(self, gpu: CudnnRef, kind: LoadKind, first: int) -> None:
        """Run the programs of some tasks, each to its end. Raises `ServiceStopped` if the server ends."""
        # A client names its own buffers alone, so it has inputs of its own.
        ground = replace(self._ground, gpu=gpu, inputs={}, quarantined=set())
        sender = LoopSender(gpu, kind)
        first += _FIRST[kind]
        host = Task(ground, first, sender)
        await host.share()
        numbers = range(first + 1, first + 1 + max(1, self._settings.tasks // 4))
        tasks = [Task(ground, each, sender).run(bursts(self._settings, each)) for each in numbers]
        # Each ends by itself, so that each request's end is noted.
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if ended is not None:
                raise ended
        await host.check_and_free_shared()

    async def _keep_a_client(self) -> None:
        """Keep a client process running: start another one whenever it has been killed."""
        while not self._ground.ending.is_set():
            async with self._process(FaultKind.KILL_CLIENT, "client", self.path) as process:
                await self.hear(process)

    async def hear(self, process: asyncio.subprocess.Process) -> None:
        """Handle the lines of a client, until it or the run ends."""
        assert process.stdout is not None
        while not self._ground.ending.is_set():
            line = asyncio.ensure_future(process.stdout.readline())
            while not (await asyncio.wait([line], timeout=_LOOK_S))[0]:
                if self._ground.ending.is_set():
                    line.cancel()
                    return
            words = line.result().decode().split(maxsplit=1)
            if not words:
                return
            if words[0] == attached_program.READY:
                self.victims[FaultKind.KILL_CLIENT] = process.pid
            else:
                wrong = Wrong("the requests of a client process", "its convolution", line.result().decode())
                self._ground.tally.note_wrongs(_FIRST[LoadKind.ATTACHED], 0, [wrong])

    # Clients of the server that is killed.

    async def _keep_a_server(self) -> None:
        """Start a server process and be its client, again whenever it has been killed."""
        life = 0
        while not self._ground.ending.is_set():
            async with self._process(FaultKind.KILL_SERVER, "server", self._doomed_path) as process:
                assert process.stdout is not None
                await process.stdout.readline()  # it serves
                self.victims[FaultKind.KILL_SERVER] = process.pid
                life += 1
                with contextlib.suppress(ServiceStopped, StartFailed):  # it may be killed at once
                    async with connect(self._doomed_path, name="chaos") as gpu:
                        await self.run_tasks(gpu, LoadKind.DOOMED, 10 * life)

    @contextlib.asynccontextmanager
    async def _process(
        self, kind: FaultKind, role: str, path: Path
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """A process of `attached_program`. It is killed at the end, if it has not been.

        Raises `RuntimeError` if it ends otherwise.
        """
        program = f"from {attached_program.__name__} import main; main()"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, role, str(path), stdout=asyncio.subprocess.PIPE
        )
        try:
            yield process
        finally:
            self.victims.pop(kind, None)
            # Not by `process.kill`: that may reap it, and then its status is lost.
            processes.send_signal(Found(process.pid, Role.OTHER), signal.SIGKILL)
            status = await process.wait()
            process._transport.close()  # type: ignore[attr-defined]  # else its pipe is closed with the loop
        if status != -signal.SIGKILL:
            raise RuntimeError(f"the {role} process has ended by itself, with status {status}")
