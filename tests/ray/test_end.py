"""The end of a pool whose cluster does not answer any more: without a cluster."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cudnn_actor import StartFailed
from cudnn_actor.ray import RayPool, placing, ray_pool
from cudnn_actor.ray.replica import Answer, Beat, Hello
from cudnn_actor.supervision import Stopped

from ..log_lines import capture_logs
from ..patience import PATIENCE_S

REPLICAS = 2


class Cluster:
    """Stands for Ray: replicas that are up, and a control service that answers, or blocks, or raises."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.error: Exception | None = None
        self.removed: list[str] = []
        self.beats = 0

    def control(self, what: str) -> Any:
        def call(*_: object, **__: object) -> str:
            assert self.answers.wait(PATIENCE_S)
            if self.error is not None:
                raise self.error
            self.removed.append(what)
            return what

        return call

    def actor_class(self, _: object) -> Any:
        actor = {"hello": self._hello, "beat": self._beat, "end": self._end}
        made = SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in actor.items()})
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: made))

    async def _hello(self, *_: object) -> Hello:
        return Hello(incarnation="first", pid=1, node="here", device="cpu")

    def _beat(self, *_: object) -> asyncio.Future[Answer]:
        beat: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.beats += 1
        if self.beats <= REPLICAS:
            beat.set_result(Answer(value=Beat(ready=True, worker_pid=None)))
        return beat

    async def _end(self) -> None: ...


def _blocked() -> list[threading.Thread]:
    """The threads that call Ray's control service."""
    return [each for each in threading.enumerate() if each.name in ("place", "remove")]


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster()
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cancel", lambda _: None)
    monkeypatch.setattr(ray, "remote", made.actor_class)
    monkeypatch.setattr(ray, "kill", made.control("actor"))
    monkeypatch.setattr(placing, "placement_group", made.control("placed"))
    monkeypatch.setattr(placing, "remove_placement_group", made.control("group"))
    yield made
    made.answers.set()
    for thread in _blocked():
        thread.join(PATIENCE_S)


@pytest.mark.parametrize("problem", ["has not answered within 0.01 s", "no control service"])
async def test_a_pool_ends_though_the_head_of_its_cluster_has_gone(
    control: Cluster, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(PATIENCE_S):
        pool = await RayPool(num_replicas=REPLICAS, num_gpus=0)
        assert pool.ready
        if "answered" in problem:
            control.answers.clear()
            monkeypatch.setattr(ray_pool, "_END_S", 0.01)
        else:
            control.error = ConnectionError("no control service\nand a long text")
        with capture_logs() as lines:
            await pool.aclose()
        (warned,) = [each for each in lines if each["event"] == "ray.not_removed"]
        assert warned["problem"].endswith(problem)
        events = [each async for each in pool.events()]  # they end
        assert isinstance(events[-1], Stopped)
        assert not pool.alive


async def test_a_pool_that_ends_removes_all_that_it_has_reserved(control: Cluster) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await (await RayPool(num_replicas=REPLICAS, num_gpus=0)).aclose()
    assert control.removed == ["placed", "actor", "actor", "group"]


async def test_a_pool_does_not_wait_for_a_cluster_that_does_not_answer(
    control: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_pool, "_END_S", 0.01)
    control.answers.clear()
    with pytest.raises(StartFailed, match=r"has not answered within 0\.01 s"):
        await RayPool(num_replicas=REPLICAS, num_gpus=0, ready_within_s=0.01)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await RayPool(num_replicas=REPLICAS, num_gpus=0)


async def cancelled_start(control: Cluster, monkeypatch: pytest.MonkeyPatch) -> RayPool:
    """A pool whose start is cancelled while Ray places its replicas. Ray answers after that."""
    monkeypatch.setattr(ray_pool, "_END_S", float(PATIENCE_S))  # nothing else ends the wait
    control.answers.clear()

    async def start() -> RayPool:
        return await RayPool(num_replicas=REPLICAS, num_gpus=0)

    starting = asyncio.ensure_future(start())
    while not _blocked():  # noqa: ASYNC110 - in a next turn
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.sleep(0)
    control.answers.set()
    return await starting


async def test_a_cancelled_start_leaves_nothing(control: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(asyncio.CancelledError):
        await cancelled_start(control, monkeypatch)
    assert control.removed == ["placed", "actor", "actor", "group"]


async def test_a_start_that_was_given_up_leaves_nothing_once_the_cluster_answers(control: Cluster) -> None:
    control.answers.clear()
    with pytest.raises(StartFailed, match=r"has not answered within 0\.01 s"):
        await RayPool(num_replicas=REPLICAS, num_gpus=0, ready_within_s=0.01)
    await asyncio.sleep(0)  # a turn in which its thread is told
    (placing_thread,) = _blocked()
    control.answers.set()
    placing_thread.join(PATIENCE_S)
    assert control.removed == ["placed", "group"]


async def test_a_cancelled_start_that_fails_is_cancelled(
    control: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    control.error = ConnectionError("no control service")
    with pytest.raises(asyncio.CancelledError):
        await cancelled_start(control, monkeypatch)
