"""Many threads, several event loops, ends at the worst moment: each request ends exactly once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pykka
import pytest
import uvloop

from cudnn_actor import ConvFwd, CudnnRef, CudnnService, Receipt, ServiceStopped, StartFailed, TensorSpec
from cudnn_actor.messages import Allocate, Download, Fill, Ping
from cudnn_actor.service import Spawning
from cudnn_actor.supervision import Backoff, RestartIntensity, Supervisor

from ..patience import PATIENCE_S
from ..whole import WHOLE, some
from .rigs import (
    ONE_BY_ONE,
    Gate,
    Trio,
    child_spec,
    gated_service,
    in_thread,
    single,
    spawn,
    spawn_gated,
    start,
)

pytestmark = pytest.mark.usefixtures("isolation")

T = TypeVar("T")
Ends = list[Any]
Loops = Callable[[], asyncio.AbstractEventLoop]
SPEC = TensorSpec.packed((1, 1, 1, 1))


@pytest.fixture
def busy_switching() -> Iterator[None]:
    """Threads take turns every few microseconds, so that a race of a few instructions is lost soon."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*jobs: Callable[[], T]) -> list[T]:
    """What jobs give that start at one moment, each on its own thread; an error of one is raised here."""
    barrier = threading.Barrier(len(jobs))
    answers = [concurrent.futures.Future[T]() for _ in jobs]

    def work(job: Callable[[], T], answer: concurrent.futures.Future[T]) -> None:
        try:
            barrier.wait(PATIENCE_S)
            answer.set_result(job())
        except BaseException as error:  # noqa: BLE001 - for the test's own thread to raise
            answer.set_exception(error)

    for job, answer in zip(jobs, answers, strict=True):
        threading.Thread(target=work, args=(job, answer), daemon=True).start()
    return [answer.result(PATIENCE_S) for answer in answers]


def on_loop(job: Callable[[], Any], loops: Loops = asyncio.new_event_loop) -> Any:
    with asyncio.Runner(loop_factory=loops) as runner:
        return runner.run(job())


# Asking against stopping.


def asks_at_once(gpu: CudnnRef, message: ConvFwd, count: int) -> Callable[[], Ends]:
    """An event loop that sends all its requests before it looks at any answer."""

    async def work() -> Ends:
        asks = [asyncio.ensure_future(gpu.ask(message)) for _ in range(count)]
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.gather(*asks, return_exceptions=True)

    return lambda: on_loop(work)


def asks_in_turn(gpu: CudnnRef, message: ConvFwd, count: int) -> Callable[[], Ends]:
    """A plain thread that waits for each answer before it asks again."""

    def work() -> Ends:
        ends: Ends = []
        for _ in range(count):
            try:
                ends.append(gpu.actor_ref.ask(message, timeout=PATIENCE_S))
            except pykka.ActorDeadError as error:
                ends.append(error)
        return ends

    return work


def asks_pykka_at_once(gpu: CudnnRef, message: ConvFwd, count: int) -> Callable[[], Ends]:
    """A plain thread that sends all its requests before it looks at any answer."""

    def work() -> Ends:
        answers = [gpu.actor_ref.ask(message, block=False) for _ in range(count)]
        ends: Ends = []
        for answer in answers:
            try:
                ends.append(answer.get(timeout=PATIENCE_S))
            except pykka.ActorDeadError as error:
                ends.append(error)
        return ends

    return work


def closes(gpu: CudnnRef, service: CudnnService, how: str, after: int) -> Callable[[], Ends]:
    """Ends the service, one way or another, once it has answered `after` pings."""
    ends: dict[str, Callable[[], Any]] = {
        "aclose": functools.partial(on_loop, gpu.aclose),
        "aclose without patience": functools.partial(on_loop, functools.partial(gpu.aclose, drain_s=0.0)),
        "stop": functools.partial(service.stop, PATIENCE_S),
        "pykka stop": functools.partial(gpu.actor_ref.stop, timeout=PATIENCE_S),
    }

    def work() -> Ends:
        for _ in range(after):
            gpu.actor_ref.ask(Ping(), timeout=PATIENCE_S)
        ends[how]()
        return []

    return work


