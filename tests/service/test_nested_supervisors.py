"""Services under a supervisor of the user's, and under pykka: who restarts, who is told, who stops when."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pykka
import pytest

from cudnn_actor import (
    BufferRef,
    CudnnActorError,
    CudnnRef,
    CudnnService,
    Fault,
    FaultPlan,
    Receipt,
    ServiceStopped,
    StaleBufferError,
)
from cudnn_actor.errors import StaleReason
from cudnn_actor.messages import Drain, Fill, Ping
from cudnn_actor.service.event_log import EventLog
from cudnn_actor.supervision import (
    Backoff,
    ChildSpec,
    Escalated,
    ExitKind,
    LifecycleEvent,
    Restart,
    Restarted,
    Restarting,
    RestartIntensity,
    Started,
    Stopped,
    Strategy,
    Supervisor,
)

from ..patience import PATIENCE_S
from .rigs import Gate, Trio, child_spec, gated_child, in_thread, outcome, single, spawn_gated, start

pytestmark = pytest.mark.usefixtures("isolation")

FIRST_FILL_CRASHES = FaultPlan().at(1, Fault.STICKY, of=Fill)


class House:
    """A supervisor of the user's, and what it told."""

    def __init__(
        self, *specs: ChildSpec, strategy: Strategy = Strategy.ONE_FOR_ONE, restarts: int = 3
    ) -> None:
        self._log = EventLog()
        self.supervisor = Supervisor(
            specs,
            strategy=strategy,
            intensity=RestartIntensity(max_restarts=restarts),
            backoff=Backoff(initial_s=0.0),
            listener=self._log.append,
        )

    async def until(self, kind: type[LifecycleEvent], child: str | None, times: int = 1) -> LifecycleEvent:
        async with asyncio.timeout(PATIENCE_S):
            async for event in self._log.follow():
                times -= isinstance(event, kind) and event.child == child
                if not times:
                    return event
        raise AssertionError(f"the house ended without {kind.__name__} of {child}")

    def told(self, kind: type[LifecycleEvent]) -> list[str | None]:
        return [event.child for event in self._log.all if isinstance(event, kind)]

    async def stop(self) -> None:
        self.supervisor.end("the test is over")
        assert await in_thread(lambda: self.supervisor.join(PATIENCE_S))


@asynccontextmanager
async def built(*specs: ChildSpec, **options: object) -> AsyncIterator[House]:
    house = House(*specs, **options)  # type: ignore[arg-type]
    house.supervisor.launch()
    try:
        for spec in specs:
            await house.until(Started, spec.policy.id)
        yield house
    finally:
        await house.stop()


def fragile(name: str) -> tuple[ChildSpec, CudnnService, CudnnRef]:
    """A service that gives up at its first Fill, and, started anew, does not again."""
    spec, service = child_spec(name, device="cpu", max_restarts=0, faults=FIRST_FILL_CRASHES)
    return spec, service, CudnnRef(service)


async def give_up(gpu: CudnnRef) -> BufferRef:
    """Have a fragile service give up; returns a buffer that it had."""
    buffer = await gpu.upload(single(1.0))
    with pytest.raises(
        ServiceStopped,
        match=r"gave up at the 1st failure within 60 s \(max_restarts=0\): crash: .*INJECTED_STICKY_ERROR",
    ):
        await gpu.fill(buffer, 2.0)
    return buffer


# A service that gives up is a crash of the user's child.


async def test_a_service_that_gives_up_is_a_crash_that_starts_it_anew() -> None:
    spec, service, gpu = fragile("gpu")
    async with built(spec) as house:
        await give_up(gpu)
        restarting = await house.until(Restarting, "gpu")
        assert isinstance(restarting, Restarting)
        assert restarting.cause.kind is ExitKind.CRASH
        assert "INJECTED_STICKY_ERROR" in restarting.cause.cause
        restarted = await house.until(Restarted, "gpu")
        assert isinstance(restarted, Restarted)
        assert restarted.generation == 2
        assert service.started.done()
        assert not service.stopped.done()


