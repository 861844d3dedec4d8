"""The event loops of a server and its client stay awake while an answer or the next request is near."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cudnn_actor import CudnnRef, Receipt, connect
from cudnn_actor.attached import serve_socket
from cudnn_actor.attached.server import nearness
from tests.isolation.crash_rigs import Points, start_forkserver, workers
from tests.isolation.test_near_answers import run_for_a_while
from tests.service.rigs import Trio

from ..inside import service_behind
from ..patience import PATIENCE_S
from ..sleeps import watched_sleeps

pytestmark = pytest.mark.usefixtures("a_forkserver")


@pytest.fixture(scope="module")
def a_forkserver() -> None:
    start_forkserver()


@pytest.fixture(params=[64])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many cores this process may use."""
    count: int = request.param
    monkeypatch.setattr("cudnn_actor.isolation.process.cores.processors", lambda *_: count)
    return count


@contextlib.asynccontextmanager
async def attached(folder: Path) -> AsyncIterator[tuple[CudnnRef, Points, Trio]]:
    """A client on the server's own loop, whose request has run once."""
    path = folder / "gpu.sock"
    async with (
        asyncio.timeout(PATIENCE_S),
        workers("AmpleEngine") as (gpu, points),
        serve_socket(gpu, path),
        connect(path) as client,
    ):
        trio = await Trio.on(client)
        await client.ask(trio.product())
        yield client, points, trio


@pytest.mark.parametrize("cores", [2, 64], indirect=True)
async def test_the_servers_loop_stays_awake_for_a_short_run_if_there_are_cores(
    cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearness, "_SOON_US", float("inf"))
    async with attached(tmp_path) as (client, points, trio):
        points.hold("finished")
        with watched_sleeps() as sleeps:
            future = client.submit(trio.product())
            if cores == 2:
                await sleeps.until_asleep()
            else:
                await sleeps.until_time_passes()
            points.let_go("finished")
            assert isinstance(await future, Receipt)


async def test_the_servers_loop_sleeps_during_a_long_run(
    cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del cores
    monkeypatch.setattr(nearness, "_SOON_US", 0.0)
    async with attached(tmp_path) as (client, points, trio):
        points.hold("finished")
        with watched_sleeps() as sleeps:
            seen = points.visits("finished?")
            future = client.submit(trio.product())
            await asyncio.to_thread(points.wait_for_visits, "finished?", seen + 1)
            await sleeps.until_asleep()
            points.let_go("finished")
            assert isinstance(await future, Receipt)


@pytest.mark.parametrize("cores", [2, 64], indirect=True)
async def test_the_servers_loop_looks_for_the_next_request_if_the_last_one_came_soon(
    cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearness, "_SOON_US", 0.0)
    async with attached(tmp_path) as (client, _, trio):
        with watched_sleeps() as sleeps:  # whose clock stands still
            await client.ask(trio.product())
            await client.ask(trio.product())
            if cores == 2:
                await sleeps.until_asleep()
            else:
                await sleeps.until_time_passes()
        assert await trio.result() == 6.0


async def test_the_servers_loop_sleeps_if_the_last_request_came_late(
    cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del cores
    monkeypatch.setattr(nearness, "_SOON_US", 0.0)
    async with attached(tmp_path) as (client, _, trio):
        with watched_sleeps() as sleeps:
            await client.ask(trio.product())
            sleeps.pass_time()
            await client.ask(trio.product())
            await sleeps.until_asleep()


async def test_a_service_tells_nothing_to_servers_that_have_ended(gpu: CudnnRef, tmp_path: Path) -> None:
    told = service_behind(gpu).state.mailbox.on_near
    first, second = contextlib.AsyncExitStack(), contextlib.AsyncExitStack()
    await first.enter_async_context(serve_socket(gpu, tmp_path / "first.sock"))
    await second.enter_async_context(serve_socket(gpu, tmp_path / "second.sock"))
    await first.aclose()  # in the order in which they began
    assert len(told) == 1
    await second.aclose()
    assert not told


@pytest.mark.parametrize("client_has_cores", [True, False])
async def test_a_client_with_cores_stays_awake_when_its_answer_is_near(
    client_has_cores: bool, cores: int, tmp_path: Path
) -> None:
    del cores
    path = tmp_path / "gpu.sock"

    async def attach_and_run(points: Points) -> None:
        async with asyncio.timeout(PATIENCE_S), connect(path) as client:
            service_behind(client).link.loops_may_stay_awake = client_has_cores
            trio = await Trio.on(client)
            await run_for_a_while(client, points, trio)
            with watched_sleeps() as sleeps:
                if not client_has_cores:
                    await run_for_a_while(client, points, trio)
                    assert not sleeps.awake.is_set()
                    return
                points.hold("finished")
                future = client.submit(trio.product())
                await sleeps.until_time_passes()
                points.let_go("finished")
                assert isinstance(await future, Receipt)
            assert await trio.result() == 6.0

    async with workers("AmpleEngine") as (gpu, points), serve_socket(gpu, path):
        await asyncio.to_thread(asyncio.run, attach_and_run(points))


@pytest.mark.parametrize("client_has_cores", [True, False])
async def test_a_client_with_cores_stays_awake_for_its_only_request_if_the_last_one_was_answered_soon(
    client_has_cores: bool, cores: int, tmp_path: Path
) -> None:
    del cores
    path = tmp_path / "gpu.sock"

    async def attach_and_run(points: Points) -> None:
        async with asyncio.timeout(PATIENCE_S), connect(path) as client:
            service_behind(client).link.loops_may_stay_awake = client_has_cores
            trio = await Trio.on(client)
            with watched_sleeps() as sleeps:  # whose clock stands still: so that all comes soon
                await client.ask(trio.product())
                points.hold("finished")
                future = client.submit(trio.product())
                if client_has_cores:
                    await sleeps.until_time_passes()
                else:
                    await sleeps.until_asleep()
                points.let_go("finished")
                assert isinstance(await future, Receipt)
            assert await trio.result() == 6.0

    async with workers("AmpleEngine") as (gpu, points), serve_socket(gpu, path):
        await asyncio.to_thread(asyncio.run, attach_and_run(points))


@pytest.mark.parametrize("last", ["late", "among others"])
async def test_a_client_sleeps_during_its_only_request_if_the_last_one(
    last: str, cores: int, tmp_path: Path
) -> None:
    del cores
    path = tmp_path / "gpu.sock"

    async def attach_and_run(points: Points) -> None:
        async with asyncio.timeout(PATIENCE_S), connect(path) as client:
            service_behind(client).link.loops_may_stay_awake = True
            trio = await Trio.on(client)
            await client.ask(trio.product())
            with watched_sleeps() as sleeps:
                points.hold("finished")
                before = [client.submit(trio.product())]
                if last == "late":
                    sleeps.pass_time()
                else:
                    before.append(client.submit(trio.product()))
                points.let_go("finished")
                await asyncio.gather(*before)
                points.hold("finished")
                future = client.submit(trio.product())
                await sleeps.until_asleep()
                points.let_go("finished")
                assert isinstance(await future, Receipt)

    async with workers("AmpleEngine") as (gpu, points), serve_socket(gpu, path):
        await asyncio.to_thread(asyncio.run, attach_and_run(points))
