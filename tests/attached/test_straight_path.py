"""A request to an idle service goes straight to the worker. All that is promised of requests holds for it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cudnn_actor import (
    ConvFwd,
    CudnnRef,
    DeadlineExceeded,
    Fault,
    FaultPlan,
    GraphBuilder,
    Receipt,
    RunGraph,
    ServiceStopped,
    StaleBufferError,
    connect,
)
from cudnn_actor.actors import Envelope, LoopBridge
from cudnn_actor.attached import ServedSocket, serve_socket
from cudnn_actor.attached.server import failures, sending
from cudnn_actor.attached.wire import Done, Refused
from cudnn_actor.broker.request_checks import check_message
from cudnn_actor.errors import StaleReason
from cudnn_actor.isolation.process.parent.dispatcher import Dispatcher
from cudnn_actor.messages import Fill, Ping
from cudnn_actor.processes.frames import BadFrame, encode
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import Layout, TensorSpec
from tests.isolation.crash_rigs import Points, freeze, gone, kill, start_forkserver, workers
from tests.service.rigs import Trio, in_thread, outcome, single

from ..inside import service_behind, sessions_of
from ..patience import PATIENCE_S
from .raw_client import ATTACH, Asking, Raw

pytestmark = pytest.mark.usefixtures("a_forkserver")
_ONE = TensorSpec.packed((1, 1, 1, 1), DType.FLOAT32, Layout.NCHW)


@pytest.fixture(scope="module")
def a_forkserver() -> None:
    start_forkserver()


class _SentAgain(Trio):
    """Products whose message is the same object each time: a service knows its own messages by that."""

    @functools.cached_property
    def _product(self) -> ConvFwd:
        return super().product()

    def product(self, **fields: Any) -> ConvFwd:
        return super().product(**fields) if fields else self._product


class Rig(NamedTuple):
    """A service, the points of its workers, its socket, and a client on its loop whose products have run."""

    gpu: CudnnRef
    points: Points
    served: ServedSocket
    client: CudnnRef
    one: Trio
    other: Trio

    @property
    def straight(self) -> int:
        """The number of the latest request that has gone straight to the worker."""
        return int(service_behind(self.gpu).state.mailbox.alone)

    @property
    def in_flight(self) -> Any:
        """The requests that the worker has."""
        return service_behind(self.gpu).state.mailbox.host.in_flight.requests

    async def ask(self, trio: Trio) -> Receipt:
        """Ask for a product until one has gone straight: at any time, the monitor may have the host."""
        while True:
            receipt: Receipt = await self.client.ask(trio.product())
            if receipt.request_id == self.straight:
                return receipt

    async def until_sent(self) -> None:
        """Wait until the worker has been sent a request. The client and the server have the same loop."""
        while not self.in_flight:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def in_work(self, message: Any, point: str = "execute") -> AsyncIterator[asyncio.Future[Receipt]]:
        """A request has gone straight to the worker, which waits at a point of it while the block lasts."""
        while True:
            self.points.hold(point)
            future = self.client.submit(message)
            await in_thread(lambda: self.points.arrival(point))
            if self.straight in self.in_flight:
                break
            self.points.let_go(point)
            await future
        yield future
        self.points.let_go(point)


@contextlib.asynccontextmanager
async def served(folder: Path, **options: Any) -> AsyncIterator[Rig]:
    path = folder / "gpu.sock"
    async with (
        asyncio.timeout(PATIENCE_S),
        workers(**options) as (gpu, points),
        serve_socket(gpu, path) as socket,
        connect(path) as client,
    ):
        one, other = await Trio.on(client), await Trio.on(client, x=5.0)
        for trio in (one, one, other, other):  # the second time, all that it takes is known
            await client.ask(trio.product())
        yield Rig(gpu, points, socket, client, one, other)


@pytest.fixture(params=["attached", "own"])
async def rig(tmp_path: Path, request: Any) -> AsyncIterator[Rig]:
    async with served(tmp_path) as made:
        yield await _with_own_client(made) if request.param == "own" else made


async def _with_own_client(rig: Rig) -> Rig:
    """The rig with the service's own handle in place of a client."""
    one, other = [_SentAgain(rig.gpu, each.x, each.w, each.y) for each in (rig.one, rig.other)]
    for trio in (one, one, other, other):
        await rig.gpu.ask(trio.product())
    return rig._replace(client=rig.gpu, one=one, other=other)


