"""A service that ends and begins again: each life's promises are its own, and the past changes nothing."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from structlog.typing import EventDict

from cudnn_actor import CudnnRef, Fault, FaultPlan, ServiceStopped, StartFailed, TensorSpec
from cudnn_actor.actors import ActorStopped
from cudnn_actor.messages import Allocate, Download, Fill, Ping
from cudnn_actor.options import make_options
from cudnn_actor.service.service import CudnnService
from cudnn_actor.supervision import Escalated, ExitReason, Restarting, Started, Stopped

from ..inside import isolation_of, supervisor_of
from ..patience import PATIENCE_S
from .limited import no_descriptors
from .rigs import (
    THREAD_ONLY,
    Gate,
    Trio,
    VolatileEngine,
    bare,
    gated,
    gated_service,
    in_thread,
    isolation_option,
    outcome,
    service_on,
    start,
)

pytestmark = pytest.mark.usefixtures("isolation")


def ended_once() -> CudnnService:
    """A service whose first life has been and gone."""
    service = start(device="cpu")
    service.stop(PATIENCE_S)
    return service


# Callbacks.


class EndsItElsewhere:
    """A callback that has another thread end the service, and waits for it."""

    def __init__(self, service: CudnnService) -> None:
        self._service = service
        self._done = threading.Event()

    def __call__(self, _: Any) -> None:
        thread = threading.Thread(target=self._service.end)
        thread.start()
        thread.join(PATIENCE_S)
        if not thread.is_alive():
            self._done.set()

    def came_back(self) -> bool:
        return self._done.wait(PATIENCE_S)


def test_a_callback_of_the_end_may_wait_for_a_thread_that_ends_the_service_again() -> None:
    service = start(device="cpu")
    callback = EndsItElsewhere(service)
    service.stopped.add_done_callback(callback)
    service.end()
    assert callback.came_back()


def test_a_callback_of_a_failed_start_may_do_the_same() -> None:
    options = {"device": "cpu", "max_restarts": 0, "faults": FaultPlan().at_start(1)}
    service = CudnnService(make_options({**isolation_option(), **options}))
    callback = EndsItElsewhere(service)
    service.started.add_done_callback(callback)
    service.launch()
    assert callback.came_back()
    assert isinstance(service.stopped.result(PATIENCE_S), Escalated)


def test_a_callback_of_the_end_may_start_the_service_anew() -> None:
    service = start(device="cpu")
    launched = threading.Event()

    def launch(_: Any) -> None:
        service.launch()
        launched.set()

    service.stopped.add_done_callback(launch)
    service.end()
    assert launched.wait(PATIENCE_S)
    assert service.started.result(PATIENCE_S) is None
    service.stop(PATIENCE_S)


# Which life an end ends.


def test_an_end_answers_with_the_promise_of_the_life_that_it_ends() -> None:
    service = ended_once()
    first = service.stopped
    service.launch()
    second = service.end()
    assert second is not first
    assert second is service.stopped
    second.result(PATIENCE_S)
    assert service.end() is second  # there is nothing more to end


class RenewedMeanwhile(CudnnService):
    """Begins another life at the moment when it is ended, as a supervisor of the user's may have it do."""

    meanwhile = False

    def end(self, *args: Any) -> Any:
        if self.meanwhile:
            self.meanwhile = False
            self.launch()
        return super().end(*args)


def renewed_meanwhile(gate: Gate) -> CudnnService:
    """One whose first life is over, and whose second will begin when it is ended, and not end by itself."""
    service = RenewedMeanwhile(
        make_options({**isolation_option(), "device": "cpu"}), engine=gated(gate, "close")
    )
    service.launch()
    service.stop(PATIENCE_S)
    service.meanwhile = True
    return service


@THREAD_ONLY
def test_a_stop_waits_for_the_life_that_it_ends_and_not_for_the_one_before() -> None:
    gate = Gate()
    service = renewed_meanwhile(gate)
    with gate.closed(), pytest.raises(TimeoutError):
        service.stop(0.05)
    service.stopped.result(PATIENCE_S)


@THREAD_ONLY
async def test_a_close_waits_for_the_life_that_it_ends_too() -> None:
    gate = Gate()
    service = await in_thread(lambda: renewed_meanwhile(gate))
    with gate.closed():
        closing = asyncio.ensure_future(CudnnRef(service).aclose())
        await in_thread(gate.wait_for_arrival)
        assert not closing.done()
        assert not service.stopped.done()
    await closing
    assert service.stopped.done()


# The past.


