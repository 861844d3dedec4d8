"""A bounded mailbox: who waits, who is refused, who overtakes; and what the log says of whom."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import structlog
from structlog.typing import EventDict

from cudnn_actor import ConvFwd, CudnnRef, Fault, FaultPlan, MailboxFull, Receipt, TensorSpec
from cudnn_actor.messages import Allocate, Fill, GetStatistics, Ping, Upload

from .rigs import Gate, Trio, in_thread, remove_gate, spawn, spawn_gated

pytestmark = pytest.mark.usefixtures("isolation")


async def crowd(gpu: CudnnRef, gate: Gate, trio: Trio, count: int) -> list[asyncio.Future[Receipt]]:
    """One request at the gate, and `count` in the mailbox behind it."""
    running = gpu.submit(trio.product())
    await in_thread(gate.wait_for_arrival)
    return [running, *(gpu.submit(Fill(dst=trio.x, value=n)) for n in range(count))]


async def test_submit_and_tell_and_pykka_are_refused_where_ask_waits() -> None:
    gate = Gate()
    async with spawn_gated(gate, mailbox=8) as gpu:
        trio = await Trio.on(gpu)
        with gate.closed():
            futures = await crowd(gpu, gate, trio, 8)
            message = Fill(dst=trio.w, value=7)
            with pytest.raises(MailboxFull, match="await ask") as caught:
                gpu.submit(message)
            assert caught.value.capacity == 8
            assert caught.value.retry_safe
            with pytest.raises(MailboxFull):
                gpu.tell(message)
            with pytest.raises(MailboxFull):
                gpu.actor_ref.tell(message)
            with pytest.raises(MailboxFull):
                await in_thread(lambda: gpu.actor_ref.ask(message))
            waiting = asyncio.ensure_future(gpu.ask(message))
            await asyncio.sleep(0)
            assert not waiting.done()
        assert isinstance(await waiting, Receipt)
        await asyncio.gather(*futures)
        assert (await gpu.download(trio.w)).item() == 7
        assert isinstance(await gpu.submit(message), Receipt)


class Telling(asyncio.Future[Any]):
    """Sends when it is asked whether it is done, as a finalizer does that the collector runs then."""

    tell: Callable[[], None] | None = None

    def done(self) -> bool:
        tell, self.tell = self.tell, None
        if tell is not None:
            tell()
        return super().done()


async def test_what_is_sent_amid_a_look_for_room_leaves_the_mailbox_as_it_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, loop = Gate(), asyncio.get_running_loop()
    async with spawn_gated(gate, mailbox=1) as gpu:
        trio = await Trio.on(gpu)
        with gate.closed():
            running = gpu.submit(trio.product())
            await in_thread(gate.wait_for_arrival)
            monkeypatch.setattr(loop, "create_future", lambda: Telling(loop=loop))
            waiting: Any = gpu.submit(trio.product())
            monkeypatch.undo()
            waiting.tell = lambda: gpu.tell(Ping())
            with pytest.raises(MailboxFull):
                gpu.submit(trio.product())
            assert waiting.tell is None
        assert [type(await future) for future in (running, waiting)] == [Receipt, Receipt]
        assert (await gpu.statistics()).restarts == 0


async def test_asks_that_wait_for_room_are_served_in_the_order_of_their_arrival() -> None:
    gate, order = Gate(), list[int]()
    async with spawn_gated(gate, mailbox=2) as gpu:
        trio = await Trio.on(gpu)

        async def ask(number: int) -> None:
            await gpu.ask(Fill(dst=trio.x, value=number))
            order.append(number)

        with gate.closed():
            futures = await crowd(gpu, gate, trio, 2)
            tasks = [asyncio.ensure_future(ask(number)) for number in range(200)]
            await asyncio.sleep(0)
        await asyncio.gather(*futures, *tasks)
        assert order == list(range(200))
        assert (await gpu.download(trio.x)).item() == 199


async def test_control_messages_overtake_a_full_mailbox_and_are_let_in(isolation: str) -> None:
    gate = Gate()
    async with spawn_gated(gate, mailbox=500) as gpu:
        trio = await Trio.on(gpu)
        with gate.closed():
            futures = await crowd(gpu, gate, trio, 500)
            # Futures, all three: a task would hear of its reply a turn of the loop later.
            ping, asked = gpu.submit(Ping()), gpu.submit(GetStatistics())
            order: list[str] = []
            futures[-1].add_done_callback(lambda _: order.append("the last in the mailbox"))
            ping.add_done_callback(lambda _: order.append("ping"))
            asked.add_done_callback(lambda _: order.append("statistics"))
            awaited = asyncio.ensure_future(gpu.ping())
            told_by_pykka = gpu.actor_ref.ask(Ping(), block=False)
            await asyncio.sleep(0)
            assert not ping.done()  # the actor is in the middle of a call
        await asyncio.gather(*futures, ping)
        assert (await awaited, await in_thread(told_by_pykka.get)) == (1, 1)
        assert order == ["ping", "statistics", "the last in the mailbox"]
        waited = (await asked).queued
        # Answered at the next turn, not in the middle of the batch. A worker begins more until it is here.
        assert waited >= 500 - 64 if isolation == "thread" else waited < 500


async def test_a_told_request_that_fails_is_logged_and_the_next_is_served(logs: list[EventDict]) -> None:
    faults = FaultPlan().at(1, Fault.FAIL_EXECUTION, of=ConvFwd)
    async with spawn(device="cpu", faults=faults) as gpu:
        trio = await Trio.on(gpu)
        gpu.tell(trio.product())
        gpu.tell(Upload(dst=trio.x, data=np.zeros(3)))
        assert (await gpu.download(trio.x)).item() == 3
    failed = [entry for entry in logs if entry["event"] == "actor.tell_failed"]
    errors = {entry["message"].partition("(")[0]: entry["error"].partition("(")[0] for entry in failed}
    assert errors == {"ConvFwd": "ExecutionFailed", "Upload": "InvalidRequest"}
    assert [entry["log_level"] for entry in failed] == ["error", "error"]


async def test_context_variables_of_the_caller_are_in_the_handler_s_log_lines(logs: list[EventDict]) -> None:
    faults = FaultPlan().at(4, Fault.SLOW, seconds=0.0, times=4)

    async def send(user: str, gpu: CudnnRef, trio: Trio) -> None:
        structlog.contextvars.bind_contextvars(user=user)
        await gpu.ask(trio.product())

    async with spawn(device="cpu", faults=faults) as gpu:
        trio = await Trio.on(gpu)
        await asyncio.gather(*(send(user, gpu, trio) for user in "abc"))
        with structlog.contextvars.bound_contextvars(user="teller"):
            gpu.tell(trio.product())
        await gpu.drain()
    lines = [entry for entry in logs if entry["event"] == "fault.injected"]
    assert [line["user"] for line in lines] == ["a", "b", "c", "teller"]
    others = [entry for entry in logs if entry["event"] != "fault.injected"]
    assert not any("user" in entry for entry in others)


async def test_context_variables_are_kept_when_the_request_runs_again(logs: list[EventDict]) -> None:
    faults = FaultPlan().at(4, Fault.STICKY).at(5, Fault.SLOW, seconds=0.0)
    async with spawn(device="cpu", faults=faults) as gpu:
        trio = await Trio.on(gpu)
        with structlog.contextvars.bound_contextvars(user="patient"):
            await gpu.ask(trio.product())
    lines = [entry for entry in logs if entry["event"] == "fault.injected"]
    assert [(line["fault"], line["user"]) for line in lines] == [("sticky", "patient"), ("slow", "patient")]


async def test_nothing_is_admitted_for_a_request_that_is_refused() -> None:
    gate = Gate()
    async with spawn_gated(gate, mailbox=1) as gpu:
        trio = await Trio.on(gpu)
        with gate.closed():
            futures = await crowd(gpu, gate, trio, 1)
            for _ in range(50):
                with pytest.raises(MailboxFull):
                    gpu.submit(Allocate(spec=TensorSpec.packed((1, 1, 1, 1))))
        await asyncio.gather(*futures)
        statistics = await gpu.statistics()
        assert (statistics.live_buffers, statistics.finished, statistics.failed) == (3, 3 + 2, 0)


async def test_a_refused_submit_costs_the_same_however_many_wait() -> None:
    """By the thread's own CPU time, so that a busy machine does not count."""
    gate, refusals = Gate(), 300
    async with spawn_gated(gate, mailbox=4) as gpu:
        trio = await Trio.on(gpu)

        def refused_s() -> float:
            began = time.thread_time()
            for _ in range(refusals):
                with pytest.raises(MailboxFull):
                    gpu.submit(trio.product())
            return time.thread_time() - began

        with gate.closed():
            asks = [asyncio.ensure_future(gpu.ask(trio.product())) for _ in range(300)]
            await asyncio.sleep(0)
            few_s = refused_s()
            asks += [asyncio.ensure_future(gpu.ask(trio.product())) for _ in range(10_000)]
            await asyncio.sleep(0)
            assert refused_s() < 10 * few_s
            remove_gate(gate)
        await asyncio.gather(*asks)