async def test_the_handle_stays_good_when_its_service_is_started_anew() -> None:
    spec, service, gpu = fragile("gpu")
    async with built(spec) as house:
        actor_ref = service.actor_ref
        await give_up(gpu)
        await house.until(Restarted, "gpu")
        assert await gpu.ping() == gpu.generation == 1  # a new life counts anew
        assert await in_thread(lambda: actor_ref.ask(Ping())) == 1
        assert actor_ref.is_alive()
        trio = await Trio.on(gpu)
        await gpu.ask(trio.product())
        assert await trio.result() == 6.0
        assert isinstance(await anext(gpu.events()), Started)
    assert not actor_ref.is_alive()
    with pytest.raises(ServiceStopped):
        await gpu.ping()


async def test_buffers_of_an_earlier_life_are_stale_and_never_another_s_bytes() -> None:
    spec, _, gpu = fragile("gpu")
    async with built(spec) as house:
        old = await give_up(gpu)
        await house.until(Restarted, "gpu")
        new = [await gpu.upload(single(float(value))) for value in range(10)]  # old's slot is taken again
        assert old.slot in {buffer.slot for buffer in new}
        attempts: list[Callable[[], object]] = [
            lambda: gpu.download(old),
            lambda: gpu.fill(old, 9.0),
            lambda: gpu.free(old),
            lambda: gpu.copy(new[0], old),
        ]
        for attempt in attempts:
            with pytest.raises(StaleBufferError) as caught:
                await attempt()  # type: ignore[misc]
            assert caught.value.reason in (StaleReason.FOREIGN, StaleReason.FREED)
        assert [float((await gpu.download(buffer)).item()) for buffer in new] == list(range(10))


async def test_the_buffers_of_one_life_all_go_with_it() -> None:
    spec, _, gpu = fragile("gpu")
    async with built(spec) as house:
        await give_up(gpu)
        await house.until(Restarted, "gpu")
        statistics = await gpu.statistics()
        assert (statistics.live_buffers, statistics.live_bytes, statistics.arena_bytes) == (0, 0, 0)


async def test_what_waits_when_a_service_gives_up_is_answered_before_the_next_life() -> None:
    gate = Gate()
    spec, service = gated_child(gate, "gpu", max_restarts=0, faults=FIRST_FILL_CRASHES)
    gpu = CudnnRef(service)
    async with built(spec) as house:
        trio = await Trio.on(gpu)
        with gate.closed():
            running = gpu.submit(trio.product())
            await in_thread(gate.wait_for_arrival)
            fatal = gpu.submit(Fill(dst=trio.x, value=0.0))
            waiting = [gpu.submit(trio.product()) for _ in range(200)]
        assert isinstance(await outcome(running), Receipt)
        assert isinstance(await outcome(fatal), ServiceStopped)
        assert {type(await outcome(future)).__name__ for future in waiting} == {"ServiceStopped"}
        await house.until(Restarted, "gpu")
        assert (await gpu.statistics()).queued == 0


async def test_a_transient_service_that_was_closed_stays_closed_and_a_permanent_one_does_not() -> None:
    spec, service = child_spec("transient", restart=Restart.TRANSIENT, device="cpu")
    other, lasting = child_spec("permanent", device="cpu")
    async with built(spec, other) as house:
        closed = CudnnRef(service)
        await closed.aclose()
        assert isinstance(await house.until(Stopped, "transient"), Stopped)
        with pytest.raises(ServiceStopped):
            await closed.ping()
        permanent = CudnnRef(lasting)
        await permanent.aclose()
        await house.until(Restarted, "permanent")
        assert await permanent.ping() == 1


