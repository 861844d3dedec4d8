"""The serving processes, seen by the process that owns the service, which starts, informs and replaces them.

The owner has everything that exists once: the models, clients' shared memory, the counters and the batches. A
serving process has connections, reads requests and writes answers. See `front`.

A version of a model that no longer serves is closed when every serving process has said that none of its
requests uses the version. So a run of an old version finishes, whichever process has read its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec

from cudnn_actor.actors.logs import Log
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.actors.threads import ThreadRefused
from cudnn_actor.attached.server.serving import ServedSocket, serve_own_processes
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import BadFrame
from cudnn_actor.processes.interpreter import start_module
from cudnn_actor.processes.own_folder import OwnFolder
from cudnn_actor.processes.process_state import ending_of
from cudnn_actor.protocol.errors import CudnnActorError, StartFailed
from cudnn_actor.service.service import CudnnService
from cudnn_actor.serving.administration import OwnAdministration
from cudnn_actor.serving.catalog import Catalog, Entry
from cudnn_actor.serving.control_link import ControlLink
from cudnn_actor.serving.front_wire import (
    FROM_FRONT,
    AddRegion,
    Ask,
    Begin,
    Counts,
    Drain,
    DropRegions,
    ErrorOnWire,
    Failed,
    GiveCounts,
    Listen,
    Listens,
    ModelRecord,
    Prepared,
    Released,
    Reply,
    Took,
    Version,
)
from cudnn_actor.serving.front_wire import Served as ServedModels
from cudnn_actor.serving.limits import Limits, shared_table
from cudnn_actor.serving.listening import Listening
from cudnn_actor.serving.regions import Region, SharedMemory
from cudnn_actor.serving.served import Served
from cudnn_actor.serving.tokens import Tokens

__all__ = ["FrontAdministration", "Fronts", "serving_processes"]

log = Log("cudnn_actor")

_ANSWER_S = 10.0
"""Seconds within which a serving process must confirm a frame. One that takes longer counts as hung, and is
killed: it would answer its clients as before a change, or not at all."""
_LOOK_S = 5.0
"""Seconds between two frames that ask each serving process for counts, so that a process that hangs is
noticed."""
_START_S = 120.0
"""Seconds that a serving process may take until it listens."""
_MOST_FAILED_STARTS = 3
"""How many of the first serving processes may end before they listen."""
_LONGEST_PAUSE_S = 30.0
_LIVES_S = 5.0
"""A process that has lived for these seconds is replaced at once, any other one after a pause."""
_LONGEST_TEXT = 10_000
"""The most characters of an error that is sent as text alone."""
_GRACE_S = 15.0
"""Seconds that a process gets for its end, in addition to those for the requests under way."""


class _Front:
    """One serving process.

    Parameters
    ----------
    row
        Its row in the table of limits, which the process that replaces it will have.
    process, channel
        The process with its pidfd, and this end of the socket pair. This object owns both from now on.
    on_frame
        This is called with this object and each frame of the process.
    listening
        A future that is done when a process with this row has listened for the first time.
    """

    def __init__(
        self,
        row: int,
        process: tuple[subprocess.Popen[bytes], int],
        channel: Channel,
        on_frame: Callable[[_Front, Any], None],
        listening: asyncio.Future[None],
    ) -> None:
        self.listening = listening
        self.row = row
        self._process, self._pidfd = process
        self.pid = self._process.pid
        self.since_s = time.monotonic()
        self.prepared = False
        """Whether the process may listen. From then on, it must know all changes."""
        self.listens = False
        self.problem = ""
        self.holds: set[int] = set()
        """The versions of models that the process's requests may use."""
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = loop.create_future()
        """How the process has ended, once it has."""
        self.waited_for: dict[int, asyncio.Future[None]] = {}
        """A future for each frame that the process was sent and has not confirmed, by the frame's number."""
        self.link = ControlLink(channel, functools.partial(on_frame, self), self._end_of_frames)
        loop.add_reader(self._pidfd, self._note_exit)

    def _end_of_frames(self) -> None:
        self.kill()  # it has ended, is about to end, or is broken

    def _note_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.link.read_rest()  # it may have said why it ends
        status = self._process.wait()  # it can be reaped: its pidfd says so
        for future in self.waited_for.values():
            if not future.done():
                future.set_result(None)
        if not self.ended.done():
            self.ended.set_result(ending_of(status))

    def kill(self) -> None:
        """Kill the process."""
        if self._process.returncode is None:
            self._process.kill()

    def kill_unless_it_listens(self) -> None:
        """Kill the process if it has had `_START_S` seconds and does not listen yet."""
        if not self.listens:
            self.problem = self.problem or f"did not listen within {_START_S:.0f} s"
            self.kill()

    async def wait_until_told(self, number: int) -> None:
        """Wait until the process has confirmed the frame with this number, or has ended.

        A process that takes longer than `_ANSWER_S` is killed, so that it answers no client any more.
        """
        if self.ended.done():
            return
        future = self.waited_for[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(_ANSWER_S):
                await future
        except TimeoutError:
            log.warning("serving.process_hangs", pid=self.pid)
            self.kill()
        finally:
            del self.waited_for[number]

    def note_confirmed(self, number: int) -> None:
        """Note that the process has confirmed the frame with this number."""
        future = self.waited_for.get(number)
        if future is not None and not future.done():
            future.set_result(None)


class Fronts:
    """All serving processes. `serving_processes` makes it. It runs on one event loop.

    Parameters
    ----------
    count
        How many processes serve.
    begin
        The first frame for each process; `row` is replaced in it.
    served
        The socket by which the processes attach to the service.
    """

    def __init__(self, count: int, begin: Begin, served: ServedSocket) -> None:
        self._count, self._begin, self._socket = count, begin, served
        self.starting = True
        self._catalog: Catalog | None = None
        self._memory: SharedMemory | None = None
        self._administration: FrontAdministration | None = None
        self._numbers = itertools.count(1)
        self._versions: dict[int, Version] = {}
        self._keys: dict[Served, int] = {}
        self._released = asyncio.Event()
        self._fronts: set[_Front] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = asyncio.Event()
        self._kept: list[asyncio.Task[None]] = []
        self._failed_starts = 0
        self._table = os.memfd_create("cudnn-actor-limits")
        self._limits = shared_table(self._table, count)

    # The processes.

    async def start(
        self, catalog: Catalog, memory: SharedMemory, administration: FrontAdministration
    ) -> None:
        """Start all processes, and wait until they listen.

        Raises `OSError` for an address or a certificate, and `StartFailed` if processes end before they
        listen.
        """
        self._catalog, self._memory, self._administration = catalog, memory, administration
        listening = [asyncio.get_running_loop().create_future() for _ in range(self._count)]
        for row, future in enumerate(listening):
            self._kept.append(self._in_task(self._keep(row, future)))
        await asyncio.gather(*listening)
        self._in_task(self._keep_looking())

    async def _keep_looking(self) -> None:
        """Look for processes that hang, until cancelled: see `_Front.wait_until_told`."""
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.gather_counts()

    async def _keep(self, row: int, listening: asyncio.Future[None]) -> None:
        """Start a process with a row, and another one whenever it has ended. `listening`: a future that is
        done when a process listens for the first time, or fails if none does."""
        pause_s = 0.0
        while not await self._drains_within(pause_s):
            try:
                front = await self._start(row, listening)
            except (OSError, CudnnActorError, ThreadRefused) as error:
                ended, lived_s = f"could not be started: {error}", 0.0
                log.warning("serving.process_ended", how=ended)
            else:
                self._fronts.add(front)
                self._send_or_end(front, functools.partial(self._greet, front))
                if self._draining.is_set():  # this process did not exist when `drain` told all processes
                    front.kill()
                late = asyncio.get_running_loop().call_later(_START_S, front.kill_unless_it_listens)
                ended = await front.ended
                late.cancel()
                lived_s = time.monotonic() - front.since_s
                self._forget(front)
                ended = front.problem or ended
                if self._draining.is_set():
                    break
                log.warning("serving.process_ended", pid=front.pid, how=ended)
            if not listening.done():
                self._failed_starts += 1
                if self._failed_starts >= _MOST_FAILED_STARTS:
                    listening.set_exception(StartFailed(detail=f"a serving process {ended}"))
                    return
            pause_s = 0.0 if lived_s > _LIVES_S else min(max(2 * pause_s, 0.5), _LONGEST_PAUSE_S)
        if not listening.done():
            listening.cancel()

    async def _drains_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._draining.wait()
        return self._draining.is_set()

    async def _start(self, row: int, listening: asyncio.Future[None]) -> _Front:
        """Start a process. Raises `OSError`, `ThreadRefused`, and `InvalidRequest` if there is no Python."""
        end_here, end_of_child = socket.socketpair()
        channel = Channel(end_here, FROM_FRONT)  # at once: then a forked child closes its copy
        try:
            with end_of_child:
                start = functools.partial(
                    start_module,
                    "cudnn_actor.serving.front",
                    str(end_of_child.fileno()),
                    str(self._table),
                    descriptors=(end_of_child.fileno(), self._table),
                    executable=None,
                )
                process = await in_own_thread(start)
        except BaseException:
            channel.close()
            raise
        return _Front(row, process, channel, self.take, listening)

    def _greet(self, front: _Front) -> None:
        """Tell a new process all that it must know before it listens."""
        assert self._memory is not None
        front.link.send(msgspec.structs.replace(self._begin, row=front.row))
        for region in self._memory.status():
            self._send_region(front, region, 0)
        self._send_models(front, self._records(), 0)

    def _forget(self, front: _Front) -> None:
        """Note that a process has ended. Its requests have ended with it."""
        self._fronts.discard(front)
        self._limits[front.row] = 0  # nobody else writes there, until its successor is started
        self._released.set()

    async def drain(self, seconds: float) -> None:
        """Let all processes take no more inferences, answer those under way within these seconds, and end."""
        self._draining.set()
        for front in tuple(self._fronts):
            front.link.send(Drain(seconds))
        if self._kept:
            await asyncio.wait(self._kept, timeout=seconds + _GRACE_S)
        await self._end_all()

    async def aclose(self) -> None:
        """End all processes at once."""
        self._draining.set()
        await self._end_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        os.close(self._table)

    async def _end_all(self) -> None:
        for front in tuple(self._fronts):
            front.kill()
        await asyncio.gather(*self._kept, return_exceptions=True)

    def _in_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def pids(self) -> list[int]:
        """The process ids of the processes that listen."""
        return sorted(front.pid for front in self._fronts if front.listens)

    # Frames from processes.

    def take(self, front: _Front, frame: Any) -> None:
        """Take a frame that a serving process has sent."""
        if isinstance(frame, Ask):
            self._in_task(self._answer(front, frame))
        elif isinstance(frame, Counts):
            self._join(frame)
            front.note_confirmed(frame.number)
        elif isinstance(frame, Took):
            front.note_confirmed(frame.number)
        elif isinstance(frame, Released):
            front.holds.difference_update(frame.keys)
            self._released.set()
        elif isinstance(frame, Prepared):
            front.prepared = True  # in the step in which `Listen` is sent: later frames are waited for
            front.link.send(Listen())
        elif isinstance(frame, Listens):
            front.listens = True
            log.info("serving.process_listens", pid=front.pid)
            if not front.listening.done():
                front.listening.set_result(None)
        elif isinstance(frame, Failed):
            front.problem = f"could not serve: {frame.text}"
            if frame.address and not front.listening.done():
                front.listening.set_exception(OSError(frame.text))

    async def _answer(self, front: _Front, asked: Ask) -> None:
        assert self._administration is not None
        try:
            value = await getattr(self._administration, asked.method)(**asked.arguments)
            front.link.send(Reply(asked.number, value))
        except CudnnActorError as error:
            self._answer_error(front, asked, error)
        except Exception as error:  # also if the answer cannot be sent: a client waits for one
            log.exception("serving.request_failed", method=asked.method)
            self._answer_error(front, asked, CudnnActorError(_sendable(error)))

    @staticmethod
    def _answer_error(front: _Front, asked: Ask, error: CudnnActorError) -> None:
        try:
            front.link.send(Reply(asked.number, error=ErrorOnWire.of(error)))
        except Exception:  # its facts are too long, or a frame cannot hold them
            log.exception("serving.request_failed", method=asked.method)
            plain = CudnnActorError(_sendable(error))
            front.link.send(Reply(asked.number, error=ErrorOnWire.of(plain)))

    def _join(self, frame: Counts) -> None:
        assert self._catalog is not None
        for entry in self._catalog.entries:
            if (counts := frame.counts.get(entry.name)) is not None:
                entry.counts.join(counts)

    async def gather_counts(self) -> None:
        """Add the counts of all processes so far to the catalog's counts."""
        await self._tell(lambda front, number: front.link.send(GiveCounts(number)))

    # Frames to processes.

    @staticmethod
    def _send_or_end(front: _Front, send: Callable[[], None]) -> None:
        """Send a process a frame by `send`. If that cannot be sent, kill the process.

        A region that waits for room in the socket needs a descriptor of its own, which the system may refuse.
        Without the region, the process would answer differently from the other processes. The process that
        replaces it is told everything again.
        """
        try:
            send()
        except (OSError, BadFrame) as error:
            front.problem = f"could not be told: {error}"
            front.kill()

    async def _tell(self, send: Callable[[_Front, int], None]) -> None:
        """Send all processes a frame by `send`, and wait until they have confirmed it.

        A process that is starting gets the frame, too, and handles it before it listens. A process that does
        not confirm it is killed, and the log says so.
        """
        waiting = []
        for front in tuple(self._fronts):
            number = next(self._numbers)
            self._send_or_end(front, functools.partial(send, front, number))
            if front.prepared:
                waiting.append(front.wait_until_told(number))
        await asyncio.gather(*waiting)

    def announce(self) -> None:
        """Tell all processes which models there are."""
        if self._fronts:
            records = self._records()
            for front in self._fronts:
                self._send_or_end(front, functools.partial(self._send_models, front, records, 0))

    async def wait_until_known(self) -> None:
        """Wait until all processes know which models there are."""
        records = self._records()
        await self._tell(lambda front, number: self._send_models(front, records, number))

    async def add_region(self, region: Region) -> None:
        """Tell all processes of a region, and wait until they have confirmed it."""
        await self._tell(lambda front, number: self._send_region(front, region, number))

    async def drop_regions(self, name: str) -> None:
        """Let all processes forget a region, or, for "", all regions, and wait until they have."""
        await self._tell(lambda front, number: front.link.send(DropRegions(number, name)))

    @staticmethod
    def _send_region(front: _Front, region: Region, number: int) -> None:
        frame = AddRegion(number, region.name, region.key, region.offset, region.nbytes)
        front.link.send(frame, (region.descriptor,))

    def _send_models(self, front: _Front, records: list[ModelRecord], number: int) -> None:
        front.holds |= {each.served.key for each in records if each.served is not None}
        front.link.send(ServedModels(number, self.starting, records))

    # Models.

    def _records(self) -> list[ModelRecord]:
        assert self._catalog is not None
        return [ModelRecord(each.name, each.loading, self._version(each)) for each in self._catalog.entries]

    def _version(self, entry: Entry) -> Version | None:
        served = entry.served
        if served is None:
            return None
        key = self._keys.get(served)
        if key is None:
            key = self._keys[served] = next(self._numbers)
            self._versions[key] = Version(
                key,
                served.version,
                self._socket.lent.lend_run(served.model, served.begin),
                served.batched,
                served.metadata(entry.name),
                served.config(entry.name),
            )
        return self._versions[key]

    async def retire(self, served: Served) -> None:
        """Wait until no process uses a version that no longer serves. Then no request can run it any more."""
        key = self._keys.get(served)
        if key is None:
            return
        while any(key in front.holds for front in self._fronts):
            self._released.clear()
            await self._released.wait()
        del self._keys[served], self._versions[key]
        self._socket.lent.take_back_run(served.model)


def _sendable(error: Exception) -> str:
    """The text of an error as a frame can hold it: of bounded length, and valid UTF-8."""
    return str(error)[:_LONGEST_TEXT].encode(errors="replace").decode()


class FrontAdministration(OwnAdministration):
    """The owner's administration, if serving processes serve. When a method returns, all of them know its
    change.

    Parameters
    ----------
    own
        The owner's own administration.
    fronts
        The serving processes.
    """

    def __init__(self, *own: Any, fronts: Fronts) -> None:
        super().__init__(*own)
        self._fronts = fronts

    async def statistics(self, name: str, version: str) -> list[dict[str, Any]]:
        """The counters of a model, or of all that answer."""
        await self._fronts.gather_counts()
        return await super().statistics(name, version)

    async def load(self, name: str) -> None:
        """Load a model again from its file."""
        await super().load(name)
        await self._fronts.wait_until_known()

    async def unload(self, name: str) -> None:
        """Serve a model no more."""
        await super().unload(name)
        await self._fronts.wait_until_known()

    async def register(self, name: str, key: str, offset: int, nbytes: int) -> None:
        """Open a region."""
        await super().register(name, key, offset, nbytes)
        for region in self._memory.status(name):
            await self._fronts.add_region(region)

    async def unregister(self, name: str) -> None:
        """Forget a region, or all."""
        await super().unregister(name)
        await self._fronts.drop_regions(name)


@contextlib.asynccontextmanager
async def serving_processes(
    service: CudnnService,
    count: int,
    at: Listening,
    tokens: Tokens | None,
    *,
    limits: Limits,
) -> AsyncIterator[Fronts]:
    """Serving processes, which `Fronts.start` starts. They end with the block."""
    folder = await in_own_thread(OwnFolder, "serving")
    try:
        path = folder.path / "service.sock"
        # A process may count twice for a moment: the owner may notice the end of its connection only after
        # another process has taken its place.
        socket_of = serve_own_processes(service, path, clients=2 * count, requests=limits.most_running)
        async with socket_of as served:
            begin = Begin(
                path=str(path),
                at=at,
                row=0,
                rows=count,
                most_running=limits.most_running,
                most_bytes=limits.most_bytes,
                tokens=None if tokens is None else tokens.digests,
            )
            fronts = Fronts(count, begin, served)
            try:
                yield fronts
            finally:
                await fronts.aclose()
    finally:
        await in_own_thread(folder.remove)
