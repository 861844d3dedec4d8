"""A service whose workers do what the test orders: wait at a given point, or break the protocol there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ..isolation.crash_rigs import Points, workers
from .scenarios import Logs
from .setups import Session, Setup, session_of

__all__ = ["scripted_workers"]


@asynccontextmanager
async def scripted_workers(
    setup: Setup, logs: Logs, engine: str = "BarrierEngine"
) -> AsyncIterator[tuple[Session, Points]]:
    """A session whose workers stop at points, and the `Points` object that tells them what to do there."""
    if setup.device != "cpu":
        pytest.skip("the engine that takes orders from a test is a CPU engine")
    async with workers(engine, host_arenas=not setup.replaces_cuda, max_restarts=9) as (gpu, points):
        yield await session_of(gpu, logs), points
