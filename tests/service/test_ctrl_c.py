"""Ctrl-C under `asyncio.run` ends a service as leaving its block does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from cudnn_actor import CudnnRef, Receipt, spawn
from cudnn_actor.messages import Fill


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """As in a program at a terminal: what a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_what_was_sent_before_ctrl_c_is_answered_and_the_service_stops() -> None:
    services: list[CudnnRef] = []
    sent: list[asyncio.Future[Receipt]] = []

    async def main() -> None:
        async with spawn(device="cpu", isolation="thread") as gpu:
            services.append(gpu)
            x = await gpu.empty((1, 1, 64, 64))
            sent.extend(gpu.submit(Fill(dst=x, value=1.0)) for _ in range(500))
            press_ctrl_c()
            await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert len([future.result() for future in sent]) == 500
    assert not services[0].alive


def test_a_second_ctrl_c_while_it_drains_stops_the_service_too() -> None:
    services: list[CudnnRef] = []

    async def main() -> None:
        async with spawn(device="cpu", isolation="thread") as gpu:
            services.append(gpu)
            press_ctrl_c()
            try:
                await asyncio.Event().wait()
            finally:
                asyncio.get_running_loop().call_soon(press_ctrl_c)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert not services[0].alive
