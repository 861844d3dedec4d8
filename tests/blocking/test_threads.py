"""Many threads, interruptions, closing: what comes of the calls of a blocking client."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import json
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudnn_actor import (
    BufferRef,
    CudnnActorError,
    CudnnService,
    DeadlineExceeded,
    Fault,
    FaultPlan,
    InvalidRequest,
    MailboxFull,
    ServiceStopped,
    TensorSpec,
    start,
)
from cudnn_actor.blocking import BlockingRef, spawn
from cudnn_actor.blocking.portal import Portal
from cudnn_actor.errors import ReentrantAsk
from cudnn_actor.messages import Allocate, Download, Fill, Ping, Upload
from cudnn_actor.operations import MaxPool, Window

from .. import forked_programs
from ..inside import gpu_behind, portal_of, service_behind
from ..onnx.small_models import image_model
from ..patience import PATIENCE_S
from ..service.rigs import Gate, gated_service

ROOT = Path(__file__).parents[2]
X = np.arange(2 * 3 * 4 * 4, dtype=np.float32).reshape(2, 3, 4, 4)
POOL = Window.symmetric(2, size=2)
FEW = TensorSpec.packed((3,))
IMAGE = np.ones((1, 3, 8, 8), np.float32)


def full(value: float) -> np.ndarray:
    return np.full(X.shape, value, np.float32)


def filling(dst: BufferRef, value: float) -> Upload:
    """A write, which waits at a gate of `gated`."""
    return Upload(dst=dst, data=full(value))


def until(condition: Callable[[], object]) -> Callable[[], None]:
    """A wait for what another thread does."""

    def wait() -> None:
        while not condition():
            threading.Event().wait(0.001)

    return wait


def asked_to_stop(service: CudnnService) -> bool:
    """Whether the actor, which is at a gate, finds that it is to stop when it returns from there."""
    return service.ending and service.state.mailbox.is_nudged


def let_the_loop_withdraw(gpu: BlockingRef) -> None:
    """Wait until what was cancelled or interrupted has been withdrawn."""
    portal_of(gpu).call(lambda: asyncio.sleep(0))


def live(gpu: BlockingRef) -> int:
    gpu.drain()
    return gpu.statistics().live_buffers


@contextmanager
def gated(gate: Gate, at: str = "write", **options: Any) -> Iterator[BlockingRef]:
    """A blocking client of a service whose engine waits at a gate, which is opened at the end."""
    service = gated_service(gate, at, **options)
    service.launch()
    service.started.result(PATIENCE_S)
    try:
        with BlockingRef(service) as gpu:
            yield gpu
            gate.open()
    finally:
        gate.open()


def test_the_requests_of_each_of_many_threads_run_in_its_order() -> None:
    with spawn(device="cpu") as gpu, ThreadPoolExecutor(8) as pool:

        def work(number: int) -> float:
            x = gpu.empty((1,))
            for step in range(10):
                last = [
                    gpu.submit(Fill(dst=x, value=number * 1000.0 + 10 * step + each)) for each in range(9)
                ]
                gpu.tell(Fill(dst=x, value=number * 1000.0 + 10 * step + 9))
                assert gpu.download(x).item() == number * 1000.0 + 10 * step + 9
                assert all(future.done() for future in last)
            found = gpu.submit(Download(src=x))
            gpu.free(x)
            return float(found.result().item())

        assert list(pool.map(work, range(8))) == [number * 1000.0 + 99 for number in range(8)]
        assert live(gpu) == 0


def test_requests_of_many_threads_run_in_batches() -> None:
    with spawn(device="cpu") as gpu, gpu.load(image_model()) as model:
        scores = gpu.run(model, image=IMAGE)["scores"]
        with gpu.batched(model, max_batch=8) as endpoint, ThreadPoolExecutor(8) as pool:
            assert endpoint.max_batch == 8
            futures = [endpoint.submit(image=IMAGE) for _ in range(16)]
            for answer in (
                *pool.map(lambda _: endpoint(image=IMAGE), range(16)),
                *[f.result() for f in futures],
            ):
                np.testing.assert_allclose(answer["scores"], scores, rtol=1e-5)
            assert endpoint.statistics().samples == 32
            assert endpoint.statistics().batches < 32
        with pytest.raises(InvalidRequest, match="is closed"):
            endpoint(image=IMAGE)


def test_it_works_in_a_running_event_loop_and_in_the_caller_s_context() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)

    async def cell() -> None:
        variable.set(5)
        with spawn(device="cpu") as gpu:
            np.testing.assert_array_equal(gpu.download(gpu.upload(X)), X)

            async def seen() -> int:
                return variable.get()

            assert portal_of(gpu).call(seen) == 5

    asyncio.run(cell())


def test_a_callback_of_a_future_cannot_block_the_thread_that_it_runs_on() -> None:
    gate = Gate()
    with gated(gate) as gpu:
        x = gpu.empty(X.shape)
        errors: list[Exception] = []
        told = threading.Event()

        def callback(_: object) -> None:
            for call in (gpu.ping, gpu.close):
                try:
                    call()
                except ReentrantAsk as error:
                    errors.append(error)
            told.set()

        gate.shut()  # so that it is not done before it has the callback, which would then run here
        gpu.submit(filling(x, 1)).add_done_callback(callback)
        gate.open()
        assert told.wait(PATIENCE_S)
        assert len(errors) == 2


def test_a_future_raises_what_its_request_did() -> None:
    gate = Gate()
    with gated(gate, mailbox=2) as gpu:
        x = gpu.empty(X.shape)
        gate.shut()
        pools = [gpu.submit(MaxPool(x=x, y=x, window=POOL))]  # invalid
        assert isinstance(pools[0].exception(PATIENCE_S), InvalidRequest)
        running = gpu.submit(filling(x, 1))
        gate.wait_for_arrival()
        refused = [gpu.submit(filling(x, 1)) for _ in range(4)]
        assert isinstance(refused[-1].exception(PATIENCE_S), MailboxFull)
        with pytest.raises(DeadlineExceeded) as late:
            gpu.write(x, full(1), timeout=0.01)
        assert not late.value.started
        gate.open()
        running.result(PATIENCE_S)


def test_a_cancelled_future_withdraws_its_request_and_frees_its_result() -> None:
    gate = Gate()
    with gated(gate) as gpu:
        x = gpu.empty(X.shape)
        gate.shut()
        running = gpu.submit(filling(x, 1))
        gate.wait_for_arrival()
        waiting = gpu.submit(filling(x, 2))
        assert waiting.cancel()
        let_the_loop_withdraw(gpu)
        gate.open()
        running.result(PATIENCE_S)
        assert gpu.download(x).max() == 1
        allocating = [gpu.submit(Allocate(spec=FEW)) for _ in range(50)]
        kept = [future.result() for future in allocating if not future.cancel()]
        assert live(gpu) == 1 + len(kept)


def test_leaving_gives_the_calls_of_other_threads_service_stopped() -> None:
    gate = Gate()
    service = gated_service(gate, "write")
    service.launch()
    service.started.result(PATIENCE_S)
    gpu = BlockingRef(service)
    x = gpu.empty(X.shape)
    gate.shut()
    with ThreadPoolExecutor(8) as pool:
        running = pool.submit(gpu.write, x, full(1))
        gate.wait_for_arrival()
        waiting = [pool.submit(gpu.write, x, full(2)) for _ in range(4)]
        sent = gpu.submit(filling(x, 3))
        closing = [pool.submit(gpu.close, drain_s=0) for _ in range(2)]
        until(lambda: asked_to_stop(service))()
        gate.open()
        for future in (*waiting, sent):
            assert isinstance(future.exception(PATIENCE_S), ServiceStopped)
        for closed in closing:
            closed.result(PATIENCE_S)
        assert running.exception(PATIENCE_S) is None
    for refused in (gpu.ping, lambda: gpu.submit(Ping()), lambda: gpu.upload(X), lambda: gpu.tell(Ping())):
        with pytest.raises(ServiceStopped):
            refused()
    gpu.close()


def test_calls_that_are_under_way_when_the_service_has_ended_are_answered() -> None:
    portal, begun, answers = Portal("portal"), threading.Event(), list[int]()
    steps = asyncio.Event()

    async def takes_some_turns() -> int:
        begun.set()
        await steps.wait()
        await asyncio.sleep(0)
        return 5

    async def end() -> None:
        steps.set()

    thread = threading.Thread(target=lambda: answers.append(portal.call(takes_some_turns)), daemon=True)
    thread.start()
    assert begun.wait(PATIENCE_S)
    portal.close(end)
    thread.join(PATIENCE_S)
    assert answers == [5]


class Alarm(Exception):
    """What a signal handler raises."""


@contextmanager
def alarmed(act: Callable[[], object]) -> Iterator[None]:
    """Have another thread do something, then raise `Alarm` in this one, which is the main thread."""
    assert threading.current_thread() is threading.main_thread()

    def handler(*_: object) -> None:
        raise Alarm

    def interrupt() -> None:
        act()
        signal.pthread_kill(main, signal.SIGUSR1)

    main, before = threading.get_ident(), signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        with pytest.raises(Alarm):
            yield
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def test_an_interrupted_call_is_withdrawn_and_leaves_nothing() -> None:
    gate = Gate()
    with gated(gate, "execute") as gpu:
        x = gpu.empty(X.shape)
        gate.shut()
        with alarmed(gate.wait_for_arrival):
            gpu.apply(MaxPool(x=x, window=POOL))
        mailbox = service_behind(gpu).state.mailbox
        with alarmed(until(lambda: any(isinstance(each, Upload) for each in mailbox.messages))):
            gpu.write(x, full(5))  # waits behind it
        let_the_loop_withdraw(gpu)
        gate.open()
        assert live(gpu) == 1
        assert not (gpu.download(x) == 5).any()


def test_an_interrupted_close_stops_without_waiting_for_requests() -> None:
    gate = Gate()
    with gated(gate) as gpu:
        x = gpu.empty(X.shape)
        gate.shut()
        future = gpu.submit(filling(x, 1))
        gate.wait_for_arrival()
        waiting = gpu.submit(filling(x, 1))
        service = service_behind(gpu)

        def open_once_it_ends() -> None:  # else the thread would never end
            until(lambda: asked_to_stop(service))()
            gate.open()

        opening = threading.Thread(target=open_once_it_ends)
        opening.start()
        with alarmed(until(lambda: portal_of(gpu).ending)):
            gpu.close(drain_s=1000)
        opening.join()
        assert isinstance(waiting.exception(), ServiceStopped)
        assert future.done()
        assert not gpu.alive


def test_an_end_that_is_interrupted_before_it_begins_is_begun_and_then_cancelled() -> None:
    portal, asked, told = Portal("portal"), threading.Event(), list[str]()
    held, scheduled, schedule = threading.Event(), list[object](), portal.loop.call_soon_threadsafe

    def noting(callback: Any, *given: Any) -> Any:
        handle = schedule(callback, *given)
        scheduled.append(callback)
        if len(scheduled) == 2:  # the end, and its cancellation
            held.set()
        return handle

    async def hold_the_loop() -> None:
        asked.set()
        held.wait(PATIENCE_S)

    async def end() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            told.append("cancelled")
            raise

    portal.begin(hold_the_loop)
    assert asked.wait(PATIENCE_S)

    def interrupted(_end: object) -> None:
        monkey.undo()
        portal.loop.call_soon_threadsafe = noting  # type: ignore[assignment,method-assign]
        portal.close_soon(end)
        raise Alarm

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(portal, "close_soon", interrupted)
        with pytest.raises(Alarm):
            portal.close(end)
    assert told == ["cancelled"]


def test_leaving_after_the_service_gave_up_says_so() -> None:
    options: dict[str, Any] = {
        "device": "cpu",
        "max_restarts": 0,
        "faults": FaultPlan().at(1, Fault.STICKY, of=Fill),
    }

    def body(after: Callable[[], object], **more: Any) -> None:
        with spawn(**options, **more) as gpu:
            with pytest.raises(CudnnActorError):
                gpu.fill(gpu.empty((3,)), 1)
            service_behind(gpu).stopped.result(PATIENCE_S)
            with pytest.raises(ServiceStopped):
                gpu.ping()
            after()

    with pytest.raises(ServiceStopped, match="restart"):
        body(lambda: None)
    with pytest.raises(ZeroDivisionError):
        body(lambda: 1 / 0)
    body(lambda: None, on_give_up=lambda _: None)


def test_a_handle_that_is_collected_ends_its_service_with_a_warning() -> None:
    handles = [spawn(device="cpu")]
    service = service_behind(handles[0])
    with pytest.warns(ResourceWarning, match="unclosed service 'cudnn': use `with spawn"):
        handles.clear()
    service.stopped.result(PATIENCE_S)


def test_a_service_that_was_started_goes_on_without_its_handle() -> None:
    with start(device="cpu") as service:
        future = BlockingRef(service).submit(Allocate(spec=FEW))
        gc.collect()
        x = future.result(PATIENCE_S)
        with BlockingRef(service).load(image_model()) as model:
            assert model.run(image=IMAGE)
        del model
        gc.collect()
        assert service.alive
        np.testing.assert_array_equal(BlockingRef(service).download(x).shape, (3,))


def test_what_a_handle_has_given_keeps_it() -> None:
    with spawn(device="cpu").load(image_model()) as model, gpu_behind(model):
        gc.collect()
        assert model.run(image=IMAGE)


def test_wherever_a_handler_may_raise_in_a_call_nothing_is_left() -> None:
    done = forked_programs.run(
        ["-m", "tests.blocking.interrupted_program"], cwd=ROOT, timeout=PATIENCE_S, spare=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found.pop("waits") > 10
    for call, told in found.items():
        assert told["raised"] > 10, call
        assert told["left"] == 0, call
        assert {"handle.py", "portal.py"} <= set(told["files"]), call


FORKING = """
import gc, os, sys, threading
from cudnn_actor import ServiceStopped
from cudnn_actor.blocking import spawn

