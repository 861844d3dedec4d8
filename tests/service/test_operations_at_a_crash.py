"""What a crash does to operations: with two outputs, with a tuple of operands."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cudnn_actor import (
    BufferRef,
    CudnnRef,
    Fault,
    FaultPlan,
    OutcomeUnknown,
    QuarantinedRequest,
    StaleBufferError,
)
from cudnn_actor.engines import EngineChoice, WorkerEngine
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.errors import StaleReason
from cudnn_actor.options import make_options
from cudnn_actor.protocol.graphs.reproduction import graph_of
from cudnn_actor.protocol.operations import MaxPool, Pointwise, PointwiseMode
from cudnn_actor.service import Spawning
from cudnn_actor.service.service import CudnnService
from cudnn_actor.trials.chaos.computations import PROBLEMS

from ..whole import WHOLE
from .families import FAMILIES, FORMS, Form, Stage
from .operation_rigs import LARGEST, DyingEngine, Operands
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


def in_each_isolation(
    name: str,
    every: dict[str, Any],
    kind: Callable[[Any], object],
    kind_in_process: Callable[[Any], object] | None = None,
) -> pytest.MarkDecorator:
    """The first of each kind on a thread, and of each `kind_in_process` in a process.

    With `WHOLE`, all of them on a thread, and the first of each kind in a process.
    `test_an_operation_writes_its_outputs_and_reads_all_else` tests for all of them which buffers are written.
    """
    some = _firsts(every, kind)
    few = some if WHOLE or kind_in_process is None else _firsts(every, kind_in_process)
    cases = [("thread", key) for key in (every if WHOLE else some)] + [("process", key) for key in few]
    given = [pytest.param(isolation, every[key], id=f"{isolation}-{key}") for isolation, key in cases]
    return pytest.mark.parametrize(("isolation", name), given, indirect=["isolation"])


def _firsts(every: dict[str, Any], kind: Callable[[Any], object]) -> list[str]:
    firsts = {kind(one): key for key, one in reversed(every.items())}
    return [key for key in every if key in firsts.values()]


each_form = in_each_isolation(
    "form",
    FORMS,
    lambda form: (len(form.operation.reads), len(form.operation.writes)),
    lambda form: len(form.operation.writes),
)


def spawn_dying(tmp_path: Path, deaths: int, kind: str = MaxPool.kind, after: int = 0) -> Spawning:
    """A service whose engine dies so many times in the middle of an operation, its outputs half-written."""
    tally = tmp_path / "deaths"
    tally.touch()
    words = (str(tally), kind, deaths, after)
    choice = EngineChoice(
        "cpu",
        lambda: DyingEngine(*words, in_worker=False),
        CpuEngine.outlives_context,
        host_arenas=in_process(),
        worker=WorkerEngine("tests.service.operation_rigs:dying_in_worker", words),
        preload=("cudnn_actor.engines.cpu.engine",),
    )
    return Spawning(CudnnService(make_options({"device": "cpu", **isolation_option()}), engine=choice))


async def values(gpu: CudnnRef, ref: BufferRef) -> list[float]:
    found: list[float] = (await gpu.download(ref)).ravel().tolist()
    return found


async def assert_torn(gpu: CudnnRef, ref: BufferRef) -> None:
    with pytest.raises(StaleBufferError, match="a crash interrupted a write") as stale:
        await gpu.download(ref)
    assert stale.value.reason is StaleReason.TORN


@each_form
async def test_an_operation_that_a_crash_interrupted_runs_again_and_all_its_outputs_are_right(
    form: Form, tmp_path: Path
) -> None:
    operation = form.operation
    async with spawn_dying(tmp_path, deaths=1, kind=operation.kind) as gpu:
        stage = await Stage.on(gpu, form.problem)
        receipt = await gpu.ask(stage.message(operation))
        assert (tmp_path / "deaths").stat().st_size == 1
        assert receipt.generation == gpu.generation == 2
        stage.computed(operation)
        await stage.assert_right()
        statistics = await gpu.statistics()
        assert (statistics.replayed, statistics.live_buffers) == (1, len(stage.held))


@each_form
async def test_of_an_operation_that_two_crashes_interrupted_all_outputs_are_torn_and_nothing_else(
    form: Form, tmp_path: Path
) -> None:
    operation = form.operation
    async with spawn_dying(tmp_path, deaths=2, kind=operation.kind) as gpu:
        stage = await Stage.on(gpu, form.problem)
        with pytest.raises(QuarantinedRequest, match="running at two crashes") as caught:
            await gpu.ask(stage.message(operation))
        for role in operation.writes:
            await assert_torn(gpu, stage.ref(role))
        await stage.assert_right(*operation.writes)
        assert (await gpu.statistics()).live_buffers == len(stage.held) - len(operation.writes)
        # Other buffers of the same shapes have the same plan, and nothing is written to them.
        other = await Stage.on(gpu, form.problem)
        with pytest.raises(QuarantinedRequest) as again:
            await gpu.ask(other.message(operation))
        await other.assert_right()
        for error in (caught.value, again.value):  # in either isolation they say how to repeat it
            assert error.digest == graph_of(error.reproduce).digest()
            assert str(error).endswith(f"cudnn-actor reproduce {error.reproduce}")
        assert gpu.generation == 3


@in_each_isolation("family", FAMILIES, lambda family: len(PROBLEMS[family].operations))
@pytest.mark.parametrize("dies", [0, -1], ids=["in the first", "in the last"])
async def test_in_a_stream_of_operations_with_a_crash_in_the_middle_all_answers_are_right(
    family: int, dies: int, tmp_path: Path
) -> None:
    """Each reads what the one before has written, and the engine dies in one of them, half-way."""
    operations = PROBLEMS[family].operations
    async with spawn_dying(tmp_path, deaths=1, kind=operations[dies].kind, after=3) as gpu:
        stages = [await Stage.on(gpu, family) for _ in range(2)]
        sent = []
        for _ in range(4):
            for stage in stages:
                for operation in operations:
                    sent.append(gpu.submit(stage.message(operation)))
                    stage.computed(operation)
        generations = [(await outcome(each)).generation for each in sent]
        assert generations == sorted(generations)
        assert {*generations} == {1, 2}
        for stage in stages:
            await stage.assert_right()
        assert (await gpu.statistics()).live_buffers == 2 * len(stages[0].held)


async def test_a_pooling_without_an_index_has_another_plan_than_a_quarantined_one(tmp_path: Path) -> None:
    async with spawn_dying(tmp_path, deaths=2) as gpu:
        operands = await Operands.on(gpu)
        with pytest.raises(QuarantinedRequest):
            await gpu.ask(operands.max_pool())
        other = await Operands.on(gpu)
        with pytest.raises(QuarantinedRequest):
            await gpu.ask(other.max_pool())
        await gpu.ask(other.max_pool(index=None))
        assert await values(gpu, other.y) == LARGEST
        assert await values(gpu, other.index) == [77] * 3


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
