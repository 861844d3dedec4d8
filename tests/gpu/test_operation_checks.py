"""The self-check of an operation with a kernel of ours finds plans that compute something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from cudnn_actor.engines.cuda import CudaEngine
from cudnn_actor.engines.cuda.plans.plan import CudaPlan
from cudnn_actor.engines.cuda.plans.recipe import OperationStep
from cudnn_actor.engines.cuda.plans.self_check import BuildContext, SelfCheck
from cudnn_actor.protocol import (
    AvgPool,
    AvgPoolBackward,
    DType,
    GraphTensor,
    MaxPool,
    MaxPoolBackward,
    Node,
    OperationGraph,
    TensorSpec,
    Window,
)

WINDOW = Window(size=(3, 3), pre_padding=(1, 1), post_padding=(1, 1), stride=(2, 2), dilation=(1, 1))
X, Y = (2, 3, 8, 8), (2, 3, 4, 4)


def tensor(uid: int, dims: tuple[int, ...], dtype: DType = DType.FLOAT32) -> GraphTensor:
    spec = TensorSpec.packed(dims, dtype)
    return GraphTensor(uid=uid, dims=dims, strides=spec.strides, dtype=dtype)


GRAPHS: dict[str, tuple[list[GraphTensor], Node]] = {
    "max": ([tensor(0, X), tensor(1, Y)], MaxPool(x=0, y=1, window=WINDOW)),
    "max with index": (
        [tensor(0, X), tensor(1, Y), tensor(2, Y, DType.INT64)],
        MaxPool(x=0, y=1, index=2, window=WINDOW),
    ),
    "max backward": (
        [tensor(0, Y), tensor(1, Y, DType.INT64), tensor(2, X)],
        MaxPoolBackward(dy=0, index=1, dx=2, window=WINDOW),
    ),
    "average": ([tensor(0, X), tensor(1, Y)], AvgPool(x=0, y=1, window=WINDOW)),
    "average backward": ([tensor(0, Y), tensor(1, X)], AvgPoolBackward(dy=0, dx=1, window=WINDOW)),
}
Sabotage = Callable[[OperationStep], tuple[OperationStep, ...]]


def missing(_: OperationStep) -> tuple[OperationStep, ...]:
    return ()


def moved(step: OperationStep) -> tuple[OperationStep, ...]:
    window = msgspec.structs.replace(WINDOW, pre_padding=(0, 1), post_padding=(2, 1))
    return (msgspec.structs.replace(step, operation=msgspec.structs.replace(step.operation, window=window)),)


def with_output(step: OperationStep, **changes: Any) -> tuple[OperationStep, ...]:
    """The step with its first output described otherwise."""
    at = len(step.operation.reads)
    tensors = list(step.tensors)
    tensors[at] = msgspec.structs.replace(tensors[at], **changes)
    return (msgspec.structs.replace(step, tensors=tuple(tensors)),)


def transposed(step: OperationStep) -> tuple[OperationStep, ...]:
    *rest, rows, columns = step.tensors[len(step.operation.reads)].strides
    return with_output(step, strides=(*rest, columns, rows))


def one_sample_less(step: OperationStep) -> tuple[OperationStep, ...]:
    return batched(step, 1)


def one_sample_more(step: OperationStep) -> tuple[OperationStep, ...]:
    return batched(step, 3)


def batched(step: OperationStep, samples: int) -> tuple[OperationStep, ...]:
    tensors = tuple(msgspec.structs.replace(t, dims=(samples, *t.dims[1:])) for t in step.tensors)
    return (msgspec.structs.replace(step, tensors=tensors),)


def swapped(step: OperationStep) -> tuple[OperationStep, ...]:
    """Read from the output's place, and write to the input's."""
    return (msgspec.structs.replace(step, sources=step.sources[::-1]),)


@pytest.fixture
def engine() -> Iterator[CudaEngine]:
    engine = CudaEngine()
    engine.open()
    yield engine
    engine.close()


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("sabotage", [missing, moved, transposed, one_sample_less, one_sample_more, swapped])
def test_a_sabotaged_plan_is_found(engine: CudaEngine, name: str, sabotage: Sabotage) -> None:
    tensors, operation = GRAPHS[name]
    graph = OperationGraph(tensors=tuple(tensors), operations=(operation,))
    plan = engine.build(graph, workspace_limit=None)
    check = SelfCheck(graph, BuildContext(engine._handle, engine.stream))
    assert check.fault(plan) is None
    (step,) = plan.recipe.steps
    assert isinstance(step, OperationStep)
    recipe = msgspec.structs.replace(plan.recipe, steps=sabotage(step))
    assert check.fault(CudaPlan(recipe, ())) is not None
    assert check.fault(plan) is None, "the next plan was blamed"
    check.close()