async def test_requests_one_at_a_time_go_straight_and_are_answered(rig: Rig) -> None:
    first, second = await rig.ask(rig.one), await rig.ask(rig.other)
    assert second.request_id > first.request_id
    assert (await rig.one.result(), await rig.other.result()) == (6.0, 10.0)


async def test_a_request_that_comes_meanwhile_runs_behind(rig: Rig) -> None:
    await rig.client.ask(rig.one.sum())
    await rig.client.ask(rig.one.sum())
    async with rig.in_work(rig.one.product()) as first:  # y = 6
        second = rig.client.submit(rig.one.sum())  # y = 12
        third = rig.client.submit(rig.one.product())  # y = 6
        fourth = rig.client.submit(rig.one.sum())  # y = 12
    receipts = await asyncio.gather(first, second, third, fourth)
    assert [each.request_id for each in receipts] == sorted(each.request_id for each in receipts)
    assert await rig.one.result() == 12.0


async def test_a_request_of_the_service_itself_that_comes_meanwhile_runs_behind(rig: Rig) -> None:
    async with rig.in_work(rig.one.product()) as first:
        own = rig.gpu.submit(rig.one.sum())
    receipts = await asyncio.gather(first, own)
    assert receipts[0].request_id < receipts[1].request_id
    assert await rig.one.result() == 12.0


async def test_a_request_that_comes_behind_one_of_the_service_itself_does_not_go_straight(rig: Rig) -> None:
    await rig.ask(rig.one)
    before, table = rig.straight, service_behind(rig.gpu).state.mailbox.host.in_flight
    rig.points.hold("execute")
    own = rig.gpu.submit(rig.one.sum())  # y = 12
    await in_thread(lambda: rig.points.arrival("execute"))
    (first,) = rig.in_flight
    request = rig.client.submit(rig.one.product())  # y = 6
    while len(rig.in_flight) == 1:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0)
    assert rig.straight == before
    assert table.oldest.number == first  # the watchdog looks at it
    rig.points.let_go("execute")
    receipts = await asyncio.gather(own, request)
    assert receipts[0].request_id < receipts[1].request_id
    assert await rig.one.result() == 6.0


async def test_a_buffer_that_was_freed_between_two_equal_requests_is_stale(rig: Rig) -> None:
    await rig.ask(rig.other)
    await rig.client.free(rig.other.x)
    with pytest.raises(StaleBufferError):
        await rig.client.ask(rig.other.product())
    await rig.ask(rig.one)
    assert await rig.one.result() == 6.0


async def test_a_buffer_that_the_service_has_freed_is_stale(rig: Rig) -> None:
    await rig.gpu.free(rig.other.x)  # the client does not know
    with pytest.raises(StaleBufferError):
        await rig.client.ask(rig.other.product())
    await rig.ask(rig.one)


async def test_a_buffer_that_ends_behind_the_sessions_check_is_stale(rig: Rig) -> None:
    state = service_behind(rig.gpu).state
    trio = await Trio.on(rig.gpu)
    message = trio.product()
    for _ in range(2):
        await rig.gpu.ask(message)
    found, bridge = check_message(state, message, {}), LoopBridge.of_running_loop()
    await rig.gpu.free(trio.x)
    future = asyncio.get_running_loop().create_future()
    envelope = Envelope(message, future=future, bridge=bridge, found=found)
    assert not state.mailbox.admit_alone(envelope)
    state.mailbox.admit(envelope)
    assert isinstance(await outcome(future), StaleBufferError)


async def test_a_buffer_that_is_freed_while_its_request_runs_ends_behind_it(rig: Rig) -> None:
    memory = service_behind(rig.gpu).state.memory
    async with rig.in_work(rig.other.product()) as running:
        await rig.gpu.free(rig.other.y)
        assert memory.is_withheld(rig.other.y)
    assert isinstance(await running, Receipt)
    assert not memory.is_withheld(rig.other.y)
    others = [await rig.gpu.upload(single(0.0)) for _ in range(4)]
    assert rig.other.y.slot in {each.slot for each in others}


async def test_the_same_bytes_of_another_client_name_buffers_that_it_does_not_have(rig: Rig) -> None:
    first, second = Raw(rig.served.path), Raw(rig.served.path)
    for raw in (first, second):
        await raw.send(encode(ATTACH))
    asking, stranger = Asking(first), Asking(second)
    trio = Trio(None, *[await asking.allocate(_ONE) for _ in range(3)])  # type: ignore[arg-type]
    for _ in range(2):
        assert isinstance(await asking.ask(trio.product()), Done)
    before = rig.straight
    refused = await stranger.ask(trio.product())
    assert rig.straight == before
    assert isinstance(refused, Refused)
    error = refused.error.to_error()
    assert isinstance(error, StaleBufferError)
    assert error.reason is StaleReason.FOREIGN
    assert isinstance(await asking.ask(trio.product()), Done)
    first.socket.close()
    second.socket.close()


