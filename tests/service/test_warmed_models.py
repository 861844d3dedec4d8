"""What the engine prepares for a model's runs: made when it is warmed, dropped when it is unloaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cudnn_actor import BufferRef, CudnnRef, CudnnService, GraphBuilder
from cudnn_actor.engines import EngineChoice, WorkerEngine
from cudnn_actor.engines.base import Plan
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.messages import DeployModel, ModelGraph, UnloadModel, WarmModel
from cudnn_actor.options import make_options
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.timing import PlanTimes
from cudnn_actor.service import Spawning

from ..onnx.small_models import image_model
from .rigs import isolation_option, spawn
from .test_deployed_models import W, check, images, placed, run

pytestmark = pytest.mark.usefixtures("isolation")


class NotingEngine(CpuEngine):
    """Notes in a file what it prepares, a byte each: how many of the buffers are constant."""

    def __init__(self, notes: str) -> None:
        super().__init__()
        self._notes = Path(notes)

    def expect(
        self,
        plan: Plan,
        buffers: Sequence[np.ndarray],
        scalars: Sequence[float],
        constant: Collection[int] = (),
    ) -> Callable[[], None]:
        with self._notes.open("ab") as file:
            file.write(bytes([len(constant)]))
        return super().expect(plan, buffers, scalars, constant)

    def measure(self, plan: Plan, graph: OperationGraph, constant: Collection[int] = ()) -> PlanTimes:
        with self._notes.open("ab") as file:
            file.write(bytes([len(constant)]))
        return super().measure(plan, graph, constant)


def spawned(notes: Path) -> Spawning:
    notes.touch()
    choice = EngineChoice(
        "cpu",
        lambda: NotingEngine(str(notes)),
        CpuEngine.outlives_context,
        host_arenas=True,
        worker=WorkerEngine(f"{__name__}:NotingEngine", (str(notes),)),
    )
    return Spawning(CudnnService(make_options({"device": "cpu", **isolation_option()}), engine=choice))


async def test_the_first_run_of_a_warmed_graph_finds_everything_prepared(tmp_path: Path) -> None:
    notes = tmp_path / "prepared"
    async with spawned(notes) as gpu:
        w = await gpu.upload(W)
        model = await gpu.ask(DeployModel())
        assert await gpu.ask(WarmModel(model=model, graphs=(await placed(gpu, w, 4),))) == 1
        assert notes.read_bytes() == b"\1"  # the weights
        for seed in range(2):
            check(await run(gpu, model, images(4, seed)), images(4, seed))
        assert notes.read_bytes() == b"\1"


async def test_a_measured_model_has_its_weights_as_constants(tmp_path: Path) -> None:
    notes = tmp_path / "prepared"
    async with spawned(notes) as gpu, await gpu.load(image_model()) as model:
        await model.explain(N=2)
        assert notes.read_bytes() == b""
        assert (await model.explain(N=2, measure=True)).run_us
        assert notes.read_bytes() == b"\5"  # three filters and two biases


async def half(gpu: CudnnRef, w: BufferRef) -> ModelGraph:
    """A product with weights of bfloat16."""
    g = GraphBuilder()
    y = g.matmul(g.input("x", (4, 3)).astype("bfloat16"), g.input("w", (3, 2), "bfloat16"))
    graph = g.build(y=y.astype("float32"))
    x, into = await gpu.empty((4, 3)), await gpu.empty((4, 2))
    return ModelGraph(
        name="half",
        graph=graph,
        buffers=(x, w, into),
        specs={"image": x.spec},
        inputs={"image": "x"},
        outputs={"logits": "y"},
    )


async def test_weights_of_half_types_are_converted_once_until_they_are_written_or_unloaded() -> None:
    x = np.array(images(4).round(2), ml_dtypes.bfloat16).astype(np.float32)
    async with spawn(onnx_runtime=False) as gpu:
        w = await gpu.upload(W * 0, dtype="bfloat16")
        model = await gpu.ask(DeployModel())
        assert (await gpu.statistics()).converted_bytes == 0
        await gpu.ask(WarmModel(model=model, graphs=(await half(gpu, w),)))
        assert (await gpu.statistics()).converted_bytes == 64  # a cache line
        for weights in (W, -W):
            await gpu.write(w, weights)
            for _ in range(2):
                logits = (await run(gpu, model, x))["logits"]
                np.testing.assert_allclose(logits, x @ weights, rtol=1e-2, atol=1e-2)
                assert (await gpu.statistics()).converted_bytes == 64
        await gpu.ask(UnloadModel(model=model))
        assert (await gpu.statistics()).converted_bytes == 0
