"""A client sends the same bytes again: nothing that was found out about them outlives what it depends on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cudnn_actor import CudnnRef, DeadlineExceeded, Receipt, ServiceStopped, StaleBufferError, connect
from cudnn_actor.attached import ServedSocket, serve_socket
from cudnn_actor.attached.wire import Done, Refused
from cudnn_actor.errors import StaleReason
from cudnn_actor.processes.frames import encode
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import Layout, TensorSpec

from ..inside import service_behind
from ..patience import PATIENCE_S
from ..service.rigs import Gate, Trio, in_thread, outcome, spawn_gated
from .raw_client import ATTACH, Asking, Raw

_ONE = TensorSpec.packed((1, 1, 1, 1), DType.FLOAT32, Layout.NCHW)


class Rig(NamedTuple):
    """A service, its gate, and a client whose products have run twice."""

    gpu: CudnnRef
    gate: Gate
    client: CudnnRef
    one: Trio
    other: Trio


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    gate = Gate()
    async with (
        asyncio.timeout(PATIENCE_S),
        spawn_gated(gate) as gpu,
        serve_socket(gpu, tmp_path / "s") as served,
        connect(served.path) as client,
    ):
        one, other = await Trio.on(client), await Trio.on(client)
        for trio in (one, one, other, other):
            await client.ask(trio.product())
        yield Rig(gpu, gate, client, one, other)


async def test_a_buffer_that_the_service_has_lost_is_stale_at_once(rig: Rig) -> None:
    await rig.gpu.free(rig.other.x)  # the client does not know
    with rig.gate.closed():
        running = rig.gpu.submit(rig.one.product())
        await in_thread(rig.gate.wait_for_arrival)
        # The service's thread is busy, so only the session can have found this out.
        with pytest.raises(StaleBufferError):
            await rig.client.ask(rig.other.product())
    assert isinstance(await running, Receipt)


async def test_other_requests_run_after_a_buffer_has_ended(rig: Rig) -> None:
    await rig.gpu.free(rig.other.x)
    await rig.client.write(rig.one.x, [[[[5.0]]]])
    assert isinstance(await rig.client.ask(rig.one.product()), Receipt)
    assert await rig.one.result() == 10.0


async def test_a_request_runs_again_after_the_service_has_dropped_its_record(rig: Rig) -> None:
    service_behind(rig.gpu).state.messages.clear()
    assert isinstance(await rig.client.ask(rig.one.product()), Receipt)
    assert await rig.one.result() == 6.0


async def turns() -> None:
    """Let the loop, which is the client's and the server's, do what it has to do."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("ends", ["cancelled", "expired"])
async def test_only_the_second_of_two_equal_requests_ends_early(rig: Rig, ends: str) -> None:
    before = rig.gate.passed
    with rig.gate.closed():
        first = rig.client.submit(rig.one.product())
        await in_thread(rig.gate.wait_for_arrival)
        if ends == "expired":
            second = await outcome(rig.client.submit(rig.one.product(), timeout=1e-6))
            assert isinstance(second, DeadlineExceeded)
            assert not second.started
        else:
            future = rig.client.submit(rig.one.product())
            await turns()  # it is sent
            future.cancel()
            await turns()  # so is that it is withdrawn
    assert isinstance(await first, Receipt)
    await rig.client.drain()
    assert rig.gate.passed == before + 1


async def test_a_service_that_has_ended_says_so(rig: Rig) -> None:
    rig.gpu.actor_ref.stop(block=False)
    with pytest.raises(ServiceStopped):
        while True:
            await rig.client.ask(rig.one.product())


async def test_the_same_bytes_of_another_client_name_buffers_that_it_does_not_have(
    served: ServedSocket,
) -> None:
    first, second = Raw(served.path), Raw(served.path)
    for raw in (first, second):
        await raw.send(encode(ATTACH))
    asking, stranger = Asking(first), Asking(second)
    trio = Trio(None, *[await asking.allocate(_ONE) for _ in range(3)])  # type: ignore[arg-type]
    for _ in range(2):
        assert isinstance(await asking.ask(trio.product()), Done)
    refused = await stranger.ask(trio.product())
    assert isinstance(refused, Refused)
    error = refused.error.to_error()
    assert isinstance(error, StaleBufferError)
    assert error.reason is StaleReason.FOREIGN
    assert isinstance(await asking.ask(trio.product()), Done)
    first.socket.close()
    second.socket.close()
