"""What a crash does to the request that was running, to those behind it, and to the buffers."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from structlog.typing import EventDict

from cudnn_actor import (
    ConvFwd,
    ConvSpec,
    ExecutionFailed,
    Fault,
    FaultPlan,
    OutcomeUnknown,
    QuarantinedRequest,
    Receipt,
    StaleBufferError,
    TensorSpec,
)
from cudnn_actor.engines.base import EngineFailure, StickyError
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.errors import StaleReason
from cudnn_actor.messages import Allocate, Copy, Download, Fill, Free, Upload
from cudnn_actor.supervision import Restarted, Restarting

from .rigs import (
    ONE_BY_ONE,
    THREAD_ONLY,
    Gate,
    Trio,
    in_thread,
    mapped_arenas,
    outcome,
    seen,
    single,
    spawn,
    spawn_gated,
    spawn_on,
)

pytestmark = pytest.mark.usefixtures("isolation")

CRASH_AT_THE_FIRST_RUN = FaultPlan().at(1, Fault.STICKY, of=ConvFwd)


async def test_with_one_running_and_many_queued_each_settles_once_and_in_order() -> None:
    gate, settled = Gate(), list[int]()
    async with spawn_gated(gate, faults=FaultPlan().at(2, Fault.STICKY, of=ConvFwd)) as gpu:
        trio = await Trio.on(gpu)
        with gate.closed():
            futures = [gpu.submit(trio.product()) for _ in range(300)]  # more than the batch of 64
            for number, future in enumerate(futures):
                future.add_done_callback(partial(_note, settled, number))
            await in_thread(gate.wait_for_arrival)
        receipts = await asyncio.gather(*futures)
        assert settled == list(range(300))
        assert [receipt.generation for receipt in receipts] == [1] + [2] * 299
        ids = [receipt.request_id for receipt in receipts]
        assert ids == sorted(ids)
        assert (await gpu.statistics()).replayed == 1
        assert gate.passed == 300


def _note(settled: list[int], number: int, _: object) -> None:
    settled.append(number)


async def test_the_order_of_effects_is_kept_across_a_crash() -> None:
    gate = Gate()
    async with spawn_gated(gate, faults=FaultPlan().at(3, Fault.STICKY, of=Fill)) as gpu:
        trio = await Trio.on(gpu)
        with gate.closed():
            first = gpu.submit(trio.product())
            await in_thread(gate.wait_for_arrival)
            sent: list[asyncio.Future[Any]] = []
            for value in range(1, 6):
                sent += [gpu.submit(Fill(dst=trio.x, value=value)), gpu.submit(trio.product())]
                sent.append(gpu.submit(Download(src=trio.y)))
        await first
        outputs = [await future for future in sent[2::3]]
        assert [float(output.item()) for output in outputs] == [2, 4, 6, 8, 10]


async def test_a_request_that_accumulates_is_not_run_twice() -> None:
    async with spawn(device="cpu", faults=CRASH_AT_THE_FIRST_RUN) as gpu:
        trio = await Trio.on(gpu)
        other = await gpu.upload(single(7))
        with pytest.raises(OutcomeUnknown, match="its output is torn: upload or compute it again") as caught:
            await gpu.ask(trio.sum())
        assert "INJECTED_STICKY_ERROR" in caught.value.cause
        for request in (Download(src=trio.y), trio.sum(), Free(buffer=trio.y)):
            with pytest.raises(StaleBufferError, match="a crash interrupted a write") as stale:
                await gpu.ask(request)
            assert stale.value.reason is StaleReason.TORN
        for ref, value in ((trio.x, 3), (trio.w, 2), (other, 7)):
            assert (await gpu.download(ref)).item() == value
        statistics = await gpu.statistics()
        assert (statistics.live_buffers, statistics.replayed) == (3, 0)


PURE: dict[str, Any] = {
    "Upload": lambda trio: Upload(dst=trio.y, data=single(6)),
    "Fill": lambda trio: Fill(dst=trio.y, value=6),
    "Copy": lambda trio: Copy(src=trio.six, dst=trio.y),
    "Download": lambda trio: Download(src=trio.y),
    "ConvFwd": lambda trio: trio.product(),
}


@pytest.mark.parametrize("message", PURE)
async def test_every_pure_message_survives_a_crash(message: str) -> None:
    async with spawn(device="cpu", faults=FaultPlan().at(1, Fault.STICKY, of=message)) as gpu:
        trio = await Trio.on(gpu, y=6)
        trio.six = await gpu.upload(single(6))  # type: ignore[attr-defined]
        await gpu.ask(PURE[message](trio))
        assert gpu.generation == 2
        assert await trio.result() == 6
        statistics = await gpu.statistics()
        assert (statistics.live_buffers, statistics.replayed) == (4, 1)


@pytest.mark.parametrize("data", [None, single(5)])
async def test_an_allocation_that_crashes_is_made_once(data: np.ndarray | None) -> None:
    async with spawn(device="cpu", faults=FaultPlan().at(1, Fault.STICKY, of=Allocate)) as gpu:
        ref = await gpu.ask(Allocate(spec=TensorSpec.packed((1, 1, 1, 1)), data=data))
        await gpu.fill(ref, 5)
        assert (await gpu.download(ref)).item() == 5
        statistics = await gpu.statistics()
        assert (statistics.live_buffers, statistics.generation, statistics.replayed) == (1, 2, 1)


async def test_a_request_without_a_plan_that_crashes_twice_is_quarantined_alone() -> None:
    async with spawn(device="cpu", faults=FaultPlan().at(1, Fault.STICKY, of=Fill, times=2)) as gpu:
        trio = await Trio.on(gpu)
        with pytest.raises(QuarantinedRequest, match="this Fill was running at two crashes") as caught:
            await gpu.fill(trio.y, 5)
        assert (caught.value.message, caught.value.digest) == ("Fill", "")
        assert "shapes" not in str(caught.value)
        await gpu.fill(trio.x, 5)  # which is not quarantined
        assert (await gpu.download(trio.x)).item() == 5


async def test_a_request_that_crashes_twice_is_quarantined_with_its_plan() -> None:
    faults = FaultPlan().at(1, Fault.STICKY, of=ConvFwd, times=2)
    async with spawn(device="cpu", faults=faults) as gpu:
        trio = await Trio.on(gpu)
        wide = await Trio.on(gpu)
        with pytest.raises(QuarantinedRequest, match="running at two crashes") as caught:
            await gpu.ask(trio.product())
        assert ((await gpu.download(trio.x)).item(), (await gpu.download(trio.w)).item()) == (3, 2)
        # Other buffers of the same shapes have the same plan; other shapes and other scalars have not.
        with pytest.raises(QuarantinedRequest) as later:
            await gpu.ask(wide.product())
        assert later.value.digest == caught.value.digest
        assert later.value.request_id > caught.value.request_id
        assert isinstance(await gpu.ask(wide.sum()), Receipt)
        large = await gpu.conv_fwd(wide.x, wide.w, conv=ConvSpec.symmetric(2, pad=1))
        assert (await gpu.download(large)).max() == 6
        assert await gpu.warm([wide.product(), wide.sum()]) == 0
        assert gpu.generation == 3


async def test_a_message_that_was_sent_before_its_plan_was_quarantined_is_refused() -> None:
    faults = FaultPlan().at(3, Fault.STICKY, of=ConvFwd, times=2)
    async with spawn(device="cpu", faults=faults) as gpu:
        trio, wide = await Trio.on(gpu), await Trio.on(gpu)
        message = wide.product()
        for _ in range(2):  # in the second one, the service knows it
            assert isinstance(await gpu.ask(message), Receipt)
        with pytest.raises(QuarantinedRequest, match="running at two crashes"):
            await gpu.ask(trio.product())
        for _ in range(2):
            with pytest.raises(QuarantinedRequest):
                await gpu.ask(message)
        assert isinstance(await gpu.ask(wide.sum()), Receipt)
        assert gpu.generation == 3


@THREAD_ONLY  # a plan counts what is handed to a worker, which is far ahead of what it runs
async def test_those_behind_a_quarantined_request_run_in_order() -> None:
    gate = Gate()
    faults = FaultPlan().at(2, Fault.STICKY, of=ConvFwd, times=2)
    async with spawn_gated(gate, faults=faults) as gpu:
        trio, bad = await Trio.on(gpu), await Trio.on(gpu)
        message = ConvFwd(x=bad.x, w=bad.w, y=bad.y, conv=ONE_BY_ONE, alpha=0.5)
        with gate.closed():
            first = gpu.submit(trio.product())
            await in_thread(gate.wait_for_arrival)
            culprit = gpu.submit(message)
            behind = [gpu.submit(trio.product()) for _ in range(100)]
        assert isinstance(await outcome(culprit), QuarantinedRequest)
        receipts = await asyncio.gather(first, *behind)
        assert [receipt.generation for receipt in receipts] == [1] + [3] * 100


async def test_buffers_keep_bytes_and_generation_across_restarts() -> None:
    rng = np.random.default_rng(4)
    arrays = [rng.standard_normal((1, 3, 40 + n, 40)).astype(np.float32) for n in range(50)]
    faults = FaultPlan().at(1, Fault.STICKY, of=Fill).at(3, Fault.STICKY, of=Fill)
    async with spawn(device="cpu", faults=faults) as gpu:
        refs = [await gpu.upload(array, layout="NHWC" if n % 2 else "NCHW") for n, array in enumerate(arrays)]
        big = await gpu.upload(np.arange(20 << 20, dtype=np.float32))  # 80 MiB: an arena of its own
        scratch = await gpu.upload(single(0))
        for generation in (2, 3):
            await gpu.fill(scratch, 1)
            assert gpu.generation == generation
            for array, ref in zip(arrays, refs, strict=True):
                np.testing.assert_array_equal(await gpu.download(ref), array)
        assert (await gpu.download(big))[-1] == np.float32((20 << 20) - 1)


@THREAD_ONLY
async def test_a_restart_maps_every_arena_anew_and_the_old_mapping_goes() -> None:
    async with spawn(device="cpu", faults=FaultPlan().at(1, Fault.STICKY, of=Fill)) as gpu:
        trio = await Trio.on(gpu)
        await gpu.ask(trio.product())
        await gpu.fill(trio.w, 1)
        gc.collect()  # the crash's traceback has the old engine's frames
        assert len(mapped_arenas()) == 1


class FailingEngine(CpuEngine):
    """Fails at each run of a plan, in whichever way."""

    def __init__(self, failure: EngineFailure, health: list[str | None]) -> None:
        super().__init__()
        self._failure, self._health = failure, health

    def execute(self, plan: Any, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> None:
        raise type(self._failure)(self._failure.status, self._failure.detail)  # a traceback of its own

    def probe(self) -> Any:
        return self._health.pop()


@THREAD_ONLY
async def test_a_failed_run_in_a_healthy_context_is_its_own_request_s() -> None:
    failure = EngineFailure("BAD_PARAM", "stride 7")
    async with spawn_on(lambda: FailingEngine(failure, [None])) as gpu:
        trio = await Trio.on(gpu)
        with pytest.raises(ExecutionFailed, match="BAD_PARAM: stride 7") as caught:
            await gpu.ask(trio.product())
        assert caught.value.plan.startswith("cpu/conv_fwd/")
        assert isinstance(await gpu.fill(trio.x, 1), Receipt)
        assert gpu.generation == 1


@THREAD_ONLY
@pytest.mark.parametrize("kind", [StickyError, EngineFailure])
async def test_a_failed_run_that_took_the_context_with_it_is_a_crash(kind: type[EngineFailure]) -> None:
    failure = kind("ILLEGAL_ADDRESS", "at 0x7")
    health: list[str | None] = [] if kind is StickyError else ["sick"] * 2  # a sticky error needs no probe
    async with spawn_on(lambda: FailingEngine(failure, health)) as gpu:
        trio = await Trio.on(gpu)
        with pytest.raises(QuarantinedRequest, match="ILLEGAL_ADDRESS"):
            await gpu.ask(trio.product())
        assert isinstance(await gpu.fill(trio.x, 1), Receipt)
        assert gpu.generation == 3


async def test_freed_buffers_stay_freed_across_a_restart() -> None:
    async with spawn(device="cpu", faults=FaultPlan().at(1, Fault.STICKY, of=Fill)) as gpu:
        kept, freed = await gpu.upload(single(1)), await gpu.upload(single(2))
        await gpu.free(freed)
        await gpu.fill(kept, 3)
        assert gpu.generation == 2
        with pytest.raises(StaleBufferError, match="freed"):
            await gpu.download(freed)
        again = await gpu.upload(single(4))
        assert again.slot == freed.slot
        with pytest.raises(StaleBufferError, match="freed"):
            await gpu.download(freed)


async def test_a_free_that_crashes_is_done_once() -> None:
    async with spawn(device="cpu", faults=FaultPlan().at(1, Fault.STICKY, of=Free)) as gpu:
        ref = await gpu.upload(single(1))
        await gpu.free(ref)
        assert gpu.generation == 2
        statistics = await gpu.statistics()
        assert (statistics.live_buffers, statistics.replayed) == (0, 1)


async def test_pykka_callers_see_only_latency_too() -> None:
    async with spawn(device="cpu", faults=CRASH_AT_THE_FIRST_RUN) as gpu:
        trio = await Trio.on(gpu)
        receipt = await in_thread(lambda: gpu.actor_ref.ask(trio.product()))
        assert receipt.generation == 2


async def test_a_crash_is_told_and_logged_with_its_cause(logs: list[EventDict]) -> None:
    async with spawn(device="cpu", faults=CRASH_AT_THE_FIRST_RUN) as gpu:
        trio = await Trio.on(gpu)
        await gpu.ask(trio.product())
        restarting = await seen(gpu, Restarting)
        assert isinstance(restarting, Restarting)
        assert "INJECTED_STICKY_ERROR" in restarting.cause.cause
        await seen(gpu, Restarted)
    (line,) = [entry for entry in logs if entry["event"] == "request.interrupted"]
    assert (line["verdict"], line["log_level"]) == ("run again", "warning")
    assert "INJECTED_STICKY_ERROR" in line["cause"]
