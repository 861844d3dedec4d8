"""A pool of services in processes of their own, on the CPU."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.typing import EventDict

from cudnn_actor import CudnnRef
from cudnn_actor.engines.engine_choice import choose_engine
from cudnn_actor.errors import (
    DeadlineExceeded,
    InvalidRequest,
    OutOfMemory,
    ServiceStopped,
    StaleBufferError,
    StartFailed,
)
from cudnn_actor.messages import Ping
from cudnn_actor.operations import MaxPool, Window
from cudnn_actor.pool import MemberState, Pool, spawn_pool
from cudnn_actor.pool.member_process import preloaded_for
from cudnn_actor.pool.replicas import Replica
from cudnn_actor.supervision import Escalated, ExitKind, Restarting, Started, Stopped

from ..forked_programs import Program
from ..inside import dispatching_of, replication_of
from .conftest import is_back, kill, product, send, some


async def test_requests_run_on_all_members_and_give_what_one_service_gives(pool: Pool) -> None:
    graph, x, w = product(), some(4, 8), some(8, 8, seed=1)
    weights = await pool.upload(w)
    given = await asyncio.gather(*(pool.compute(graph, x=x + k, w=weights) for k in range(20)))
    for k, y in enumerate(given):
        np.testing.assert_allclose(y, np.maximum((x + k) @ w, 0), rtol=1e-5, atol=1e-5)
    assert all(member.finished for member in pool.statistics().members)
    assert {member.outstanding for member in pool.statistics().members} == {0}
    task = pool.submit(graph, x=x, w=w)
    np.testing.assert_allclose(await task, np.maximum(x @ w, 0), rtol=1e-5, atol=1e-5)
    await pool.free(weights)
    with pytest.raises(InvalidRequest, match="was freed"):
        await pool.compute(graph, x=x, w=weights)


async def test_what_a_killed_member_had_runs_elsewhere_and_callers_see_no_error(
    pool: Pool, logs: list[EventDict]
) -> None:
    graph, x, w = product(), some(4, 8), some(8, 8, seed=1)
    weights = await pool.upload(w)
    killed = [0, 0]

    async def caller(number: int) -> None:
        for turn in range(30):
            if number == 0 and turn % 10 == 5:
                member = turn // 10 % 2
                kill(pool, member)
                killed[member] += 1
                await is_back(pool, member, 1 + killed[member])
            y = await pool.compute(graph, x=x + number, w=weights)
            np.testing.assert_allclose(y, np.maximum((x + number) @ w, 0), rtol=1e-5, atol=1e-4)

    await asyncio.gather(*(caller(number) for number in range(8)))
    found = pool.statistics()
    assert [member.restarts for member in found.members] == killed == [2, 1]
    assert sum(member.finished for member in found.members) == 8 * 30
    assert found.waiting == 0
    assert not [line for line in logs if line["event"] not in ("service.restarting", "service.restarted")]


async def test_a_stopped_members_requests_run_elsewhere_when_it_is_killed(pool: Pool) -> None:
    """No race: the member cannot answer, so what it has is lost for sure."""
    graph, x, w = product(), some(4, 8), some(8, 8)
    send(pool, 0, signal.SIGSTOP)
    tasks = [pool.submit(graph, x=x, w=w) for _ in range(4)]
    await asyncio.sleep(0)  # each has a member now
    had = pool.statistics().members[0].outstanding
    assert had
    kill(pool, 0)
    for task in tasks:
        np.testing.assert_allclose(await task, np.maximum(x @ w, 0), rtol=1e-5, atol=1e-5)
    assert pool.statistics().moved == had
    assert pool.statistics().members[0].finished == 0
    await is_back(pool, 0, 2)


async def test_a_call_runs_on_a_member_with_its_own_buffers_and_elsewhere_if_that_is_lost(pool: Pool) -> None:
    w = some(8, 8)
    weights = await pool.upload(w)
    send(pool, 0, signal.SIGSTOP)
    tasks = [
        asyncio.ensure_future(pool.call(lambda gpu, own: gpu.download(own(weights)), kind="download"))
        for _ in range(4)
    ]
    late = asyncio.ensure_future(pool.call(lambda _gpu, _own: asyncio.sleep(100), timeout=0.01))
    await asyncio.sleep(0)
    assert pool.statistics().members[0].outstanding
    with pytest.raises(DeadlineExceeded):
        await late
    kill(pool, 0)
    for values in await asyncio.gather(*tasks):
        np.testing.assert_array_equal(values, w)


async def test_requests_wait_while_no_member_is_up(pool: Pool) -> None:
    graph, x, w = product(), some(4, 8), some(8, 8)
    kill(pool, 0)
    kill(pool, 1)
    y = await pool.compute(graph, x=x, w=w)
    np.testing.assert_allclose(y, np.maximum(x @ w, 0), rtol=1e-5, atol=1e-5)
    assert pool.ready


async def test_a_model_is_loaded_on_all_members_and_on_those_that_are_restarted(pool: Pool) -> None:
    onnx = pytest.importorskip("onnx")
    w = some(8, 8)
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> scores (float[N, 8] x, float[8, 8] w) => (float[N, 8] y)'
        "{ y = MatMul(x, w) }"
    )
    model.graph.input.pop()
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    loaded = await pool.load(model, dims={"N": 4})
    assert [each.name for each in loaded.inputs] == ["x"]
    assert repr(loaded) == "<model 'scores' of a pool, on 2 members>"
    x = some(4, 8, seed=2)
    for member in (0, 1):
        kill(pool, member)
        found = await asyncio.gather(*(pool.run(loaded, x=x) for _ in range(6)))
        for outputs in found:
            np.testing.assert_allclose(outputs["y"], x @ w, rtol=1e-5, atol=1e-5)
        await is_back(pool, member, 2)
    assert repr(loaded) == "<model 'scores' of a pool, on 2 members>"
    await pool.unload(loaded)
    with pytest.raises(InvalidRequest, match="was unloaded"):
        await pool.run(loaded, x=x)


class Failing(Replica[None]):
    """What a member gets at its first start, and is refused at its second."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    async def make(self, gpu: CudnnRef) -> None:
        self.made += 1
        if self.made == 2:
            raise OutOfMemory(requested=1, in_use=0, limit=0)

    async def drop(self, gpu: CudnnRef, copy: None) -> None: ...


