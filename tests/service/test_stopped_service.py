"""What a service that is gone says, and what becomes of replies whose event loop is gone."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pykka
import pytest

from cudnn_actor import CudnnRef, ServiceStopped, Statistics, TensorSpec
from cudnn_actor.messages import Allocate, GetStatistics, Ping
from cudnn_actor.service.service import CudnnService

from ..onnx.small_models import image_model
from ..patience import PATIENCE_S
from .rigs import Gate, Trio, gated_service, in_thread, spawn, start

pytestmark = pytest.mark.usefixtures("isolation")

SPEC = TensorSpec.packed((1, 1, 1, 1))


async def test_every_way_of_asking_a_stopped_service_says_so() -> None:
    gpu = await spawn(device="cpu")
    trio = await Trio.on(gpu)
    await gpu.aclose()
    for message in (trio.product(), Ping(), Allocate(spec=SPEC)):
        with pytest.raises(ServiceStopped, match="spawn a new one") as caught:
            await gpu.ask(message)
        assert "closed" in caught.value.reason
        assert isinstance(caught.value, pykka.ActorDeadError)
        with pytest.raises(ServiceStopped):
            gpu.submit(message)
        with pytest.raises(ServiceStopped):
            gpu.tell(message)
        with pytest.raises(pykka.ActorDeadError):
            gpu.actor_ref.tell(message)
        with pytest.raises(pykka.ActorDeadError):
            await in_thread(partial(gpu.actor_ref.ask, message))
    with pytest.raises(ServiceStopped):
        await gpu.download(trio.y)
    with pytest.raises(ServiceStopped):
        await gpu.drain()


def test_a_with_statement_ends_once_the_service_has_stopped() -> None:
    with start(device="cpu") as service:
        buffer: Any = service.actor_ref.ask(Allocate(spec=SPEC))
        assert buffer.dims == (1, 1, 1, 1)
    assert service.stopped.done()
    assert not service.alive
    with pytest.raises(pykka.ActorDeadError):
        service.actor_ref.ask(Ping())


def test_a_with_statement_stops_the_service_and_raises_what_its_body_raises() -> None:
    with pytest.raises(LookupError, match="of the body"), start(device="cpu") as service:
        raise LookupError("of the body")
    assert service.stopped.done()


def test_a_with_statement_may_stop_its_service_itself() -> None:
    with start(device="cpu") as service:
        service.stop(timeout=PATIENCE_S)
    assert not service.alive


def test_coroutines_of_a_handle_run_on_any_thread_that_has_no_event_loop() -> None:
    with start(device="cpu") as service, concurrent.futures.ThreadPoolExecutor(4) as threads:
        gpu = CudnnRef(service)
        model = asyncio.run(gpu.load(image_model().SerializeToString()))

        def run(value: int) -> np.ndarray:
            image = np.full((1 + value % 3, 3, 8, 8), value, "float32")
            scores: np.ndarray = asyncio.run(gpu.run(model, image=image))["scores"]
            return scores

        together = list(threads.map(run, range(24)))
        for value, scores in enumerate(together):
            np.testing.assert_array_equal(scores, run(value))


@pytest.mark.parametrize("closed", ["before the replies", "with the replies on their way"])
def test_a_loop_that_closes_before_its_replies_loses_only_them(closed: str) -> None:
    gate = Gate()
    service = gated_service(gate)
    service.launch()
    gpu = CudnnRef(service)
    sent: list[asyncio.Future[Any]] = []

    async def ask_and_leave() -> None:
        trio = await Trio.on(gpu)
        gate.shut()
        sent.extend(gpu.submit(message) for message in (trio.product(), Allocate(spec=SPEC), trio.product()))
        await in_thread(gate.wait_for_arrival)

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(ask_and_leave())
        if closed == "with the replies on their way":
            gate.open()
            # Statistics are answered in a later turn than the allocation, so its reply has been sent off.
            wait_until(service, lambda statistics: statistics.live_buffers == 4)
        loop.close()
    finally:
        gate.open()
    asyncio.run(gpu.ping())  # whoever makes the next loop sweeps up what the last had not taken
    came = sum(future.done() for future in sent)  # in time: an allocation that no worker is asked for
    left = (3 - came, 3 + came)
    wait_until(service, lambda statistics: (statistics.dropped_replies, statistics.live_buffers) == left)
    service.stop(PATIENCE_S)


def wait_until(service: CudnnService, condition: Callable[[Statistics], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition(statistics := service.actor_ref.ask(GetStatistics(), block=True)):
        assert time.monotonic() < deadline, statistics


def test_a_service_that_is_started_anew_tells_of_its_new_life_alone() -> None:
    service = start(device="cpu")
    service.stop(PATIENCE_S)
    assert [type(event).__name__ for event in service.events.all] == ["Started", "Stopped", "Stopped"]
    service.launch()
    service.started.result(PATIENCE_S)
    assert [type(event).__name__ for event in service.events.all] == ["Started"]
    assert service.actor_ref.ask(Ping()) == 1
    service.stop(PATIENCE_S)
    assert [type(event).__name__ for event in service.events.all] == ["Started", "Stopped", "Stopped"]


def test_waiting_for_a_start_or_an_end_cannot_cancel_it_for_the_others() -> None:
    gate = Gate()
    service = gated_service(gate, "open")
    with gate.closed():
        service.launch()
        assert not service.started.cancel()
        assert not service.stopped.cancel()
    service.started.result(PATIENCE_S)
    service.stop(PATIENCE_S)
    assert service.stopped.result() is None


async def test_a_waiter_that_is_cancelled_in_the_start_leaves_the_service_sound() -> None:
    gate = Gate()
    service = gated_service(gate, "open")
    with gate.closed():
        service.launch()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(service.started), 0)
    await asyncio.wrap_future(service.started)
    gpu = CudnnRef(service)
    assert await gpu.ping() == 1
    await gpu.aclose()
