"""What a worker had finished when it died, and had not said: it has been done, and it is answered."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import Any

import pytest

from cudnn_actor import (
    ConvFwd,
    CudnnRef,
    OutcomeUnknown,
    QuarantinedRequest,
    Receipt,
    StaleBufferError,
    spawn,
)
from cudnn_actor.messages import Copy, Download, Fill
from cudnn_actor.protocol.messages.messages import Message
from tests.service.rigs import ONE_BY_ONE, Trio, in_thread, outcome, single

from ..patience import PATIENCE_S
from .crash_rigs import Points, freeze, kill, sent, workers

pytestmark = pytest.mark.usefixtures("a_forkserver")
ENOUGH = 30
"""So many small requests run within the time for which a worker gathers answers, or some of them do."""


async def killed_at_the_last(gpu: CudnnRef, points: Points, *messages: Message) -> list[Any]:
    """What becomes of messages that are sent together: the worker is killed at the last, a `Fill`."""
    points.hold("fill")
    pid = freeze(gpu)
    futures = [gpu.submit(message) for message in messages]
    await sent(gpu)
    os.kill(pid, signal.SIGCONT)
    (await in_thread(lambda: points.arrival("fill"))).kill()
    points.let_go()
    return [await outcome(future) for future in futures]


@pytest.mark.parametrize("host_arenas", [True, False], ids=["host memory", "device memory"])
async def test_what_had_finished_is_answered_though_a_later_request_writes_its_input(
    host_arenas: bool,
) -> None:
    async with workers("FillBarrierEngine", host_arenas=host_arenas) as (gpu, points):
        trio = await Trio.on(gpu)
        first = await gpu.ask(trio.product())
        products = [trio.product() for _ in range(ENOUGH)]
        ends = await killed_at_the_last(gpu, points, *products, Fill(dst=trio.x, value=5.0))
        assert [type(end) for end in ends] == [Receipt] * (ENOUGH + 1), ends
        assert {end.plan for end in ends[:-1]} == {first.plan}
        assert all(end.queue_us > 0 and end.run_us > 0 for end in ends)
        assert await trio.result() == 6.0, "a product of what x was"
        assert (await gpu.statistics()).replayed == 1, "the Fill alone"


@pytest.mark.parametrize("host_arenas", [True, False], ids=["host memory", "device memory"])
async def test_what_accumulates_and_had_finished_has_run_once_and_is_answered(host_arenas: bool) -> None:
    async with workers("FillBarrierEngine", host_arenas=host_arenas) as (gpu, points):
        trio = await Trio.on(gpu)
        await gpu.warm([trio.sum()])
        sums = [trio.sum() for _ in range(ENOUGH)]
        ends = await killed_at_the_last(gpu, points, *sums, Fill(dst=trio.x, value=5.0))
        assert [type(end) for end in ends] == [Receipt] * (ENOUGH + 1), ends
        assert await trio.result() == 1.0 + 6.0 * ENOUGH


async def test_values_that_had_come_down_are_delivered() -> None:
    async with workers("FillBarrierEngine", host_arenas=False) as (gpu, points):
        trio = await Trio.on(gpu)
        other = await gpu.upload(single(0.0))
        copies = [Copy(src=trio.x, dst=other) for _ in range(ENOUGH)]
        *_, down, filled = await killed_at_the_last(
            gpu, points, *copies, Download(src=other), Fill(dst=trio.x, value=5.0)
        )
        assert down.item() == 3.0
        assert isinstance(filled, Receipt)
        assert (await gpu.statistics()).replayed == 1


async def test_only_what_was_running_at_both_crashes_is_quarantined() -> None:
    async with workers("FillBarrierEngine", max_restarts=9) as (gpu, points):
        trio = await Trio.on(gpu)
        other = await gpu.upload(single(0.0))
        await gpu.ask(trio.product())
        products = [trio.product() for _ in range(ENOUGH)]
        points.order("fill", "leave", "leave")
        pid = freeze(gpu)
        messages: list[Message] = [*products, Fill(dst=other, value=5.0)]
        futures = [gpu.submit(message) for message in messages]
        await sent(gpu)
        os.kill(pid, signal.SIGCONT)
        *ends, filled = [await outcome(future) for future in futures]
        assert isinstance(filled, QuarantinedRequest)
        assert all(isinstance(end, Receipt) for end in ends)
        assert await trio.result() == 6.0


class Load:
    """Pure requests that write what others read, and sums, sent without a pause until `stop`."""

    def __init__(self, gpu: CudnnRef) -> None:
        self._gpu = gpu
        self.stop = asyncio.Event()
        self.sent = asyncio.Event()
        """Whether the worker has a lot to do."""
        self.pure: list[Any] = []
        self.sums: list[Any] = []

    async def run(self) -> None:
        await asyncio.gather(self._send_pure(), self._send_sums())

    async def _send_pure(self) -> None:
        x, w, y = [await self._gpu.upload(single(value)) for value in (3.0, 2.0, 0.0)]
        product = ConvFwd(x=x, w=w, y=y, conv=ONE_BY_ONE)
        messages: list[Message] = [product, Fill(dst=x, value=4.0), Copy(src=w, dst=x)]
        while not self.stop.is_set():
            try:
                futures = [self._gpu.submit(message) for message in messages * 60]
            except StaleBufferError as torn:
                self.pure.append(torn)
                self.stop.set()
                return
            finally:
                self.sent.set()
            self.pure += [await outcome(future) for future in futures]

    async def _send_sums(self) -> None:
        w = await self._gpu.upload(single(2.0))
        while not self.stop.is_set():
            total, ran = await self._gpu.upload(single(0.0)), 0
            sums: list[Any] = []
            while not self.stop.is_set() and ran == len(sums):
                add = ConvFwd(x=w, w=w, y=total, conv=ONE_BY_ONE, beta=1.0)
                sums += [await outcome(future) for future in [self._gpu.submit(add) for _ in range(8)]]
                ran = sum(isinstance(end, Receipt) for end in sums)
            self.sums += sums
            if ran == len(sums):  # else it is torn, from the one on whose outcome is unknown
                assert (await self._gpu.download(total)).item() == 4.0 * ran


async def test_pure_requests_run_again_and_others_at_most_once_whenever_the_worker_is_killed() -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    async with spawn(device="cpu", isolation="process", max_restarts=100) as gpu:
        load = Load(gpu)
        running = asyncio.ensure_future(load.run())
        for _ in range(12):
            generation = gpu.generation
            load.sent.clear()
            await asyncio.wait_for(load.sent.wait(), PATIENCE_S)
            if load.stop.is_set():
                break
            await asyncio.sleep(chance.random() * 0.003)
            kill(gpu)
            while gpu.generation == generation and not running.done():  # noqa: ASYNC110 - see below
                await asyncio.sleep(0.001)  # the load is to go on meanwhile
        load.stop.set()
        await running
        odd = [end for end in load.pure if not isinstance(end, Receipt)]
        assert not odd, f"seed {seed}: {len(odd)} of {len(load.pure)}: {odd[:3]}"
        assert {type(end) for end in load.sums} <= {Receipt, OutcomeUnknown, StaleBufferError}, f"seed {seed}"


async def test_what_is_read_back_after_a_crash_is_not_what_a_later_request_has_written() -> None:
    """On a device several have begun: the worker dies with the answer to one download sent, in the next."""
    async with workers("LateEngine", host_arenas=False) as (gpu, points):
        trio = await Trio.on(gpu)
        await gpu.warm([trio.product()])
        points.hold("fetched", passing=1)
        pid = freeze(gpu)  # so that it takes all at once, and one fence is behind them all
        messages: list[Message] = [
            trio.product(),
            Download(src=trio.w),
            Download(src=trio.y),
            Fill(dst=trio.y, value=5.0),
        ]
        futures = [gpu.submit(message) for message in messages]
        await sent(gpu)
        os.kill(pid, signal.SIGCONT)
        (await in_thread(lambda: points.arrival("fetched"))).kill()
        points.let_go()
        made, weight, product, filled = [await outcome(future) for future in futures]
        assert [type(end) for end in (made, filled)] == [Receipt, Receipt]
        assert weight.item() == 2.0
        assert isinstance(product, OutcomeUnknown), "the Fill may have run"
        assert await trio.result() == 5.0


async def test_what_a_device_has_finished_counts_only_once_it_is_answered() -> None:
    """A download and a Fill behind it have finished, and the worker dies before it says so.

    Were the Fill taken for done then, the download would run again and read what the Fill has written.
    """
    async with workers("LateEngine", host_arenas=False) as (gpu, points):
        trio = await Trio.on(gpu)
        other = await gpu.upload(single(0.0))
        await gpu.warm([trio.product()])
        points.hold("finished")
        fences = points.visits("fence")
        pid = freeze(gpu)  # so that it takes the three at once, and one fence is behind them
        messages: list[Message] = [trio.product(), Download(src=trio.y), Fill(dst=trio.y, value=5.0)]
        futures = [gpu.submit(message) for message in messages]
        await sent(gpu)
        os.kill(pid, signal.SIGCONT)
        await in_thread(lambda: points.wait_for_visits("fence", fences + 1))
        futures.append(gpu.submit(Copy(src=trio.w, dst=other)))
        await in_thread(lambda: points.wait_for_visits("fence", fences + 2))
        points.order("finished?", "go", "leave")  # it dies when it asks for the second fence
        points.let_go("finished")
        made, product, filled, copied = [await outcome(future) for future in futures]
        assert [type(end) for end in (made, filled, copied)] == [Receipt] * 3
        assert isinstance(product, OutcomeUnknown), "the Fill may have run"
        assert await trio.result() == 5.0


async def test_what_a_blocking_read_has_waited_for_is_answered_before_it() -> None:
    async with workers("UnstagedEngine", host_arenas=False) as (gpu, points):
        trio = await Trio.on(gpu)
        await gpu.warm([trio.sum()])
        points.hold("finished")
        pid = freeze(gpu)  # so that it takes both at once, with no fence between them
        added, down = gpu.submit(trio.sum()), gpu.submit(Download(src=trio.y))
        await sent(gpu)
        os.kill(pid, signal.SIGCONT)
        assert (await down).item() == 7.0
        assert added.done(), "a crash could find it begun, and what has read its sum done"
        assert isinstance(added.result(), Receipt)