@pytest.mark.parametrize("point", ["execute", "after execute"])
async def test_a_request_whose_worker_is_killed_runs_again_and_is_answered_once(rig: Rig, point: str) -> None:
    async with rig.in_work(rig.one.product(), point) as future:
        number = rig.straight
        await gone(kill(rig.gpu))
    receipt = await future
    assert (receipt.request_id, receipt.generation) == (number, 2)
    assert await rig.one.result() == 6.0
    statistics = await rig.gpu.statistics()
    assert (statistics.restarts, statistics.failed) == (1, 0)
    await rig.ask(rig.one)  # the next worker gets requests straight, too


async def test_a_request_that_waits_until_one_has_run_again_alone_runs_behind_it(rig: Rig) -> None:
    mailbox = service_behind(rig.gpu).state.mailbox
    async with rig.in_work(rig.one.product()) as first:  # y = 6
        await gone(kill(rig.gpu))
        await in_thread(lambda: rig.points.arrival("execute"))
        second = rig.gpu.submit(rig.one.sum())  # y = 12
        while not len(mailbox):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(mailbox) == 1, "nothing runs beside a request that was running at a crash"
    receipts = await asyncio.gather(first, second)
    assert [each.generation for each in receipts] == [2, 2]
    assert await rig.one.result() == 12.0


async def test_a_request_to_a_worker_that_has_just_been_killed_is_run_by_the_next(rig: Rig) -> None:
    kill(rig.gpu)
    receipt = await rig.client.ask(rig.one.product())
    assert receipt.generation == 2
    assert await rig.one.result() == 6.0


async def test_a_worker_whose_answer_is_no_frame_is_replaced(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = service_behind(rig.gpu).state.mailbox.channel

    def fetch() -> bool:
        monkeypatch.undo()
        raise BadFrame("more descriptors came than belong to frames")

    async with rig.in_work(rig.one.product()) as future:
        monkeypatch.setattr(channel, "fetch", fetch)
    assert isinstance(await future, Receipt)
    assert await rig.one.result() == 6.0
    assert (await rig.gpu.statistics()).restarts == 1


async def test_a_request_that_is_withdrawn_before_it_begins_never_runs(rig: Rig) -> None:
    visits = rig.points.visits("execute")
    pid = freeze(rig.gpu)
    future = rig.client.submit(rig.one.product())
    await rig.until_sent()
    future.cancel()
    pinged = asyncio.ensure_future(rig.client.ask(Ping()))
    for _ in range(20):
        await asyncio.sleep(0)
    _go_on(pid)
    await pinged
    await rig.client.drain()
    assert rig.points.visits("execute") == visits


async def test_a_deadline_that_passes_before_a_request_begins_is_told_so(rig: Rig) -> None:
    await rig.client.ask(rig.one.sum())
    await rig.client.ask(rig.one.sum())  # y = 18
    visits = rig.points.visits("execute")
    pid = freeze(rig.gpu)
    error = await outcome(rig.client.submit(rig.one.sum(), timeout=0.01))
    assert rig.in_flight
    _go_on(pid)
    assert isinstance(error, DeadlineExceeded)
    await rig.client.drain()
    assert rig.points.visits("execute") == visits + error.started


async def test_a_client_that_ends_withdraws_its_request(rig: Rig) -> None:
    client = await connect(rig.served.path)
    trio = await Trio.on(client)
    await client.ask(trio.product())
    await client.ask(trio.product())
    visits = rig.points.visits("execute")
    pid = freeze(rig.gpu)
    future = client.submit(trio.product())
    await rig.until_sent()
    await client.aclose(drain_s=0.0)
    assert isinstance(await outcome(future), ServiceStopped)
    while len(sessions_of(rig.served)) > 1:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0)
    _go_on(pid)
    await rig.gpu.drain()
    assert rig.points.visits("execute") == visits
    await rig.ask(rig.one)