async def test_a_member_that_cannot_get_all_that_the_pool_has_is_started_again_with_all_of_it() -> None:
    async with spawn_pool(["cpu"]) as pool:
        w = some(8, 8)
        weights = await pool.upload(w)
        failing = Failing()
        await replication_of(pool).add(failing)
        kill(pool, 0)
        await is_back(pool, 0, 3)
        assert failing.made == 3
        np.testing.assert_array_equal(await pool.call(lambda gpu, own: gpu.download(own(weights))), w)


async def test_what_is_uploaded_while_a_member_starts_or_pauses_is_there_too(pool: Pool) -> None:
    """Whichever comes first: the member's own start makes what it lacks, or the upload waits for it."""
    kill(pool, 0)
    early = await pool.upload(some(8, 8))  # its process is not there yet
    dispatching_of(pool).pause(1)  # as while its worker restarts
    late = await pool.upload(some(8, 8))
    dispatching_of(pool).up(1)
    await is_back(pool, 0, 2)
    assert set(early.at) == set(late.at) == {0, 1}
    await pool.free(early)
    with pytest.raises(InvalidRequest, match="was freed"):
        await pool.call(lambda gpu, own: gpu.download(own(early)))


async def test_a_reference_of_one_member_is_refused_by_name(pool: Pool) -> None:
    graph, x = product(), some(4, 8)
    w = await pool.on(1).upload(some(8, 8))
    with pytest.raises(InvalidRequest, match="buffer of pool-1") as refused:
        await pool.compute(graph, x=x, w=w)
    assert refused.value.field == "w"
    with pytest.raises(StaleBufferError):
        await pool.on(0).download(w)
    assert (await pool.on(1).download(w)).shape == (8, 8)
    with pytest.raises(InvalidRequest):
        pool.on(2)


async def test_a_buffer_of_the_pool_is_never_overwritten(pool: Pool) -> None:
    y = await pool.upload(np.zeros((1, 1, 2, 2), np.float32))
    with pytest.raises(InvalidRequest, match="overwritten on one member alone"):
        await pool.compute(MaxPool, x=some(1, 1, 4, 4), y=y, window=Window.symmetric(2, size=2, stride=2))


