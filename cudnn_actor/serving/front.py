"""A serving process: HTTP and gRPC in front of a service that another process owns.

Its program is `main`. It is attached to the service, and sends it the inferences of its clients. The owner
(the process that owns the service) tells it of models and of clients' shared memory. Other requests about
them it passes on to the owner. So it can be replaced at any time: only its connections are lost with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cudnn_actor.attached import ServedModel, connect
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.process_state import call_this_process
from cudnn_actor.protocol.errors import ServiceStopped
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.serving.control_link import ControlLink
from cudnn_actor.serving.failures import require_known, require_version
from cudnn_actor.serving.front_wire import (
    FROM_OWNER,
    AddRegion,
    Ask,
    Begin,
    Counts,
    Drain,
    DropRegions,
    Failed,
    GiveCounts,
    Listen,
    Listens,
    ModelRecord,
    Prepared,
    Released,
    Reply,
    Served,
    Took,
    Version,
)
from cudnn_actor.serving.host import Host
from cudnn_actor.serving.limits import SharedLimits, shared_table
from cudnn_actor.serving.listening import listen
from cudnn_actor.serving.regions import Region, SharedMemory
from cudnn_actor.serving.statistics import ModelCounts, count_samples
from cudnn_actor.serving.tokens import Tokens
from cudnn_actor.serving.under_way import UnderWay

__all__ = ["NAME", "main"]

NAME = "cudnn-serving"
"""The name of a serving process, as `ps -o comm` shows it."""
_LOST_S = 1.0
"""Seconds within which the owner must send `Drain` after the service has ended; else this process ends at
once."""
_COUNTS_S = 1.0
"""Seconds between two reports of counts to the owner. The counts since the last report are lost if this
process is killed."""


class _VersionHere:
    """A version of a model, which the owner's process runs."""

    def __init__(self, gpu: CudnnRef, record: Version) -> None:
        self._record = record
        self.key = record.key
        self.version = record.version
        self._model = ServedModel(gpu, f"version {record.version}", record.loaded)
        self.outputs: Sequence[str] = [each.name for each in record.loaded.outputs]
        self.under_way = UnderWay()  # the owner keeps the version until no request is under way

    async def run(self, inputs: Mapping[str, np.ndarray], timeout_s: float | None) -> dict[str, np.ndarray]:
        return await self._model.run(inputs, timeout=timeout_s)

    def samples(self, inputs: Mapping[str, np.ndarray]) -> int:
        return count_samples(inputs, batched=self._record.batched)

    def metadata(self, _name: str) -> dict[str, Any]:
        return self._record.metadata

    def config(self, _name: str) -> dict[str, Any]:
        return self._record.config


class _Named:
    """A model by its name, with the counts that this process has not reported to the owner yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts = ModelCounts()
        self.loading = False
        self.served: _VersionHere | None = None


class _ModelsHere:
    """The models, as the owner's last `Served` lists them."""

    def __init__(self, gpu: CudnnRef) -> None:
        self._gpu = gpu
        self._named: dict[str, _Named] = {}

    def find(self, name: str, version: str = "") -> tuple[_Named, _VersionHere]:
        """A model and the version that answers for it. Raises `NotServed`."""
        named = require_known(name, self._named.get(name))
        return named, require_version(name, named.served, version, loading=named.loading)

    def replace(self, records: Sequence[ModelRecord]) -> list[_VersionHere]:
        """Use these models from now on. Returns the versions that no longer answer."""
        before = {each.served.key: each.served for each in self._named.values() if each.served is not None}
        known = {each.name: self._named.get(each.name) or _Named(each.name) for each in records}
        for record in records:
            named = known[record.name]
            named.loading = record.loading
            if record.served is None:
                named.served = None
            else:
                there = before.pop(record.served.key, None)
                named.served = there or _VersionHere(self._gpu, record.served)
        self._named = known
        return list(before.values())

    def taken_counts(self) -> dict[str, ModelCounts]:
        """The counts since the last call, by the model's name."""
        taken = {}
        for named in self._named.values():
            if named.counts.success.count or named.counts.fail.count:
                taken[named.name], named.counts = named.counts, ModelCounts()
        return taken