async def test_a_drain_waits_for_a_straight_request(rig: Rig) -> None:
    async with rig.in_work(rig.one.product()) as running:
        drained = [asyncio.ensure_future(each.drain()) for each in (rig.client, rig.gpu)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(each.done() for each in drained)
    assert isinstance(await running, Receipt)
    await asyncio.gather(*drained)


async def test_a_stop_waits_for_a_straight_request_and_nothing_goes_straight_behind_it(rig: Rig) -> None:
    async with rig.in_work(rig.one.product()) as running:
        rig.gpu.actor_ref.stop(block=False)
    assert isinstance(await running, Receipt)
    with pytest.raises(ServiceStopped):
        while True:
            await rig.client.ask(rig.one.product())


@pytest.mark.parametrize("buffers", [2, 4, 10])
async def test_each_buffer_of_a_request_is_in_use_until_the_answer(rig: Rig, buffers: int) -> None:
    g = GraphBuilder()
    refs = {f"x{number}": await rig.client.upload(single(1.0)) for number in range(buffers)}
    total, *terms = [g.input(name, (1, 1, 1, 1)) for name in refs]
    for term in terms:
        total = total + term
    message = RunGraph.bind(g.build(updates={"x0": total}), refs)
    for _ in range(2):
        await rig.client.ask(message)
    memory = service_behind(rig.gpu).state.memory
    slots = [memory.resolve(ref) for ref in refs.values()]
    async with rig.in_work(message) as future:
        assert all(slot.users for slot in slots)
    await future
    assert not any(slot.users for slot in slots)


async def test_what_is_counted_is_the_same_as_of_requests_by_the_mailbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(rig: Rig) -> dict[str, Any]:
        (session,) = sessions_of(rig.served)
        share, state = rig.served.share, service_behind(rig.gpu).state
        table = state.mailbox.host.in_flight
        counts = {each.operation: each.finished for each in state.counters.snapshots()}
        times = {each.operation: each.run.count for each in state.counters.snapshots()}
        return {
            "finished": state.counters.finished,
            "counts": counts,
            "times": times,
            "awaited": table.requests,
            "places": table.room,
            "outstanding": share.outstanding_us,
            "has one": share.has_one,
            "asked": session.asked,
        }

    found = []
    for name, goes_straight in (("straight", True), ("mailbox", False)):
        folder = tmp_path / name
        folder.mkdir()
        if not goes_straight:
            monkeypatch.setattr(Dispatcher, "admit_alone", lambda *_: False)
        async with served(folder) as rig:
            for _ in range(5):
                await rig.client.ask(rig.one.product())
            assert bool(rig.straight) is goes_straight
            found.append(counted(rig))
    assert found[0] == found[1]


@pytest.mark.parametrize("rig", ["attached"], indirect=True)
async def test_fair_share_counts_a_straight_request_until_its_answer(rig: Rig) -> None:
    share = rig.served.share
    async with rig.in_work(rig.one.product()):
        assert share.has_one
        assert share.outstanding_us > 0
    await rig.client.drain()
    assert (share.has_one, share.outstanding_us) == (False, 0.0)


@pytest.mark.parametrize("rig", ["attached"], indirect=True)
async def test_a_request_whose_answer_the_server_has_no_memory_to_send_does_not_stay_in_fair_share(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise MemoryError

    async with rig.in_work(rig.one.product()) as running:
        monkeypatch.setattr(sending, "encode", fail)
        monkeypatch.setattr(failures, "encode", fail)
    assert isinstance(await outcome(running), ServiceStopped)
    monkeypatch.undo()
    await rig.gpu.drain()
    assert (rig.served.share.has_one, rig.served.share.outstanding_us) == (False, 0.0)


@pytest.mark.parametrize("rig", ["own"], indirect=True)
async def test_what_a_finalizer_sends_during_a_mailbox_operation_does_not_go_straight(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.ask(rig.one)
    sent: list[asyncio.Future[Receipt]] = []

    def finalized() -> int:
        monkeypatch.undo()
        sent.append(rig.gpu.submit(rig.one.product()))
        assert not rig.in_flight
        return 0

    # The mailbox asks this with its lock held, where a finalizer may run.
    monkeypatch.setattr(service_behind(rig.gpu).state.mailbox, "waiting_elsewhere", finalized)
    await rig.gpu.submit(Fill(dst=rig.one.y, value=0.0))
    (receipt,) = await asyncio.gather(*sent)
    assert receipt.request_id != rig.straight
    assert await rig.one.result() == 6.0


async def test_with_faults_requests_do_not_go_straight(tmp_path: Path) -> None:
    """Each is a message that a fault may hit."""
    async with served(tmp_path, faults=FaultPlan().at(1000, Fault.FAIL_EXECUTION)) as rig:
        for _ in range(3):
            await rig.client.ask(rig.one.product())
        assert not rig.straight


def _go_on(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)
