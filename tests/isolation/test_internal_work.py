"""What a service asks of its workers for itself (plans for a standby, reads of `verify`) meets no request."""

from __future__ import annotations

import asyncio
import functools

import pytest
from structlog.typing import EventDict

from cudnn_actor import CudnnRef, MailboxFull, OutcomeUnknown, Receipt, StaleBufferError
from cudnn_actor.protocol.errors import StaleReason
from tests.service.rigs import Trio, in_thread, outcome

from ..log_lines import line
from ..patience import PATIENCE_S
from .crash_rigs import Points, after, freeze, gone, kill, pid_of, workers

pytestmark = pytest.mark.usefixtures("a_forkserver")


async def planned(gpu: CudnnRef, plans: int) -> None:
    """Until the worker that serves has so many plans: all that it deferred for them has begun by then."""
    async with asyncio.timeout(PATIENCE_S):
        while (await gpu.statistics()).plans.size < plans:
            pass


async def promoted_while_it_warms(gpu: CudnnRef, points: Points, logs: list[EventDict]) -> Trio:
    """Have the standby serve that has built the plan of a sum, and is building another: held at "build".

    The standby is held at "open".
    """
    starting = await in_thread(lambda: points.arrival("open"))
    trio = await Trio.on(gpu)
    pair = [await gpu.empty((1, 2, 1, 1)) for _ in range(2)]
    other = Trio(gpu, pair[0], pair[1], trio.y)
    await gpu.ask(other.product())
    await gpu.ask(trio.sum())  # the latest, so the first that the standby builds
    assert await trio.result() == 6.0
    points.hold("build", passing=1)
    points.let_go("open")
    await in_thread(lambda: points.arrival("build"))
    kill(gpu)
    assert (await line(logs, "standby.promoted"))["pid"] == starting.pid
    return trio


async def test_a_plan_that_a_standby_was_building_hides_no_request_that_has_begun(
    logs: list[EventDict],
) -> None:
    async with workers("LateBuildingEngine", held="open", standby=1, max_restarts=9) as (gpu, points):
        trio = await promoted_while_it_warms(gpu, points, logs)
        points.hold("finished")
        runs = points.visits(after("execute"))
        added = gpu.submit(trio.sum())  # takes the first place there is
        await in_thread(lambda: points.wait_for_visits(after("execute"), runs + 1))
        points.let_go("build")
        await planned(gpu, 2)
        await gone(kill(gpu))
        points.let_go()
        end = await outcome(added)
        assert isinstance(end, OutcomeUnknown), f"it had run, and ran again: {end}"
        with pytest.raises(StaleBufferError) as stale:
            await gpu.download(trio.y)
        assert stale.value.reason is StaleReason.TORN


async def test_what_a_standby_has_built_makes_no_room_in_the_mailbox(logs: list[EventDict]) -> None:
    async with workers(standby=1, mailbox=16) as (gpu, points):
        trio = await Trio.on(gpu)
        for channels in range(1, 40):  # one Warm each: the standby has each plan before the next is known
            x, w = await gpu.empty((1, channels, 1, 1)), await gpu.empty((1, channels, 1, 1))
            await gpu.ask(Trio(gpu, x, w, trio.y).product())
            await in_thread(functools.partial(points.wait_for_visits, after("build"), 2 * channels))
            await gpu.free(x)
            await gpu.free(w)
        standby = (await line(logs, "standby.ready"))["pid"]
        kill(gpu)
        await gpu.ping()
        assert pid_of(gpu) == standby
        freeze(gpu)
        admitted = [gpu.submit(trio.product()) for _ in range(16)]
        with pytest.raises(MailboxFull):
            gpu.submit(trio.product())
        kill(gpu)
        for future in admitted:
            assert isinstance(await outcome(future), Receipt)
        assert (await gpu.download(trio.y)).item() == 6.0
