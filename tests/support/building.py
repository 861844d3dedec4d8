"""Makes what a request for a graph needs, up to what only a device can do. Used in a child."""

from __future__ import annotations

from cudnn_actor.engines.cuda.plans.compiler import WORKSPACE_BYTES, possible_plans
from cudnn_actor.engines.cuda.plans.frontend_graph import Refused
from cudnn_actor.engines.cuda.plans.kernels import source
from cudnn_actor.engines.cuda.plans.recipe import KernelStep
from cudnn_actor.protocol.graph import OperationGraph

from .device import h200
from .nvrtc import compile_cuda

__all__ = ["first_plan"]


def first_plan(graph: OperationGraph) -> str:
    """The first plan that the engine would check on a device, as its tag's last part.

    cuDNN has finalised every graph in it, and its elementwise kernels are compiled. Raises `Refused` if no
    plan is cuDNN's, and `DoesNotCompile`.
    """
    try:
        plan = next(possible_plans(graph, h200(), WORKSPACE_BYTES))
    except ImportError as error:  # a launcher of kernels of our own needs CuPy
        raise Refused("cuDNN has no plan for it, only a kernel of our own could run it") from error
    for step in plan.recipe.steps:
        if isinstance(step, KernelStep):
            compile_cuda(source(step.kernel))
    return plan.tag.split("/", 3)[3]
