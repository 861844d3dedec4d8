"""Workers that do at a point of their way what a test says: lie, or wait."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ..workers.crash_rigs import Points, workers
from .places import Place, World, furnished
from .scenarios import Logs

__all__ = ["told"]


@asynccontextmanager
async def told(
    place: Place, logs: Logs, engine: str = "BarrierEngine"
) -> AsyncIterator[tuple[World, Points]]:
    """A world whose workers pass points."""
    if place.device != "cpu":
        pytest.skip("the engine that does what a test says is one of the CPU's")
    async with workers(engine, host_arenas=not place.stands_in, max_restarts=9) as (gpu, points):
        yield await furnished(gpu, logs), points