@pytest.mark.parametrize("how", ["aclose", "aclose without patience", "stop", "pykka stop"])
def test_each_request_that_races_the_end_has_its_result_or_service_stopped(how: str) -> None:
    results = stopped = 0
    for iteration in range(some(40)):
        service = start(device="cpu", mailbox=100_000)
        gpu = CudnnRef(service)
        trio: Trio = on_loop(functools.partial(Trio.on, gpu))
        workers = [
            asks_at_once(gpu, trio.product(), 60),
            asks_in_turn(gpu, trio.product(), 40),
            asks_in_turn(gpu, trio.product(), 40),
            asks_pykka_at_once(gpu, trio.product(), 60),
        ]
        told = together(closes(gpu, service, how, after=iteration % 5), *workers)[1:]
        assert [len(ends) for ends in told] == [60, 40, 40, 60]
        for ends in told:
            # Once the service has ended pykka's own references raise pykka's own error.
            assert all(isinstance(end, Receipt | ServiceStopped | pykka.ActorDeadError) for end in ends)
            ran = [isinstance(end, Receipt) for end in ends]
            assert ran == sorted(ran, reverse=True)  # the end is one moment
            results += ran.count(True)
            stopped += ran.count(False)
        service.stopped.result(PATIENCE_S)
    assert results, "the end always came first: there was no race"
    assert stopped, "the end always came last: there was no race"


async def test_asks_and_acloses_of_one_loop_all_end() -> None:
    for iteration in range(some(60)):
        gpu = await spawn(device="cpu")
        trio = await Trio.on(gpu)

        async def ask_after(turns: int, gpu: CudnnRef = gpu, trio: Trio = trio) -> Any:
            for _ in range(turns):
                await asyncio.sleep(0)
            return await gpu.ask(trio.product())

        asks = [asyncio.ensure_future(ask_after(turns)) for turns in range(30)]
        for _ in range(iteration % 20):
            await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(gpu.aclose(), gpu.aclose(drain_s=0.0), gpu.aclose())
            ends = await asyncio.gather(*asks, return_exceptions=True)
        assert all(isinstance(end, Receipt | ServiceStopped) for end in ends)


@pytest.mark.usefixtures("busy_switching")
def test_a_service_may_be_ended_by_many_threads_while_it_ends() -> None:
    for _ in range(some(40)):
        service = start(device="cpu")

        def keep_ending(service: CudnnService = service) -> None:
            for _ in range(1000):
                service.end()
            service.stop(PATIENCE_S)

        together(keep_ending, keep_ending, keep_ending)


@pytest.mark.usefixtures("busy_switching")
def test_closing_a_service_that_is_started_anew_at_once_waits_for_the_life_that_it_closed() -> None:
    lives = some(150)
    spec, service = child_spec("gpu", device="cpu")
    supervisor = Supervisor(
        [spec], backoff=Backoff(initial_s=0.0), intensity=RestartIntensity(max_restarts=10 * lives)
    )
    supervisor.launch()
    service.started.result(PATIENCE_S)

    async def close_again_and_again() -> None:
        gpu = CudnnRef(service)
        for life in range(lives):
            closing = asyncio.ensure_future(gpu.aclose(drain_s=0.0))
            done, _ = await asyncio.wait([closing], timeout=PATIENCE_S)
            if not done:
                supervisor.end("so that the test, too, can end")  # closing outlasts a cancellation
                await closing
                raise AssertionError(f"closed life {life + 1}, and waited for the end of the next")
            await closing

    asyncio.run(close_again_and_again())
    supervisor.end("the test is over")
    assert supervisor.join(PATIENCE_S)


# Starting against stopping.


