"""Several requests unfinished at the same time, as on a GPU: the test decides when the engine's work ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cudnn_actor.messages import Fill

from ..isolation.crash_rigs import after, kill
from ..service.rigs import AsynchronousEngine, Device, in_thread, outcome, service_on
from .scenarios import Logs
from .scripted_workers import scripted_workers
from .setups import Session, Setup, session_on

__all__ = ["product_whose_input_is_written"]


class VolatileAsynchronousEngine(AsynchronousEngine):
    """An asynchronous engine whose memory counts as lost when its context dies."""

    outlives_context = False


@asynccontextmanager
async def product_whose_input_is_written(
    setup: Setup, logs: Logs
) -> AsyncIterator[tuple[Session, asyncio.Future[Any]]]:
    """A session after a crash with two unfinished requests: a product, and then a `Fill` of its input."""
    if setup.device != "cpu":
        pytest.skip("on a GPU, a test cannot decide which requests are unfinished at a crash")
    if setup.in_process:
        async with scripted_workers(setup, logs, "LateEngine") as (session, points):
            points.hold("finished")
            fills = points.visits(after("fill"))
            product, fill = enqueued(session)
            await in_thread(lambda: points.wait_for_visits(after("fill"), fills + 1))
            kill(session.gpu)
            points.let_go()
            yield session, product
            await outcome(fill)
    else:
        device = Device()
        device.run_freely()
        async with session_on(service_on(lambda: VolatileAsynchronousEngine(device)), logs) as session:
            device.pause()
            product, fill = enqueued(session)
            await in_thread(device.wait_for_fence)
            device.die()
            yield session, product
            device.run_freely()
            await outcome(fill)


def enqueued(session: Session) -> tuple[asyncio.Future[Any], asyncio.Future[Any]]:
    """Send a product, and a `Fill` of its input."""
    product = session.gpu.submit(session.trio.product())
    return product, session.gpu.submit(Fill(dst=session.trio.x, value=5))
