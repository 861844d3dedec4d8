"""A thread that nobody can end: its engine waits for the test, and listens to nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cudnn_actor.supervision import supervisor

from ..service.rigs import SOON_S, Gate, MortalEngine, in_thread, outcome, service_on
from ..service.worker_rigs import GatedEngine
from .places import Place, World, living_on
from .scenarios import Logs

__all__ = ["lost_thread"]


@asynccontextmanager
async def lost_thread(place: Place, logs: Logs) -> AsyncIterator[tuple[World, asyncio.Future[Any]]]:
    """A world whose first actor was given up in the middle of a product, with the product's end."""
    if place.device != "cpu":
        pytest.skip("a call of CUDA's that never ends cannot be ended at the end of the test either")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(supervisor, "KILL_GRACE_S", SOON_S)
    gate = Gate()
    engine = MortalEngine if place.mortal else GatedEngine
    service = service_on(lambda: engine(gate), hang_after_s=SOON_S)
    try:
        async with living_on(service, logs) as here:
            gate.catch_one()
            product = here.gpu.submit(here.trio.product())
            await in_thread(gate.wait_for_arrival)
            await outcome(product)
            try:
                yield here, product
            finally:
                gate.open()
    finally:
        gate.open()
        monkeypatch.undo()
