"""Plans with kernels that cuDNN compiled for other sizes: right on the device, as built and as stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from benchmarks.blocks import bottleneck
from cudnn_actor.engines.cuda.checking.self_check import SelfCheck
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import GraphStep
from cudnn_actor.protocol import OperationGraph

from ..engines.cuda.cudnn.test_kernel_caches import convolution, product


@pytest.fixture
def builder() -> Iterator[CudaBuilder]:
    """One that has built nothing."""
    yield from opened()


@pytest.fixture
def other() -> Iterator[CudaBuilder]:
    """One that restores plans, and builds nothing."""
    yield from opened()


def opened() -> Iterator[CudaBuilder]:
    builder = CudaBuilder(0, dynamic_shapes=True)
    builder.open()
    yield builder
    builder.close()


def fault(graph: OperationGraph, plan: CudaPlan, builder: CudaBuilder) -> str | None:
    """What a self-check of the whole graph finds."""
    check = SelfCheck(graph, builder.context)
    try:
        return check.fault(plan)
    finally:
        check.close()


def block(batch: int) -> OperationGraph:
    """As for inference: convolutions with a scale, a bias and relu, or the residual."""
    return bottleneck(batch=batch, channels=64, width=16, size=14, inference=True).forward.body


@pytest.mark.parametrize(
    "graphs",
    [
        pytest.param([block(n) for n in (4, 8, 3, 1)], id="a block of smaller and larger batches"),
        pytest.param([convolution(n) for n in (32, 8, 5)], id="a convolution of smaller batches"),
        pytest.param([convolution(5), convolution(32, 256, 28)], id="a larger convolution"),
        pytest.param([product(n) for n in (512, 127, 4096)], id="a product of fewer and more rows"),
        pytest.param([product(96, 96, transposed=turned) for turned in (False, True)], id="transposed"),
    ],
)
def test_a_plan_with_the_kernel_of_another_is_right_as_it_is_and_as_bytes(
    builder: CudaBuilder, other: CudaBuilder, graphs: Sequence[OperationGraph]
) -> None:
    for graph in graphs:
        plan = builder.build(graph, workspace_limit=None)
        steps = [step for step in plan.recipe.steps if isinstance(step, GraphStep)]
        assert steps
        assert all(step.plan for step in steps), "a plan was discarded, and another compiled for itself"
        assert fault(graph, plan, builder) is None
        data = builder.export(plan)
        assert data is not None
        assert fault(graph, other.restore(graph, data), other) is None
