"""Killed workers that the kernel ends late, as on a busy machine."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cudnn_actor import Receipt
from cudnn_actor.supervision import ExitKind, Restarting
from tests.service.noticed_hangs import notice_hang
from tests.service.rigs import Trio, in_thread, outcome, seen

from ..patience import PATIENCE_S
from .crash_rigs import kill, workers
from .slow_death import dying_slowly, is_dying

pytestmark = pytest.mark.usefixtures("a_forkserver")
LATE_S = 1.5


@pytest.mark.parametrize("crash", ["hang", "kill"])
async def test_a_pure_request_runs_again_although_its_worker_dies_late(crash: str) -> None:
    async with workers() as (gpu, points):
        trio = await Trio.on(gpu)
        points.hold("execute")
        product = gpu.submit(trio.product())
        await in_thread(lambda: points.arrival("execute"))
        async with dying_slowly(gpu) as pid:
            if crash == "kill":
                kill(gpu)
            else:
                notice_hang(gpu)
            async with asyncio.timeout(PATIENCE_S):
                while not is_dying(pid):  # noqa: ASYNC110 - nothing tells when a process begins to die
                    await asyncio.sleep(0)
            points.let_go()
            late = threading.Event()
            await in_thread(lambda: late.wait(LATE_S))
            assert not product.done()
        receipt = await outcome(product)
        assert isinstance(receipt, Receipt), receipt
        assert receipt.generation == 2
        assert await trio.result() == 6.0
        event = await seen(gpu, Restarting)
        assert isinstance(event, Restarting)
        assert event.cause.kind is (ExitKind.HUNG if crash == "hang" else ExitKind.CRASH)
