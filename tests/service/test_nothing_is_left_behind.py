"""Buffers, services and errors at the edges: nothing leaks, nothing hangs, nothing comes out raw."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cudnn_actor import ConvSpec, CudnnRef, ExecutionFailed, OutOfMemory, Receipt, ServiceStopped
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.messages import Ping

from ..patience import PATIENCE_S
from .rigs import THREAD_ONLY, Gate, Trio, child_spec, in_thread, spawn, spawn_gated, spawn_on

pytestmark = pytest.mark.usefixtures("isolation")


async def test_a_cancelled_convolution_frees_its_result_although_the_mailbox_is_full() -> None:
    gate = Gate()
    async with spawn_gated(gate, mailbox=1) as gpu:
        trio = await Trio.on(gpu)
        before = (await gpu.statistics()).live_buffers
        with gate.closed():
            asked = asyncio.ensure_future(gpu.conv_fwd(trio.x, trio.w, conv=ConvSpec.symmetric(2)))
            await in_thread(gate.wait_for_arrival)
            filler = gpu.submit(trio.product())  # the mailbox's one place
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        assert isinstance(await filler, Receipt)
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == before


async def test_a_service_that_was_never_started_stops_at_once() -> None:
    _, service = child_spec(device="cpu")
    service.stop(PATIENCE_S)
    await asyncio.wait_for(CudnnRef(service).aclose(), PATIENCE_S)
    with pytest.raises(ServiceStopped):
        await CudnnRef(service).ask(Ping())


class ClumsyEngine(CpuEngine):
    """Raises what no engine should, once for each kind."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self._errors = [error]

    def execute(self, plan: Any, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> None:
        if self._errors:
            raise self._errors.pop()("by mistake")
        super().execute(plan, buffers, scalars)


@THREAD_ONLY
@pytest.mark.parametrize(("error", "seen"), [(KeyError, ExecutionFailed), (MemoryError, OutOfMemory)])
async def test_what_an_engine_raises_by_mistake_comes_out_typed(
    error: type[Exception], seen: type[Exception]
) -> None:
    async with spawn_on(lambda: ClumsyEngine(error)) as gpu:
        trio = await Trio.on(gpu)
        with pytest.raises(seen):
            await gpu.ask(trio.product())
        assert isinstance(await gpu.ask(trio.product()), Receipt)
        assert gpu.generation == 1


async def test_an_int8_convolution_gives_int32_unless_told_otherwise() -> None:
    async with spawn(device="cpu") as gpu:
        x = await gpu.upload(np.full((1, 1, 1, 1), 100, np.int8))
        w = await gpu.upload(np.full((1, 1, 1, 1), 100, np.int8))
        wide = await gpu.conv_fwd(x, w, conv=ConvSpec.symmetric(2))
        assert (await gpu.download(wide)).item() == 10_000
        narrow = await gpu.conv_fwd(x, w, conv=ConvSpec.symmetric(2), dtype="int8")
        assert (await gpu.download(narrow)).item() == 127


async def test_closing_a_coroutine_that_waits_for_its_allocation_leaves_no_buffer() -> None:
    async with spawn(device="cpu") as gpu:
        before = (await gpu.statistics()).live_buffers
        for _ in range(5):
            waiting = gpu.empty((1, 1, 2, 2))
            waiting.send(None)
            waiting.close()
        await gpu.drain()
        await gpu.drain()  # behind the frees that the first one let in
        assert (await gpu.statistics()).live_buffers == before


async def test_the_events_of_a_service_that_was_never_started_end() -> None:
    _, service = child_spec(device="cpu")
    service.end("changed my mind")
    events = [event async for event in CudnnRef(service).events()]
    assert [type(event).__name__ for event in events] == ["Stopped"]
