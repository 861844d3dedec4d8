"""What a crash does to operations: with two outputs, with a tuple of operands."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cudnn_actor import (
    BufferRef,
    CudnnRef,
    Fault,
    FaultPlan,
    OutcomeUnknown,
    QuarantinedRequest,
    Spawning,
    StaleBufferError,
    StaleReason,
)
from cudnn_actor.engines import EngineChoice
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.protocol.operations import MaxPool, Pointwise, PointwiseMode
from cudnn_actor.service.options import make_options
from cudnn_actor.service.service import CudnnService

from .operation_rigs import ALL, IMAGE, INDEX, LARGEST, DyingEngine, Operands
from .rigs import (
    THREAD_ONLY,
    AsynchronousEngine,
    Device,
    Trio,
    in_process,
    isolation_option,
    outcome,
    single,
    spawn,
    spawn_on,
)

pytestmark = pytest.mark.usefixtures("isolation")


def spawn_dying(tmp_path: Path, deaths: int) -> Spawning:
    """A service whose engine dies so many times in the middle of a max pooling, its outputs half-written."""
    tally = tmp_path / "deaths"
    tally.touch()
    choice = EngineChoice(
        "cpu",
        lambda: DyingEngine(str(tally), deaths, in_worker=False),
        CpuEngine.outlives_context,
        host_arenas=in_process(),
        worker=("tests.service.operation_rigs:dying_in_worker", (str(tally), deaths)),
        preload=("cudnn_actor.engines.cpu",),
    )
    return Spawning(CudnnService(make_options({"device": "cpu", **isolation_option()}), engine=choice))


async def values(gpu: CudnnRef, ref: BufferRef) -> list[float]:
    found: list[float] = (await gpu.download(ref)).ravel().tolist()
    return found


async def assert_torn(gpu: CudnnRef, ref: BufferRef) -> None:
    with pytest.raises(StaleBufferError, match="a crash interrupted a write") as stale:
        await gpu.download(ref)
    assert stale.value.reason is StaleReason.TORN


async def test_a_pooling_that_a_crash_interrupted_runs_again_and_both_outputs_are_right(
    tmp_path: Path,
) -> None:
    async with spawn_dying(tmp_path, deaths=1) as gpu:
        operands = await Operands.on(gpu)
        receipt = await gpu.ask(operands.max_pool())
        assert (tmp_path / "deaths").stat().st_size == 1
        assert receipt.generation == gpu.generation == 2
        assert await values(gpu, operands.y) == LARGEST
        assert await values(gpu, operands.index) == INDEX
        assert await values(gpu, operands.x) == IMAGE.ravel().tolist()
        statistics = await gpu.statistics()
        assert (statistics.replayed, statistics.live_buffers) == (1, 8)


async def test_of_a_pooling_that_two_crashes_interrupted_both_outputs_are_torn(tmp_path: Path) -> None:
    async with spawn_dying(tmp_path, deaths=2) as gpu:
        operands = await Operands.on(gpu)
        with pytest.raises(QuarantinedRequest, match="running at two crashes") as caught:
            await gpu.ask(operands.max_pool())
        for output in (operands.y, operands.index):
            await assert_torn(gpu, output)
        assert await values(gpu, operands.x) == IMAGE.ravel().tolist()
        assert (await gpu.statistics()).live_buffers == 6
        # Other buffers of the same shapes have the same plan. Without an index it is another.
        other = await Operands.on(gpu)
        with pytest.raises(QuarantinedRequest) as again:
            await gpu.ask(other.max_pool())
        assert again.value.digest == caught.value.digest
        assert await values(gpu, other.index) == [77] * 3
        await gpu.ask(other.max_pool(index=None))
        assert await values(gpu, other.y) == LARGEST
        assert gpu.generation == 3


async def test_of_a_pooling_without_an_index_only_the_result_is_torn(tmp_path: Path) -> None:
    async with spawn_dying(tmp_path, deaths=2) as gpu:
        operands = await Operands.on(gpu)
        with pytest.raises(QuarantinedRequest):
            await gpu.ask(operands.max_pool(index=None))
        await assert_torn(gpu, operands.y)
        assert await values(gpu, operands.index) == [77] * 3


async def test_a_torn_operand_in_a_tuple_is_named_by_its_place(tmp_path: Path) -> None:
    async with spawn_dying(tmp_path, deaths=2) as gpu:
        operands = await Operands.on(gpu)
        with pytest.raises(QuarantinedRequest):
            await gpu.ask(operands.max_pool())
        message = operands.pointwise(operands=(operands.dy, operands.y), result=operands.found)
        with pytest.raises(StaleBufferError) as stale:
            await gpu.ask(message)
        assert (stale.value.field, stale.value.reason) == ("operands[1]", StaleReason.TORN)


async def test_what_reads_both_outputs_behind_an_interrupted_pooling_reads_the_right_ones(
    tmp_path: Path,
) -> None:
    async with spawn_dying(tmp_path, deaths=1) as gpu:
        operands = await Operands.on(gpu)
        pooled = gpu.submit(operands.max_pool())
        back = gpu.submit(operands.max_pool_backward(dy=operands.y, index=operands.index))
        await pooled
        await back
        assert await values(gpu, operands.whole) == [0, 5, 4, 0, 2, 0]


@pytest.mark.parametrize("name", ALL)
async def test_every_operation_survives_a_crash(name: str) -> None:
    async with spawn(device="cpu", faults=FaultPlan().at(1, Fault.STICKY, of=name)) as gpu:
        operands = await Operands.on(gpu)
        message = operands.all()[name]
        await gpu.ask(message)
        assert gpu.generation == 2
        assert await values(gpu, message.writes[0]) == ALL[name]
        statistics = await gpu.statistics()
        assert (statistics.live_buffers, statistics.replayed) == (8, 1)


@pytest.mark.parametrize("name", ALL)
async def test_of_every_operation_outputs_are_torn_by_a_second_crash_and_inputs_are_not(name: str) -> None:
    async with spawn(device="cpu", faults=FaultPlan().at(1, Fault.STICKY, of=name, times=2)) as gpu:
        operands = await Operands.on(gpu)
        message = operands.all()[name]
        before = [await values(gpu, ref) for ref in message.reads]
        with pytest.raises(QuarantinedRequest):
            await gpu.ask(message)
        for ref in message.writes:
            await assert_torn(gpu, ref)
        assert [await values(gpu, ref) for ref in message.reads] == before
        assert (await gpu.statistics()).live_buffers == 8 - len(message.writes)


@asynccontextmanager
async def paused() -> AsyncIterator[tuple[CudnnRef, Device, Trio, BufferRef]]:
    """A service whose device finishes only what the test finishes, four buffers, and nothing under way."""
    device = Device()
    device.run_freely()
    async with spawn_on(lambda: AsynchronousEngine(device)) as gpu:
        trio, elsewhere = await Trio.on(gpu), await gpu.upload(single(77))
        device.pause()
        try:
            yield gpu, device, trio, elsewhere
        finally:
            device.run_freely()


async def all_begun(gpu: CudnnRef) -> None:
    while (await gpu.statistics()).queued:
        pass
    await gpu.ping()


@THREAD_ONLY  # the device that finishes nothing is in this process
async def test_a_buffer_freed_behind_a_request_that_reads_it_in_a_tuple_is_read_when_it_runs_again() -> None:
    async with paused() as (gpu, device, trio, elsewhere):
        adds = Pointwise(mode=PointwiseMode.ADD, operands=(trio.x, trio.w), result=elsewhere)
        asked = gpu.submit(adds)
        await gpu.free(trio.w)
        await all_begun(gpu)
        device.die()
        device.run_freely()
        assert (await asked).generation == 2
        assert await values(gpu, elsewhere) == [5]
        with pytest.raises(StaleBufferError) as stale:
            await gpu.ask(adds)
        assert (stale.value.field, stale.value.reason) == ("operands[1]", StaleReason.FREED)


@THREAD_ONLY
async def test_what_was_running_behind_a_torn_operand_in_its_tuple_does_not_run_again() -> None:
    async with paused() as (gpu, device, trio, elsewhere):
        accumulates = gpu.submit(trio.sum())
        adds = gpu.submit(Pointwise(mode=PointwiseMode.ADD, operands=(trio.x, trio.y), result=elsewhere))
        await all_begun(gpu)
        device.die()
        device.run_freely()
        assert isinstance(await outcome(accumulates), OutcomeUnknown)
        error = await outcome(adds)
        assert isinstance(error, OutcomeUnknown)
        assert "operands[1]" in error.why
        await assert_torn(gpu, elsewhere)


async def test_a_fault_is_meant_for_an_operation_by_its_class_or_its_name() -> None:
    faults = FaultPlan().at(1, Fault.STICKY, of=MaxPool).at(1, Fault.FAIL_EXECUTION, of="Pointwise")
    assert [rule.of for rule in faults.rules] == [MaxPool.__name__, Pointwise.__name__]
    async with spawn(device="cpu", faults=faults) as gpu:
        operands = await Operands.on(gpu)
        await gpu.ask(operands.avg_pool())
        assert gpu.generation == 1
        await gpu.ask(operands.max_pool())
        assert gpu.generation == 2