class _AskedOwner:
    """An `Administration` that sends each request to the owner, and waits for its answer."""

    def __init__(self, link: ControlLink) -> None:
        self._link = link
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._gone = False

    async def index(self, *, ready: bool) -> list[dict[str, str]]:
        return await self._ask("index", ready=ready)  # type: ignore[no-any-return]

    async def statistics(self, name: str, version: str) -> list[dict[str, Any]]:
        return await self._ask("statistics", name=name, version=version)  # type: ignore[no-any-return]

    async def load(self, name: str) -> None:
        await self._ask("load", name=name)

    async def unload(self, name: str) -> None:
        await self._ask("unload", name=name)

    async def regions(self, name: str) -> list[dict[str, Any]]:
        return await self._ask("regions", name=name)  # type: ignore[no-any-return]

    async def register(self, name: str, key: str, offset: int, nbytes: int) -> None:
        await self._ask("register", name=name, key=key, offset=offset, nbytes=nbytes)

    async def unregister(self, name: str) -> None:
        await self._ask("unregister", name=name)

    async def metrics(self) -> bytes:
        return await self._ask("metrics")  # type: ignore[no-any-return]

    async def _ask(self, method: str, **arguments: Any) -> Any:
        if self._gone:  # requests may outlive the link until their connections have ended
            raise _owner_has_gone()
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._link.send(Ask(number, method, arguments))
            return await future
        finally:
            del self._asked[number]

    def take(self, reply: Reply) -> None:
        """Take the owner's answer."""
        future = self._asked.get(reply.number)
        if future is None or future.done():  # the client has gone
            return
        if reply.error is not None:
            future.set_exception(reply.error.to_error())
        else:
            future.set_result(reply.value)

    def end(self) -> None:
        """Answer all waiting and future requests with an error, because the owner has gone."""
        self._gone = True
        for future in self._asked.values():
            if not future.done():
                future.set_exception(_owner_has_gone())


def _owner_has_gone() -> ServiceStopped:
    return ServiceStopped(reason="the process that owns the service has ended")