def test_a_lost_supervisor_that_comes_back_in_the_middle_of_its_news_leaves_the_next_life_alone() -> None:
    service = start(device="cpu")
    lost = supervisor_of(service)
    with service._turning:  # so its thread cannot finish what it does with its next event
        service.end("the first life's end")
        assert not lost.join(0.2)  # it has the event, and waits
        assert lost.give_up(ActorStopped(reason="given up by a supervisor of the user's"))
        service.launch()
    assert lost.join(PATIENCE_S)
    service.started.result(PATIENCE_S)
    service.end("the second life's end")
    service.stopped.result(PATIENCE_S)
    events = service.events.all
    assert [(type(event), event.child) for event in events] == [
        (Started, "cudnn"),
        (Stopped, "cudnn"),
        (Stopped, None),
    ]
    assert bare(events[-1]) == Stopped(child=None, reason=ExitReason.shutdown("the second life's end"))


# A life that begins while the last is ending.


@pytest.mark.parametrize("was_started", [True, False])
def test_a_life_that_begins_while_the_last_releases_its_resources_keeps_its_own(was_started: bool) -> None:
    """It is no longer alive, so code that watches that, or a supervisor of the user's, may start it again."""
    service = CudnnService(make_options({**isolation_option(), "device": "cpu"}))
    if was_started:
        service.launch()
        service.started.result(PATIENCE_S)
    release = isolation_of(service).end
    gate = Gate()

    def end() -> None:
        gate.go_through()
        release()

    isolation_of(service).end = end
    with gate.closed():
        ending = threading.Thread(target=service.end)
        ending.start()
        gate.wait_for_arrival()
        assert not service.alive
        beginning = threading.Thread(target=service.launch)
        beginning.start()
        beginning.join(0.2)
    for thread in (ending, beginning):
        thread.join(PATIENCE_S)
    service.started.result(PATIENCE_S)
    values = np.ones((1, 1, 1, 4), np.float32)
    spec = TensorSpec.packed(values.shape)
    ref: Any = service.actor_ref.ask(Allocate(spec=spec, data=values), timeout=PATIENCE_S)
    np.testing.assert_array_equal(service.actor_ref.ask(Download(src=ref), timeout=PATIENCE_S), values)
    service.stop(PATIENCE_S)


def test_one_that_has_no_room_for_another_life_may_begin_it_later() -> None:
    service = CudnnService(make_options({"device": "cpu", "isolation": "process"}))
    service.stop(PATIENCE_S)
    with no_descriptors(), pytest.raises(StartFailed):
        service.launch()
    service.stop(PATIENCE_S)
    service.launch()
    service.started.result(PATIENCE_S)
    assert service.actor_ref.ask(Ping(), timeout=PATIENCE_S) == 1
    service.stop(PATIENCE_S)


# Saying so.


async def test_an_escalation_is_said_once(logs: list[EventDict]) -> None:
    service = gated_service(Gate(), max_restarts=0, faults=FaultPlan().at(1, Fault.STICKY, of=Fill))
    service.launch()
    gpu = CudnnRef(service)
    with pytest.raises(ServiceStopped):
        await gpu.fill((await Trio.on(gpu)).x, 1.0)
    await asyncio.wrap_future(service.stopped)
    for thread in threading.enumerate():
        if "Supervisor" in thread.name:
            thread.join(PATIENCE_S)  # it would say so as its last act
    errors = [(entry["event"], entry["child"]) for entry in logs if entry["log_level"] == "error"]
    assert errors == [("service.stopped", "cudnn"), ("service.escalated", "cudnn"), ("service.stopped", None)]
    assert len([entry for entry in logs if entry["event"] == "actor.died"]) == 1  # the actor that crashed


async def test_who_asks_a_stopped_service_reads_the_public_name_of_the_error() -> None:
    service = await in_thread(ended_once)
    gpu = CudnnRef(service)
    with pytest.raises(ServiceStopped) as sent:
        await gpu.ping()
    assert type(sent.value).__name__ == "ServiceStopped"
    assert "ActorStopped" not in f"{sent.type} {sent.value!r}"


# An engine whose memory dies with its context.


@THREAD_ONLY
async def test_what_was_ready_there_is_not_replaced_although_restarts_are_left() -> None:
    faults = FaultPlan().at_start(1).at(1, Fault.STICKY, of=Fill)
    service = service_on(lambda: VolatileEngine(Gate()), faults=faults, max_restarts=9)
    service.launch()
    gpu = CudnnRef(service)
    await outcome(gpu.submit(Fill(dst=(await Trio.on(gpu)).x, value=1.0)))
    escalated: Escalated | None = await asyncio.wrap_future(service.stopped)
    assert escalated is not None
    restarts = [event async for event in gpu.events() if isinstance(event, Restarting)]
    assert [restart.generation for restart in restarts] == [1]