async def test_a_spawn_that_is_cancelled_while_the_engine_opens_leaves_nothing() -> None:
    gate = Gate()
    with gate.closed():
        service = gated_service(gate, "open")
        spawning = asyncio.ensure_future(_enter(service))
        await in_thread(gate.wait_for_arrival)
        spawning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await spawning
        assert not service.stopped.done()
    assert await asyncio.wait_for(asyncio.wrap_future(service.stopped), PATIENCE_S) is None
    assert not service.actor_ref.is_alive()


async def _enter(service: CudnnService) -> None:
    async with Spawning(service):
        raise AssertionError("it was to be cancelled before this")


async def test_a_spawn_that_is_cancelled_just_as_it_gets_ready_leaves_nothing() -> None:
    for turns in range(0, 40, 1 if WHOLE else 3):
        gate, entered = Gate(), False

        async def body(gate: Gate = gate) -> None:
            nonlocal entered
            async with spawn_gated(gate, "open"):
                entered = True
                await asyncio.Event().wait()

        with gate.closed():
            task = asyncio.ensure_future(body())
            await in_thread(gate.wait_for_arrival)
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, PATIENCE_S)


def test_a_start_that_races_an_end_ends_in_one_or_the_other() -> None:
    for _ in range(some(60)):
        service = gated_service(Gate())

        def launch(service: CudnnService = service) -> None:
            service.launch()
            with contextlib.suppress(StartFailed):
                service.started.result(PATIENCE_S)

        def end(service: CudnnService = service) -> None:
            for _ in range(200):  # an end before the launch is none
                service.end()

        together(launch, end)
        service.stop(PATIENCE_S)
        assert not service.actor_ref.is_alive()


# Several loops and threads at once.


def work_of_a_loop(gpu: CudnnRef, number: int, rounds: int) -> Any:
    async def work() -> None:
        trio = await Trio.on(gpu, w=float(number))
        for value in range(rounds):
            sent: list[asyncio.Future[Any]] = [
                gpu.submit(Fill(dst=trio.x, value=float(value))),
                gpu.submit(trio.product()),
                gpu.submit(Download(src=trio.y)),
            ]
            _, receipt, answer = await asyncio.gather(*sent)
            assert isinstance(receipt, Receipt)
            assert answer.item() == number * value
        await asyncio.gather(*[gpu.free(buffer) for buffer in (trio.x, trio.w, trio.y)])

    return work


def work_of_a_thread(gpu: CudnnRef, number: int, rounds: int) -> None:
    ask: Callable[..., Any] = gpu.actor_ref.ask
    x, w, y = [ask(Allocate(spec=SPEC, data=single(float(value)))) for value in (0, number, 0)]
    for value in range(rounds):
        ask(Fill(dst=x, value=float(value)), block=False)
        ask(ConvFwd(x=x, w=w, y=y, conv=ONE_BY_ONE), block=False)
        assert ask(Download(src=y), timeout=PATIENCE_S).item() == number * value


def test_two_loops_and_three_threads_each_get_their_own_results() -> None:
    rounds = 150
    service = start(device="cpu")
    gpu = CudnnRef(service)
    together(
        lambda: on_loop(work_of_a_loop(gpu, 2, rounds)),
        lambda: on_loop(work_of_a_loop(gpu, 3, rounds), uvloop.new_event_loop),
        lambda: work_of_a_thread(gpu, 5, rounds),
        lambda: work_of_a_thread(gpu, 7, rounds),
        lambda: work_of_a_thread(gpu, 11, rounds),
    )
    statistics = on_loop(gpu.statistics)
    # Five times 3 buffers and 3 requests a round; the loops free theirs.
    assert statistics.finished == 5 * (3 + 3 * rounds) + 2 * 3
    assert (statistics.failed, statistics.withdrawn, statistics.dropped_replies) == (0, 0, 0)
    assert statistics.live_buffers == 3 * 3
    service.stop(PATIENCE_S)