class _Front:
    """The handlers of the owner's frames."""

    def __init__(self, connection: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[Begin] = self._loop.create_future()
        self.may_listen: asyncio.Future[None] = self._loop.create_future()
        self.ending: asyncio.Future[float] = self._loop.create_future()
        """A future of the seconds that requests under way have left. It is done once this process is to
        end."""
        self.link = ControlLink(Channel(connection, FROM_OWNER), self._take, self._owner_gone)
        self.administration = _AskedOwner(self.link)
        self.memory = SharedMemory(offered=True)  # the owner decides whether a client may have a region
        self.models: _ModelsHere | None = None
        self.host: Host | None = None
        self._waiting: list[Any] = []
        self._releasing: set[asyncio.Task[None]] = set()

    def start(self, host: Host, models: _ModelsHere) -> None:
        """Take the host and the models that frames are about, and handle the frames that have arrived
        already."""
        self.host, self.models = host, models
        waiting, self._waiting = self._waiting, []
        for frame in waiting:
            self._take(frame)

    def _take(self, frame: Any) -> None:
        if isinstance(frame, Begin):
            self.begun.set_result(frame)
        elif isinstance(frame, AddRegion):
            self.memory.adopt(
                Region(frame.name, frame.key, frame.offset, frame.nbytes, self.link.take_descriptor())
            )
            self.link.send(Took(frame.number))
        elif isinstance(frame, DropRegions):
            self.memory.unregister(frame.name)
            self.link.send(Took(frame.number))
        elif isinstance(frame, Listen):
            self.may_listen.set_result(None)
        elif isinstance(frame, Drain):
            self._end(frame.seconds)
        elif isinstance(frame, Reply):
            self.administration.take(frame)
        elif self.models is None or self.host is None:
            self._waiting.append(frame)
        elif isinstance(frame, GiveCounts):
            self.link.send(Counts(frame.number, self.models.taken_counts()))
        elif isinstance(frame, Served):
            self.host.starting = frame.starting
            if counts := self.models.taken_counts():  # the counts of a model that goes would be lost with it
                self.link.send(Counts(0, counts))
            for version in self.models.replace(frame.models):
                self._release(version)
            self.link.send(Took(frame.number))

    def _release(self, version: _VersionHere) -> None:
        """Tell the owner once no request uses a version any more. No further request begins, since no name
        leads to it."""
        if not version.under_way.count:
            self.link.send(Released([version.key]))
            return

        async def release() -> None:
            await version.under_way.none()
            self.link.send(Released([version.key]))

        task = asyncio.create_task(release())
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    def _owner_gone(self) -> None:
        self.administration.end()
        if not self.begun.done():
            self.begun.cancel()
        self._end(0.0)

    def lost_soon(self) -> None:
        """Note that the connection to the service has ended. Any thread.

        This process then ends, too, and another one takes its place, unless the owner sends `Drain` before
        that.
        """
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._loop.call_later, _LOST_S, self._end, 0.0)

    def _end(self, seconds: float) -> None:
        if self.host is not None:
            self.host.draining = True
        if not self.ending.done():
            self.ending.set_result(seconds)

    async def keep_counting(self) -> None:
        """Report counts to the owner again and again, until cancelled."""
        while True:
            await asyncio.sleep(_COUNTS_S)
            if self.models is not None and (counts := self.models.taken_counts()):
                self.link.send(Counts(0, counts))


def main() -> None:
    """Serve until the owner sends `Drain`, or has gone.

    The program's arguments are two descriptors: its end of the socket pair, and the table of limits.
    """
    call_this_process(NAME)
    for each in (signal.SIGINT, signal.SIGTERM):  # the owner gets them, too, and sends `Drain`
        signal.signal(each, signal.SIG_IGN)
    connection, table = (int(number) for number in sys.argv[1:])
    os.set_inheritable(connection, False)
    os.set_inheritable(table, False)
    asyncio.run(_serve(socket.socket(fileno=connection), table))


async def _serve(connection: socket.socket, table: int) -> None:
    front = _Front(connection)
    with contextlib.suppress(asyncio.CancelledError):
        begin = await front.begun
        try:
            async with connect(begin.path, name=f"{NAME} {begin.row}") as gpu:
                await _serve_at(front, gpu, begin, table)
        except Exception as error:
            front.link.send(Failed(str(error) or repr(error), isinstance(error, OSError)))
            raise
    front.link.close()


async def _serve_at(front: _Front, gpu: CudnnRef, begin: Begin, table: int) -> None:
    models = _ModelsHere(gpu)
    limits = SharedLimits(begin.most_running, begin.most_bytes, shared_table(table, begin.rows), begin.row)
    host = Host(gpu, models, front.administration, front.memory, limits)
    front.start(host, models)
    gpu._service.stopped.add_done_callback(lambda _: front.lost_soon())
    tokens = None if begin.tokens is None else Tokens.of_digests(begin.tokens)
    # No client reaches this process before it knows all models and regions, and before the owner waits until
    # it knows of changes. So no client finds a model or a region here as it was before another client changed
    # it.
    front.link.send(Prepared())
    await asyncio.wait((front.may_listen, front.ending), return_when=asyncio.FIRST_COMPLETED)
    if front.ending.done():
        return
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(listen(host, tokens, begin.at))
        stack.callback(asyncio.create_task(front.keep_counting()).cancel)
        front.link.send(Listens())
        gc.collect()
        gc.freeze()  # as the command does: a full collection would hold up all requests
        seconds = await front.ending
        host.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await host.idle()
    front.memory.close()