async def test_a_supervisor_whose_service_keeps_giving_up_gives_up_itself() -> None:
    faults = FaultPlan().at(1, Fault.STICKY, of=Fill, times=99)
    spec, service = child_spec("gpu", device="cpu", max_restarts=0, faults=faults)
    gpu = CudnnRef(service)
    async with built(spec, restarts=1) as house:
        await give_up(gpu)
        await house.until(Restarted, "gpu")
        await give_up(gpu)
        escalated = await house.until(Escalated, "gpu")
        assert isinstance(escalated, Escalated)
        assert "INJECTED_STICKY_ERROR" in escalated.cause.cause
        await house.until(Stopped, None)
        with pytest.raises(ServiceStopped):
            await gpu.ping()


# Two services.


async def test_with_one_for_one_the_other_service_goes_on() -> None:
    (a_spec, _, a), (b_spec, _, b) = fragile("a"), fragile("b")
    async with built(a_spec, b_spec, strategy=Strategy.ONE_FOR_ONE) as house:
        kept = await b.upload(single(7.0))
        lost = await give_up(a)
        await house.until(Restarted, "a")
        assert (await b.download(kept)).item() == 7.0
        assert house.told(Restarting) == ["a"]
        with pytest.raises(StaleBufferError):
            await a.download(lost)


@pytest.mark.parametrize("failing", ["a", "b"])
async def test_with_one_for_all_both_start_anew(failing: str) -> None:
    (a_spec, _, a), (b_spec, _, b) = fragile("a"), fragile("b")
    async with built(a_spec, b_spec, strategy=Strategy.ONE_FOR_ALL) as house:
        gpus = {"a": a, "b": b}
        buffers = {name: await gpu.upload(single(7.0)) for name, gpu in gpus.items()}
        await give_up(gpus[failing])
        await house.until(Restarted, "b")  # which starts behind a
        assert sorted(str(child) for child in house.told(Restarting)) == ["a", "b"]
        assert house.told(Restarted) == ["a", "b"]
        for name, gpu in gpus.items():
            with pytest.raises(StaleBufferError):
                await gpu.download(buffers[name])
            assert await gpu.ping() == 1


async def test_with_rest_for_one_those_before_go_on_and_those_behind_start_anew() -> None:
    (a_spec, _, a), (b_spec, _, b), (c_spec, _, c) = fragile("a"), fragile("b"), fragile("c")
    async with built(a_spec, b_spec, c_spec, strategy=Strategy.REST_FOR_ONE) as house:
        kept, gone = await a.upload(single(7.0)), await c.upload(single(7.0))
        await give_up(b)
        await house.until(Restarted, "c")
        assert (await a.download(kept)).item() == 7.0
        with pytest.raises(StaleBufferError):
            await c.download(gone)
        assert sorted(str(child) for child in house.told(Restarting)) == ["b", "c"]


async def test_services_start_in_order_and_stop_in_reverse() -> None:
    specs = [child_spec(name, device="cpu") for name in "abc"]
    async with built(*[spec for spec, _ in specs]) as house:
        assert house.told(Started) == ["a", "b", "c"]
    assert house.told(Stopped) == ["c", "b", "a", None]
    assert all(service.stopped.done() for _, service in specs)


async def test_a_service_that_stops_with_its_supervisor_answers_what_waits() -> None:
    gate = Gate()
    spec, service = gated_child(gate, "gpu")
    gpu = CudnnRef(service)
    async with built(spec) as house:
        trio = await Trio.on(gpu)
        with gate.closed():
            running = gpu.submit(trio.product())
            await in_thread(gate.wait_for_arrival)
            waiting = [gpu.submit(trio.product()) for _ in range(100)]
            house.supervisor.end("enough")
        await house.until(Stopped, None)
        assert isinstance(await outcome(running), Receipt | ServiceStopped)
        ends = [await outcome(future) for future in waiting]
        assert all(isinstance(end, Receipt | ServiceStopped) for end in ends)


# pykka.


