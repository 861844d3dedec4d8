"""What a replica gets before it has what all replicas have: without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cudnn_actor import ServiceStopped
from cudnn_actor.actors import Deadline
from cudnn_actor.processes.process_state import ProcessName
from cudnn_actor.ray.replica import Answer, Beat, Hello
from cudnn_actor.ray.watching import Watched
from cudnn_actor.supervision import LifecycleEvent

from ..patience import PATIENCE_S


def actor(**methods: Callable[..., Awaitable[Any]]) -> Any:
    """Stands for Ray's handle of an actor with these methods."""
    return SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})


class Gates:
    """A listener who is stopped in each preparation, and is told when a replica is up or lost."""

    def __init__(self) -> None:
        self.begun, self.may_end = asyncio.Semaphore(0), asyncio.Semaphore(0)
        self.is_up, self.is_lost = asyncio.Event(), asyncio.Event()

    async def prepare(self, _: Watched) -> None:
        self.begun.release()
        await self.may_end.acquire()

    def up(self, _: Watched) -> None:
        self.is_up.set()

    def pauses(self, _: Watched) -> None: ...

    def lost(self, _: Watched) -> None:
        self.is_up.clear()
        self.is_lost.set()

    def given_up(self, _: Watched) -> None: ...

    def happened(self, _: LifecycleEvent) -> None: ...


async def test_a_replica_gets_no_request_before_it_has_what_all_have() -> None:
    """Neither when it starts, nor when it answers again."""
    beats: list[asyncio.Future[Answer]] = []

    async def hello(_: object) -> Hello:
        return Hello(incarnation="first", pid=1, node="here", device="cpu")

    def beat(*_: object) -> asyncio.Future[Answer]:
        beats.append(asyncio.get_running_loop().create_future())
        return beats[-1]

    async def call(*_: object) -> Answer:
        return Answer(value="called")

    async def is_refused() -> bool:
        with pytest.raises(ServiceStopped, match="does not run, or cannot be reached"):
            await replica.request(Deadline(None), "call")
        return True

    gates = Gates()
    handle = actor(hello=hello, beat=beat, call=call)
    replica = Watched(0, "pool-0", handle, mailbox=1, lost_after_s=1.0, listener=gates)
    watching = asyncio.ensure_future(replica.watch())
    ready = Answer(value=Beat(ready=True, worker_pid=None))
    async with asyncio.timeout(PATIENCE_S):
        await gates.begun.acquire()
        assert await is_refused()
        gates.may_end.release()
        while not beats:  # noqa: ASYNC110 - in a next turn
            await asyncio.sleep(0)
        beats[-1].set_result(ready)
        await gates.is_up.wait()
        assert await replica.request(Deadline(None), "call") == "called"
        await gates.is_lost.wait()  # it says nothing any more
        beats[-1].set_result(ready)
        await gates.begun.acquire()
        assert await is_refused()
        gates.may_end.release()
        await gates.is_up.wait()
        assert await replica.request(Deadline(None), "call") == "called"
    for silent in beats:
        silent.cancel()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_a_replica_is_not_near_if_its_process_is_not_seen_here() -> None:
    """Then nobody would see its end, either, until which it may use the pool's memory."""
    own = ProcessName.own()
    for process, near in ((own, True), (replace(own, began=own.began - 1), False), (None, False)):
        gates, said = Gates(), asyncio.get_running_loop().create_future()
        hello = Hello(incarnation="first", pid=1, node="here", device="cpu", near=True, process=process)
        said.set_result(hello)

        watched = Watched(
            0, "pool-0", actor(hello=lambda _, said=said: said), mailbox=1, lost_after_s=1.0, listener=gates
        )
        watching = asyncio.ensure_future(watched.watch())
        async with asyncio.timeout(PATIENCE_S):
            await gates.begun.acquire()
        assert watched.life is not None
        assert watched.life.hello.near is near
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