async def test_an_error_of_the_request_is_its_callers(pool: Pool) -> None:
    with pytest.raises(InvalidRequest):
        await pool.compute(product(), x=some(4, 8), w=some(4, 4))
    assert pool.statistics().moved == 0


async def test_events_say_which_member_was_replaced_and_the_end(pool: Pool) -> None:
    kill(pool, 1)
    await is_back(pool, 1, 2)
    await pool.aclose()
    await pool.aclose()
    events = [event async for event in pool.events()]
    assert [type(event) for event in events[:2]] == [Started, Started]
    restarting = [event for event in events if isinstance(event, Restarting)]
    assert [event.child for event in restarting] == ["pool-1"]
    assert re.fullmatch("crash: its process (was killed by SIGKILL|has ended)", str(restarting[0].cause))
    stopped = [event for event in events if isinstance(event, Stopped)]
    assert {event.child for event in stopped} == {"pool-0", "pool-1", None}
    assert {event.reason.kind for event in stopped} == {ExitKind.SHUTDOWN}  # none had to be killed
    assert stopped[-1] is events[-1]
    with pytest.raises(ServiceStopped):
        await pool.compute(product(), x=some(4, 8), w=some(8, 8))
    with pytest.raises(ServiceStopped):
        pool.on(0)
    assert not pool.alive


async def gone(pool: Pool, member: int) -> None:
    """Kill a member that may not be replaced, and wait until it has been given up."""
    kill(pool, member)
    name = pool.statistics().members[member].name
    async for event in pool.events():
        if isinstance(event, Escalated) and event.child == name:
            break


async def test_a_member_that_dies_too_often_is_given_up_and_the_others_go_on(logs: list[EventDict]) -> None:
    graph, x, w = product(), some(4, 8), some(8, 8)
    pool = await spawn_pool(["cpu"], replicas=2, name="two", max_restarts=0)
    await gone(pool, 0)
    y = await pool.compute(graph, x=x, w=w)
    np.testing.assert_allclose(y, np.maximum(x @ w, 0), rtol=1e-5, atol=1e-5)
    assert [member.state for member in pool.statistics().members] == [MemberState.REMOVED, MemberState.UP]
    removed = next(line for line in logs if line["event"] == "member.removed")
    assert (removed["child"], removed["left"], removed["min_ready"]) == ("two-0", 1, 1)
    send(pool, 1, signal.SIGSTOP)
    waiting = pool.submit(graph, x=x, w=w)
    await asyncio.sleep(0)
    kill(pool, 1)
    with pytest.raises(ServiceStopped, match="no member of the pool is left"):
        await waiting
    assert not pool.alive
    with pytest.raises(ServiceStopped):
        await pool.compute(graph, x=x, w=w)
    await pool.aclose()


async def test_with_fewer_members_than_min_ready_the_pool_stops_and_says_so_to_whoever_entered_it() -> None:
    pools = list[Pool]()

    async def body() -> None:
        async with spawn_pool(["cpu", "cpu"], max_restarts=0, min_ready=2) as pool:
            pools.append(pool)
            kill(pool, 1)
            await asyncio.Event().wait()  # until it is cancelled

    with pytest.raises(ServiceStopped, match="1 members are left, and min_ready=2") as stopped:
        await body()
    assert "was killed" in str(stopped.value)
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
    *_, last = [event async for event in pools[0].events()]
    assert isinstance(last, Stopped)
    assert last.reason.kind is ExitKind.CRASH


async def test_closing_waits_for_what_has_begun_and_removes_the_sockets() -> None:
    pool = await spawn_pool(["cpu"])
    folder = Path(pool.statistics().members[0].socket).parent
    assert folder.exists()
    task = pool.submit(product(), x=some(4, 8), w=np.eye(8, dtype=np.float32))
    await asyncio.sleep(0)
    await pool.aclose()
    np.testing.assert_array_equal(await task, np.maximum(some(4, 8), 0))
    assert not folder.exists()


