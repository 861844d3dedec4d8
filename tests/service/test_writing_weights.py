"""Weights of a model that are overwritten while it runs: each run sees all the old ones, or all the new."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor import (
    BufferRef,
    CudnnRef,
    DeadlineExceeded,
    ExecutionFailed,
    Fault,
    FaultPlan,
    Graph,
    GraphBuilder,
    InvalidRequest,
    QuarantinedRequest,
    Receipt,
    ServiceStopped,
    StaleBufferError,
)
from cudnn_actor.errors import NotDeployed
from cudnn_actor.messages import (
    DeployModel,
    Download,
    Free,
    ModelGraph,
    ModelRef,
    RunModel,
    UnloadModel,
    WriteWeights,
)

from ..patience import PATIENCE_S
from .rigs import Gate, in_process, spawn, spawn_gated, spawn_lagging

pytestmark = pytest.mark.usefixtures("isolation")

COUNT = 4
"""How many weights the model has. All have the same value, the version, so a mixture is seen."""


def adding(rows: int) -> Graph:
    g = GraphBuilder()
    x = g.input("x", (rows,))
    outputs = {f"y{number}": x + g.input(f"w{number}", (1,)) for number in range(COUNT)}
    return g.build(outputs)


class Adder:
    """A model with an output for each weight: the input plus that weight."""

    def __init__(self, gpu: CudnnRef, ref: ModelRef, weights: list[BufferRef]) -> None:
        self.gpu, self.ref, self.weights = gpu, ref, weights

    @classmethod
    async def on(cls, gpu: CudnnRef, *rows: int) -> Adder:
        weights = [await gpu.upload(np.zeros(1, np.float32)) for _ in range(COUNT)]
        graphs = []
        for count in rows or (3,):
            graph = adding(count)
            x, *ys = [await gpu.empty((count,)) for _ in range(1 + COUNT)]
            of_port = {"x": x}
            of_port |= {f"w{number}": ref for number, ref in enumerate(weights)}
            of_port |= {f"y{number}": ref for number, ref in enumerate(ys)}
            graphs.append(
                ModelGraph(
                    name=str(count),
                    graph=graph,
                    buffers=tuple(of_port[port] for port in graph.places),
                    specs={"x": x.spec},
                    inputs={"x": "x"},
                    outputs={f"y{number}": f"y{number}" for number in range(COUNT)},
                )
            )
        return cls(gpu, await gpu.ask(DeployModel(graphs=tuple(graphs))), weights)

    def running(self, x: float = 0.0, rows: int = 3) -> RunModel:
        return RunModel(model=self.ref, arrays={"x": np.full(rows, x, np.float32)})

    def writing(self, version: float, **changes: Any) -> WriteWeights:
        values = tuple(np.full(1, version, np.float32) for _ in self.weights)
        fields: dict[str, Any] = {"model": self.ref, "buffers": tuple(self.weights), "values": values}
        return WriteWeights(**(fields | changes))

    async def version(self, x: float = 0.0, rows: int = 3) -> float:
        return version_of(await self.gpu.ask(self.running(x, rows)), x)


def version_of(answer: dict[str, np.ndarray], x: float = 0.0) -> float:
    """The weights that a run has read. Fails if they are not all of one version."""
    found = {float(each) - x for array in answer.values() for each in array}
    assert len(answer) == COUNT
    assert len(found) == 1, f"a mixture: {found}"
    return found.pop()


@asynccontextmanager
async def adder(*rows: int, **options: Any) -> AsyncIterator[Adder]:
    async with spawn(**options) as gpu:
        yield await Adder.on(gpu, *rows)


@asynccontextmanager
async def lagging_adder(folder: Path) -> AsyncIterator[Adder]:
    """A model on a device that finishes nothing more until there is a file `done`."""
    (folder / "done").touch()
    async with spawn_lagging(folder) as gpu:
        model = await Adder.on(gpu)
        (folder / "done").unlink()
        yield model


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - a worker writes the file
            await asyncio.sleep(0.001)


async def killed_between_two_weights(
    gpu: CudnnRef, model: Adder, gate: Gate
) -> tuple[asyncio.Future[Any], asyncio.Future[Any]]:
    """A write and a run behind it, whose worker was killed when one weight was written and the second not."""
    gate.catch_one()
    writing, running = gpu.submit(model.writing(4)), gpu.submit(model.running())
    await asyncio.to_thread(gate.wait_for_arrival)
    gate.release_caught()
    await asyncio.to_thread(gate.wait_for_arrival)
    assert gpu.worker_pid is not None
    os.kill(gpu.worker_pid, signal.SIGKILL)
    gate.open()
    return writing, running


async def test_runs_after_a_write_read_the_new_weights_for_all_dims() -> None:
    async with adder(3, 5) as model:
        assert await model.version() == 0
        receipt = await model.gpu.ask(model.writing(2))
        assert isinstance(receipt, Receipt)
        assert await model.version() == await model.version(rows=5) == 2
        await model.gpu.ask(model.writing(7))
        assert await model.version(rows=5) == 7


async def test_a_write_does_not_fit_and_nothing_is_written() -> None:
    async with adder() as model:
        gpu, three = model.gpu, np.zeros(3, np.float32)
        good, other = model.writing(9), await gpu.upload(three)
        values, buffers = good.values, good.buffers
        cases: dict[str, dict[str, Any]] = {
            "not of the weight's dtype and dims": {"values": (*values[:3], three)},
            "weight's dtype and dims, float32": {"values": (*values[:3], values[3].astype(np.float64))},
            "one for each of the 4 buffers": {"values": values[:2]},
            "is given twice": {"buffers": (*buffers[:3], buffers[0])},
            "is of type list": {"values": (*values[:3], [1.0])},
            "is of type ndarray": {"buffers": (*buffers[:3], values[0])},
            "is of type str": {"model": "model"},
        }
        for problem, wrong in cases.items():
            with pytest.raises(InvalidRequest, match=problem):
                await gpu.ask(model.writing(9, **wrong))
        with pytest.raises(NotDeployed):
            await gpu.ask(model.writing(9, model=msgspec.structs.replace(model.ref, number=99)))
        await gpu.free(other)
        with pytest.raises(StaleBufferError):
            await gpu.ask(model.writing(9, buffers=(other,), values=(three,)))
        assert await model.version() == 0


async def test_the_places_of_a_graph_are_no_weights() -> None:
    async with spawn() as gpu:
        g = GraphBuilder()
        graph = g.build(y=g.input("x", (3,)) + g.input("w", (3,)))
        x, w, y = [await gpu.upload(np.zeros(3, np.float32)) for _ in range(3)]
        of = ModelGraph(
            name="",
            graph=graph,
            buffers=(x, w, y),
            specs={"x": x.spec},
            inputs={"x": "x"},
            outputs={"y": "y"},
        )
        model = await gpu.ask(DeployModel(graphs=(of,)))
        for place in (x, y):
            with pytest.raises(InvalidRequest, match="is no weight"):
                await gpu.ask(WriteWeights(model=model, buffers=(w, place), values=(np.ones(3, "f"),) * 2))
        np.testing.assert_array_equal(await gpu.download(w), 0)


async def test_what_one_sender_sends_is_done_in_order() -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        model = await Adder.on(gpu, 3, 5)
        gate.shut()
        sent: list[Any] = []
        for version in range(6):
            sent += [gpu.submit(model.running(rows=rows)) for rows in (3, 5)]
            sent.append(gpu.submit(model.writing(version + 1)))
        sent.append(gpu.submit(UnloadModel(model=model.ref)))
        sent += [gpu.submit(Free(buffer=ref)) for ref in model.weights]
        gate.open()
        answers = await asyncio.gather(*sent)
        for version in range(6):
            one, two, _ = answers[3 * version : 3 * version + 3]
            assert version_of(one) == version_of(two) == version
        with pytest.raises(NotDeployed):
            await gpu.ask(model.running())


async def test_a_write_begins_only_once_earlier_runs_are_answered(tmp_path: Path) -> None:
    """Otherwise a run that a crash interrupts could not be repeated: its weights would be others."""
    async with lagging_adder(tmp_path) as model:
        gpu = model.gpu
        first = gpu.submit(model.running(1))
        await until((tmp_path / "runs").exists)  # it has begun, and is not answered
        writing = gpu.submit(model.writing(5))
        behind = gpu.submit(model.running(2))
        reading = gpu.submit(Download(src=model.weights[0]))  # reads what is to be written: behind it, too
        await gpu.ping()  # behind the write, had that begun
        (tmp_path / "dead").touch()
        await until(lambda: gpu.generation == 2)
        (tmp_path / "done").touch()
        assert version_of(await first, 1) == 0
        await writing
        assert version_of(await behind, 2) == 5
        assert float((await reading).item()) == 5


async def test_what_has_nothing_to_do_with_a_waiting_write_goes_on(tmp_path: Path) -> None:
    async with lagging_adder(tmp_path) as model:
        gpu = model.gpu
        running = gpu.submit(model.running())
        await until((tmp_path / "runs").exists)
        writing = gpu.submit(model.writing(1))
        behind = gpu.submit(model.running())
        other = await gpu.empty((2,))
        await gpu.free(other)
        assert (await gpu.statistics()).live_buffers == COUNT + 1 + COUNT
        assert not any(each.done() for each in (running, writing, behind))
        (tmp_path / "done").touch()
        await gpu.drain()  # which waits for what is held back, too
        assert all(each.done() for each in (running, writing, behind))
        assert [version_of(await each) for each in (running, behind)] == [0, 1]


async def test_a_write_that_waits_can_be_withdrawn(tmp_path: Path) -> None:
    async with lagging_adder(tmp_path) as model:
        gpu = model.gpu
        running = gpu.submit(model.running())
        await until((tmp_path / "runs").exists)
        with pytest.raises(DeadlineExceeded) as caught:
            await gpu.ask(model.writing(1), timeout=0.05)
        assert not caught.value.started
        (tmp_path / "done").touch()
        assert version_of(await running) == await model.version() == 0


async def test_a_service_that_stops_leaves_no_write_unanswered(tmp_path: Path) -> None:
    async with lagging_adder(tmp_path) as model:
        gpu = model.gpu
        running = gpu.submit(model.running())
        await until((tmp_path / "runs").exists)
        waiting = [gpu.submit(model.writing(1)), gpu.submit(model.running())]
        closing = asyncio.ensure_future(gpu.aclose(drain_s=0))
        await asyncio.sleep(0)
        (tmp_path / "done").touch()
        await closing
        for outcome in await asyncio.gather(running, *waiting, return_exceptions=True):
            assert isinstance(outcome, dict | Receipt | ServiceStopped), outcome


@pytest.mark.parametrize("fault", [Fault.KILL, Fault.STICKY])
@pytest.mark.parametrize("of", [RunModel, WriteWeights])
async def test_a_crash_leaves_no_mixture_and_loses_nothing(fault: Fault, of: type) -> None:
    if fault is Fault.KILL and not in_process():
        pytest.skip("there is no worker to kill")
    faults = FaultPlan().at(2, fault, of=of).at(31, fault, of=of)
    async with adder(3, 5, faults=faults, max_restarts=9) as model:
        written = [0.0]

        async def write() -> None:
            for version in range(1, 41):
                written.append(float(version))
                await model.gpu.ask(model.writing(version))

        async def run(rows: int) -> None:
            last, number = 0.0, 0
            while last < 40:
                number += 1
                found = await model.version(float(number % 3), rows)
                assert last <= found <= written[-1]  # they never go back
                last = found

        async with asyncio.timeout(PATIENCE_S * 2):
            await asyncio.gather(write(), *(run(rows) for rows in (3, 5) * 4))
        assert model.gpu.generation == 3


async def test_a_write_that_is_killed_between_two_weights_is_repeated(isolation: str) -> None:
    if isolation == "thread":
        pytest.skip("there is no worker to kill")
    gate = Gate()
    async with spawn_gated(gate, at="write") as gpu:
        model = await Adder.on(gpu)
        assert await model.version() == 0
        writing, running = await killed_between_two_weights(gpu, model, gate)
        await writing
        assert version_of(await running) == 4
        assert gpu.generation == 2


async def test_runs_behind_a_write_that_ends_two_workers_find_the_weights_torn() -> None:
    faults = FaultPlan().at(1, Fault.STICKY, of=WriteWeights, times=2)
    async with adder(faults=faults, max_restarts=9) as model:
        writing = model.gpu.submit(model.writing(4))
        running = [model.gpu.submit(model.running()) for _ in range(4)]
        with pytest.raises(QuarantinedRequest):
            await writing
        for each in running:
            with pytest.raises(StaleBufferError, match="torn"):
                await each


async def test_weights_of_which_some_are_written_are_torn_if_the_second_try_fails(isolation: str) -> None:
    if isolation == "thread":
        pytest.skip("there is no worker to kill")
    gate = Gate()
    faults = FaultPlan().at(2, Fault.FAIL_EXECUTION, of=WriteWeights)
    async with spawn_gated(gate, at="write", faults=faults) as gpu:
        model = await Adder.on(gpu)
        writing, running = await killed_between_two_weights(gpu, model, gate)
        with pytest.raises(ExecutionFailed):
            await writing
        with pytest.raises(StaleBufferError, match="torn"):
            await running


async def test_a_pykka_caller_writes_weights() -> None:
    async with adder() as model:
        message, ref = model.writing(3), model.gpu.actor_ref
        receipt: Any = await asyncio.to_thread(lambda: ref.ask(message))
        assert isinstance(receipt, Receipt)
        assert await model.version() == 3


async def test_large_weights_are_written() -> None:
    g = GraphBuilder()
    graph = g.build(y=g.sum(g.input("w", (512, 1024))) + g.input("x", (1, 1)))
    async with spawn() as gpu:
        x, y = await gpu.empty((1, 1)), await gpu.empty((1, 1))
        w = await gpu.upload(np.zeros((512, 1024), np.float32))
        of = ModelGraph(
            name="",
            graph=graph,
            buffers=tuple({"x": x, "w": w, "y": y}[port] for port in graph.places),
            specs={"x": x.spec},
            inputs={"x": "x"},
            outputs={"y": "y"},
        )
        model = await gpu.ask(DeployModel(graphs=(of,)))
        for value in (1, 2):
            await gpu.ask(
                WriteWeights(model=model, buffers=(w,), values=(np.full(w.spec.dims, value, np.float32),))
            )
            results = await gpu.ask(RunModel(model=model, arrays={"x": np.zeros((1, 1), np.float32)}))
            assert float(results["y"].item()) == value * w.spec.size
