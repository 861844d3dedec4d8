"""Makes what a request for a graph needs, up to what only a device can do. Used in a child."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cudnn_actor.engines.cuda.operations import KERNELS
from cudnn_actor.engines.cuda.operations.normalization import normalization
from cudnn_actor.engines.cuda.operations.normalization import source as normalization_source
from cudnn_actor.engines.cuda.operations.pooling import pooling
from cudnn_actor.engines.cuda.operations.pooling import source as pooling_source
from cudnn_actor.engines.cuda.plans.compiler import WORKSPACE_BYTES, possible_plans
from cudnn_actor.engines.cuda.plans.kernels import source
from cudnn_actor.engines.cuda.plans.recipe import GraphStep, KernelStep, Step
from cudnn_actor.protocol.graph import OperationGraph

from .device import h200
from .nvrtc import compile_cuda

__all__ = ["first_plan"]

_SOURCES: dict[Callable[..., Any], Callable[..., str]] = {
    pooling: pooling_source,
    normalization: normalization_source,
}
"""What compiles an operation's own kernels → what gives their source."""


def first_plan(graph: OperationGraph) -> str:
    """The first plan that the engine would check on a device, as its tag's last part.

    cuDNN has finalised every graph in it, and every kernel of ours is compiled. Raises `Refused`,
    `DoesNotCompile`.
    """
    plan = next(possible_plans(graph, h200(), WORKSPACE_BYTES))
    for step in plan.recipe.steps:
        if not isinstance(step, GraphStep):
            compile_cuda(_source(step))
    return plan.tag.split("/", 3)[3]


def _source(step: Step) -> str:
    if isinstance(step, KernelStep):
        return source(step.kernel)
    assert not isinstance(step, GraphStep)
    return _SOURCES[KERNELS[type(step.operation)].compile](step.operation, step.tensors)