gpu = spawn(device="cpu")
x = gpu.upload([1.0])
scope = gpu.scope()
scope.upload([1.0])
busy = threading.Thread(target=lambda: [gpu.ping() for _ in range(1000)])
busy.start()
child = os.fork()
if not child:
    refused = 0
    for call in (gpu.ping, lambda: gpu.submit(None), lambda: gpu.upload([1.0]), gpu.health, gpu.events):
        try:
            call()
        except ServiceStopped as error:
            refused += error.forked and "spawn after the fork" in str(error)
    scope.end()
    gpu.close()
    assert not gpu.alive
    with spawn(device="cpu") as own:
        assert own.download(own.upload([2.0])).item() == 2.0
    del call, gpu, scope
    gc.collect()
    sys.exit(refused)
busy.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
assert gpu.download(x).item() == 1.0
gpu.close()
print("done")
"""
UNCLOSED = """
from cudnn_actor.blocking import spawn

gpu = spawn(device="cpu", isolation="process")
print(gpu.download(gpu.upload([1.0])), gpu.submit.__name__)
"""


@pytest.mark.parametrize(("program", "said"), [(FORKING, "done\n"), (UNCLOSED, "[1.] submit\n")])
def test_programs_that_fork_or_do_not_close_end_well(program: str, said: str) -> None:
    filters = ["-W", "error", "-W", "ignore:This process:DeprecationWarning"]
    done = forked_programs.run([*filters, "-c", program], timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