@pytest.mark.parametrize("loops", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
async def test_a_second_loop_that_closes_before_its_replies_loses_only_its_own(loops: Loops) -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        trio = await Trio.on(gpu)
        sent: list[asyncio.Future[Any]] = []

        async def ask_and_leave() -> None:
            allocations = (Allocate(spec=SPEC), Allocate(spec=SPEC, data=single(9.0)))
            sent.extend(gpu.submit(message) for message in (trio.sum(), *allocations, trio.sum()))

        with gate.closed():
            running = gpu.submit(trio.product())
            await in_thread(gate.wait_for_arrival)
            await in_thread(lambda: on_loop_unclosed(ask_and_leave, loops))
            behind = asyncio.ensure_future(gpu.download(trio.y))
        assert isinstance(await running, Receipt)
        assert (await behind).item() == 3.0 * 2.0 * 3  # all ran, each once: 6, 6 + 6, 12 + 6
        came = sum(future.done() for future in sent)  # in time: allocations that no worker is asked for
        left = (4 - came, 3 + came, 4 * (3 + came))
        async with asyncio.timeout(PATIENCE_S):
            while True:
                now = await gpu.statistics()
                if (now.dropped_replies, now.live_buffers, now.live_bytes) == left:
                    break


def on_loop_unclosed(job: Callable[[], Any], loops: Loops) -> None:
    """Run a job, and close its loop at once, as a Runner would not: it first cancels what is left."""
    loop = loops()
    try:
        loop.run_until_complete(job())
    finally:
        loop.close()


def test_loops_that_come_and_go_while_others_work_cost_nobody_a_reply_or_a_buffer() -> None:
    service = start(device="cpu", mailbox=10_000)
    gpu = CudnnRef(service)

    def come_and_go() -> int:
        sent: list[asyncio.Future[Any]] = []

        async def leave_early() -> None:
            sent.extend(gpu.submit(Allocate(spec=SPEC)) for _ in range(5))

        for _ in range(40):
            on_loop_unclosed(leave_early, asyncio.new_event_loop)
        return sum(future.done() for future in sent)

    delivered = together(
        come_and_go,
        come_and_go,
        lambda: on_loop(work_of_a_loop(gpu, 2, 100)),
        lambda: work_of_a_thread(gpu, 3, 100),
    )[:2]

    async def settled() -> None:
        await gpu.ping()  # whoever makes the next loop sweeps up what the last ones had not taken
        await gpu.drain()
        lost = 2 * 40 * 5 - sum(delivered)
        async with asyncio.timeout(PATIENCE_S):
            while (statistics := await gpu.statistics()).dropped_replies < lost:
                pass
            while (statistics := await gpu.statistics()).live_buffers > 3 + sum(delivered):
                pass
        assert statistics.dropped_replies == lost
        assert statistics.live_buffers == 3 + sum(delivered)  # those came while their loop still ran

    on_loop(settled)
    service.stop(PATIENCE_S)


def test_a_pykka_future_of_a_stopped_service_is_answered_before_the_stop_returns() -> None:
    gate = Gate()
    service = gated_service(gate)
    service.launch()
    service.started.result(PATIENCE_S)
    gpu = CudnnRef(service)
    trio: Trio = on_loop(lambda: Trio.on(gpu))
    with gate.closed():
        first = service.actor_ref.ask(trio.product(), block=False)
        gate.wait_for_arrival()
        rest = [service.actor_ref.ask(trio.product(), block=False) for _ in range(200)]
        service.end()
    service.stopped.result(PATIENCE_S)
    assert isinstance(first.get(timeout=0), Receipt)
    ran = [ran_at_all(answer) for answer in rest]  # some may: the actor hears of the end a moment later
    assert ran == sorted(ran, reverse=True)


def ran_at_all(answer: pykka.Future[object]) -> bool:
    try:
        return isinstance(answer.get(timeout=0), Receipt)
    except pykka.ActorDeadError:
        return False
