"""A thread that hangs and cannot be ended: its engine waits until the test lets it continue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cudnn_actor.supervision import supervisor

from ..service.noticed_hangs import notice_hang
from ..service.rigs import SOON_S, Gate, VolatileEngine, in_thread, outcome, service_on
from ..service.worker_rigs import GatedEngine
from .scenarios import Logs
from .setups import Session, Setup, session_on

__all__ = ["hung_thread"]


@asynccontextmanager
async def hung_thread(setup: Setup, logs: Logs) -> AsyncIterator[tuple[Session, asyncio.Future[Any]]]:
    """A session whose first actor hung in a product and was given up, and the future of that product."""
    if setup.device != "cpu":
        pytest.skip("a CUDA call that never ends could not be ended at the end of the test either")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(supervisor, "KILL_GRACE_S", SOON_S)
    gate = Gate()
    engine = VolatileEngine if setup.loses_memory else GatedEngine
    service = service_on(lambda: engine(gate))
    try:
        async with session_on(service, logs) as session:
            gate.catch_one()
            product = session.gpu.submit(session.trio.product())
            await in_thread(gate.wait_for_arrival)
            notice_hang(session.gpu)
            await outcome(product)
            try:
                yield session, product
            finally:
                gate.open()
    finally:
        gate.open()
        monkeypatch.undo()
