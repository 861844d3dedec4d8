"""Requests that are unfinished together, as on a device: engines whose work is done when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cudnn_actor import Fill

from ..service.rigs import AsynchronousEngine, Device, in_thread, service_on
from ..workers.crash_rigs import after, kill
from .places import Place, World, living_on
from .scenarios import Logs
from .told import told

__all__ = ["product_whose_input_is_written"]


class MortalAsynchronousEngine(AsynchronousEngine):
    """One whose memory dies with its context."""

    outlives_context = False


@asynccontextmanager
async def product_whose_input_is_written(
    place: Place, logs: Logs
) -> AsyncIterator[tuple[World, asyncio.Future[Any]]]:
    """A world after a crash that has found a product enqueued, and behind it a `Fill` of its input."""
    if place.device != "cpu":
        pytest.skip("what a GPU has finished at a crash is not for a test to say")
    if place.in_process:
        async with told(place, logs, "LateEngine") as (here, points):
            points.hold("finished")
            fills = points.visits(after("fill"))
            product, _ = enqueued(here)
            await in_thread(lambda: points.wait_for_visits(after("fill"), fills + 1))
            kill(here.gpu)
            points.let_go()
            yield here, product
    else:
        device = Device()
        device.run_freely()
        async with living_on(service_on(lambda: MortalAsynchronousEngine(device)), logs) as here:
            device.pause()
            product, _ = enqueued(here)
            await in_thread(device.wait_for_fence)
            device.die()
            yield here, product
            device.run_freely()


def enqueued(here: World) -> tuple[asyncio.Future[Any], asyncio.Future[Any]]:
    """A product, and a `Fill` of its input."""
    product = here.gpu.submit(here.trio.product())
    return product, here.gpu.submit(Fill(dst=here.trio.x, value=5))
