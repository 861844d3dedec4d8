"""One message object, sent again and again: what was found out about it holds only while it is true."""

from __future__ import annotations

import numpy as np
import pytest

from cudnn_actor import ConvSpec, InvalidRequest, StaleBufferError
from cudnn_actor.messages import Free
from cudnn_actor.supervision import Fault, FaultPlan, Restarted

from .rigs import THREAD_ONLY, AsynchronousEngine, Device, Trio, seen, single, spawn, spawn_on

pytestmark = pytest.mark.usefixtures("isolation")


async def test_it_is_stale_as_soon_as_a_buffer_of_it_is_freed() -> None:
    async with spawn(device="cpu") as gpu:
        trio = await Trio.on(gpu)
        message = trio.product()
        await gpu.ask(message)
        await gpu.free(trio.x)
        with pytest.raises(StaleBufferError):
            await gpu.ask(message)


async def test_it_is_stale_when_the_free_was_sent_just_before_it() -> None:
    async with spawn(device="cpu") as gpu:
        trio = await Trio.on(gpu)
        message = trio.product()
        await gpu.ask(message)
        freeing = gpu.submit(Free(buffer=trio.w))
        with pytest.raises(StaleBufferError):
            await gpu.submit(message)  # mostly passes the sender's look, and never the actor's
        await freeing


async def test_it_runs_on_the_bytes_of_the_incarnation_that_serves() -> None:
    faults = FaultPlan().at(6, Fault.STICKY)
    async with spawn(device="cpu", faults=faults) as gpu:
        trio = await Trio.on(gpu)
        message = trio.product()
        for _ in range(4):
            await gpu.ask(message)
        await seen(gpu, Restarted)
        await gpu.write(trio.x, single(5.0))
        await gpu.ask(message)
        assert await trio.result() == 10.0


@THREAD_ONLY
async def test_it_follows_what_is_written_to_its_buffers() -> None:
    device = Device()
    device.run_freely()
    async with spawn_on(lambda: AsynchronousEngine(device)) as gpu:
        trio = await Trio.on(gpu)
        message = trio.product()
        for value in (1.0, 2.0, 3.0):
            await gpu.write(trio.x, single(value))
            await gpu.ask(message)
            assert await trio.result() == 2.0 * value


async def test_another_object_at_the_same_place_in_memory_is_another_message() -> None:
    async with spawn(device="cpu") as gpu:
        trio = await Trio.on(gpu)
        for number in range(2000):  # more than are remembered, and each gone before the next is made
            await gpu.ask(trio.product(alpha=float(number)))
            if number % 250 == 0:
                assert await trio.result() == 6.0 * number


async def test_what_is_wrong_with_it_is_said_each_time() -> None:
    async with spawn(device="cpu") as gpu:
        trio = await Trio.on(gpu)
        wrong = trio.product(conv=ConvSpec.symmetric(3))
        for _ in range(2):
            with pytest.raises(InvalidRequest):
                await gpu.ask(wrong)


async def test_it_is_foreign_to_another_service() -> None:
    async with spawn(device="cpu") as gpu, spawn(device="cpu") as other:
        trio = await Trio.on(gpu)
        await Trio.on(other)
        message = trio.product()
        await gpu.ask(message)
        with pytest.raises(StaleBufferError):
            await other.ask(message)
        assert np.isclose(await trio.result(), 6.0)
