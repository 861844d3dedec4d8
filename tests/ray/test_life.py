"""The requests of one incarnation of a replica: without a cluster."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from cudnn_actor import ServiceStopped
from cudnn_actor.processes.process_state import ProcessName
from cudnn_actor.ray.life import Life
from cudnn_actor.ray.packing import INLINE_BYTES
from cudnn_actor.ray.replica import Answer, Hello
from cudnn_actor.ray.values import Values

from ..patience import PATIENCE_S

LARGE = np.zeros(INLINE_BYTES + 1, np.int8)


class Actor:
    """Stands for Ray's handle of an actor whose calls are answered when the test says so."""

    def __init__(self) -> None:
        self.answers: list[asyncio.Future[Answer]] = []
        self.tasks: list[int] = []
        self.call = SimpleNamespace(remote=self._call)

    def _call(self, *_: object) -> asyncio.Future[Answer]:
        self.answers.append(asyncio.get_running_loop().create_future())
        self.tasks.append(len(asyncio.all_tasks()))
        return self.answers[-1]

    def life(self, most: int = 1) -> Life:
        hello = Hello(incarnation="first", pid=1, node="here", device="cpu")
        return Life(self, hello, most=most, found_ended=lambda _: None)

    async def asked(self, count: int) -> None:
        """Wait until there were so many calls."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.answers) < count:  # noqa: ASYNC110 - in a next turn
                await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that were cancelled with Ray."""
    found: list[Any] = []
    monkeypatch.setattr(ray, "cancel", found.append)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    return found


async def test_a_request_is_sent_by_its_callers_task() -> None:
    actor = Actor()
    asking = asyncio.ensure_future(actor.life().request("call"))
    await actor.asked(1)
    assert actor.tasks == [2]  # the test's, and the caller's
    actor.answers[0].set_result(Answer(value=3))
    assert await asking == 3


async def test_requests_that_are_withdrawn_say_whether_they_were_sent(cancelled: list[Any]) -> None:
    actor = Actor()
    life = actor.life()
    sent, waiting = (asyncio.ensure_future(life.request("call")) for _ in range(2))
    await actor.asked(1)
    life.withdraw("it has ended")
    for task, interrupted in ((sent, True), (waiting, False)):
        with pytest.raises(ServiceStopped, match="it has ended") as caught:
            await task
        assert caught.value.interrupted is interrupted
        assert task.cancelling() == 0
    assert cancelled == actor.answers
    life.end("it is over")
    with pytest.raises(ServiceStopped, match="it is over"):
        await life.request("call")


async def test_a_caller_that_is_cancelled_is_not_told_that_its_request_was_withdrawn() -> None:
    actor = Actor()
    life = actor.life(most=2)
    tasks = [asyncio.ensure_future(life.request("call")) for _ in range(2)]
    await actor.asked(2)
    tasks[0].cancel()
    life.withdraw("it has ended")
    tasks[1].cancel()
    for task in tasks:
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_memory_is_kept_while_the_process_of_a_replica_that_cannot_be_reached_lives() -> None:
    """It may use the memory, unlike the process of an actor that has died."""
    actor, values, process = Actor(), Values(), ProcessName.own()
    await asyncio.to_thread(values.begin)
    for error, kept in ((ActorDiedError(), 0), (ActorUnavailableError("no connection", None), 1)):
        life = actor.life()
        life.hello = replace(life.hello, near=True, process=process)
        begun = len(actor.answers)
        asking = asyncio.ensure_future(life.request("call", values=values.of("a kind", {"x": LARGE})))
        await actor.asked(begun + 1)
        actor.answers[-1].set_exception(error)
        with pytest.raises(ServiceStopped):
            await asking
        assert [(each, len(pieces)) for each, pieces in values.kept.items()] == [(process, 1)] * kept
    values.end()


async def test_what_is_cancelled_after_the_end_of_ray_starts_no_other_one(
    cancelled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    actor = Actor()
    task = asyncio.ensure_future(actor.life().request("call"))
    await actor.asked(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not cancelled


async def test_what_is_cancelled_before_it_is_sent_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[Any] = []
    monkeypatch.setattr(ray, "put", put.append)
    actor, values = Actor(), Values()
    life = actor.life()
    first, *others = (
        asyncio.ensure_future(life.request("call", values=values.of("a kind", {"x": LARGE})))
        for _ in range(9)
    )
    await actor.asked(1)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    actor.answers[0].set_result(Answer(value=LARGE))
    assert await first is LARGE
    assert len(put) == 1
    values.end()