async def test_closing_ends_a_member_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cudnn_actor.pool.pool.SHUTDOWN_S", 0.1)
    async with spawn_pool(["cpu"]) as pool:
        send(pool, 0, signal.SIGSTOP)
        task = pool.submit(product(), x=some(4, 8), w=some(8, 8))
        await asyncio.sleep(0)
        await pool.aclose(drain_s=0)
        with pytest.raises(ServiceStopped):
            await task


async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    async def start() -> Pool:
        return await spawn_pool(["cpu", "cpu"])

    for turns in (1, 20):
        task = asyncio.ensure_future(start())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_members_on_the_cpu_find_their_engine_imported() -> None:
    """Its modules are most of what a member's start would take."""
    assert {*choose_engine("cpu").preload} < {*preloaded_for("cpu")}


async def test_members_end_with_the_process_of_their_pool() -> None:
    with Program(["-m", "tests.pool.pool_program"], stdout=subprocess.PIPE, spare=True) as process:
        member = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(member, ended.set)
    await ended.wait()
    asyncio.get_running_loop().remove_reader(member)
    os.close(member)


async def test_a_pool_that_cannot_start_says_why_and_leaves_nothing() -> None:
    with pytest.raises(StartFailed, match=r"pool-0.* no CUDA|pool-0"):
        await spawn_pool(["cuda:7"], max_restarts=0)


async def test_all_gpus_where_there_is_none_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(InvalidRequest, match=r'spawn_pool\(\["cpu", "cpu"\]\)') as refused:
        await spawn_pool("all")
    assert refused.value.field == "devices"


def test_options_of_a_pool_are_checked_at_once() -> None:
    options: list[dict[str, Any]] = [
        {"devices": "cpu"},
        {"devices": []},
        {"devices": ["cpu"], "replicas": 0},
        {"devices": "all", "replicas": 0},
        {"devices": "all", "min_ready": 0},
        {"devices": ["cpu"], "min_ready": 2},
        {"devices": ["cpu"], "max_restarts": -1},
        {"devices": ["gpu"]},
        {"devices": ["cpu"], "on_give_up": "exit"},
        {"devices": ["cpu"], "standbye": 1},
    ]
    for wrong in options:
        with pytest.raises(InvalidRequest):
            spawn_pool(**wrong)


async def test_a_member_whose_worker_restarts_keeps_its_requests() -> None:
    """The process of the member lives: its service replaces its worker, and its buffers stay."""
    async with spawn_pool(["cpu"], isolation="process") as pool:
        gpu = pool.on(0)
        w = await gpu.upload(some(8, 8))
        assert gpu.worker_pid is not None
        os.kill(gpu.worker_pid, signal.SIGKILL)
        y = await pool.compute(product(), x=some(4, 8), w=np.eye(8, dtype=np.float32))
        np.testing.assert_allclose(y, np.maximum(some(4, 8), 0), rtol=1e-5, atol=1e-5)
        assert (await gpu.download(w)).shape == (8, 8)
        await gpu.ask(Ping())
        assert pool.statistics().members[0].restarts == 0


async def test_what_a_restarting_worker_had_runs_elsewhere_if_that_is_sooner() -> None:
    graph, x, w = product(), some(4, 8), some(8, 8)
    async with spawn_pool(["cpu", "cpu"], isolation="process") as pool:
        await asyncio.gather(*(pool.compute(graph, x=x, w=w) for _ in range(8)))
        dispatching_of(pool).restart_times.start_s[0] = 100.0  # later than elsewhere, however slow that is
        worker = pool.on(0).worker_pid
        assert worker is not None
        os.kill(worker, signal.SIGSTOP)
        tasks = [pool.submit(graph, x=x, w=w) for _ in range(6)]
        await asyncio.sleep(0)
        finished = [member.finished for member in pool.statistics().members]
        had = pool.statistics().members[0].outstanding
        assert had
        os.kill(worker, signal.SIGKILL)
        for task in tasks:
            np.testing.assert_allclose(await task, np.maximum(x @ w, 0), rtol=1e-5, atol=1e-5)
        found = pool.statistics()
        assert [member.finished for member in found.members] == [finished[0], finished[1] + 6]
        assert found.moved == had
        assert found.members[0].restarts == 0