async def test_pykka_s_stop_all_stops_services_and_answers_what_waits() -> None:
    gate = Gate()
    service = await in_thread(lambda: start(device="cpu"))
    gpu = await spawn_gated(gate)
    trio = await Trio.on(gpu)
    with gate.closed():
        running = gpu.submit(trio.product())
        await in_thread(gate.wait_for_arrival)
        waiting = [gpu.submit(trio.product()) for _ in range(100)]
        asked = [gpu.actor_ref.ask(trio.product(), block=False) for _ in range(100)]
        stopping = asyncio.ensure_future(in_thread(pykka.ActorRegistry.stop_all))
        await asyncio.sleep(0)
    await stopping
    assert isinstance(await outcome(running), Receipt)
    for future in waiting:
        assert isinstance(await outcome(future), Receipt | ServiceStopped)
    for answer in asked:
        assert isinstance(await in_thread(functools.partial(_result, answer)), Receipt | ServiceStopped)
    await asyncio.wrap_future(service.stopped)
    await gpu.aclose()
    assert not gpu.actor_ref.is_alive()
    assert not service.actor_ref.is_alive()


async def test_stopping_the_reference_ends_the_service_and_answers_what_waits_behind_it() -> None:
    gate = Gate()
    gpu = await spawn_gated(gate)
    trio = await Trio.on(gpu)
    with gate.closed():
        running = gpu.submit(trio.product())
        await in_thread(gate.wait_for_arrival)
        before = [gpu.submit(trio.product()) for _ in range(10)]
        stopped = gpu.actor_ref.stop(block=False)
        behind = [gpu.submit(trio.product()) for _ in range(200)]
        asked = [gpu.actor_ref.ask(trio.product(), block=False) for _ in range(20)]
    assert await in_thread(lambda: stopped.get(timeout=PATIENCE_S)) is True
    assert isinstance(await outcome(running), Receipt)
    assert all([isinstance(await outcome(future), Receipt) for future in before])
    assert all([isinstance(await outcome(future), ServiceStopped) for future in behind])
    for answer in asked:
        assert isinstance(await in_thread(functools.partial(_result, answer)), pykka.ActorDeadError)
    events = [event async for event in gpu.events()]
    assert [(type(event), event.child) for event in events[-2:]] == [(Stopped, "cudnn"), (Stopped, None)]
    assert not any(isinstance(event, Restarting) for event in events)
    assert await in_thread(gpu.actor_ref.stop) is False  # dead already, as pykka says it


def _result(answer: pykka.Future[object]) -> object:
    """What a pykka request ended in, its error as a value."""
    try:
        return answer.get(timeout=PATIENCE_S)
    except CudnnActorError as error:
        return error


class Parent(pykka.ThreadingActor):
    """A plain pykka actor that keeps what it is told."""

    use_daemon_thread = True

    def __init__(self, told: pykka.ThreadingFuture[object]) -> None:
        super().__init__()
        self._told = told

    def on_receive(self, message: object) -> None:
        self._told.set(message)


def test_a_pykka_parent_is_told_that_its_service_gave_up() -> None:
    told = pykka.ThreadingFuture[object]()
    parent = Parent.start(told)
    service = start(device="cpu", parent=parent, max_restarts=0, faults=FaultPlan().at(1, Fault.STICKY))
    with pytest.raises(ServiceStopped):
        service.actor_ref.ask(Drain(), timeout=PATIENCE_S)
    event = told.get(timeout=PATIENCE_S)
    assert isinstance(event, Escalated)
    assert event.child == "cudnn"
    assert "INJECTED_STICKY_ERROR" in event.cause.cause
    assert service.stopped.result(PATIENCE_S) == event
    parent.stop()


def test_a_pykka_parent_that_is_gone_does_not_keep_its_service_from_ending() -> None:
    parent = Parent.start(pykka.ThreadingFuture())
    service = start(device="cpu", parent=parent, max_restarts=0, faults=FaultPlan().at(1, Fault.STICKY))
    parent.stop()
    with pytest.raises(ServiceStopped):
        service.actor_ref.ask(Drain(), timeout=PATIENCE_S)
    assert isinstance(service.stopped.result(PATIENCE_S), Escalated)
